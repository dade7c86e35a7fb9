"""Each unit's own parameters θ + c_i v_i, as far as possible without writing them out.

Receives: a parameter, the records of v_i, and a factor c_i for each unit.
Gives: Own: products and look-ups by way of the records, and the values themselves where that is cheaper; moved: one
parameter's; vectors: the values of all biases and scales.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from clipwise.records import forms
from clipwise.records.kinds import Convolution, Dense, Indexed, Outer, Record, joined, tensors_of, wide, widened


@dataclass(frozen=True)
class Own:
    """What each unit of ``views`` consecutive samples has in place of a parameter, or of a tensor made from some."""

    views: int
    make: Callable[[], Tensor]  # the values written out, [unit, *shape], in float32 or better
    records: tuple[Record, ...] = ()  # v, where the values are θ + c v; without records only the values are known
    factors: Tensor | None = None  # c, [unit, 1]
    # v of some units, where a layer adds c v's part to θ's own: a convolution on a GPU
    direction: Callable[[int, int], Tensor] | None = None

    @cached_property
    def value(self) -> Tensor:
        """The values written out, [unit, *shape]; a parameter's are a leaf, so that gradients can be pulled to it."""
        return self.make()

    @property
    def lent(self) -> Tensor:
        """The values for a layer's own use: not kept here, so that they are gone once its backward pass is over."""
        if "value" in self.__dict__:
            return cut(self.value)
        known: Callable[[], Tensor | None] = self.__dict__.get("_lent", lambda: None)
        value = known()
        if value is None:
            value = cut(self.make())
            self.__dict__["_lent"] = weakref.ref(value)  # another layer with the same weight shares it
        return value

    @property
    def each(self) -> Tensor:
        """The values for every sample, [sample, *shape]."""
        value = cut(self.value)
        return value if self.views == 1 else value.repeat_interleave(self.views, 0)

    def turned(self) -> Own:
        """The transposes of matrices."""
        return Own(self.views, lambda: self.value.transpose(1, 2))

    @property
    def factored(self) -> bool:
        """Whether c v is known as products of vectors, Σ_s b_s a_sᵀ, or as rows of a table."""
        return bool(self.records) and not any(isinstance(r, (Dense, Convolution)) for r in self.records)

    def product(self, y: Tensor, x: Tensor, *, turned: bool, free: bool = False) -> Tensor:
        """The sum y + x (c v)ᵀ for x [unit, position, p]; ``turned``: y + x (c v); ``free``: y may be overwritten."""
        for record in self.records:
            if isinstance(record, Indexed):
                y = self._table_product(record, y, x, turned=turned)
                continue
            assert isinstance(record, Outer)
            a, b = wide(record.a)[:, 0], wide(record.b)[:, 0]
            if turned:
                a, b = b, a
            # c on the small matrix in the middle: neither a nor b is copied
            add = y.baddbmm_ if free and type(y) is Tensor else y.baddbmm  # a compiler reuses memory by itself
            y = add((x @ a.mT) * self._scale(x), b.to(x.dtype))
        return y

    def _table_product(self, record: Indexed, y: Tensor, x: Tensor, *, turned: bool) -> Tensor:
        """The same where v is rows of a table: row id_s receives b_s."""
        b = wide(record.b).to(x.dtype) * self._scale(x)
        ids = record.ids[:, None, :].expand(-1, x.shape[1], -1)  # [unit, position, s]
        if turned:
            return torch.baddbmm(y, x.gather(2, ids), b)
        return y.scatter_add(2, ids, x @ b.mT)

    def rows(self, ids: Tensor) -> Tensor:
        """Rows ``ids`` [unit, position] of c v."""
        parts = []
        for record in self.records:
            if isinstance(record, Indexed):
                b = wide(record.b)
                same = ids[:, :, None] == record.ids[:, None, :]  # [unit, position, s]
            else:
                assert isinstance(record, Outer)
                b = wide(record.a)[:, 0]
                same = wide(record.b)[:, 0].gather(2, ids[:, None, :].expand(-1, b.shape[1], -1)).mT
            parts.append((same * self._scale(b)) @ b)
        return sum(parts[1:], parts[0])

    def pairs(self) -> tuple[Tensor, Tensor]:
        """All pairs (a, b) at once, [unit, s, feature], c on the narrower one, which is copied for it."""
        outers = joined([r for r in self.records if isinstance(r, Outer)])
        assert isinstance(outers[0], Outer)
        a, b = wide(outers[0].a)[:, 0], wide(outers[0].b)[:, 0]
        return (a, b * self._scale(b)) if b.shape[2] <= a.shape[2] else (a * self._scale(a), b)

    def _scale(self, like: Tensor) -> Tensor:
        assert self.factors is not None
        return self.factors.to(like.dtype)[:, :, None]


def ready(records: tuple[Record, ...]) -> tuple[Record, ...]:
    """The same gradients as a displaced pass uses them: as they are, or written out where that is cheaper.

    A product with T positions by S pairs (a, b) costs T·S·(p + q) in each direction, beside θ's own product; writing
    costs S·p·q once, and then θ's own product is not needed. T is taken to be S: the second pass is like the first.
    Pairs may cost a quarter more, for they take no memory. A table is never written; a convolution's weight is,
    but one that is ``apart`` and takes more memory than its record a few units at a time, for each use again.
    """
    records = tuple(widened(r) for r in records)
    if len(records) == 1 and apart(records[0]):
        (record,) = records
        if isinstance(record, Convolution) and record.written_nbytes <= KEPT * record.nbytes:
            return (Dense(record.written().contiguous()),)
        return records
    outers = [r for r in records if isinstance(r, Outer) and r.a.shape[1] == 1]
    spare = len(outers) + sum(isinstance(r, Indexed) for r in records) == len(records)
    if spare and len(outers) == len(records):
        pairs, p, q = sum(r.a.shape[2] for r in outers), outers[0].a.shape[3], outers[0].b.shape[3]
        spare = 2 * pairs**2 * (p + q) <= 1.25 * (pairs + forms.TRAFFIC) * p * q
    if spare or (len(records) == 1 and isinstance(records[0], Dense)):
        return records
    dense = [r.dense() for r in records]
    return (Dense(sum(dense[1:], dense[0])),)


KEPT = 1  # times the memory of a convolution's record, up to which v is written once, for both passes


def apart(record: Record) -> bool:
    """Whether a convolution computes c v's part apart, from v alone.

    On a GPU: a kernel writes v, and a convolution with a weight for each unit is slow there.
    """
    if isinstance(record, Dense):
        return record.value.is_cuda and record.value.dim() > 3
    return isinstance(record, Convolution) and record.x.is_cuda


def moved(
    parameter: Tensor,
    given: tuple[Record, ...],
    prepared: tuple[Record, ...],
    factors: Tensor,
    views: int,
    *,
    reuse: bool,
) -> Own:
    """θ + c_i v_i for each unit; ``given`` are the records of v, ``prepared`` the same once they are ``ready``.

    ``reuse``: a v that was written for this may be overwritten by it.
    """
    alone = len(prepared) == 1 and apart(prepared[0])
    # what was written to be ready is for the first who asks, and then gone, unless both passes read it
    spare = [r for r in prepared if isinstance(r, Dense) and not alone and all(r is not known for known in given)]
    records = () if spare else prepared

    def add(value: Tensor, record: Record, c: Tensor, *, free: bool) -> Tensor:
        v = record.dense()
        c = c.to(v.dtype).reshape(-1, *(1,) * (v.dim() - 1))
        # a compiler reuses memory by itself
        return torch.addcmul(value, v, c, out=v) if free and reuse and type(v) is Tensor else torch.addcmul(value, v, c)

    def make() -> Tensor:
        value = wide(parameter.detach())
        if spare:
            return cut(add(value, spare.pop(), factors, free=True)).requires_grad_()
        for record in records or given:
            value = add(value, record, factors, free=not isinstance(record, Dense))
        return cut(value).requires_grad_()

    def direction(start: int, stop: int) -> Tensor:
        (record,) = records
        if isinstance(record, Dense):
            return record.value if stop - start == record.samples else record.value[start:stop]
        assert isinstance(record, Convolution)
        return record.rows(start, stop).written()

    return Own(views, make, records, factors, direction if alone else None)


def vectors(
    parameters: Mapping[str, Tensor], prepared: Mapping[str, tuple[Record, ...]], factors: Tensor
) -> dict[str, Tensor]:
    """θ + c_i v_i of all biases and scales, [unit, number]: one call, since there are many and they are small."""
    found = {
        name: records[0].dense()
        for name, records in prepared.items()
        if parameters[name].dim() == 1 and len(records) == 1 and isinstance(records[0], Dense)
    }
    if not found:
        return {}
    with torch.no_grad():
        own = [wide(parameters[name]) for name in found]
        values = torch._foreach_addcmul(own, list(found.values()), [factors] * len(own))
    return dict(zip(found, values, strict=True))


def cut(tensor: Tensor) -> Tensor:
    """The tensor without its history; forward-mode derivatives stay, which ``detach`` would drop."""
    primal, tangent = forward_ad.unpack_dual(tensor)
    if tangent is not None:
        return forward_ad.make_dual(primal.detach(), tangent.detach())
    return tensor.detach() if tensor.requires_grad else tensor


def tangents(record: Record) -> tuple[Record, tuple[Record, ...]]:
    """A record whose tensors carry forward-mode derivatives: without them, and the derivative as a sum of records.

    A record is linear in each of its tensors: (b aᵀ)˙ = ḃ aᵀ + b ȧᵀ.
    """
    pairs = {name: forward_ad.unpack_dual(t) for name, t in tensors_of(record).items()}
    plain: Any = dataclasses.replace(record, **{name: pair.primal.detach() for name, pair in pairs.items()})  # type: ignore[type-var]
    moving = {name: pair.tangent.detach() for name, pair in pairs.items() if pair.tangent is not None}
    return plain, tuple(dataclasses.replace(plain, **{name: tangent}) for name, tangent in moving.items())


def dual_dense(record: Record) -> Tensor:
    """The record written out with its derivative; what writes it need not know of derivatives."""
    plain, moving = tangents(record)
    dense = plain.dense()
    return forward_ad.make_dual(dense, torch.stack([r.dense() for r in moving]).sum(0)) if moving else dense
