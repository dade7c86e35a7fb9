"""From counted errors to lower bounds on ε, each with the confidence that was asked for.

Receives: how often a test for one sample's presence was wrong, or how many guesses about canaries were right.
Gives: Clopper–Pearson limits, the μ of a Gaussian and of a Poisson-sampled one, their ε, and the one-run bound.

A test says "present" or "absent"; FPR is how often it says "present" of an absent sample, FNR the reverse. A trade-off
curve f says what a mechanism allows: FNR ≥ f(FPR) for every test (Dong, Roth & Su 2022).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clipwise.accounting.events import discretisation
from clipwise.types import InputError, PoissonGaussian, at_least_zero, fraction, whole

Array: TypeAlias = NDArray[np.float64]
# upper limits of (FPR, FNR) → the least strength that explains them, elementwise
Strength: TypeAlias = Callable[[Array, Array], Array]

_THRESHOLDS = 512  # tried on the half of the scores that chooses one
_MOST = 100.0  # an ε beyond which nothing is told apart: e⁻¹⁰⁰ is never counted


@dataclass(frozen=True)
class Bound:
    """What an audit shows with the stated confidence, and what the same audit would have shown without any error."""

    value: float
    ceiling: float


def rate_at_most(count: ArrayLike, trials: int, confidence: float) -> Array:
    """Clopper–Pearson: the largest rate at which so few of the trials are not too unlikely; one-sided."""
    from scipy.special import betaincinv

    found = np.asarray(count, dtype=np.float64)
    whole("trials", trials)
    fraction("confidence", confidence, open_end=True)
    # P[Bin(n, p) ≤ k] = 1 − confidence at p = the Beta(k + 1, n − k) quantile
    limit = betaincinv(found + 1, np.maximum(trials - found, 1), confidence)
    return np.where(found < trials, limit, 1.0)


def gaussian_mu(fpr: Array, fnr: Array) -> Array:
    """The least μ whose curve Φ(Φ⁻¹(1−α) − μ) allows these rates: Φ⁻¹(1 − FPR) − Φ⁻¹(FNR), at least 0."""
    from scipy.special import ndtri

    return np.maximum(-ndtri(fpr) - ndtri(fnr), 0.0)  # −Φ⁻¹(x) keeps the digits that 1 − x loses


def sampled_mu(fpr: Array, fnr: Array, rate: float) -> Array:
    """The least μ = 1/σ that allows these rates where the sample takes part only with probability ``rate``.

    The curve is (1−q)(1−α) + q Φ(Φ⁻¹(1−α) − μ); it falls as μ grows, so the least μ is that of the *largest* noise.
    *Edge cases.* Rates that not even μ = ∞ allows, which only a sample drawn more often can give, make it infinite.
    """
    from scipy.special import ndtri

    q = fraction("sampling_rate", rate)
    given = (fnr - (1 - q) * (1 - fpr)) / q  # the FNR among the draws in which the sample took part
    missed = ndtri(np.clip(given, 0.0, 1.0))  # −∞ where no noise is small enough
    return np.maximum(-ndtri(fpr) - missed, 0.0)


def direct_epsilon(fpr: Array, fnr: Array, delta: float) -> Array:
    """ε without any assumption on the mechanism: ln((1−δ−FPR)/FNR) or ln((1−δ−FNR)/FPR), whichever is more."""
    fpr, fnr = np.asarray(fpr, dtype=np.float64), np.asarray(fnr, dtype=np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = np.maximum((1 - delta - fpr) / fnr, (1 - delta - fnr) / fpr)
        return np.maximum(np.log(np.maximum(ratios, 1e-300)), 0.0)


def gaussian_delta(mu: float, epsilon: float) -> float:
    """δ(ε) of a Gaussian mechanism with μ = sensitivity/σ: Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ)."""
    from scipy.special import log_ndtr

    if mu == 0:
        return 0.0
    lost, gained = log_ndtr(mu / 2 - epsilon / mu), epsilon + log_ndtr(-mu / 2 - epsilon / mu)
    return float(math.exp(lost) * -math.expm1(min(gained - lost, 0.0)))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The ε at which a Gaussian mechanism with this μ has this δ; 0 where δ is enough by itself."""
    from scipy.optimize import brentq

    at_least_zero("mu", mu)
    if gaussian_delta(mu, 0.0) <= fraction("delta", delta, open_end=True):
        return 0.0
    high = mu * mu / 2 + mu * 40  # δ there is below Φ(−40)
    return float(brentq(lambda e: gaussian_delta(mu, e) - delta, 0.0, high, xtol=1e-12))


@lru_cache
def composed_epsilon(mu: float, sampling_rate: float, steps: int, delta: float) -> float:
    """A lower bound on the ε of so many Poisson-sampled Gaussian steps with noise multiplier 1/μ.

    *Guarantees.* PLD rounded down, where accounting rounds it up: what is printed as a lower bound is one.
    *Edge cases.* μ = 0 gives 0; noise so small that nothing is protected gives infinity, as accounting does.
    """
    if mu <= 1e-6:
        return 0.0
    if mu > 1e6:
        return math.inf
    if sampling_rate == 1:
        return gaussian_epsilon(mu * math.sqrt(steps), delta)
    interval = discretisation([(PoissonGaussian(1 / mu, sampling_rate), steps)])
    if interval > 1:
        return math.inf

    from dp_accounting.pld import privacy_loss_distribution as pld

    one = pld.from_gaussian_mechanism(
        1 / mu,
        pessimistic_estimate=False,
        value_discretization_interval=interval,
        sampling_prob=sampling_rate,
        use_connect_dots=False,
    )
    return float(one.self_compose(steps).get_epsilon_for_delta(delta))


def split(without: Array, present: Array, strength: Strength, confidence: float, *, missed: float = 0.0) -> Bound:
    """The strength that scores of an absent and of a present sample show; ``missed`` is the FNR without any noise.

    The threshold is chosen on the first half of each; on the second half FPR and FNR get an upper limit, each of them
    at half of what the confidence leaves. *Guarantees.* If scores are independent, the bound is above the truth with a
    probability of at most 1 − confidence. *Edge cases.* Fewer than two scores of a kind is an InputError.
    """
    if min(len(without), len(present)) < 2:
        raise InputError(f"expected at least 2 scores of each kind, got {len(without)} and {len(present)}: try longer")
    each = (1 + fraction("confidence", confidence, open_end=True)) / 2

    def bound(first: Array, second: Array, thresholds: Array) -> Array:
        false_positives = len(first) - np.searchsorted(np.sort(first), thresholds, side="right")  # score > threshold
        false_negatives = np.searchsorted(np.sort(second), thresholds, side="right")
        fpr = rate_at_most(false_positives, len(first), each)
        return strength(fpr, rate_at_most(false_negatives, len(second), each))

    (a, b), (c, d) = np.array_split(without, 2), np.array_split(present, 2)
    tried = np.quantile(np.concatenate([a, c]), np.linspace(0, 1, _THRESHOLDS))
    values = bound(a, c, tried)
    first, last = np.flatnonzero(values == values.max())[[0, -1]]
    # the middle of what is best: an edge is where this half's outermost score happens to be
    chosen = np.array([(tried[first] + tried[min(last + 1, len(tried) - 1)]) / 2])
    best = strength(rate_at_most(0, len(b), each), rate_at_most(missed * len(d), len(d), each))
    return Bound(float(bound(b, d, chosen)[0]), float(best))


def one_run_p_value(right: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """How unlikely so many right guesses are under (ε, δ) (Steinke, Nasr & Jagielski 2023, Theorem 5.2).

    With q = e^ε/(1+e^ε): β = P[Bin(r, q) ≥ W], p = β + 2mδ · max_{1≤i≤W} (P[Bin(r, q) ≥ W−i] − β)/i.
    """
    from scipy.special import expit
    from scipy.stats import binom

    beta = float(binom.sf(right - 1, guesses, expit(epsilon)))
    steps = np.arange(1, right + 1)
    above = binom.sf(right - 1 - steps, guesses, expit(epsilon)) - beta
    return min(1.0, beta + 2 * canaries * delta * float(np.max(above / steps, initial=0.0)))


def one_run_epsilon(right: int, guesses: int, canaries: int, delta: float, confidence: float) -> float:
    """The largest ε that so many right guesses contradict; ``guesses`` must have been fixed in advance."""
    from scipy.optimize import brentq

    if not 0 <= whole("right", right, least=0) <= whole("guesses", guesses) <= whole("canaries", canaries):
        raise InputError(f"expected right ≤ guesses ≤ canaries, got {right}, {guesses} and {canaries}")
    allowed = 1 - fraction("confidence", confidence, open_end=True)

    def excess(epsilon: float) -> float:
        return one_run_p_value(right, guesses, canaries, epsilon, delta) - allowed

    if excess(0.0) > 0:
        return 0.0
    return float(brentq(excess, 0.0, _MOST, xtol=1e-9)) if excess(_MOST) > 0 else _MOST


def one_run(scores: Array, included: NDArray[np.bool_], guesses: int, delta: float, confidence: float) -> Bound:
    """The bound from one run: the highest scores are guessed to be included, the lowest not, half of the guesses each.

    Canaries must have been included by independent fair coins. The ceiling is that of no wrong guess.
    """
    canaries = len(scores)
    whole("guesses", guesses, least=2)
    order = np.argsort(scores, kind="stable")
    low = guesses // 2
    high = order[canaries - (guesses - low) :]
    right = int(included[high].sum() + (~included[order[:low]]).sum())
    return Bound(
        one_run_epsilon(right, guesses, canaries, delta, confidence),
        one_run_epsilon(guesses, guesses, canaries, delta, confidence),
    )
