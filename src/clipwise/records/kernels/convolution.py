"""Every unit's convolution weight gradient v_i, never unfolded: its squared norm, itself, or the weighted sum of all.

Receives: the inputs x [image, channel, y, x] and output gradients b of a 2-d convolution, and its geometry; each
``probes`` consecutive images are one unit. A linear layer is a 1×1 convolution of as many positions as it has.
Gives: operators clipwise::convolution_sq_norm, _dense and _total: Triton kernels on CUDA, plain twins elsewhere.

v[o, (dy, dx, c)] = Σ_positions b[position, o] · x[position moved by (dy, dx), c] is a matrix product whose right side
is never formed: a tile of its columns, several taps side by side where channels are few, is read straight from x.
The weighted sum multiplies by w_i after a unit's product, in float32: w_i b_i is never rounded to b's format, so the
term that is summed is w_i times the v_i whose norm was taken.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from clipwise.jit import triton
from clipwise.records import forms
from clipwise.records.kernels.convolution_tiles import (
    Ints,
    Shape,
    Tile,
    candidates,
    launch,
    launch_dense,
    launch_total,
    total_candidates,
)
from clipwise.records.kernels.tiles import best_tile, like_random
from clipwise.types import InputError


def convolution_sq_norm(
    x: Tensor, b: Tensor, stride: Ints, padding: Ints, dilation: Ints, kernel: Ints, groups: int, probes: int = 1
) -> Tensor:
    """‖v_i‖² of each unit's weight gradient, for x [image, channel, y, x] and b [image, output, y, x]. [unit].

    Guarantees: accumulated in float32 or better; float32 operands are never rounded to TF32; no atomics, so within a
    process the same input gives the same bits. Edge cases: float64 gives float64; no samples give an empty result.
    """
    check(x, b, stride, padding, dilation, kernel, groups, probes)
    return _sq_norm(*_laid_out(x, b), stride, padding, dilation, kernel, groups, probes)


def convolution_dense(
    x: Tensor,
    b: Tensor,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    kernel: Ints,
    groups: int,
    probes: int = 1,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """v_i written out: [unit, output, channel, y, x], channels last in memory.

    Rounded once, to ``dtype`` or float32 or better. Otherwise guarantees and edge cases of ``convolution_sq_norm``.
    """
    check(x, b, stride, padding, dilation, kernel, groups, probes)
    v = _dense(*_laid_out(x, b), stride, padding, dilation, kernel, groups, probes, dtype or result_dtype(x))
    return v.permute(0, 1, 4, 2, 3)


def convolution_total(
    x: Tensor,
    b: Tensor,
    weights: Tensor,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    kernel: Ints,
    groups: int,
    probes: int = 1,
) -> Tensor:
    """Σ_i w_i v_i for weights [unit], float32 or better: [output, channel, y, x], channels last in memory.

    Guarantees: w_i multiplies the finished v_i, so that no product with it is rounded to the format of x and b.
    Otherwise those of ``convolution_sq_norm``. Edge cases: a unit that is not finite spoils the sum even with weight 0,
    as in any other product: mask it first.
    """
    check(x, b, stride, padding, dilation, kernel, groups, probes)
    if weights.shape != (x.shape[0] // probes,):
        raise InputError(f"weights must be one for each of {x.shape[0] // probes} units, got {tuple(weights.shape)}")
    total = _total(*_laid_out(x, b), weights, stride, padding, dilation, kernel, groups, probes)
    return total.permute(0, 3, 1, 2)


def _laid_out(x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Channels last on CUDA; outside the operators, so that a compiler can write this layout in the first place."""
    if not x.is_cuda:
        return x, b
    return x.contiguous(memory_format=torch.channels_last), b.contiguous(memory_format=torch.channels_last)


def check(
    x: Tensor, b: Tensor, stride: Ints, padding: Ints, dilation: Ints, kernel: Ints, groups: int, probes: int
) -> None:
    """Refuse numbers that do not describe one convolution: a kernel reads wherever they point."""
    if x.dim() != 4 or b.dim() != 4 or x.shape[0] != b.shape[0] or x.dtype != b.dtype:
        raise InputError(
            "x and b must be [sample, channel, y, x] with as many samples and one dtype, "
            f"got {tuple(x.shape)} {x.dtype} and {tuple(b.shape)} {b.dtype}"
        )
    if groups < 1 or x.shape[1] % groups or b.shape[1] % groups:
        raise InputError(f"groups must divide {x.shape[1]} input and {b.shape[1]} output channels, got {groups}")
    if probes < 1 or x.shape[0] % probes:
        raise InputError(f"probes must divide the {x.shape[0]} images, got {probes}")
    for axis in (0, 1):
        reach = x.shape[2 + axis] + 2 * padding[axis] - dilation[axis] * (kernel[axis] - 1) - 1
        if reach < 0 or b.shape[2 + axis] != reach // stride[axis] + 1:
            raise InputError(
                f"b must have {reach // stride[axis] + 1} positions along axis {axis} for this x and geometry, "
                f"got {b.shape[2 + axis]}"
            )


def _twin_sq_norm(x: Tensor, b: Tensor, *geometry: Any) -> Tensor:
    """Written out, a few units at a time."""
    shape = Shape.of(x, b, *geometry)
    step = shape.probes * max(1, forms.STREAM_FLOATS // (shape.outputs * shape.columns))
    norms = [x.new_zeros(0, dtype=result_dtype(x))]
    for start in range(0, x.shape[0], step):
        rows = slice(start, start + step)
        v = _twin_dense(x[rows], b[rows], *geometry)
        norms.append(torch.linalg.vector_norm(v.flatten(1), dim=1).square())
    return torch.cat(norms)


def _twin_dense(
    x: Tensor,
    b: Tensor,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    kernel: Ints,
    groups: int,
    probes: int = 1,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """One convolution with a group per unit: its weight gradient is every unit's own. [unit, output, y, x, channel]."""
    result = dtype or result_dtype(x)
    # On CUDA in float64: cuDNN may round float32 to TF32.
    exactly = torch.float64 if x.is_cuda or x.dtype == torch.float64 else torch.float32
    units, out, channels = x.shape[0] // probes, b.shape[1], x.shape[1] // groups
    if units == 0:
        return x.new_zeros(0, out, *kernel, channels, dtype=result)
    x, b = (
        t.to(exactly).unflatten(0, (units, probes)).transpose(0, 1).reshape(probes, units * t.shape[1], *t.shape[2:])
        for t in (x, b)
    )
    shape = x.new_zeros(()).expand(units * out, channels, *kernel)  # asked for, but only its shape is read
    v = torch.ops.aten.convolution_backward(
        b, x, shape, None, stride, padding, dilation, False, [0, 0], units * groups, [False, True, False]
    )[1]
    return v.reshape(units, out, channels, *kernel).permute(0, 1, 3, 4, 2).contiguous().to(result)


def _twin_total(x: Tensor, b: Tensor, weights: Tensor, *geometry: Any) -> Tensor:
    """Σ w_i v_i of the written gradients, a few units at a time. [output, y, x, channel]."""
    shape = Shape.of(x, b, *geometry)
    step = max(1, forms.STREAM_FLOATS // (shape.outputs * shape.columns))
    total = x.new_zeros(shape.gradient, dtype=result_dtype(x))
    for start in range(0, len(weights), step):
        rows = slice(start * shape.probes, (start + step) * shape.probes)
        v = _twin_dense(x[rows], b[rows], *geometry)
        w = weights[start : start + step].to(v.dtype)
        total += torch.tensordot(w, v, 1)
    return total


def result_dtype(x: Tensor) -> torch.dtype:
    """The format of what is summed: float32, or float64 where x is."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# what the functions that make these operators call ``geometry``
_GEOMETRY = "int[] stride, int[] padding, int[] dilation, int[] kernel, int groups, int probes"
_sq_norm = torch.library.custom_op(
    "clipwise::convolution_sq_norm",
    _twin_sq_norm,
    mutates_args=(),
    schema=f"(Tensor x, Tensor b, {_GEOMETRY}) -> Tensor",
)
_dense = torch.library.custom_op(
    "clipwise::convolution_dense",
    _twin_dense,
    mutates_args=(),
    schema=f"(Tensor x, Tensor b, {_GEOMETRY}, ScalarType dtype) -> Tensor",
)
_total = torch.library.custom_op(
    "clipwise::convolution_total",
    _twin_total,
    mutates_args=(),
    schema=f"(Tensor x, Tensor b, Tensor weights, {_GEOMETRY}) -> Tensor",
)


@_sq_norm.register_fake
def _fake_sq_norm(x: Tensor, b: Tensor, *geometry: Any) -> Tensor:
    return x.new_empty(x.shape[0] // Shape.of(x, b, *geometry).probes, dtype=result_dtype(x))


@_dense.register_fake
def _fake_dense(x: Tensor, b: Tensor, *rest: Any) -> Tensor:
    *geometry, dtype = rest
    shape = Shape.of(x, b, *geometry)
    return x.new_empty(x.shape[0] // shape.probes, *shape.gradient, dtype=dtype)


@_total.register_fake
def _fake_total(x: Tensor, b: Tensor, weights: Tensor, *geometry: Any) -> Tensor:
    return x.new_empty(Shape.of(x, b, *geometry).gradient, dtype=result_dtype(x))


def _by_twin(x: Tensor) -> bool:
    """Whether CUDA tensors go through the twin too: no tensor cores, float64, or nothing to do."""
    able = triton is not None and torch.cuda.get_device_capability(x.device) >= (8, 0)
    return not able or x.dtype == torch.float64 or x.shape[0] == 0


@_sq_norm.register_kernel("cuda")
def _cuda_sq_norm(x: Tensor, b: Tensor, *geometry: Any) -> Tensor:
    if _by_twin(x):
        return _twin_sq_norm(x, b, *geometry)
    x, b = _laid_out(x, b)
    shape = Shape.of(x, b, *geometry)
    tiles = candidates(shape, x.element_size())
    with torch.cuda.device(x.device):
        right = partial(_agrees, x, b, lambda v: v.square().flatten(1).sum(1), launch, shape)
        return launch(x, b, shape, best_tile(("norm", shape), x, tiles, right, launch, x, b, shape))


@_dense.register_kernel("cuda")
def _cuda_dense(x: Tensor, b: Tensor, *rest: Any) -> Tensor:
    if _by_twin(x):
        return _twin_dense(x, b, *rest)
    *geometry, dtype = rest
    x, b = _laid_out(x, b)
    shape = Shape.of(x, b, *geometry)
    tiles, run = candidates(shape, x.element_size()), partial(launch_dense, dtype=dtype)
    with torch.cuda.device(x.device):
        right = partial(_agrees, x, b, lambda v: v, run, shape)
        v = run(x, b, shape, best_tile(("dense", shape, dtype), x, tiles, right, run, x, b, shape))
    return v.view(-1, *shape.gradient)


@_total.register_kernel("cuda")
def _cuda_total(x: Tensor, b: Tensor, weights: Tensor, *geometry: Any) -> Tensor:
    if _by_twin(x):
        return _twin_total(x, b, weights, *geometry)
    x, b = _laid_out(x, b)
    shape = Shape.of(x, b, *geometry)
    arguments = (x, b, weights.float().contiguous(), shape)
    tiles = total_candidates(shape, x.element_size())
    with torch.cuda.device(x.device):
        right = partial(_agrees, x, b, lambda v: v.sum(0), _launch_sum, shape)
        out = launch_total(*arguments, best_tile(("total", shape), x, tiles, right, launch_total, *arguments))
    return out.view(shape.gradient)


def _agrees(
    x: Tensor, b: Tensor, of: Callable[[Tensor], Tensor], run: Callable[..., Tensor], shape: Shape, tile: Tile
) -> bool:
    """Whether a tile's result is that of the written gradients in float64: a compiler of kernels can be wrong too.

    Tried on random images of two units: what a layer holds while it is tuned may be zeros.
    """
    n = min(2 * shape.probes, x.shape[0])
    x, b = (like_random(t[:n]).contiguous(memory_format=torch.channels_last) for t in (x, b))
    found, expected = run(x, b, shape, tile), of(exact(x, b, shape))
    return bool((found - expected).norm() <= max(1e-3, torch.finfo(found.dtype).eps) * expected.norm())


def _launch_sum(x: Tensor, b: Tensor, shape: Shape, tile: Tile) -> Tensor:
    return launch_total(x, b, torch.ones(x.shape[0] // shape.probes, device=x.device), shape, tile)


def exact(x: Tensor, b: Tensor, shape: Shape) -> Tensor:
    """Every unit's gradient in float64, by unfolding. [unit, output, column]."""
    s, n = shape, x.shape[0]
    patches = torch.nn.functional.unfold(
        x.double(),
        (s.kernel_y, s.kernel_x),
        (s.dilation_y, s.dilation_x),
        (s.padding_y, s.padding_x),
        (s.stride_y, s.stride_x),
    )  # [image, channel · tap, position]
    a = patches.reshape(n, s.groups, s.channels // s.groups, -1, s.positions).transpose(2, 3)  # [..., tap, channel, …]
    v = b.double().reshape(n, s.groups, -1, s.positions) @ a.reshape(n, s.groups, s.columns, s.positions).mT
    return v.reshape(n // s.probes, s.probes, s.outputs, s.columns).sum(1)
