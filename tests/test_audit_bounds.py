"""Audit bounds: equal to slow explicit definitions, and above the truth no more often than they say.

Receives: closed forms of Gaussians, binomial sums written out, the formulas and values that jax_privacy.auditing
publishes, and simulated mechanisms whose ε is known.
Gives: the bounds of clipwise.audit.bounds against each of them.
"""

import math
from statistics import NormalDist

import numpy as np
import pytest

from clipwise import accounting
from clipwise.audit import bounds, mia
from clipwise.types import InputError

NORMAL = NormalDist()


def binomial_at_most(k: int, n: int, p: float) -> float:
    """P[Bin(n, p) ≤ k], term by term."""
    return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))


def gaussian_curve(fpr: float, mu: float) -> float:
    """The least FNR of a test between N(0, 1) and N(μ, 1) at this FPR."""
    return NORMAL.cdf(NORMAL.inv_cdf(1 - fpr) - mu)


def sampled_curve(fpr: float, mu: float, q: float) -> float:
    """The same between N(0, 1) and (1−q) N(0, 1) + q N(μ, 1): the threshold test, written out."""
    threshold = NORMAL.inv_cdf(1 - fpr)
    return (1 - q) * NORMAL.cdf(threshold) + q * NORMAL.cdf(threshold - mu)


def hockey_stick(mu: float, epsilon: float) -> float:
    """δ = ∫ max(0, p − e^ε p') of N(μ, 1) against N(0, 1), by a fine sum."""
    x = np.linspace(-15, 15 + mu, 600_001)
    p, other = (np.exp(-((x - m) ** 2) / 2) / math.sqrt(2 * math.pi) for m in (mu, 0.0))
    return float(np.maximum(p - math.exp(epsilon) * other, 0).sum() * (x[1] - x[0]))


@pytest.mark.parametrize(("k", "n"), [(0, 20), (3, 20), (19, 20), (7, 60)])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.9995])
def test_clopper_pearson_is_the_rate_at_which_so_few_are_as_unlikely_as_allowed(
    k: int, n: int, confidence: float
) -> None:
    limit = float(bounds.rate_at_most(k, n, confidence))
    assert binomial_at_most(k, n, limit) == pytest.approx(1 - confidence, rel=1e-6)


def test_clopper_pearson_of_nothing_but_errors_is_one() -> None:
    assert float(bounds.rate_at_most(20, 20, 0.95)) == 1.0
    assert list(bounds.rate_at_most(np.array([0.0, 20.0]), 20, 0.95)) == [pytest.approx(1 - 0.05 ** (1 / 20)), 1.0]


@pytest.mark.parametrize("mu", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("fpr", [0.001, 0.2, 0.6])
def test_exact_rates_of_a_gaussian_give_its_mu_back(mu: float, fpr: float) -> None:
    found = bounds.gaussian_mu(np.array(fpr), np.array(gaussian_curve(fpr, mu)))
    assert float(found) == pytest.approx(mu, rel=1e-9)


@pytest.mark.parametrize("q", [0.01, 0.3, 1.0])
@pytest.mark.parametrize("mu", [0.5, 2.0])
@pytest.mark.parametrize("fpr", [0.001, 0.2])
def test_exact_rates_of_a_sampled_gaussian_give_its_mu_back(q: float, mu: float, fpr: float) -> None:
    found = bounds.sampled_mu(np.array(fpr), np.array(sampled_curve(fpr, mu, q)), q)
    assert float(found) == pytest.approx(mu, rel=1e-6)


def test_the_sampled_bound_is_that_of_the_largest_noise_whose_curve_allows_the_rates() -> None:
    q, fpr, fnr = 0.3, 0.1, 0.75
    allowed = [sigma for sigma in np.linspace(0.05, 5, 2000) if sampled_curve(fpr, 1 / sigma, q) <= fnr]
    assert 1 / float(bounds.sampled_mu(np.array(fpr), np.array(fnr), q)) == pytest.approx(max(allowed), rel=5e-3)


def test_rates_that_sampling_cannot_give_show_an_infinite_strength_and_useless_ones_none() -> None:
    assert math.isinf(float(bounds.sampled_mu(np.array(0.01), np.array(0.3), 0.5)))  # seen in more than half
    assert float(bounds.sampled_mu(np.array(0.4), np.array(0.6), 0.5)) == 0.0
    assert float(bounds.gaussian_mu(np.array(0.7), np.array(0.7))) == 0.0
    assert float(bounds.direct_epsilon(np.array(0.7), np.array(0.7), 1e-5)) == 0.0


@pytest.mark.parametrize("strength", ["gaussian", "sampled", "direct"])
def test_more_errors_never_show_more(strength: str) -> None:
    rates = np.linspace(0.001, 0.999, 40)
    fpr, fnr = np.meshgrid(rates, rates, indexing="ij")
    found = {
        "gaussian": lambda: bounds.gaussian_mu(fpr, fnr),
        "sampled": lambda: bounds.sampled_mu(fpr, fnr, 0.4),
        "direct": lambda: bounds.direct_epsilon(fpr, fnr, 1e-3),
    }[strength]()
    for axis in (0, 1):
        first, second = np.moveaxis(found, axis, 0)[:-1], np.moveaxis(found, axis, 0)[1:]
        assert (second <= first + 1e-12).all()
    assert found.max() > 1


@pytest.mark.parametrize("mu", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("epsilon", [0.0, 1.0, 4.0])
def test_the_gaussians_delta_is_the_integral_of_what_the_one_density_has_beyond_the_other(
    mu: float, epsilon: float
) -> None:
    assert bounds.gaussian_delta(mu, epsilon) == pytest.approx(hockey_stick(mu, epsilon), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize(("mu", "delta"), [(0.05, 1e-5), (1.0, 1e-5), (1.0, 1e-12), (6.0, 1e-5), (30.0, 1e-3)])
def test_epsilon_of_a_gaussian_inverts_its_delta_and_is_what_accounting_says(mu: float, delta: float) -> None:
    found = bounds.gaussian_epsilon(mu, delta)
    assert bounds.gaussian_delta(mu, found) == pytest.approx(delta, rel=1e-6)
    if delta > 1e-10:
        claimed = accounting.epsilon(noise_multiplier=1 / mu, delta=delta, sampling_rate=1.0, steps=1)
        assert found <= claimed <= found + 2e-3 * (1 + found)


def test_a_gaussian_that_delta_alone_covers_has_epsilon_zero() -> None:
    assert bounds.gaussian_epsilon(0.0, 1e-5) == bounds.gaussian_epsilon(1e-6, 1e-5) == 0.0


@pytest.mark.parametrize(("fpr", "fnr"), [(0.01, 0.3), (0.3, 0.01), (0.2, 0.2)])
def test_the_direct_bound_is_the_least_epsilon_that_allows_the_rates(fpr: float, fnr: float) -> None:
    delta = 1e-3

    def allows(epsilon: float) -> bool:
        return 1 - fnr <= math.exp(epsilon) * fpr + delta and 1 - fpr <= math.exp(epsilon) * fnr + delta

    found = float(bounds.direct_epsilon(np.array(fpr), np.array(fnr), delta))
    assert allows(found + 1e-9) and not allows(found - 1e-6)


@pytest.mark.parametrize(("mu", "rate", "steps"), [(1.0, 0.1, 50), (1.5, 0.5, 3), (0.5, 1.0, 9)])
def test_composition_stays_just_below_what_accounting_says(mu: float, rate: float, steps: int) -> None:
    found = bounds.composed_epsilon(mu, rate, steps, 1e-5)
    claimed = accounting.epsilon(noise_multiplier=1 / mu, delta=1e-5, sampling_rate=rate, steps=steps)
    assert claimed - 0.02 - 1e-4 * steps <= found <= claimed


def test_composition_of_nothing_is_zero_and_of_no_noise_infinite() -> None:
    assert bounds.composed_epsilon(0.0, 0.1, 100, 1e-5) == 0.0
    assert math.isinf(bounds.composed_epsilon(math.inf, 0.1, 100, 1e-5))


def normals(mu: float, n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    return generator.normal(size=n), generator.normal(size=n) + mu


@pytest.mark.parametrize("mu", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("n", [20, 400])
def test_bounds_are_above_the_truth_no_more_often_than_their_confidence_leaves(mu: float, n: int) -> None:
    tries = 400
    found = np.array([bounds.split(*normals(mu, n, i), bounds.gaussian_mu, 0.8).value for i in range(tries)])
    assert (found > mu).mean() <= 0.2 + 3 * math.sqrt(0.2 * 0.8 / tries)
    if mu == 1.0 and n == 400:
        assert found.mean() > 0.6  # not by showing nothing


def test_sampled_bounds_are_above_the_truth_no_more_often_than_their_confidence_leaves() -> None:
    tries, n, q, mu = 200, 2000, 0.5, 2.0
    found = []
    for i in range(tries):
        without, present = normals(0.0, n, i)
        present = present + mu * (np.random.default_rng(10**6 + i).uniform(size=n) < q)
        found.append(bounds.split(without, present, lambda a, b: bounds.sampled_mu(a, b, q), 0.8).value)
    assert (np.array(found) > mu).mean() <= 0.2 + 3 * math.sqrt(0.16 / tries)
    assert np.mean(found) > 1.4


def test_many_looks_come_close_to_the_truth() -> None:
    assert 0.97 <= bounds.split(*normals(1.0, 200_000, 0), bounds.gaussian_mu, 0.95).value <= 1.0


def test_the_ceiling_is_what_scores_that_never_err_show() -> None:
    n = 2000
    without, present = normals(0.0, n, 0)
    bound = bounds.split(without, present + 100, bounds.gaussian_mu, 0.95)
    assert bound.value == bound.ceiling
    direct = bounds.split(without, present + 100, lambda a, b: bounds.direct_epsilon(a, b, 0.0), 0.95)
    assert direct.ceiling == pytest.approx(math.log(n / 2 / 3.7), abs=0.01)  # half of the scores chose the threshold
    seen = np.arange(n) % 2 == 0
    half = bounds.split(without, present + 100 * seen, lambda a, b: bounds.sampled_mu(a, b, 0.5), 0.95, missed=0.5)
    assert half.value == pytest.approx(half.ceiling, rel=0.05)


def test_too_few_scores_are_refused() -> None:
    with pytest.raises(InputError, match="at least 2 scores"):
        bounds.split(np.zeros(1), np.zeros(5), bounds.gaussian_mu, 0.95)


# One run


def slow_p_value(m: int, r: int, w: int, epsilon: float, delta: float) -> float:
    """Steinke, Nasr & Jagielski (2023), Theorem 5.2, with every probability a sum over outcomes."""
    q = math.exp(epsilon) / (1 + math.exp(epsilon))

    def at_least(v: int) -> float:
        return sum(math.comb(r, i) * q**i * (1 - q) ** (r - i) for i in range(max(v, 0), r + 1))

    beta = at_least(w)
    alpha = max([(at_least(w - i) - beta) / i for i in range(1, w + 1)], default=0.0)
    return min(1.0, beta + 2 * m * delta * alpha)


@pytest.mark.parametrize(("m", "r", "w"), [(100, 40, 38), (100, 100, 70), (50, 10, 10), (30, 20, 0), (1000, 60, 55)])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-2])
@pytest.mark.parametrize("epsilon", [0.0, 0.7, 3.0])
def test_the_one_run_p_value_is_the_published_one(m: int, r: int, w: int, delta: float, epsilon: float) -> None:
    found = bounds.one_run_p_value(w, r, m, epsilon, delta)
    assert found == pytest.approx(slow_p_value(m, r, w, epsilon, delta), rel=1e-8, abs=1e-12)


def test_the_one_run_bound_is_the_largest_epsilon_that_is_contradicted() -> None:
    found = bounds.one_run_epsilon(90, 100, 500, 1e-5, 0.95)
    assert slow_p_value(500, 100, 90, found - 1e-4, 1e-5) < 0.05 < slow_p_value(500, 100, 90, found + 1e-4, 1e-5)


def test_a_thousand_right_guesses_show_5_8_at_most() -> None:
    q = 0.05 ** (1 / 1000)
    assert bounds.one_run_epsilon(1000, 1000, 1000, 0.0, 0.95) == pytest.approx(math.log(q / (1 - q)), abs=1e-6)
    assert bounds.one_run_epsilon(1000, 1000, 1000, 1e-5, 0.95) == pytest.approx(5.8, abs=0.05)


def test_more_right_guesses_never_show_less_and_more_canaries_or_delta_never_more() -> None:
    by_right = [bounds.one_run_epsilon(w, 60, 300, 1e-5, 0.95) for w in range(61)]
    assert by_right == sorted(by_right) and by_right[30] == 0.0 and by_right[60] > 2.5
    for name in ("canaries", "delta"):
        given = {"right": 58, "guesses": 60, "canaries": 300, "delta": 1e-5, "confidence": 0.95}
        more = bounds.one_run_epsilon(**{**given, name: 100 * given[name]})  # type: ignore[arg-type]
        assert more <= bounds.one_run_epsilon(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
def test_the_one_run_bound_covers_randomised_response_whose_epsilon_is_known(epsilon: float) -> None:
    tries, m, above = 400, 100, 0
    generator = np.random.default_rng(0)
    for _ in range(tries):
        included = generator.uniform(size=m) < 0.5
        told = np.where(generator.uniform(size=m) < 1 / (1 + math.exp(-epsilon)), included, ~included)
        scores = told + 0.01 * generator.normal(size=m)
        above += bounds.one_run(scores, included, 40, 0.0, 0.8).value > epsilon
    assert above / tries <= 0.2 + 3 * math.sqrt(0.16 / tries)


def test_one_run_guesses_the_highest_scores_present_and_the_lowest_absent() -> None:
    included = np.arange(100) % 2 == 0
    perfect = bounds.one_run(included.astype(float), included, 40, 1e-5, 0.95)
    assert perfect.value == perfect.ceiling > 2
    assert bounds.one_run(-included.astype(float), included, 40, 1e-5, 0.95).value == 0.0


def test_more_guesses_than_canaries_are_refused() -> None:
    with pytest.raises(InputError, match="right ≤ guesses ≤ canaries"):
        bounds.one_run_epsilon(5, 20, 10, 1e-5, 0.95)


# What jax_privacy.auditing publishes (CanaryScoreAuditor and its tests): formulas in scipy's words, and values


def even_normals(mu: float, n: int) -> np.ndarray:
    """The n middle quantiles of N(μ, 1)."""
    from scipy.stats import norm

    return norm.ppf((np.arange(n) + 0.5) / n) + mu


def corners(points: np.ndarray) -> np.ndarray:
    """Those of a rising staircase that no line between two others passes above or through."""
    kept: list[tuple[int, int]] = []
    for x, y in points.tolist():
        while len(kept) >= 2:
            (a, b), (c, d) = kept[-2:]
            if (d - b) * (x - c) > (y - d) * (c - a):
                break
            kept.pop()
        kept.append((x, y))
    return np.array(kept)


@pytest.mark.parametrize(("shift", "published"), [(0.0, 0.0), (1.0, 1.13346), (2.0, 2.311945), (4.0, 4.395568)])
def test_one_run_bounds_are_those_that_jax_privacy_publishes(shift: float, published: float) -> None:
    """10 000 canaries in and as many out, significance 0.05 shared by all thresholds (Bonferroni), δ = 1e-6."""
    from scipy.special import expit
    from scipy.stats import binom

    n, delta = 10_000, 1e-6
    out, present = even_normals(0, n), even_normals(shift, n)
    thresholds = np.concatenate([np.union1d(out, present), [np.inf]])
    missed, rejected = (np.searchsorted(scores, thresholds, side="left") for scores in (present, out))
    found = corners(np.stack([missed, rejected], 1))
    right = n - found[:, 0]
    guesses = right + n - found[:, 1]
    allowed, best = 0.05 / len(found), 0.0
    left = guesses > 0
    # a p-value without δ is the least one: of the thresholds that could beat the best so far, the most promising first
    while (p := np.where(left, binom.sf(right - 1, guesses, expit(best)), 1.0)).min() <= allowed:
        i = int(p.argmin())
        best = max(best, bounds.one_run_epsilon(int(right[i]), int(guesses[i]), 2 * n, delta, 1 - allowed))
        left[i] = False
    assert best == pytest.approx(published, rel=1e-5)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("n", [100, 1000])
@pytest.mark.parametrize("delta", [0.0, 1e-3])
def test_the_direct_bound_is_jax_privacys_at_a_given_threshold(threshold: float, n: int, delta: float) -> None:
    """ln((TPR − δ)/FPR), or the reverse, with Clopper–Pearson limits at half of the significance each."""
    from scipy.stats import beta

    misses, alarms = int((even_normals(1, n) < threshold).sum()), int((even_normals(0, n) >= threshold).sum())
    fnr, fpr = (beta.ppf(1 - 0.1 / 2, count + 1, n - count) for count in (misses, alarms))
    expected = max(0.0, math.log((1 - fnr - delta) / fpr), math.log((1 - fpr - delta) / fnr))
    limits = [bounds.rate_at_most(count, n, 1 - 0.1 / 2) for count in (alarms, misses)]
    assert float(bounds.direct_epsilon(*limits, delta)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("fpr", "fnr"), [(0.01, 0.6), (0.2, 0.3), (1e-4, 0.02)])
@pytest.mark.parametrize("delta", [1e-6, 0.05])
def test_the_gaussian_bound_is_jax_privacys(fpr: float, fnr: float, delta: float) -> None:
    """μ by equation 6 and ε by corollary 2.13 of Dong, Roth & Su, both as differences of logarithms."""
    from dp_accounting import get_epsilon_gaussian
    from scipy.optimize import brentq
    from scipy.stats import norm

    mu = norm.isf(fpr) - norm.ppf(fnr)

    def excess(epsilon: float) -> float:
        first, second = norm.logcdf(mu / 2 - epsilon / mu), epsilon + norm.logcdf(-mu / 2 - epsilon / mu)
        return float(first + math.log1p(-math.exp(second - first)) - math.log(delta))

    found = bounds.gaussian_epsilon(float(bounds.gaussian_mu(np.array(fpr), np.array(fnr))), delta)
    assert found == pytest.approx(brentq(excess, 0.0, 100.0), abs=1e-9)
    assert found == pytest.approx(get_epsilon_gaussian(1 / mu, delta), rel=1e-4)  # what its own test compares with


def test_a_curve_that_is_a_quarter_of_a_circle_has_the_area_and_rates_that_jax_privacy_publishes() -> None:
    n = 10_000
    found = mia.roc(np.sqrt(1 - np.linspace(0, 1, n) ** 2), np.linspace(0, 1, n))
    assert found.area == pytest.approx(math.pi / 4, abs=1e-3)
    for fpr in (0.1, 0.4, 0.9):
        assert found.tpr_at(fpr) == pytest.approx(math.sqrt(fpr * (2 - fpr)), abs=1e-3)
