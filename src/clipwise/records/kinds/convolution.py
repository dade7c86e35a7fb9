"""Per-sample gradients of a convolution's weight, kept as images and output gradients, never unfolded without need.

Receives: a convolution's inputs x and output gradients b, [unit, channel, *space], and its Geometry.
Gives: Convolution; Geometry: the weight's shape, stride, padding, dilation and groups; patches: x unfolded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clipwise.records import forms, tuning
from clipwise.records.kernels import convolution_dense, convolution_gram_sq_norm, convolution_sq_norm, convolution_total
from clipwise.records.kernels.convolution_gram import gram_cost, possible
from clipwise.records.kernels.gram import HALF
from clipwise.records.kinds.dense import streamed_sq_norm
from clipwise.records.kinds.halved import Halved
from clipwise.records.kinds.outer import Outer
from clipwise.records.kinds.record import masked, raised, shaped, wide, wide_format, written_format
from clipwise.records.tf32 import halves, rounds


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
    def nbytes(self) -> int:
        """What the record takes."""
        return self.x.nbytes + self.b.nbytes

    @property
    def written_nbytes(self) -> int:
        """What it would take ``written``."""
        return self.samples * self.geometry.shape.numel() * self.formats[1].itemsize

    @property
    def probes(self) -> int:
        """How many images a unit has."""
        return self.x.shape[1] if self.x.dim() == 3 + len(self.geometry.stride) else 1

    def _images(self) -> tuple[Tensor, Tensor]:
        """The pair x and b with images one after the other, [unit · image, channel, *space]."""
        several = self.x.dim() == 3 + len(self.geometry.stride)
        return (self.x.flatten(0, 1), self.b.flatten(0, 1)) if several else (self.x, self.b)

    def scaled(self, factors: Tensor) -> Convolution:
        """Scaling a sample scales b."""
        return replace(self, b=self.b * shaped(self.b, factors))

    def merged(self, size: int) -> Convolution:
        """Samples become images of one unit."""
        count = size * self.probes
        x, b = (t.reshape(t.shape[0] // count, count, *t.shape[1:]) for t in self._images())
        return replace(self, x=x, b=b)

    def masked(self, keep: Tensor) -> Convolution:
        """Zeros where not ``keep``."""
        return Convolution(masked(self.x, keep), masked(self.b, keep), self.geometry)

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
    def counted(self) -> forms.Form:
        """How the norm would be computed by counting alone."""
        groups, space = self.geometry.groups, len(self.geometry.stride)
        return forms.choose(
            self.probes * self.b.shape[-space:].numel(),
            self.geometry.shape[1:].numel(),
            self.b.shape[-space - 1] // groups,
            blocks=groups,
            raw_inputs=self.x.shape[1:].numel(),
            cuda=self.x.is_cuda,
            kernel=self._by_kernel,
            unfolds=True,
            not_unfolded=self._gram_cost,
            formats=self.formats,
        )

    @property
    def formats(self) -> tuple[torch.dtype, torch.dtype]:
        """Of the factors as they are read, and of the gradient where it is written out to be kept."""
        read = torch.float16 if self.rounded else torch.promote_types(self.x.dtype, self.b.dtype)
        return read, written_format(read, cuda=self._by_kernel)

    @property
    def _half(self) -> bool:
        """Whether kernels read factors in half precision."""
        return self.x.is_cuda and (self.x.dtype in HALF or self.rounded)

    @property
    def _gram_cost(self) -> int | None:
        """Multiplications of the Gram form's kernel, where it takes such a record."""
        if not self._by_kernel or not self._half:
            return None
        x, b, _, _, _, kernel, groups, probes = self._planes()
        if not possible(x, kernel, groups, probes):
            return None
        inputs, positions = x.shape[2] * x.shape[3], b.shape[2] * b.shape[3]
        return gram_cost(inputs, x.shape[1], positions, b.shape[1], kernel[0] * kernel[1])

    @property
    def form(self) -> forms.Form:
        """How the norm is computed."""
        if not self._by_kernel:  # its Gram form unfolds, and would be tried with what no GPU should write
            return self.counted
        shape = ("convolution", self.geometry, self.x.shape[1:], self.b.shape[1:], self.formats)
        return tuning.tuned(self.counted, shape, self.x, self._random)

    def _random(self, samples: int) -> Convolution | Halved:
        """Random images of so many samples, channels last: a compiled step writes them as kernels read them."""
        after = len(self.geometry.stride) + 1  # channel and space

        def images(t: Tensor) -> Tensor:
            channel, *space = t.shape[-after:]
            return tuning.numbers(t, t.dtype, samples, *t.shape[1:-after], *space, channel).movedim(-1, -after)

        record = replace(self, x=images(self.x), b=images(self.b))
        return record.halved() if record.rounded else record

    @property
    def _by_kernel(self) -> bool:
        return self.x.is_cuda and len(self.geometry.stride) <= 2 and self.x.dtype == self.b.dtype

    @property
    def rounded(self) -> bool:
        """Whether the library may round both factors to TF32, and a kernel takes them rounded."""
        return rounds(self.x, self.b, convolution=True) and len(self.geometry.stride) <= 2

    @property
    def _double(self) -> Convolution | None:
        """The same in float64 where the library may round to TF32 and no kernel takes rounded factors."""
        if rounds(self.x, self.b, convolution=True) and not self.rounded:
            return replace(self, x=self.x.double(), b=self.b.double())
        return None

    def halved(self) -> Halved:
        """The same from rounded factors."""
        return Halved(*halves(self.x, self.b), partial(Convolution, geometry=self.geometry))

    def _planes(self) -> tuple[Any, ...]:
        """What kernels take: x, b and geometry of images, [unit · image, channel, y, x]; lines have a height of one."""
        g, (x, b) = self.geometry, self._images()
        sizes = g.stride, g.padding, g.dilation, tuple(g.shape[2:])
        if len(g.stride) == 1:
            x, b = x.unsqueeze(2), b.unsqueeze(2)
            sizes = tuple((least, *size) for least, size in zip((1, 0, 1, 1), sizes, strict=True))  # type: ignore[assignment]
        return x, b, *sizes, g.groups, self.probes

    def sq_norm(self) -> Tensor:
        """Gram form of the unfolded input where that is cheaper, otherwise written out a few samples at a time."""
        if self.rounded:
            return self.halved().sq_norm()
        if (double := self._double) is not None:
            return double.sq_norm().float()
        return self.norm_by(self.form.kept)

    def norm_by(self, name: forms.Name) -> Tensor:
        """‖v_i‖² by one form, of factors as they are."""
        if name == "fused":
            return convolution_sq_norm(*self._planes())
        if name == "gram":
            return convolution_gram_sq_norm(*self._planes()) if self._by_kernel else self.unfolded().sq_norm()
        taps = self.geometry.shape[2:].numel()  # a patch holds a number of x at most so many times
        streamed = streamed_sq_norm(self, self.rows, self.geometry.shape.numel(), cuda=self.x.is_cuda)
        return raised(streamed, self.x, self.b, taps)

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
        if (double := self._double) is not None:
            return double.total(weights.double()).float()
        if self._by_kernel and self.x.dtype in HALF:
            x, b, *sizes = self._planes()
            return convolution_total(x, b, weights, *sizes).reshape(self.geometry.shape)
        x, b = self._images()
        b = wide(b)
        return _weight_gradient(wide(x), b * shaped(b, weights.repeat_interleave(self.probes)), self.geometry)

    def dense(self) -> Tensor:
        """One convolution with a group per sample: its weight gradient is every sample's own."""
        if self.rounded:
            return self.halved().dense()
        if (double := self._double) is not None:
            return double.dense().float()
        if self._by_kernel:
            return self._by_planes(wide_format(self.x.dtype))
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

    def written(self) -> Tensor:
        """Written out in the format in which it is kept."""
        kept = self.formats[1]
        return self._by_planes(kept) if kept in HALF else self.dense()

    def _by_planes(self, dtype: torch.dtype) -> Tensor:
        v = convolution_dense(*self._planes(), dtype=dtype)
        return v if v.dim() == 1 + len(self.geometry.shape) else v.squeeze(3)

    def rows(self, start: int, stop: int) -> Convolution:
        """Samples start … stop."""
        return Convolution(self.x[start:stop], self.b[start:stop], self.geometry)

    def unfolded(self) -> Outer:
        """The same gradient as an Outer: each output position's input patch is a row of a."""
        g, (x, b) = self.geometry, self._images()
        n, positions = len(x), b.shape[2:].numel()
        a = patches(x, g).reshape(n, g.groups, g.shape[1:].numel(), positions).transpose(2, 3)
        b = b.reshape(n, g.groups, b.shape[1] // g.groups, positions).transpose(2, 3)
        each = Outer(a, b, g.shape)
        return each.merged(self.probes) if self.probes > 1 else each


def patches(x: Tensor, g: Geometry) -> Tensor:
    """What each output position sees of x [image, channel, *space]: [image, channel, *kernel, *out]."""
    x = torch.nn.functional.pad(x, [pad for size in reversed(g.padding) for pad in (size, size)])
    # views, and none that names strides: a graph of them may be given x in another order of memory
    for axis, (size, step, spread) in enumerate(zip(g.shape[2:], g.stride, g.dilation, strict=True)):
        x = x.unfold(2 + axis, spread * (size - 1) + 1, step)[..., ::spread]
    space = range(2, x.dim() - len(g.stride))
    return x.movedim(tuple(space), tuple(len(g.stride) + axis for axis in space))


def _weight_gradient(x: Tensor, b: Tensor, g: Geometry) -> Tensor:
    shape_only = x.new_zeros(()).expand(g.shape)  # the kernel asks for the weight but reads only its shape
    space = len(g.stride)
    return torch.ops.aten.convolution_backward(
        b, x, shape_only, None, g.stride, g.padding, g.dilation, False, [0] * space, g.groups, [False, True, False]
    )[1]
