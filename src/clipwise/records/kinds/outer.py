"""Per-sample gradients of a weight that is used at several positions, kept as the layer's inputs and output gradients.

Receives: layer inputs a and output gradients b, [sample, block, position, feature].
Gives: Outer; outer_form: how the norm of one would be computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clipwise.records import planner
from clipwise.records.kernels import convolution_dense, convolution_sq_norm, convolution_total, gram_sq_norm
from clipwise.records.kernels.gram import HALF, aligned
from clipwise.records.kinds.dense import streamed_sq_norm
from clipwise.records.kinds.halved import Halved
from clipwise.records.kinds.record import masked, shaped, units, wide
from clipwise.records.tf32 import halves, rounds


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
        return replace(self, b=self.b * shaped(self.b, factors))

    def merged(self, size: int) -> Outer:
        """Samples become positions."""
        a, b = (units(t.transpose(1, 2), size).transpose(1, 2) for t in (self.a, self.b))
        return Outer(a, b, self.shape)

    def masked(self, keep: Tensor) -> Outer:
        """Zeros where not ``keep``."""
        return Outer(masked(self.a, keep), masked(self.b, keep), self.shape)

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
        form = self.form
        if form.name == "gram":
            return gram_sq_norm(self.a, self.b)
        if form.name == "fused":
            return convolution_sq_norm(*self._images(), *ONE)
        return streamed_sq_norm(self, self.rows, form.written_floats, cuda=self.a.is_cuda)

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
        a, b = (a, b * shaped(b, weights)) if b.shape[3] <= a.shape[3] else (a * shaped(a, weights), b)
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
        return Halved(*halves(self.a, self.b), partial(Outer, shape=self.shape))

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
