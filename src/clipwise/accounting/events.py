"""Events as dp-accounting knows them, and their composition.

Receives: the package's events with their counts, δ and the name of an accountant.
Gives: as_dp_event, and spent: an upper bound on ε; everything without a proof is refused.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, get_args

from clipwise.types import (
    BlockGaussian,
    Event,
    Gaussian,
    InputError,
    MemoryGaussian,
    Refused,
    at_least_zero,
    fraction,
    one_of,
    positive,
    whole,
)

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from dp_accounting.pld.pld_pmf import PLDPmf
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from dp_accounting.pld.privacy_loss_mechanism import MonotonePrivacyLoss

# pld: privacy loss distributions, tight. rdp: Rényi divergences, the second opinion.
ACCOUNTANTS = ("pld", "rdp")
# The grid of privacy losses. PLD rounds up to it, so that a coarser grid costs tightness and never soundness.
DISCRETISATION = 1e-4
# PLD composes by FFT, whose rounding moves δ by up to about 1e-16 per release, in either direction: against the closed
# form of Gaussians, ε at δ = 1e-14 after 1e5 releases came out 0.06 too small. Ten times that is kept back from δ.
ROUNDING_PER_RELEASE = 1e-15
# So tails need not be followed further than a hundredth of that; what lies beyond counts as an infinite loss.
TAIL = ROUNDING_PER_RELEASE / 100
# Each cell of one release's grid takes dp-accounting 3 µs, and the tails have most of the cells and hold next to
# nothing. So the distribution stands on every cell up to about this many, and further out on losses that are about a
# 4000th of themselves apart. That rounds up, as a coarser grid does: an ε below 50 grows by less than a millionth of
# itself. (Above 700, where e^ε overflows, ε is one of these losses, or infinite.)
THINNED = 4000
# dp-accounting inverts the loss of a mixture to within 1e-6, where the noise's standard deviation is this. The error in
# δ is of second order, ½ · 0.4 · signal · (1e-6/scale)² = 2e-15 · signal per release: kept back too.
MIXTURE_SCALE = 10.0
# The most cells from end to end of one release's grid: composing them costs half a µs each. One that a mixture stands
# on costs about 100 µs. So mixtures have a coarser grid: cells of at most a tenth of a loss's standard deviation, which
# add at most a few thousandths to its variance.
CELLS, MIXTURE_CELLS, MIXTURE_GRID = 5e5, 4e4, 0.1
MOST_ROWS = 1000  # of a person: with so many there is no privacy left that anybody could use


def relation(rows_per_person: int) -> str:
    """Which data sets are neighbours, in words."""
    return f"add or remove one {'sample' if rows_per_person == 1 else f'person with at most {rows_per_person} samples'}"


class Cost(NamedTuple):
    """What a release costs: a shift of memory + J in noise of σ, J how many of a person's ``rows`` were drawn.

    J is binomial: each row is drawn by itself, with probability ``rate``.
    """

    sigma: float
    rate: float
    memory: float
    rows: int = 1


def cost(event: Event, rows: int = 1) -> Cost | None:
    """The cost of one release to whoever has so many rows; None where an earlier release has paid for it.

    *Guarantees*: only events with a proof pass; a subclass may mean something else, so it is refused too.
    """
    if type(event) not in get_args(Event):
        raise Refused(
            f"there is no privacy proof for an event of type {type(event).__name__}: write PoissonGaussian("
            "noise_multiplier, sampling_rate), or another of clipwise.types.Event, the releases that accounting knows"
        )
    # numbers that dp-accounting can compute with, and that cost no less
    sigma = min(positive("noise_multiplier", event.noise_multiplier), 1e100)
    if isinstance(event, Gaussian):
        if not (isinstance(event.what, str) and event.what.strip() and event.what.isprintable()):
            raise InputError(f"what must say in a few words what was released, got {event.what!r}")
        return Cost(sigma / rows, 1.0, 0.0)
    rate = fraction("sampling_rate", event.sampling_rate)
    rate = 1.0 if rate > 1 - 1e-9 else rate
    if isinstance(event, BlockGaussian):
        if not isinstance(event.begins, bool):
            raise InputError(f"begins must be True or False, got {event.begins!r}")
        if rows > 1:  # they may be in several groups, and each has its turn in the same block
            raise Refused(
                f"there is no proof for several rows of a person in steps by groups, got rows_per_person={rows}: write "
                "rows_per_person=1, or dice(…, memory='none')"
            )
        return Cost(sigma, rate, 0.0) if event.begins else None
    memory = at_least_zero("memory", event.memory) if isinstance(event, MemoryGaussian) else 0.0
    return Cost(sigma / (rows + memory), 1.0, 0.0) if rate == 1 else Cost(sigma, rate, memory, rows)


def as_dp_event(event: Event) -> DpEvent:
    """One release as dp-accounting's event; what is not in the union of events is refused."""
    found = cost(event)

    from dp_accounting import NoOpDpEvent  # imported late: it takes a second

    return NoOpDpEvent() if found is None else _dp_event(found)


def _dp_event(cost: Cost) -> DpEvent:
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.dp_event import MixtureOfGaussiansDpEvent

    if cost.rate == 1:
        return GaussianDpEvent(cost.sigma)
    if not _is_mixture(cost):
        return PoissonSampledDpEvent(cost.rate, GaussianDpEvent(cost.sigma))
    return MixtureOfGaussiansDpEvent(MIXTURE_SCALE, *_mixture(cost))


def _is_mixture(cost: Cost) -> bool:
    """Whether it is more than one Gaussian that is there or not."""
    return bool(cost.memory) or cost.rows > 1


def _mixture(cost: Cost) -> tuple[list[float], tuple[float, ...]]:
    """Σ_j P(J = j) N(m + j, σ²) against N(0, σ²): docs/decisions/0013, for J of one row docs/dicesgd.md, S1.

    Shifts in noise of scale 10, and their probabilities.
    """
    unit, memory = MIXTURE_SCALE / cost.sigma, max(cost.memory, 1e-6) if cost.memory else 0.0
    drawn = _drawn(cost.rows, cost.rate)
    return [(memory + j) * unit for j in range(len(drawn))], drawn


@functools.lru_cache(maxsize=64)
def _drawn(rows: int, rate: float) -> tuple[float, ...]:
    """P(J = j) for j = 0, 1, …; in the last one all that is further out, since no more than a tail is."""
    if rows == 1:
        return 1 - rate, rate
    from scipy.stats import binom

    last = min(rows, int(binom.isf(TAIL, rows, rate)) + 1)
    return *map(float, binom.pmf(range(last), rows, rate)), float(binom.sf(last - 1, rows, rate))


def discretisation(entries: Iterable[tuple[Event, int]], *, rows_per_person: int = 1) -> float:
    """The interval of PLD's grid for these releases.

    *Guarantees*: ``DISCRETISATION``, or a power of ten times it where so fine a grid would take too much memory or
    time (a noise multiplier below about 0.5, an ε in the hundreds, hidden memory). More noise or fewer releases never
    make it coarser.
    """
    return _interval(counted(entries, rows_per_person))


def counted(entries: Iterable[tuple[Event, int]], rows: int = 1) -> Counter[Cost]:
    """How often each cost, to whoever has so many rows, occurs: their order does not matter to the composition.

    Within a block that no release of the same noise and rate began, nobody has paid: each costs as if it began one.
    """
    counts: Counter[Cost] = Counter()
    entries = list(entries)
    begun = {event for event, count in entries if isinstance(event, BlockGaussian) and event.begins and count}
    for event, count in entries:
        found = cost(event, rows)
        if isinstance(event, BlockGaussian) and found is None and (first := replace(event, begins=True)) not in begun:
            found = cost(first)
        if whole("count", count, least=0) and found is not None:
            counts[found] += count
    return counts


def _interval(costs: Counter[Cost]) -> float:
    most = squares = 0.0
    enough = math.inf if costs else DISCRETISATION
    for cost, count in costs.items():
        always, mixture = cost.memory / cost.sigma, _is_mixture(cost)
        signal, amplified = _signals(cost)
        squares += count * (amplified + always) ** 2 if signal + always < 1e100 else math.inf
        enough = min(enough, (amplified + always) * MIXTURE_GRID if mixture else DISCRETISATION)
        signal += always
        if cost.rate == 1:
            signal *= math.sqrt(count)  # they are one Gaussian before they meet the grid
        most = max(most, (signal * signal + 20 * signal) / (MIXTURE_CELLS if mixture else CELLS))
    needed = max(most, (squares + 16 * math.sqrt(squares)) / 1e7, DISCRETISATION)
    up = math.ceil(math.log10(min(needed, 1e9) / DISCRETISATION))
    down = math.floor(math.log10(min(max(enough, DISCRETISATION), 1e9) / DISCRETISATION))
    return DISCRETISATION * 10.0 ** max(up, down)


def _signals(cost: Cost) -> tuple[float, float]:
    """How far a draw moves a release's output at most, in standard deviations, and how far as amplified by sampling."""
    if cost.rate == 1:
        return 1 / cost.sigma, 1 / cost.sigma
    chances, unit = _drawn(cost.rows, cost.rate), 1 / cost.sigma
    most = (len(chances) - 1) * unit
    # the root of the χ² divergence, Σ_jk P(j) P(k) (e^(jk/σ²) − 1): of one row q √(e^(1/σ²) − 1)
    squares = math.fsum(
        p * q * math.expm1(min(j * k * unit * unit, 700.0))
        for j, p in enumerate(chances)
        for k, q in enumerate(chances)
        if j and k
    )
    return most, min(most, math.sqrt(squares))


def spent(
    entries: Iterable[tuple[Event, int]],
    delta: float,
    accountant: str = "pld",
    *,
    rows_per_person: int = 1,
    coarser: int = 1,
) -> float:
    """An upper bound on the ε of all these releases together, at δ.

    *Guarantees*: it holds under adding or removing one sample, or one person with at most ``rows_per_person`` of them
    (docs/decisions/0013), on any grid; a ``coarser`` one is faster and looser.
    *Edge cases*: no releases cost 0; noise too small to protect anything (ε in the millions) gives infinity.
    """
    fraction("delta", delta, open_end=True)
    one_of("accountant", accountant, ACCOUNTANTS)
    if not 1 <= (rows := whole("rows_per_person", rows_per_person)) <= MOST_ROWS:
        raise InputError(f"rows_per_person must be from 1 to {MOST_ROWS}, got {rows}: keep fewer rows of each person")
    if rows > 1 and accountant == "rdp":
        raise InputError(f"accountant 'rdp' knows one row of a person, got rows_per_person={rows}: write 'pld'")
    costs = counted(entries, rows)
    if not costs:
        return 0.0
    if _interval(costs) > 1:
        return math.inf
    if accountant == "rdp":
        return least_rdp(costs, delta)
    reserve = ROUNDING_PER_RELEASE * sum(_roundings(cost, count) for cost, count in costs.items())
    if delta - reserve < delta / 2:
        raise InputError(
            f"delta must be at least {2 * reserve:.1g} for accountant 'pld' over "
            f"{costs.total()} releases, where its rounding would hide less, got {delta!r}: write accountant 'rdp'"
        )

    return _epsilon(tuple(sorted(costs.items())), delta - reserve, coarser * _interval(costs))


@functools.lru_cache(maxsize=64)
def _epsilon(costs: tuple[tuple[Cost, int], ...], delta: float, interval: float) -> float:
    """What ``PLDAccountant`` gives; remembered, and so is each release's own distribution, which takes longest."""
    losses = [
        _loss(cost._replace(sigma=cost.sigma / math.sqrt(count)), interval)  # they are one Gaussian
        if cost.rate == 1
        else _loss(cost, interval).self_compose(count, count * TAIL)
        for cost, count in costs
    ]
    total = functools.reduce(lambda one, other: one.compose(other), losses)
    return float(total.get_epsilon_for_delta(delta))


@functools.lru_cache(maxsize=8)  # some megabytes each
def _loss(cost: Cost, interval: float) -> PrivacyLossDistribution:
    from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
    from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss, MixtureGaussianPrivacyLoss

    def losses(adjacency: AdjacencyType) -> PLDPmf:
        how = {"log_mass_truncation_bound": math.log(TAIL), "adjacency_type": adjacency}
        if _is_mixture(cost):
            return _discretised(MixtureGaussianPrivacyLoss(MIXTURE_SCALE, *_mixture(cost), **how), interval)
        return _discretised(GaussianPrivacyLoss(cost.sigma, sampling_prob=cost.rate, **how), interval)

    removed = losses(AdjacencyType.REMOVE)  # of a Gaussian without sampling, adding has the same
    return PrivacyLossDistribution(removed, None if cost.rate == 1 else losses(AdjacencyType.ADD))


def _discretised(loss: MonotonePrivacyLoss, interval: float) -> PLDPmf:
    """The loss on cells of the grid, by connecting dots of dp-accounting's δ(ε): a bound whichever cells are taken.

    Doroshenko et al. 2022 prove that for every finite set of losses. dp-accounting alone would take all cells.
    """
    import numpy as np
    from dp_accounting.pld.pld_pmf import create_pmf_pessimistic_connect_dots

    bounds = loss.connect_dots_bounds()
    low, high = math.floor(bounds.epsilon_lower / interval), math.ceil(bounds.epsilon_upper / interval)
    first, last = (THINNED * math.asinh(end / THINNED) for end in (low, high))
    far = THINNED * np.sinh(np.arange(math.floor(first), math.ceil(last) + 1) / THINNED)  # evenly spaced, then further
    cells = np.unique(np.clip(np.rint(far), low, high).astype(int))
    return create_pmf_pessimistic_connect_dots(
        interval, cells, loss.get_delta_for_epsilon(cells * interval)
    ).to_dense_pmf()  # of sparse ones it computes how many cells 10⁵ of them might have, a number of 10⁵ digits


def _roundings(cost: Cost, count: int) -> float:
    """How many roundings a cost's composition is charged for."""
    if cost.rate == 1:
        return 1  # unsampled Gaussians compose to one Gaussian, without an FFT each
    most = cost.memory + len(_drawn(cost.rows, cost.rate)) - 1
    return count * (1 + (2 * most / cost.sigma if _is_mixture(cost) else 0))


def _composed(costs: Mapping[Cost, int]) -> DpEvent:
    from dp_accounting import ComposedDpEvent, GaussianDpEvent, SelfComposedDpEvent

    events: list[DpEvent] = [SelfComposedDpEvent(_dp_event(cost), count) for cost, count in costs.items()]
    # A sampled release's divergence of order α comes out short by up to 2e-17 α: with much noise that is all of it, and
    # ε would be 0. A Gaussian of 1e-15 α for each makes up for it.
    sampled = sum(count for cost, count in costs.items() if cost.rate < 1)
    if sampled:
        events.append(GaussianDpEvent(1 / math.sqrt(2 * ROUNDING_PER_RELEASE * sampled)))
    return ComposedDpEvent(events)


def least_rdp(costs: Counter[Cost], delta: float, whole: Callable[[DpEvent], DpEvent] = lambda event: event) -> float:
    """ε by Rényi divergences, of the composition or of what ``whole`` makes of it.

    RDP knows no mixtures, so noise is split, σ² = σ_a² + σ_b²: a Poisson-sampled Gaussian with σ_a and an unsampled one
    with σ_b together tell more than their sum (docs/dicesgd.md, S1). Any split is a bound; the least is searched for.
    """
    from dp_accounting import NeighboringRelation, rdp
    from scipy.optimize import minimize_scalar

    def at(logit: float) -> float:
        share = 1 / (1 + math.exp(-logit))  # σ_a²/σ²
        parts: Counter[Cost] = Counter()
        for cost, count in costs.items():
            if cost.memory:
                parts[Cost(cost.sigma * math.sqrt(share), cost.rate, 0.0)] += count
                parts[Cost(cost.sigma * math.sqrt(1 - share) / cost.memory, 1.0, 0.0)] += count
            else:
                parts[cost] += count
        accountant = rdp.RdpAccountant(neighboring_relation=NeighboringRelation.ADD_OR_REMOVE_ONE)
        return float(accountant.compose(whole(_composed(parts))).get_epsilon(delta))

    with _quiet():
        if not any(cost.memory for cost in costs):
            return at(0.0)
        return float(minimize_scalar(at, bounds=(-15.0, 15.0), method="bounded", options={"xatol": 0.02}).fun)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence RDP's warnings about orders that it leaves out: its bound holds for those that it keeps."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
