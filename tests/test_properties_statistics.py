"""The statistics module: exact p-values, stated discrepancies that are really found, sample sizes, the budget."""

import mpmath
import numpy as np
import pytest
from scipy import stats

from branchgrpo.properties.budget import ALPHA, FALSE_ALARM, POWER, SLOTS, bonferroni, holm
from branchgrpo.properties.checks.leaves import FULL_ELEMENTS as LEAF_ELEMENTS
from branchgrpo.properties.checks.leaves import PROMPTS as LEAF_PROMPTS
from branchgrpo.properties.checks.noise import FULL_ELEMENTS, PROMPTS, ROOTS
from branchgrpo.properties.findings import Finding, worst
from branchgrpo.properties.ledger import Ledger
from branchgrpo.properties.statistics import anderson, correlation, ks, law, mean, moments, saddlepoint, variance
from branchgrpo.properties.statistics.size import sample_size
from branchgrpo.properties.tolerances import ANDERSON_FINITE_SAMPLE, SADDLEPOINT
from branchgrpo.reference.errors import InputError, OptionError

RUNS, N = 120, 10_000
MISSES = 3
"""At power 0.999 more than 3 of 120 runs miss with probability 8e-6; at power 0.9 at most 3 miss with 0.4 %."""


def flipped(x, delta):
    """Positive x turned over so that P(x < 0) = ½ + δ: the distribution function is δ off at 0, less elsewhere."""
    positive = x > 0
    share = 2.0 * delta
    turn = positive & (np.modf(np.abs(x) * 1e4)[0] < share)
    return np.where(turn, -x, x)


def correlated(x, y, rho):
    return x, rho * x + np.sqrt(1.0 - rho * rho) * y


DISCREPANCIES = {
    "mean up": (mean.mean_test, lambda x, d: x + d),
    "mean down": (mean.mean_test, lambda x, d: x - d),
    "variance up": (variance.variance_test, lambda x, d: x * np.sqrt(1.0 + d)),
    "variance down": (variance.variance_test, lambda x, d: x * np.sqrt(1.0 - d)),
    "KS": (ks.ks_test, flipped),
    "Anderson–Darling": (anderson.anderson_test, lambda x, d: x + d),
    "skewness up": (moments.skewness_test, moments.skewed),
    "skewness down": (moments.skewness_test, lambda x, d: moments.skewed(x, -d)),
    "kurtosis up": (moments.kurtosis_test, moments.heavy_tailed),
    "kurtosis down": (moments.kurtosis_test, lambda x, d: moments.heavy_tailed(x, -d)),
}


@pytest.mark.parametrize("name", list(DISCREPANCIES))
def test_the_detectable_discrepancy_is_detected(name):
    test, inject = DISCREPANCIES[name]
    rng = np.random.default_rng(len(name))
    delta = test(rng.standard_normal(N)).detectable
    missed = sum(test(inject(rng.standard_normal(N), delta)).p > ALPHA for _ in range(RUNS))
    assert missed <= MISSES


@pytest.mark.parametrize("name", list(DISCREPANCIES))
def test_a_third_of_it_is_mostly_missed(name):
    """The stated discrepancy is near the smallest: a third of it is missed more often than not."""
    test, inject = DISCREPANCIES[name]
    rng = np.random.default_rng(len(name))
    delta = test(rng.standard_normal(N)).detectable / 3.0
    missed = sum(test(inject(rng.standard_normal(N), delta)).p > ALPHA for _ in range(30))
    assert missed >= 20


@pytest.mark.parametrize("rho", [0.0, 1.0 / 17.0, 0.5, -0.3])
def test_the_detectable_correlation_is_detected(rho):
    rng = np.random.default_rng(17)
    delta = correlation.correlation_detectable(N, rho)
    for sign in (1.0, -1.0):
        pairs = [correlated(*rng.standard_normal((2, N)), rho + sign * delta) for _ in range(RUNS)]
        assert sum(correlation.correlation_test(x, y, rho).p > ALPHA for x, y in pairs) <= MISSES


TESTS = [
    mean.mean_test,
    variance.variance_test,
    ks.ks_test,
    anderson.anderson_test,
    moments.skewness_test,
    moments.kurtosis_test,
]


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.__name__)
def test_p_values_of_right_samples_are_uniform(test):
    """Against U(0, 1) by Kolmogorov–Smirnov at 1e-6: fixed seeds, 200 samples."""
    rng = np.random.default_rng(5)
    p = [test(rng.standard_normal(N)).p for _ in range(200)]
    assert stats.kstest(p, "uniform").pvalue > 1e-6


def test_correlation_p_values_are_uniform_at_any_correlation():
    rng = np.random.default_rng(6)
    pairs = [correlated(*rng.standard_normal((2, 2000)), 1.0 / 17.0) for _ in range(200)]
    p = [correlation.correlation_test(x, y, 1.0 / 17.0).p for x, y in pairs]
    assert stats.kstest(p, "uniform").pvalue > 1e-6


def test_p_of_the_variance_is_exact_deep_in_the_tail():
    n = 3_200_000
    total = n + 5.85 * np.sqrt(2.0 * n)
    x = np.full(n, np.sqrt(total / n))
    mpmath.mp.dps = 30
    exact = 2.0 * mpmath.gammainc(mpmath.mpf(n) / 2, float(np.square(x).sum()) / 2.0, mpmath.inf, regularized=True)
    assert variance.variance_test(x).p == pytest.approx(float(exact), rel=1e-9)


def test_p_of_the_correlation_is_exact_in_the_tail():
    """F(n, n) against the beta integral in 40 digits: B = 1/(1 + F) ~ Beta(n/2, n/2)."""
    n, f = 800_000, 1.0132
    mpmath.mp.dps = 40
    a, end = mpmath.mpf(n) / 2, 1 / (1 + mpmath.mpf(f))
    norm = 2 * mpmath.loggamma(a) - mpmath.loggamma(2 * a)
    edges = [end - mpmath.mpf(k) / 2000 for k in range(8, -1, -1)]
    exact = mpmath.quad(lambda t: mpmath.exp((a - 1) * (mpmath.log(t) + mpmath.log(1 - t)) - norm), edges)
    assert 0 < exact < 1e-6
    assert stats.f.sf(f, n, n) == pytest.approx(float(exact), rel=1e-8)


def test_the_tail_of_kolmogorov_is_below_massarts_bound():
    for n in (1000, 100_000, 3_200_000):
        for z in (1.0, 2.0, 3.147):
            p = stats.kstwo.sf(z / np.sqrt(n), n)
            assert 0.5 * p < p <= 2.0 * np.exp(-2.0 * z * z)


@pytest.mark.parametrize(("a2", "p"), [(1.933, 0.10), (2.492, 0.05), (3.857, 0.01)])
def test_anderson_darling_has_its_published_critical_values(a2, p):
    """Anderson and Darling (1954), to the digits printed and the next term's 2.4 %."""
    assert anderson.anderson_limit_sf(a2) == pytest.approx(p, rel=0.025)


def test_the_tail_of_anderson_darling_is_its_leading_term():
    """P(A² > a) → √3·P(χ²_1 > 2a): the product over the other weights telescopes to 1/3."""
    assert anderson.anderson_limit_sf(30.0) == pytest.approx(np.sqrt(3.0) * stats.chi2.sf(60.0, 1), rel=0.012)


def importance_sample(n, count, target, seed):
    """A² of n uniforms tilted along 2u − 1 towards ``target``, with likelihood weights.

    A mixture over tilts of both signs: the weaker ones bound the weights of samples that are far out in other ways.
    """
    rng = np.random.default_rng(seed)
    tilts = 3.0 * np.sqrt(2.0 * target) / np.sqrt(3.0 * n) * np.array([-1.0, -0.8, -0.5, 0.5, 0.8, 1.0])
    t = rng.choice(tilts, size=(count, 1))
    u = np.sort((t - 1.0 + np.sqrt((1.0 - t) ** 2 + 4.0 * t * rng.random((count, n)))) / (2.0 * t), axis=1)
    a2 = np.array([anderson.anderson_statistic(*pair) for pair in zip(np.log(u), np.log1p(-u), strict=True)])
    density = np.mean([np.exp(np.log1p(tilt * (2.0 * u - 1.0)).sum(axis=1)) for tilt in tilts], axis=0)
    return a2, 1.0 / density


@pytest.mark.parametrize("target", [8.0, 17.5])
def test_finite_samples_keep_to_the_limit_of_anderson_darling(target):
    """P(A²_n > a) at the smallest n allowed, by importance sampling, stays under the factor that p is given."""
    parts = [importance_sample(anderson.MINIMUM, 2000, target, seed) for seed in range(12)]
    value = np.concatenate([weight * (a2 > target) for a2, weight in parts])
    ratio = value.mean() / anderson.anderson_limit_sf(target)
    error = value.std() / np.sqrt(len(value)) / anderson.anderson_limit_sf(target)
    assert error < 0.04
    assert ratio - 3.0 * error < ANDERSON_FINITE_SAMPLE
    assert ratio + 3.0 * error > 1.0 / ANDERSON_FINITE_SAMPLE


def test_the_saddlepoint_matches_the_exact_law_of_a_squared_normal():
    form = saddlepoint.QuadraticForm(np.eye(1), np.zeros(1))
    for n in (1000, 100_000):
        for z in (-5.0, -1.0, 0.3, 2.0, 6.0):
            total = n + z * np.sqrt(2.0 * n)
            exact = 2.0 * min(stats.chi2.cdf(total, n), stats.chi2.sf(total, n))
            assert form.p_value(total / n, n) == pytest.approx(exact, rel=SADDLEPOINT)


def test_the_saddlepoint_is_smooth_at_the_centre():
    form = saddlepoint.QuadraticForm(np.diag([1.0, 0.5]), np.array([0.3, 0.0]), 0.2)
    step = 1e-6 * np.sqrt(form.variance)
    tails = [form.p_value(form.mean + k * step, 1000) for k in range(-40, 41)]
    assert np.abs(np.diff(tails)).max() < 1e-3


def test_a_quadratic_form_has_the_moments_of_its_law():
    rng = np.random.default_rng(8)
    matrix, vector = rng.standard_normal((3, 3)), rng.standard_normal(3)
    form = saddlepoint.QuadraticForm(matrix, vector, 0.7)
    g = rng.standard_normal((400_000, 3))
    values = np.einsum("ni,ij,nj->n", g, matrix, g) + g @ vector + 0.7
    assert values.mean() == pytest.approx(form.mean, abs=5.0 * np.sqrt(form.variance / len(g)))
    assert values.var() == pytest.approx(form.variance, rel=0.03)


def test_the_detectable_shift_of_a_law_is_detected():
    rng = np.random.default_rng(9)
    form = saddlepoint.QuadraticForm(np.diag([0.4, -0.2]), np.array([1.0, 0.5]))
    n, missed = 400, 0
    shift = law.law_detectable(form, n) * np.sqrt(form.variance)
    for _ in range(RUNS):
        g = rng.standard_normal((n, 2))
        total = float((np.square(g) @ [0.4, -0.2] + g @ [1.0, 0.5]).mean())
        missed += law.law_test(total + shift, form, n).p > ALPHA
    assert missed <= MISSES


def test_full_size_detects_what_it_promises():
    """One step: variance 1 %, sibling correlation 0.01, mean 0.005 σ.  Leaves: 3 %, 0.03, 0.015 σ."""
    edges = PROMPTS * ROOTS * 2 * FULL_ELEMENTS
    assert variance.variance_detectable(edges) <= 0.01
    assert correlation.correlation_detectable(edges, 1.0 / 17.0) <= 0.01
    assert mean.mean_detectable(edges) <= 0.005
    leaves = LEAF_PROMPTS * LEAF_ELEMENTS
    assert variance.variance_detectable(leaves) <= 0.03
    assert correlation.correlation_detectable(leaves) <= 0.03
    assert mean.mean_detectable(leaves) <= 0.015


@pytest.mark.parametrize(
    ("detectable", "discrepancy", "expected"),
    [
        (variance.variance_detectable, 0.01, 1.6e6),
        (correlation.correlation_detectable, 0.01, 0.8e6),
        (mean.mean_detectable, 0.005, 3.2e6),
    ],
)
def test_sample_sizes(detectable, discrepancy, expected):
    n = sample_size(detectable, discrepancy)
    assert n == pytest.approx(expected, rel=0.02)
    assert detectable(n) <= discrepancy < detectable(n - 1)
    assert (ALPHA, POWER) == (FALSE_ALARM / SLOTS, 0.999)


def test_bonferroni_and_holm():
    assert bonferroni([0.01, 0.2, 0.9]) == pytest.approx(0.03)
    assert holm([0.2, 0.012, 0.01], 0.03) == [False, True, True]
    assert holm([0.2, 0.016, 0.01], 0.03) == [False, False, True]
    assert holm([0.011, 0.2], 0.03, total=3) == [False, False]
    for wrong in ([], [1.2], [float("nan")]):
        with pytest.raises(OptionError):
            bonferroni(wrong)
    with pytest.raises(OptionError):
        holm([0.1], 0.0)


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.__name__)
def test_bad_samples_are_refused(test):
    with pytest.raises(InputError):
        test(np.full(20_000, np.nan))
    with pytest.raises(InputError):
        test(np.zeros(0))


def test_a_finding_has_one_judge():
    with pytest.raises(OptionError):
        Finding("x", "NORM-1", 1, 0.0)
    with pytest.raises(OptionError):
        Finding("x", "NORM-1", 1, 0.0, p=0.5)
    assert not Finding("x", "NORM-1", 1, float("nan"), tolerance=1.0).passed
    assert not Finding("x", "NORM-1", 1, 0.0, p=ALPHA / 2, detectable=1.0).passed


def test_rows_of_one_exact_check_are_merged_into_the_worst():
    rows = [Finding("a", "X", 2, s, tolerance=t) for s, t in ((0.1, 1.0), (0.3, 1.0), (0.2, 10.0))]
    (merged,) = worst(rows)
    assert (merged.statistic, merged.n) == (0.3, 6)


def test_the_ledger_fails_on_a_failed_finding_and_counts_its_budget(tmp_path):
    ledger = Ledger()
    ledger.judge([Finding("good", "NORM-1", 10, 0.1, p=0.4, detectable=0.2)])
    with pytest.raises(AssertionError, match="bad"):
        ledger.judge([Finding("bad", "NORM-1", 10, 0.1, tolerance=0.01)])
    with pytest.raises(AssertionError):
        ledger.judge([])
    assert ledger.judged == 1
    assert not ledger.over_budget()
    assert not ledger.holm_rejections()
    assert any(line.startswith("FAILED bad") for line in ledger.table())
    ledger.findings += [Finding("more", "NORM-1", 1, 0.0, p=0.5, detectable=1.0)] * SLOTS
    assert ledger.over_budget()
    ledger.write(tmp_path / "report.json")
    assert '"passed": false' in (tmp_path / "report.json").read_text()
