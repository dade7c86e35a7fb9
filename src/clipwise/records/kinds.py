"""Per-sample gradients of one parameter, in the form that is cheapest to keep.

Receives: layer inputs a and output gradients b, [sample, position, feature], or written-out gradients.
Gives: Outer, Convolution, Indexed and Dense, each with the same algebra: scaled, merged, sq_norm, inner, total, dense;
and Halved, an Outer or a Convolution as its norm and its sum are computed where products may be rounded to TF32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from clipwise.records import planner
from clipwise.records.kernels import convolution_dense, convolution_sq_norm, convolution_total, gram_sq_norm
from clipwise.records.kernels.gram import HALF, aligned
from clipwise.records.tf32 import halves, rounds

PIECE = 1 << 14  # numbers whose squares one accumulator adds up


class Record(Protocol):
    """v_1 … v_B for one parameter."""

    @property
    def samples(self) -> int:
        """How many units there are."""
        ...

    def scaled(self, factors: Tensor) -> Record:
        """c_i v_i."""
        ...

    def merged(self, size: int) -> Record:
        """Each ``size`` consecutive samples become one unit, whose gradient is their sum."""
        ...

    def masked(self, keep: Tensor) -> Record:
        """v_i where ``keep``, exact zeros elsewhere, even where v_i is not finite."""
        ...

    def sq_norm(self) -> Tensor:
        """‖v_i‖², never under-estimated by more than the format's rounding. [sample]."""
        ...

    def inner(self, direction: Tensor) -> Tensor:
        """⟨v_i, u⟩. [sample]."""
        ...

    def total(self, weights: Tensor) -> Tensor:
        """Σ_i w_i v_i, of the parameter's shape."""
        ...

    def dense(self) -> Tensor:
        """v_i written out. [sample, *shape]."""
        ...


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32 or better: sums and norms are never taken in half precision."""
    return tensor.float() if tensor.dtype in HALF else tensor


def _like(tensor: Tensor, factors: Tensor) -> Tensor:
    """[sample] factors, shaped to multiply [sample, …]."""
    return factors.to(tensor.dtype).reshape(-1, *(1,) * (tensor.dim() - 1))


def _masked(tensor: Tensor, keep: Tensor) -> Tensor:
    # where, not a product: 0 · inf is not 0
    return torch.where(keep.reshape(-1, *(1,) * (tensor.dim() - 1)), tensor, torch.zeros((), dtype=tensor.dtype))


def _flat(tensor: Tensor) -> Tensor:
    """[sample, everything else], also for a scalar parameter and for no samples."""
    return tensor.reshape(tensor.shape[0], tensor.shape[1:].numel())


def _order(tensor: Tensor) -> list[int]:
    """The dimensions after the samples' as they lie in memory: a channels-last weight is flattened without a copy."""
    strides = tensor.stride()
    return sorted(range(1, tensor.dim()), key=lambda d: -strides[d])


def _units(tensor: Tensor, size: int) -> Tensor:
    """[sample, position, …] → [unit, size · position, …]."""
    return tensor.reshape(tensor.shape[0] // size, size * tensor.shape[1], *tensor.shape[2:])


@dataclass(frozen=True)
class Dense:
    """Written out: ``value`` is [sample, *shape]."""

    value: Tensor

    @property
    def samples(self) -> int:
        """How many units there are."""
        return self.value.shape[0]

    def scaled(self, factors: Tensor) -> Dense:
        """c_i v_i."""
        return Dense(self.value * _like(self.value, factors))

    def merged(self, size: int) -> Dense:
        """Sums of ``size`` consecutive samples."""
        return Dense(self.value.reshape(-1, size, *self.value.shape[1:]).sum(1))

    def masked(self, keep: Tensor) -> Dense:
        """Zeros where not ``keep``."""
        return Dense(_masked(self.value, keep))

    def sq_norm(self) -> Tensor:
        """Σ v²."""
        # No copy of squares. In pieces: a float32 accumulator loses small terms after some hundred thousand of them.
        value = _flat(wide(self.value).permute(0, *_order(self.value)))
        even = value.shape[1] // PIECE * PIECE
        norms = torch.linalg.vector_norm(value[:, None, even:], dim=-1)
        if even:
            pieces = value[:, :even].unflatten(1, (even // PIECE, PIECE))
            norms = torch.cat([norms, torch.linalg.vector_norm(pieces, dim=-1)], 1)
        return norms.square().sum(1)

    def inner(self, direction: Tensor) -> Tensor:
        """⟨v_i, u⟩."""
        return _flat(wide(self.value)) @ direction.to(wide(self.value).dtype).flatten()

    def total(self, weights: Tensor) -> Tensor:
        """Σ w_i v_i."""
        order = _order(self.value)
        value = wide(self.value).permute(0, *order)
        total = (weights.to(value.dtype) @ _flat(value)).reshape(value.shape[1:])
        return total.permute([order.index(d) for d in range(1, value.dim())])

    def dense(self) -> Tensor:
        """The value itself."""
        return wide(self.value)


@dataclass(frozen=True)
class Outer:
    """v_i = Σ_s b_is a_isᵀ in each of several blocks (the groups of a convolution; a Linear has one).

    a: [sample, block, position, p], b: [sample, block, position, q]; the parameter is [block · q, p] reshaped.
    """

    a: Tensor
    b: Tensor
    shape: torch.Size

    @property
    def samples(self) -> int:
        """How many units there are."""
        return self.a.shape[0]

    def scaled(self, factors: Tensor) -> Outer:
        """Scaling a sample scales b."""
        return replace(self, b=self.b * _like(self.b, factors))

    def merged(self, size: int) -> Outer:
        """Samples become positions."""
        a, b = (_units(t.transpose(1, 2), size).transpose(1, 2) for t in (self.a, self.b))
        return Outer(a, b, self.shape)

    def masked(self, keep: Tensor) -> Outer:
        """Zeros where not ``keep``."""
        return Outer(_masked(self.a, keep), _masked(self.b, keep), self.shape)

    def plus(self, *others: Outer) -> Outer:
        """Adding concatenates positions."""
        a, b = (torch.cat(parts, 2) for parts in zip(*((r.a, r.b) for r in (self, *others)), strict=True))
        return Outer(a, b, self.shape)

    @property
    def form(self) -> planner.Form:
        """How the norm is computed."""
        return outer_form(self.a, self.b.shape[3], self.b.dtype)

    def sq_norm(self) -> Tensor:
        """⟨A Aᵀ, B Bᵀ⟩, or written out and squared: whichever costs less."""
        if self.rounded:
            return self.halved().sq_norm()
        form = self.form.name
        if form == "gram":
            return gram_sq_norm(self.a, self.b)
        return convolution_sq_norm(*self._images(), *ONE) if form == "fused" else _streamed_sq_norm(self)

    def inner(self, direction: Tensor) -> Tensor:
        """Σ_s b_sᵀ U a_s."""
        a, b = wide(self.a), wide(self.b)
        u = direction.to(a.dtype).reshape(a.shape[1], b.shape[3], a.shape[3])  # [block, q, p]
        return ((b @ u) * a).flatten(1).sum(1)

    def total(self, weights: Tensor) -> Tensor:
        """One ordinary weight-gradient product with b, or a, scaled by w."""
        if self.rounded:
            return self.halved().total(weights)
        if _by_kernel(self.a, self.b.dtype):  # b scaled in its own format would be rounded, in a wider one copied
            total = convolution_total(*self._images(), weights, *ONE)
            return total[: self.b.shape[3], : self.a.shape[3], 0, 0].reshape(self.shape)
        a, b = wide(self.a), wide(self.b)
        # w on the narrower one, which is copied for it
        a, b = (a, b * _like(b, weights)) if b.shape[3] <= a.shape[3] else (a * _like(a, weights), b)
        a, b = (t.transpose(0, 1).flatten(1, 2) for t in (a, b))  # [block, sample · position, …]
        return (b.transpose(1, 2) @ a).reshape(self.shape)

    def dense(self) -> Tensor:
        """Written out."""
        if self.rounded:
            return self.halved().dense()
        if _by_kernel(self.a, self.b.dtype):
            v = convolution_dense(*self._images(), *ONE)
            return v[:, : self.b.shape[3], : self.a.shape[3], 0, 0].reshape(self.samples, *self.shape)
        return (wide(self.b).transpose(2, 3) @ wide(self.a)).reshape(self.samples, *self.shape)

    @property
    def rounded(self) -> bool:
        """Whether the library may round both factors to TF32, and their sum over positions may cancel."""
        return rounds(self.a, self.b, convolution=False) and self.a.shape[1] == 1 and self.a.shape[2] > 1

    def halved(self) -> Halved:
        """The same from rounded factors."""
        return Halved(*halves(self.a, self.b), self.shape)

    def _images(self) -> tuple[Tensor, Tensor]:
        """The same as a 1×1 convolution: [sample, feature, position, 1], features last in memory."""
        a, b = (aligned(t[:, 0])[:, :, None].permute(0, 3, 1, 2) for t in (self.a, self.b))
        return a, b

    def rows(self, start: int, stop: int) -> Outer:
        """Samples start … stop."""
        return Outer(self.a[start:stop], self.b[start:stop], self.shape)


ONE: tuple[Any, ...] = (
    (1, 1),
    (0, 0),
    (1, 1),
    (1, 1),
    1,
)  # a 1×1 convolution: stride, padding, dilation, kernel, groups


def _by_kernel(a: Tensor, other: torch.dtype) -> bool:
    """Whether kernels take these operands as they are: half precision, and more than one position to sum over."""
    return a.is_cuda and a.dtype == other and a.dtype in HALF and a.shape[1] == 1 and a.shape[2] > 1


def outer_form(a: Tensor, outputs: int, dtype: torch.dtype) -> planner.Form:
    """How the norm of an Outer of ``a`` [sample, block, position, p] and a b of so many features is computed."""
    _, blocks, positions, inputs = a.shape
    halved = dtype == a.dtype and rounds(a, a, convolution=False) and blocks == 1 and positions > 1
    kernel = halved or _by_kernel(a, dtype)
    return planner.choose(positions, inputs, outputs, blocks=blocks, cuda=a.is_cuda, kernel=kernel, half=kernel)


@dataclass(frozen=True)
class Geometry:
    """What a convolution's weight gradient needs to know beside input and output gradient."""

    shape: torch.Size  # of the weight
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


@dataclass(frozen=True)
class Convolution:
    """v_i is the weight gradient of a convolution of ``x`` [unit, channel, *space] with output gradient ``b``.

    A unit of several images (samples merged into one, probes added up) has one more dimension, [unit, image, channel,
    *space], and its gradient is the images' sum. A transposed convolution is the same record with x and b in each
    other's place: it is the adjoint.
    """

    x: Tensor
    b: Tensor
    geometry: Geometry

    @property
    def samples(self) -> int:
        """How many units there are."""
        return self.x.shape[0]

    @property
    def probes(self) -> int:
        """How many images a unit has."""
        return self.x.shape[1] if self.x.dim() == 3 + len(self.geometry.stride) else 1

    def _images(self) -> tuple[Tensor, Tensor]:
        """X and b with images one after the other, [unit · image, channel, *space]."""
        several = self.x.dim() == 3 + len(self.geometry.stride)
        return (self.x.flatten(0, 1), self.b.flatten(0, 1)) if several else (self.x, self.b)

    def scaled(self, factors: Tensor) -> Convolution:
        """Scaling a sample scales b."""
        return replace(self, b=self.b * _like(self.b, factors))

    def merged(self, size: int) -> Convolution:
        """Samples become images of one unit."""
        count = size * self.probes
        x, b = (t.reshape(t.shape[0] // count, count, *t.shape[1:]) for t in self._images())
        return replace(self, x=x, b=b)

    def masked(self, keep: Tensor) -> Convolution:
        """Zeros where not ``keep``."""
        return Convolution(_masked(self.x, keep), _masked(self.b, keep), self.geometry)

    def adds_to(self, other: Convolution) -> bool:
        """Whether both are of one geometry and size, so that adding puts images side by side."""
        mine, theirs = self._images(), other._images()
        same = all(a.shape[1:] == c.shape[1:] and a.dtype == c.dtype for a, c in zip(mine, theirs, strict=True))
        return same and self.geometry == other.geometry

    def plus(self, other: Convolution) -> Convolution:
        """Adding concatenates images."""
        mine, theirs = self.merged(1), other.merged(1)
        return replace(self, x=torch.cat([mine.x, theirs.x], 1), b=torch.cat([mine.b, theirs.b], 1))

    @property
    def form(self) -> planner.Form:
        """How the norm is computed."""
        groups, space = self.geometry.groups, len(self.geometry.stride)
        return planner.choose(
            self.probes * self.b.shape[-space:].numel(),
            self.geometry.shape[1:].numel(),
            self.b.shape[-space - 1] // groups,
            blocks=groups,
            raw_inputs=self.x.shape[1:].numel(),
            cuda=self.x.is_cuda,
            kernel=self._by_kernel,
            unfolds=True,
            half=self.x.is_cuda and (self.x.dtype in HALF or self.rounded),
        )

    @property
    def _by_kernel(self) -> bool:
        return self.x.is_cuda and len(self.geometry.stride) == 2 and self.x.dtype == self.b.dtype

    @property
    def rounded(self) -> bool:
        """Whether the library may round both factors to TF32, and a kernel takes them rounded."""
        return rounds(self.x, self.b, convolution=True) and len(self.geometry.stride) == 2

    def halved(self) -> Halved:
        """The same from rounded factors."""
        return Halved(*halves(self.x, self.b), self.geometry)

    def _arguments(self) -> tuple[Any, ...]:
        g = self.geometry
        return g.stride, g.padding, g.dilation, g.shape[2:], g.groups, self.probes

    def sq_norm(self) -> Tensor:
        """Gram form of the unfolded input where that is cheaper, otherwise written out a few samples at a time."""
        if self.rounded:
            return self.halved().sq_norm()
        form = self.form.name
        if form == "fused":
            return convolution_sq_norm(*self._images(), *self._arguments())
        return self.unfolded().sq_norm() if form == "gram" else _streamed_sq_norm(self)

    def inner(self, direction: Tensor) -> Tensor:
        """⟨v_i, u⟩ = ⟨b_i, conv(x_i, u)⟩: the convolution is linear in its weight."""
        g, (x, b) = self.geometry, (wide(t) for t in self._images())
        space = len(g.stride)
        moved = torch.ops.aten.convolution(
            x, direction.to(x.dtype), None, g.stride, g.padding, g.dilation, False, [0] * space, g.groups
        )
        return (moved * b).reshape(self.samples, -1).sum(1)

    def total(self, weights: Tensor) -> Tensor:
        """The library's own weight gradient, with b scaled by w; in half precision a kernel's, which scales nothing."""
        if self.rounded:
            return self.halved().total(weights)
        x, b = self._images()
        if self._by_kernel and x.dtype in HALF:
            return convolution_total(x, b, weights, *self._arguments())
        b = wide(b)
        return _weight_gradient(wide(x), b * _like(b, weights.repeat_interleave(self.probes)), self.geometry)

    def dense(self) -> Tensor:
        """One convolution with a group per sample: its weight gradient is every sample's own."""
        if self.rounded:
            return self.halved().dense()
        if self._by_kernel:
            return convolution_dense(*self._images(), *self._arguments())
        g, n, probes = self.geometry, self.samples, self.probes
        x, b = (wide(t) for t in self._images())
        if n == 0:
            return x.new_zeros(0, *g.shape)
        if g.shape[1] <= 4 and g.groups == 1:  # so few channels would leave the convolution's vectors empty
            return self.unfolded().dense()
        each = replace(g, shape=torch.Size([n * g.shape[0], *g.shape[1:]]), groups=n * g.groups)
        x, b = (  # [image, unit · channel, *space]
            t.unflatten(0, (n, probes)).transpose(0, 1).reshape(probes, n * t.shape[1], *t.shape[2:]) for t in (x, b)
        )
        return _weight_gradient(x, b, each).reshape(n, *g.shape)

    def rows(self, start: int, stop: int) -> Convolution:
        """Samples start … stop."""
        return Convolution(self.x[start:stop], self.b[start:stop], self.geometry)

    def unfolded(self) -> Outer:
        """The same gradient as an Outer: each output position's input patch is a row of a."""
        g, (x, b) = self.geometry, self._images()
        space = len(g.stride)
        pads = [pad for size in reversed(g.padding) for pad in (size, size)]
        x = torch.nn.functional.pad(x, pads)
        out, kernel = b.shape[2:], g.shape[2:]
        strides = x.stride()[2:]
        patches = x.as_strided(
            (*x.shape[:2], *kernel, *out),
            (
                *x.stride()[:2],
                *(s * d for s, d in zip(strides, g.dilation, strict=True)),
                *(s * d for s, d in zip(strides, g.stride, strict=True)),
            ),
            x.storage_offset(),
        )  # [image, channel, *kernel, *out]
        n, channels = x.shape[:2]
        a = patches.reshape(n, g.groups, channels // g.groups * kernel.numel(), out.numel()).transpose(2, 3)
        b = b.reshape(n, g.groups, b.shape[1] // g.groups, out.numel()).transpose(2, 3)
        assert space == len(out)
        each = Outer(a, b, g.shape)
        return each.merged(self.probes) if self.probes > 1 else each


@dataclass(frozen=True)
class Halved:
    """scale_i times the gradients of an Outer or a Convolution with factors in float16 (``tf32``).

    Norms and sums are of these very gradients: what is summed is what was measured, however much of it cancels.
    """

    one: Tensor
    other: Tensor
    scale: Tensor  # [sample]
    like: Geometry | torch.Size

    @property
    def record(self) -> Outer | Convolution:
        """Without the scale."""
        if isinstance(self.like, Geometry):
            return Convolution(self.one, self.other, self.like)
        return Outer(self.one, self.other, self.like)

    @property
    def samples(self) -> int:
        """How many units there are."""
        return self.one.shape[0]

    def widened(self) -> Outer | Convolution:
        """The same gradients exactly, with factors in float32."""
        one, other = self.one.float(), self.other.float()
        return replace(self, one=one, other=other * _like(other, self.scale)).record

    def scaled(self, factors: Tensor) -> Record:
        """c_i v_i."""
        return self.widened().scaled(factors)

    def merged(self, size: int) -> Record:
        """Sums of ``size`` consecutive samples."""
        return self.widened().merged(size)

    def masked(self, keep: Tensor) -> Record:
        """Zeros where not ``keep``."""
        return self.widened().masked(keep)

    def sq_norm(self) -> Tensor:
        """scale² ‖v‖², in an order that neither overflows nor vanishes unless the result does."""
        return self.record.sq_norm() * self.scale * self.scale

    def inner(self, direction: Tensor) -> Tensor:
        """⟨v_i, u⟩."""
        return self.record.inner(direction) * self.scale

    def total(self, weights: Tensor) -> Tensor:
        """Σ w_i v_i."""
        return self.record.total(weights * self.scale)

    def dense(self) -> Tensor:
        """Written out."""
        v = self.record.dense()
        return v * _like(v, self.scale)


def summed(record: Record) -> Record:
    """The record whose gradients norms and sums are made of: the same, or with factors as they are rounded."""
    return record.halved() if isinstance(record, (Outer, Convolution)) and record.rounded else record


def widened(record: Record) -> Record:
    """The record with the whole algebra."""
    return record.widened() if isinstance(record, Halved) else record


@dataclass(frozen=True)
class Indexed:
    """Rows of a table: v_i is zero but for row ids_is, which receives b_is. Never [sample, table, feature]."""

    ids: Tensor  # [sample, position]
    b: Tensor  # [sample, position, feature]
    shape: torch.Size

    @property
    def samples(self) -> int:
        """How many units there are."""
        return self.ids.shape[0]

    def scaled(self, factors: Tensor) -> Indexed:
        """Scaling a sample scales b."""
        return replace(self, b=self.b * _like(self.b, factors))

    def merged(self, size: int) -> Indexed:
        """Samples become positions."""
        return Indexed(_units(self.ids, size), _units(self.b, size), self.shape)

    def masked(self, keep: Tensor) -> Indexed:
        """Zeros where not ``keep``."""
        return replace(self, b=_masked(self.b, keep))

    def plus(self, *others: Indexed) -> Indexed:
        """Adding concatenates positions."""
        ids, b = (torch.cat(parts, 1) for parts in zip(*((r.ids, r.b) for r in (self, *others)), strict=True))
        return Indexed(ids, b, self.shape)

    def sq_norm(self) -> Tensor:
        """Rows that a sample meets several times are added first: sort each sample's ids, sum the runs, square."""
        if self.ids.shape[1] == 0:
            return wide(self.b).new_zeros(self.samples)
        ids, order = self.ids.sort(dim=1, stable=True)
        b = wide(self.b).gather(1, order[:, :, None].expand_as(self.b))
        changes = torch.nn.functional.pad((ids[:, 1:] != ids[:, :-1]).long(), (1, 0))
        run = changes.cumsum(1)  # which run of equal ids each position belongs to
        rows = torch.zeros_like(b).scatter_add(1, run[:, :, None].expand_as(b), b)
        return rows.square().flatten(1).sum(1)

    def inner(self, direction: Tensor) -> Tensor:
        """Σ_s ⟨b_s, u[id_s]⟩."""
        b = wide(self.b)
        return (b * direction.to(b.dtype)[self.ids]).flatten(1).sum(1)

    def total(self, weights: Tensor) -> Tensor:
        """Scaled rows, added where they belong."""
        b = wide(self.b)
        rows = (b * _like(b, weights)).flatten(0, 1)
        return b.new_zeros(self.shape).index_add_(0, self.ids.flatten(), rows)

    def dense(self) -> Tensor:
        """Written out: only for tests and for tables as small as a sample."""
        b = wide(self.b)
        out = b.new_zeros(self.samples, *self.shape)
        return out.scatter_add_(1, self.ids[:, :, None].expand_as(b), b)


def _streamed_sq_norm(record: Outer | Convolution) -> Tensor:
    floats = record.form.written_floats
    step = max(
        1, planner.stream_floats(cuda=(record.a if isinstance(record, Outer) else record.x).is_cuda) // max(1, floats)
    )
    if step >= record.samples:
        return Dense(record.dense()).sq_norm()
    starts = range(0, record.samples, step)
    return torch.cat([Dense(record.rows(s, s + step).dense()).sq_norm() for s in starts])


def _weight_gradient(x: Tensor, b: Tensor, g: Geometry) -> Tensor:
    shape_only = x.new_zeros(()).expand(g.shape)  # the kernel asks for the weight but reads only its shape
    space = len(g.stride)
    return torch.ops.aten.convolution_backward(
        b, x, shape_only, None, g.stride, g.padding, g.dilation, False, [0] * space, g.groups, [False, True, False]
    )[1]


def cross(first: Record, second: Record) -> Tensor:
    """⟨u_i, v_i⟩ for two records of one parameter (a tied weight used by layers of different kinds). [sample]."""
    first, second = summed(first), summed(second)
    if isinstance(second, Indexed):
        first, second = second, first
    if isinstance(first, Indexed) and isinstance(second, Halved):
        outer = Halved(second.one.double(), second.other.double(), second.scale, second.like).record  # not in TF32
        return cross(first, outer).to(second.scale.dtype) * second.scale
    if isinstance(first, Indexed) and isinstance(second, Outer) and second.a.shape[1] == 1:
        # a table tied to an output layer: ⟨e_id b1ᵀ, b2 a2ᵀ⟩ = b2[id] · ⟨b1, a2⟩, for every pair of positions
        a, b = wide(second.a)[:, 0], second.b[:, 0]
        picked = wide(b.gather(2, first.ids[:, None, :].expand(-1, b.shape[1], -1)))  # [sample, position 2, position 1]
        return (picked * (a @ wide(first.b).to(a.dtype).transpose(1, 2))).sum((1, 2))
    return _flat(first.dense() * second.dense()).sum(1)


def joined(records: Sequence[Record]) -> tuple[Record, ...]:
    """The same sum in fewer records: those of one kind are added where adding is concatenation or plain addition."""
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
