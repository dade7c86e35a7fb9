"""What takes records of any kind: their sum, their inner products, and the change to rounded factors and back.

Receives: records of one parameter, of whatever kinds.
Gives: joined: their sum in fewer records; cross: inner products; summed and beside: with factors as norms and sums take
them; widened: with the whole algebra again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from clipwise.records.kinds.convolution import Convolution
from clipwise.records.kinds.dense import Dense
from clipwise.records.kinds.halved import Halved
from clipwise.records.kinds.indexed import Indexed
from clipwise.records.kinds.outer import Outer
from clipwise.records.kinds.record import Record, flat, wide
from clipwise.records.tf32 import rounds


def summed(record: Record) -> Record:
    """The record whose gradients norms and sums are made of: the same, or with factors as they are rounded."""
    return record.halved() if isinstance(record, (Outer, Convolution)) and record.rounded else record


def beside(record: Record) -> Record:
    """The same for a record that is not its parameter's only one.

    A product of one position cannot cancel, and may be rounded as the library likes; beside others it can.
    """
    if isinstance(record, Outer) and not record.rounded and rounds(record.a, record.b, convolution=False):
        return replace(record, a=record.a.double(), b=record.b.double())
    return summed(record)


def widened(record: Record) -> Record:
    """The record with the whole algebra."""
    return record.widened() if isinstance(record, Halved) else record


def cross(first: Record, second: Record) -> Tensor:
    """⟨u_i, v_i⟩ for two records of one parameter (a tied weight used by layers of different kinds). [sample]."""
    first, second = beside(first), beside(second)
    if isinstance(second, Indexed):
        first, second = second, first
    if isinstance(first, Indexed) and isinstance(second, Halved):
        exact = second.like(second.one.double(), second.other.double())  # not in TF32
        return cross(first, exact).to(second.scale.dtype) * second.scale
    if isinstance(first, Indexed) and isinstance(second, Outer) and second.a.shape[1] == 1:
        # a table tied to an output layer: ⟨e_id b1ᵀ, b2 a2ᵀ⟩ = b2[id] · ⟨b1, a2⟩, for every pair of positions
        a, b = wide(second.a)[:, 0], second.b[:, 0]
        picked = wide(b.gather(2, first.ids[:, None, :].expand(-1, b.shape[1], -1)))  # [sample, position 2, position 1]
        return (picked * (a @ wide(first.b).to(a.dtype).transpose(1, 2))).sum((1, 2))
    return flat(first.dense() * second.dense()).sum(1)


def joined(records: Sequence[Record]) -> tuple[Record, ...]:
    """The same sum in fewer records: those of one kind are added where adding is concatenation or plain addition."""
    records = [widened(r) for r in records]  # what is of no kind below would be lost
    outers = [r for r in records if isinstance(r, Outer)]
    indexed = [r for r in records if isinstance(r, Indexed)]
    dense = [r for r in records if isinstance(r, Dense)]
    rest: list[Convolution] = []
    for record in records:
        if isinstance(record, Convolution):
            if rest and rest[-1].adds_to(record):
                record = rest.pop().plus(record)
            rest.append(record)
    if len(rest) > 1 or (rest and (outers or dense or indexed)):
        dense += [Dense(r.dense()) for r in rest]
        rest = []
    if dense and (outers or indexed):
        dense += [Dense(r.dense()) for r in outers] + [Dense(r.dense()) for r in indexed]
        outers, indexed = [], []
    out: list[Record] = list(rest)
    if dense:
        first, *others = (d.value for d in dense)
        out.append(Dense(sum(others, first)))
    if len(outers) > 1:
        several = outers[0].plus(*outers[1:])
        # with so many positions writing may be cheaper, as it may be in a capture
        out.append(Dense(several.dense()) if several.form.name == "written" else several)
    elif outers:
        out += outers
    if indexed:
        out.append(indexed[0].plus(*indexed[1:]) if len(indexed) > 1 else indexed[0])
    return tuple(out)
