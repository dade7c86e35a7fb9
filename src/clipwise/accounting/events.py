"""Events as dp-accounting knows them, and their composition.

Receives: the package's events with their counts, δ and the name of an accountant.
Gives: as_dp_event, and spent: an upper bound on ε; everything without a proof is refused.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from clipwise.types import Event, InputError, PoissonGaussian, Refused, fraction, one_of, positive

if TYPE_CHECKING:
    from dp_accounting import DpEvent

# pld: privacy loss distributions, tight. rdp: Rényi divergences, the second opinion.
ACCOUNTANTS = ("pld", "rdp")
RELATION = "add or remove one sample"
# The grid of privacy losses. PLD rounds up to it, so that a coarser grid costs tightness and never soundness.
DISCRETISATION = 1e-4
# PLD composes by FFT, whose rounding moves δ by up to about 1e-16 per release, in either direction: against the closed
# form of Gaussians, ε at δ = 1e-14 after 1e5 releases came out 0.06 too small. Ten times that is kept back from δ.
ROUNDING_PER_RELEASE = 1e-15


def as_dp_event(event: Event) -> DpEvent:
    """One release as dp-accounting's event.

    *Guarantees*: only events with a proof pass; a subclass may mean something else, so it is refused too.
    """
    if type(event) is not PoissonGaussian:
        raise Refused(
            f"there is no privacy proof for an event of type {type(event).__name__}: "
            "write PoissonGaussian(noise_multiplier, sampling_rate), the only release that accounting knows"
        )
    noise_multiplier = positive("noise_multiplier", event.noise_multiplier)
    sampling_rate = fraction("sampling_rate", event.sampling_rate)

    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent  # imported late: it takes a second

    gaussian = GaussianDpEvent(noise_multiplier)
    return gaussian if sampling_rate == 1 else PoissonSampledDpEvent(sampling_rate, gaussian)


def discretisation(entries: Iterable[tuple[Event, int]]) -> float:
    """The interval of PLD's grid for these releases.

    *Guarantees*: ``DISCRETISATION``, or a power of ten times it where so fine a grid would not fit in memory (a noise
    multiplier below about 0.5, an ε in the hundreds). More noise or fewer releases never make it coarser.
    """
    widest = squares = 0.0
    for event, count in entries:
        signal = 1 / event.noise_multiplier
        # How far a release moves its output, in standard deviations: amplified by sampling, or at worst not at all.
        amplified = event.sampling_rate * math.sqrt(math.expm1(min(signal * signal, 700.0)))
        squares += count * min(signal, amplified) ** 2 if signal < 1e100 else math.inf
        if event.sampling_rate == 1:
            signal *= math.sqrt(count)  # they are one Gaussian before they meet the grid
        widest = max(widest, signal * signal + 20 * signal)
    # A cell of one release costs about 3 µs, a cell of the composition far less.
    needed = max(widest / 5e5, (squares + 16 * math.sqrt(squares)) / 1e7)
    if needed <= DISCRETISATION:
        return DISCRETISATION
    return DISCRETISATION * 10.0 ** math.ceil(math.log10(min(needed, 1e9) / DISCRETISATION))


def spent(entries: Iterable[tuple[Event, int]], delta: float, accountant: str = "pld", *, coarser: int = 1) -> float:
    """An upper bound on the ε of all these releases together, at δ.

    *Guarantees*: it holds under adding or removing one sample, on any grid; a ``coarser`` one is faster and looser.
    *Edge cases*: no releases cost 0; noise too small to protect anything (ε in the millions) gives infinity.
    """
    fraction("delta", delta, open_end=True)
    one_of("accountant", accountant, ACCOUNTANTS)
    counts: Counter[Event] = Counter()  # the order of releases does not matter to their composition
    for event, count in entries:
        as_dp_event(event)
        counts[event] += count
    releases = counts.total()
    if not releases:
        return 0.0
    usable = delta
    if accountant == "pld":
        # unsampled Gaussians compose to one Gaussian, without an FFT each
        reserve = ROUNDING_PER_RELEASE * sum(1 if event.sampling_rate == 1 else n for event, n in counts.items())
        usable -= reserve
        if usable < delta / 2:
            raise InputError(
                f"delta must be at least {2 * reserve:.1g} for accountant 'pld' over "
                f"{releases} releases, where its rounding would hide less, got {delta!r}: write accountant 'rdp'"
            )
    interval = discretisation(counts.items())
    if interval > 1:
        return math.inf

    from dp_accounting import ComposedDpEvent, SelfComposedDpEvent

    composed = ComposedDpEvent([SelfComposedDpEvent(as_dp_event(event), count) for event, count in counts.items()])
    with _quiet():
        return float(_accountant(accountant, coarser * interval).compose(composed).get_epsilon(usable))


def _accountant(name: str, interval: float) -> Any:
    """dp-accounting's accountant of that name, for adding or removing one sample."""
    from dp_accounting import NeighboringRelation, pld, rdp

    relation = NeighboringRelation.ADD_OR_REMOVE_ONE
    if name == "pld":
        return pld.PLDAccountant(relation, value_discretization_interval=interval)
    return rdp.RdpAccountant(neighboring_relation=relation)


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
