"""Every tolerance of the checks, with where it comes from."""

ALPHA = 1e-9
"""False-alarm probability of one statistical test: a run makes a few hundred, which leaves 1e-6 with room."""

MISS = 1e-3
"""Probability that a test misses the fault that it is meant for; with too few elements for that it is unsupported."""

STD = 1e-6
"""Stds: float64 formulas agree to 1e-15; one that was computed in float32 to 1e-7."""

LOG_PROB = 2e-5
"""Log-probabilities, an element: in float32 z carries an error of 2⁻²⁴·|x|/std ≤ 6e-8·5/0.03 = 1e-5; a child that was
not rounded to bf16 before it was scored shows as (2⁻⁹·|x|/std)²/24 ≥ 1e-4 beside a random term of the same size."""

VALUE = 1e-9
"""Fused values, relative to the largest reward: N·2⁻⁵³ for sums, 1e-12 for weights whose exponents are O(10⁴)."""

ADVANTAGE = 1e-9
"""Advantages, in units of max(1, |A|), beside the condition of the values: float64 throughout leaves 1e-15, one
rounding to float32 on the way 3e-8."""

CONDITION = 2.0**-47
"""Advantages, beside: sums of a few dozen values round by 2⁻⁵³·max |r̄| each, which the std divides."""

SCOPE = 1e-6
"""Means and scales of groups of advantages: another group's differ by far more, rounding is not asked about here."""

COEFFICIENT = 1e-3
"""∂J/∂log p relative to its largest entry: the ratio is within a tenth of the clip range of 1, 1e-4 for ε = 1e-3."""

EXACT = 1e-12
"""Two float64 evaluations of one formula: a few hundred operations of 2⁻⁵³, relative to the largest entry."""

INVARIANCE = 1e-9
"""Advantages of ε = 0 under a change of the rewards' origin or scale: 2⁻⁵³·1000/spread, for spreads above 1e-3."""
