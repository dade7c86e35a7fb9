"""What has no handler of its own: one sample at a time, by vmap.

Receives: a Meeting.
Gives: the call's output, with a leaf for each sample in every parameter's place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from clipwise.records.displacement import cut
from clipwise.records.kinds import Dense, wide
from clipwise.records.layers.meeting import Meeting, mixing, sources
from clipwise.records.trees import mapped, vmapped
from clipwise.types import InputError, Refused


def by_vmap(m: Meeting) -> Any:
    """Any other operation: run once per sample, as on a batch of one, with the sample's own copy of the parameter."""
    n = m.samples
    found = sources(m)

    def place(argument: Tensor) -> tuple[Tensor, int | None]:
        source, rows = m.source(argument), m.rows(argument)
        if source is not None:
            leaf = cut(m.each(argument)).requires_grad_()
            return m.tape.leaf(leaf, source, lambda g: Dense(wide(g))), 0
        if m.half is not None:  # the operation sees one format
            argument = wide(argument)
        if rows is not None:
            # [..., sample, factor, ...]: mapped over the first, the operation sees a batch of one
            return argument.unflatten(rows.dim, (n, rows.factor)), rows.dim
        return argument, None

    names = ", ".join(sorted({name for s in found for name in s.names}))
    try:
        result = vmapped(m.call.function, m.args, m.kwargs, place, "different")
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"cannot follow the parameter {names} through {m.call.label} one sample at a time "
            f"({str(error).splitlines()[0]}); use it through a torch.nn layer or arithmetic, or freeze it"
        ) from error
    m.tape.site(found, m.call.label, None, fallback=True)
    outputs = iter(m.call.outputs)

    def joined(value: Tensor) -> Tensor:
        rows = next(outputs)
        if rows is None:
            raise Refused(mixing(m.call.label))
        return m.narrowed(value.movedim(0, rows.dim).flatten(rows.dim, rows.dim + 1))

    return mapped(result, joined)
