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

ADVANTAGE = 1e-6
"""Advantages: values to 1e-12 of the rewards' scale, divided by a spread of at least 1e-6 of it."""

COEFFICIENT = 1e-3
"""∂J/∂log p relative to its largest entry: the ratio is within a tenth of the clip range of 1, 1e-4 for ε = 1e-3."""

EXACT = 1e-12
"""Two float64 evaluations of one formula: a few hundred operations of 2⁻⁵³, relative to the largest entry."""

INVARIANCE = 1e-6
"""Advantages under a change of the rewards' origin or scale: 2⁻⁵³·|shift|/spread, and ε = 1e-8 beside the std."""
