"""Per-sample gradients of a weight that is used at several positions, kept as the layer's inputs and output gradients.

Receives: layer inputs a and output gradients b, [sample, block, position, feature].
Gives: Outer; outer_form: how the norm of one would be computed.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from clipwise.records import forms, tuning
from clipwise.records.kernels import (
    convolution_dense,
    convolution_sq_norm,
    convolution_total,
    gram_sq_norm,
    outer_dense,
    outer_gram_sq_norms,
    outer_totals,
)
from clipwise.records.kernels.gram import HALF, aligned
from clipwise.records.kernels.many import takes
from clipwise.records.kernels.tiles import milliseconds
from clipwise.records.kinds.dense import streamed_sq_norm
from clipwise.records.kinds.halved import Halved
from clipwise.records.kinds.record import masked, raised, shaped, units, wide, written_format
from clipwise.records.tf32 import halves_by_position, rounds


@dataclass(frozen=True)
class Outer:
    """v_i = Σ_s b_is a_isᵀ in each of several blocks (the groups of a convolution; a Linear has one).

    a: [sample, block, position, p], b: [sample, block, position, q]; the parameter is [block · q, p] reshaped.
    ``spare`` features of zeros may stand behind those of a and b, so that a kernel can read them. ``turned``: the layer
    multiplies by its parameter as it is, [p, q], so that b is what it read and a the gradient of its output.
    """

    a: Tensor
    b: Tensor
    shape: torch.Size
    spare: tuple[int, int] = (0, 0)
    turned: bool = False

    @property
    def samples(self) -> int:
        """How many units there are."""
        return self.a.shape[0]

    def scaled(self, factors: Tensor) -> Outer:
        """Scaling a sample scales one of its factors: the narrower, which is copied for it."""
        if self.a.shape[3] < self.b.shape[3]:
            return replace(self, a=self.a * shaped(self.a, factors))
        return replace(self, b=self.b * shaped(self.b, factors))

    def merged(self, size: int) -> Outer:
        """Samples become positions."""
        a, b = (units(t.transpose(1, 2), size).transpose(1, 2) for t in (self.a, self.b))
        return replace(self, a=a, b=b)

    def masked(self, keep: Tensor) -> Outer:
        """Zeros where not ``keep``."""
        return replace(self, a=masked(self.a, keep), b=masked(self.b, keep))

    def plus(self, *others: Outer) -> Outer:
        """Adding concatenates positions."""
        records = [record.unpadded() for record in (self, *others)]
        a, b = (torch.cat(parts, 2) for parts in zip(*((r.a, r.b) for r in records), strict=True))
        return Outer(a, b, self.shape)

    @property
    def form(self) -> forms.Form:
        """How the norm is computed."""
        own = self.unpadded()  # which it was chosen for
        return outer_form(own.a, own.b.shape[3], own.b.dtype)

    def sq_norm(self) -> Tensor:
        """⟨A Aᵀ, B Bᵀ⟩, or written out and squared: whichever costs less."""
        if self.rounded:
            return self.halved().sq_norm()
        return self.norm_by(self.form.kept)

    def norm_by(self, name: forms.Name) -> Tensor:
        """‖v_i‖² by one form, of factors as they are."""
        if name == "gram":
            return gram_sq_norm(self.a, self.b)
        if name == "fused":
            return convolution_sq_norm(*self._images(), *ONE)
        return raised(streamed_sq_norm(self, self.rows, self.shape.numel(), cuda=self.a.is_cuda), self.a, self.b)

    def inner(self, direction: Tensor) -> Tensor:
        """Σ_s b_sᵀ U a_s."""
        own = self.unpadded()
        a, b = wide(own.a), wide(own.b)
        u = direction.to(a.dtype).reshape(a.shape[1], b.shape[3], a.shape[3])  # [block, q, p]
        return ((b @ u) * a).flatten(1).sum(1)

    def total(self, weights: Tensor) -> Tensor:
        """One ordinary weight-gradient product with b, or a, scaled by w."""
        if self.rounded:
            return self.halved().total(weights)
        if by_kernel(self.a, self.b.dtype):  # b scaled in its own format would be rounded, in a wider one copied
            return self.of_parameter(convolution_total(*self._images(), weights, *ONE)[:, :, 0, 0])
        own = self.unpadded()
        a, b = wide(own.a), wide(own.b)
        # w on the narrower one, which is copied for it; samples and positions in the order of the other one's memory
        a, b, other = (a, b * shaped(b, weights), a) if b.shape[3] <= a.shape[3] else (a * shaped(a, weights), b, b)
        order = (1, 0, 2, 3) if other.stride(0) >= other.stride(2) else (1, 2, 0, 3)
        a, b = (t.permute(order).flatten(1, 2) for t in (a, b))  # [block, sample · position, …]
        return (b.transpose(1, 2) @ a).reshape(self.shape)

    def dense(self) -> Tensor:
        """Written out."""
        if self.rounded:
            return self.halved().dense()
        own = self.unpadded()
        if by_kernel(self.a, self.b.dtype):
            v = convolution_dense(*self._images(), *ONE)
            return v[:, : own.b.shape[3], : own.a.shape[3], 0, 0].reshape(self.samples, *self.shape)
        return (wide(own.b).transpose(2, 3) @ wide(own.a)).reshape(self.samples, *self.shape)

    def written(self) -> Tensor:
        """Written out in the format in which it is kept."""
        factors = torch.promote_types(self.a.dtype, self.b.dtype)
        if written_format(factors, cuda=self.a.is_cuda) not in HALF:
            return self.dense()
        own = self.unpadded()
        if own.a.shape[1] > 1:
            return (own.b.transpose(2, 3) @ own.a).reshape(self.samples, *self.shape)
        # with rows to spare, which are left out as they lie: a product of uneven size can take five times as long
        ready = own if self.spare[0] else self
        return outer_dense(ready.a[:, 0], ready.b[:, 0])[:, : own.b.shape[3]].reshape(self.samples, *self.shape)

    @property
    def rounded(self) -> bool:
        """Whether the library may round both factors to TF32, and their sum over positions may cancel."""
        return rounded(self.a, self.b)

    def halved(self) -> Halved:
        """The same from rounded factors."""
        if self.turned:  # what a layer read is there first, and is best rounded as it is made
            other, one, scale = halves_by_position(self.b, self.a)
        else:
            one, other, scale = halves_by_position(self.a, self.b)
        ready = Outer(one, other, self.shape, self.spare).padded()
        return Halved(ready.a, ready.b, scale, functools.partial(Outer, shape=self.shape, spare=ready.spare))

    def padded(self) -> Outer:
        """The same with rows that a kernel can read, where it may: to be kept like that, for norm and sum alike."""
        if not by_kernel(self.a, self.b.dtype):
            return self
        a, b = aligned(self.a), aligned(self.b)
        p, q = self.spare
        return Outer(a, b, self.shape, (p + a.shape[3] - self.a.shape[3], q + b.shape[3] - self.b.shape[3]))

    def unpadded(self) -> Outer:
        """The same without spare features."""
        if self.spare == (0, 0):
            return self
        (p, q), a, b = self.spare, self.a, self.b
        return Outer(a[..., : a.shape[3] - p], b[..., : b.shape[3] - q], self.shape)

    def of_parameter(self, total: Tensor) -> Tensor:
        """A matrix [q, p] that may have features to spare, as the parameter."""
        own = self.unpadded()
        return total[: own.b.shape[3], : own.a.shape[3]].reshape(self.shape)

    def _images(self) -> tuple[Tensor, Tensor]:
        """The same as a 1×1 convolution: [sample, feature, position, 1], features last in memory."""
        a, b = (aligned(t[:, 0])[:, :, None].permute(0, 3, 1, 2) for t in (self.a, self.b))
        return a, b

    def rows(self, start: int, stop: int) -> Outer:
        """Samples start … stop."""
        return replace(self, a=self.a[start:stop], b=self.b[start:stop])


# a 1×1 convolution: stride, padding, dilation, kernel, groups
ONE: tuple[Any, ...] = ((1, 1), (0, 0), (1, 1), (1, 1), 1)


def by_kernel(a: Tensor, other: torch.dtype) -> bool:
    """Whether kernels take these operands as they are: half precision, and more than one position to sum over."""
    return a.is_cuda and a.dtype == other and a.dtype in HALF and a.shape[1] == 1 and a.shape[2] > 1


def rounded(a: Tensor, b: Tensor) -> bool:
    """Whether the library may round these factors to TF32, and their sum over positions may cancel."""
    return rounds(a, b, convolution=False) and a.shape[1] == 1 and a.shape[2] > 1


def outer_form(a: Tensor, outputs: int, dtype: torch.dtype, *, swap: bool = False, measure: bool = True) -> forms.Form:
    """How the norm of an Outer of ``a`` [sample, block, position, p] and a b of so many features is computed.

    ``swap``: of an Outer in which they change places; ``measure``: not only counted.
    """
    _, blocks, positions, inputs = a.shape
    halved = dtype == a.dtype and rounds(a, a, convolution=False) and blocks == 1 and positions > 1
    kernel = halved or by_kernel(a, dtype)
    # rounded factors are float16's from here on
    read = torch.float16 if halved else torch.promote_types(a.dtype, dtype)
    formats = read, written_format(read, cuda=a.is_cuda)
    form = forms.choose(positions, inputs, outputs, blocks=blocks, cuda=a.is_cuda, kernel=kernel, formats=formats)
    if not measure or positions == 1:  # of one position ‖b aᵀ‖ = ‖a‖‖b‖: nothing is faster
        return form
    sides = ((outputs, dtype), (inputs, a.dtype)) if swap else ((inputs, a.dtype), (outputs, dtype))

    def random(samples: int) -> Outer | Halved:
        one, other = (tuning.numbers(a, kind, samples, blocks, positions, size) for size, kind in sides)
        record = Outer(one, other, torch.Size([blocks * other.shape[3], one.shape[3]]))
        return record.halved() if halved else record.padded()

    found = tuple((size, torch.float16 if halved else kind) for size, kind in sides)
    return tuning.tuned(form, ("outer", blocks, positions, found), a, random, _took)


MANY = 8  # layers that a launch is taken to have


def _took(record: Outer | Halved, name: forms.Name, weights: Tensor) -> float:
    """Milliseconds of a layer's part of a step by one form: kernels that take all layers at once are timed with many.

    Alone a layer may fill no large device, and would take several times as long.
    """
    outer = record.record if isinstance(record, Halved) else record
    assert isinstance(outer, Outer)
    if name == "written" or not by_kernel(outer.a, outer.b.dtype) or not takes(outer.a[:, 0], outer.b[:, 0]):
        return tuning.took(record, name, weights)
    copies = max(1, min(MANY, forms.CUDA_STREAM_FLOATS // outer.shape.numel()))
    a, b = [outer.a[:, 0]] * copies, [outer.b[:, 0]] * copies
    each = functools.partial(milliseconds, repeats=1, rounds=20)
    total = each(lambda: outer_totals(a, b, weights.expand(copies, -1))) / copies
    if name == "gram":
        return total + each(lambda: outer_gram_sq_norms(a, b)) / copies
    return total + each(lambda: outer.norm_by(name))
