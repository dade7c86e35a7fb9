"""A schedule: one method after another, switched at steps fixed in advance ("mix-up training", paper 2 §6.3).

Receives: (first step, method) pairs, beginning with step 0.
Gives: a Method that is the active one; its noise follows the active bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from clipwise.methods.citations import BU_2023_CONVERGENCE
from clipwise.methods.flat import flat
from clipwise.methods.method import Method
from clipwise.types import InputError, Released, whole


def schedule(phases: Sequence[tuple[int, Method]] | None = None, step: int = 0) -> Method:
    """For instance ``schedule([(0, flat(1.0)), (950, global_(50.0))])``; steps are public, so switching is free."""
    try:
        given = ((0, flat()),) if phases is None else tuple((first, m) for first, m in phases)
    except (TypeError, ValueError):
        raise InputError(f"phases must be pairs such as [(0, flat(1.0)), (950, …)], got {phases!r}") from None
    firsts = [whole("a phase's first step", first, least=0) for first, _ in given]
    if not given or firsts[0] != 0 or sorted(set(firsts)) != firsts:
        raise InputError(f"phases must begin at step 0 and rise, got {firsts}; write [(0, flat(1.0)), (950, …)]")
    if any(not isinstance(method, Method) for _, method in given):
        raise InputError("a phase is a pair of its first step and a method, such as (0, flat(1.0))")
    hidden = [method for _, method in given if method.feedback or method.recall]
    if hidden:
        raise InputError(f"a phase cannot be a method with private state, whose bound is for a whole run: {hidden[0]}")
    return _scheduled(tuple(zip(firsts, (method for _, method in given), strict=True)), whole("step", step, least=0))


def _scheduled(given: tuple[tuple[int, Method], ...], step: int) -> Method:
    index = max(i for i, (first, _) in enumerate(given) if first <= step)
    active = given[index][1]

    def at(step: int, place: int, method: Method) -> Method:
        return _scheduled((*given[:place], (given[place][0], method), *given[place + 1 :]), step)

    def after(released: Released, units: float) -> Method:
        return at(step + 1, index, active.next(released, units))

    def later() -> tuple[Method, ...]:
        # a phase may have phases of its own
        own = ((i, method) for i in range(index, len(given)) for method in given[i][1].phases)
        return tuple(at(max(step, given[i][0]), i, method) for i, method in own)[1:]

    return replace(
        active,
        name="schedule",
        citation=BU_2023_CONVERGENCE,
        settings={"phases": given, "step": step},
        after=after,
        later=later,
        past=max(method.past for _, method in given),  # a later phase may look back to steps of an earlier one
    )
