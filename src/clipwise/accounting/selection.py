"""The price of choosing among runs by their results.

Receives: the releases of one run, δ, and how many runs are tried.
Gives: selection: ε where the number of runs is drawn at random and only the best one is ever seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from clipwise.accounting.events import counted, least_rdp
from clipwise.types import Event, InputError, fraction, one_of

# how the number of runs is drawn → the shape that dp-accounting knows it by
DRAWS = {"poisson": math.inf, "geometric": 1.0, "logarithmic": 0.0}


def selection(entries: Iterable[tuple[Event, int]], delta: float, *, runs: float, draw: str = "poisson") -> float:
    """An upper bound on the ε of publishing the best of a random number of runs, ``runs`` on average.

    *Guarantees*: it holds (Papernot and Steinke 2022, by RDP) if the number of runs is drawn once from that
    distribution, every run takes its settings at random from a list that is public, costs at most ``entries`` with its
    score included, and nothing of the other runs is seen: neither their scores nor how many there were.
    *Edge cases*: a fixed number of runs, or a table of all of them, has no such discount: there the entries of all runs
    are composed, ``spent([*first.entries, *second.entries], delta)``.
    """
    fraction("delta", delta, open_end=True)
    one_of("draw", draw, DRAWS)
    if isinstance(runs, bool) or not isinstance(runs, (int, float)) or not 1 <= runs < math.inf:
        raise InputError(f"runs must be a number of at least 1, the runs on average, got {runs!r}")
    costs = counted(entries)
    if not costs:
        return 0.0

    from dp_accounting.dp_event import RepeatAndSelectDpEvent

    return least_rdp(costs, delta, lambda run: RepeatAndSelectDpEvent(run, float(runs), DRAWS[draw]))
