"""What takes records of any kind: their sum, their inner products, and the change to rounded factors and back.

Receives: records of one parameter, of whatever kinds.
Gives: joined: their sum in fewer records; sq_norms and totals: norms of each, and weighted sums over samples; cross:
inner products; summed and beside: with factors as norms and sums take them; widened: with the whole algebra again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from clipwise.records.kernels import gram_sq_norm, outer_gram_sq_norms, outer_totals
from clipwise.records.kernels.many import takes
from clipwise.records.kinds.convolution import Convolution
from clipwise.records.kinds.dense import Dense
from clipwise.records.kinds.halved import Halved
from clipwise.records.kinds.indexed import Indexed
from clipwise.records.kinds.outer import Outer, by_kernel
from clipwise.records.kinds.record import Record, flat, wide
from clipwise.records.tf32 import rounds


def summed(record: Record) -> Record:
    """The record whose gradients norms and sums are made of: with factors as they are rounded and read."""
    if isinstance(record, (Outer, Convolution)) and record.rounded:
        return record.halved()
    return record.padded() if isinstance(record, Outer) else record


def beside(record: Record) -> Record:
    """The same for a record that is not its parameter's only one.

    A product of one position cannot cancel, and may be rounded as the library likes; beside others it can.
    """
    if isinstance(record, Outer) and not record.rounded and rounds(record.a, record.b, convolution=False):
        return replace(record, a=record.a.double(), b=record.b.double())
    return summed(record)


def widened(record: Record) -> Record:
    """The record with the whole algebra."""
    record = record.widened() if isinstance(record, Halved) else record
    return record.unpadded() if isinstance(record, Outer) else record


def sq_norms(records: Sequence[Record]) -> list[Tensor]:
    """What adds up to Σ ‖v_i‖² over all records, [sample]; Gram forms of linear layers by one launch where one can."""
    records, outers = _outers(records)
    outers = {i: outer for i, outer in outers.items() if outer.form.kept == "gram"}
    parts, pairs = list[Tensor](), list[tuple[Tensor, Tensor]]()
    for i, record in enumerate(records):
        if i in outers:
            continue
        if isinstance(record, Outer) and not record.a.is_cuda and record.form.kept == "gram":
            pairs.append((record.a, record.b))
        else:
            parts.append(record.sq_norm())
    parts += [gram_sq_norm(a, b) for a, b in _side_by_side(pairs)]
    for places in _alike(outers):
        squares = outer_gram_sq_norms([outers[i].a[:, 0] for i in places], [outers[i].b[:, 0] for i in places])
        if any(isinstance(records[i], Halved) for i in places):
            one = torch.ones_like(squares[0])
            scales = torch.stack([record.scale if isinstance(record := records[i], Halved) else one for i in places])
            squares = squares * scales * scales
        parts.append(squares.double().sum(0).to(squares.dtype))
    return parts


def _side_by_side(pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The same Σ ‖v_i‖² from fewer Gram matrices: weights that have a factor in common are one wider weight.

    A recurrent layer's two weights have the same b; queries, keys and values often have the same a.
    """
    for _ in range(2):  # those with the same b; then a and b have changed places
        alike: dict[Any, tuple[Tensor, list[Tensor]]] = {}
        for a, b in pairs:
            where = b.untyped_storage()._cdata, b.storage_offset(), b.shape, b.stride(), b.dtype
            alike.setdefault(where, (b, []))[1].append(a)
        pairs = [(b, torch.cat(own, 3) if len(own) > 1 else own[0]) for b, own in alike.values()]
    return pairs


def totals(records: Sequence[Record], weights: Tensor) -> list[Tensor]:
    """Σ_i w_i v_i of each record, of whatever parameters: those of linear layers together where a kernel can."""
    records, outers = _outers(records)
    sums: dict[int, Tensor] = {}
    for places in _alike(outers):
        a, b = [outers[i].a[:, 0] for i in places], [outers[i].b[:, 0] for i in places]
        own = [weights * record.scale if isinstance(record := records[i], Halved) else weights for i in places]
        sums |= dict(zip(places, outer_totals(a, b, torch.stack(own)), strict=True))
    return [outers[i].of_parameter(sums[i]) if i in sums else record.total(weights) for i, record in enumerate(records)]


def _outers(records: Sequence[Record]) -> tuple[list[Record], dict[int, Outer]]:
    """The records as kernels read them; of those that kernels of many layers take, the factors, by their place."""
    # what is yet to be rounded is rounded one by one: all at once would take as much memory again
    ready = [record.padded() if isinstance(record, Outer) else record for record in records]
    found: dict[int, Outer] = {}
    for i, record in enumerate(ready):
        outer = record.record if isinstance(record, Halved) else record
        if isinstance(outer, Outer) and by_kernel(outer.a, outer.b.dtype) and takes(outer.a[:, 0], outer.b[:, 0]):
            found[i] = outer
    return ready, found


def _alike(outers: Mapping[int, Outer]) -> list[list[int]]:
    """Their places, those together that one launch can take."""
    alike: dict[Any, list[int]] = {}
    for i, outer in outers.items():
        alike.setdefault((outer.a.dtype, outer.a.device, outer.a.shape[:3]), []).append(i)
    return list(alike.values())


def cross(first: Record, second: Record) -> Tensor:
    """⟨u_i, v_i⟩ for two records of one parameter (a tied weight used by layers of different kinds). [sample]."""
    first, second = beside(first), beside(second)
    if isinstance(second, Indexed):
        first, second = second, first
    if isinstance(first, Indexed) and isinstance(second, Halved):
        exact = second.like(second.one.double(), second.other)  # a product of these is not in TF32
        return cross(first, exact).to(second.scale.dtype) * second.scale
    if isinstance(first, Indexed) and isinstance(second, Outer) and second.a.shape[1] == 1:
        # a table tied to an output layer: ⟨e_id b1ᵀ, b2 a2ᵀ⟩ = b2[id] · ⟨b1, a2⟩, for every pair of positions
        second = second.unpadded()
        a, b = wide(second.a)[:, 0], second.b[:, 0]
        picked = wide(b.gather(2, first.ids[:, None, :].expand(-1, b.shape[1], -1)))  # [sample, position 2, position 1]
        return (picked * (a @ wide(first.b).to(a.dtype).transpose(1, 2))).sum((1, 2))
    if isinstance(first, Indexed) and isinstance(second, Dense):
        rows = second.value.gather(1, first.ids[:, :, None].expand_as(first.b))
        return flat(wide(rows) * wide(first.b)).sum(1)
    return flat(first.dense() * second.dense()).sum(1)


def joined(records: Sequence[Record]) -> tuple[Record, ...]:
    """The same sum in fewer records: those of one kind are added where adding is concatenation or plain addition."""
    records = [r.widened() if isinstance(r, Halved) else r for r in records]  # what is no kind below would be lost
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
    if dense and outers:
        dense += [Dense(r.dense()) for r in outers]
        outers = []
    out: list[Record] = list(rest)
    if dense:
        first, *others = dense
        out.append(Dense(sum((d.dense() for d in others), first.dense())) if others else first)
    if len(outers) > 1:
        several = outers[0].plus(*outers[1:])
        # with so many positions writing may be cheaper, as it may be in a capture
        out.append(Dense(several.written()) if several.form.name == "written" else several)
    elif outers:
        out += outers
    if indexed:
        out.append(indexed[0].plus(*indexed[1:]) if len(indexed) > 1 else indexed[0])
    return tuple(out)
