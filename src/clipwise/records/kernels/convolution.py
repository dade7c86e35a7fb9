"""The squared norm of every sample's convolution weight gradient, neither unfolded nor written.

Receives: the input x [sample, channel, y, x] and the output gradient b of a 2-d convolution, and its geometry.
Gives: one operator, clipwise::convolution_sq_norm: a Triton kernel on CUDA, its plain twin elsewhere. [sample].

v[o, (dy, dx, c)] = Σ_positions b[position, o] · x[position moved by (dy, dx), c] is a matrix product whose right side is
never formed: a tile of its columns, several taps side by side where channels are few, is read straight from x.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from clipwise.records import planner
from clipwise.types import InputError

triton: Any
tl: Any
try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU build of torch comes without it
    triton = tl = None

_jit: Callable[[Callable[..., Any]], Any] = triton.jit if triton else lambda function: function


def convolution_sq_norm(
    x: Tensor,
    b: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    kernel: Sequence[int],
    groups: int,
) -> Tensor:
    """‖v_i‖² of each sample's weight gradient v_i, for x [sample, channel, y, x] and b [sample, output, y, x]. [sample].

    Guarantees: accumulated in float32 or better; float32 operands are never rounded to TF32; no atomics, so the same
    input gives the same bits. Edge cases: float64 gives float64; no samples give an empty result.
    """
    _check(x, b, stride, padding, dilation, kernel, groups)
    if x.is_cuda:  # outside the operator, so that a compiler writes this layout in the first place
        x, b = (t.contiguous(memory_format=torch.channels_last) for t in (x, b))
    return _operator(x, b, list(stride), list(padding), list(dilation), list(kernel), groups)


def _check(
    x: Tensor,
    b: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    kernel: Sequence[int],
    groups: int,
) -> None:
    # The kernel reads wherever these numbers point: they must describe one convolution.
    if x.dim() != 4 or b.dim() != 4 or x.shape[0] != b.shape[0] or x.dtype != b.dtype or x.device != b.device:
        raise InputError(
            "x and b must be [sample, channel, y, x] of one length, dtype and device, "
            f"got {tuple(x.shape)} {x.dtype} {x.device} and {tuple(b.shape)} {b.dtype} {b.device}"
        )
    if groups < 1 or x.shape[1] % groups or b.shape[1] % groups:
        raise InputError(f"groups must divide {x.shape[1]} input and {b.shape[1]} output channels, got {groups}")
    for axis in (0, 1):
        reach = x.shape[2 + axis] + 2 * padding[axis] - dilation[axis] * (kernel[axis] - 1) - 1
        if b.shape[2 + axis] != reach // stride[axis] + 1:
            raise InputError(
                f"b must have {reach // stride[axis] + 1} positions along axis {axis} for this x and geometry, "
                f"got {b.shape[2 + axis]}"
            )


@torch.library.custom_op("clipwise::convolution_sq_norm", mutates_args=())
def _operator(
    x: Tensor, b: Tensor, stride: list[int], padding: list[int], dilation: list[int], kernel: list[int], groups: int
) -> Tensor:
    """The plain twin: one convolution with a group per sample, whose weight gradient is every sample's own."""
    out, channels = b.shape[1], x.shape[1] // groups
    if x.is_cuda:
        x, b = x.double(), b.double()  # cuDNN may round float32 to TF32
    elif x.dtype != torch.float64:
        x, b = x.float(), b.float()
    step = max(1, planner.STREAM_FLOATS // max(1, out * channels * kernel[0] * kernel[1]))
    norms = [x.new_zeros(0)]
    for some_x, some_b in zip(x.split(step), b.split(step), strict=True):
        n = some_x.shape[0]
        if n == 0:
            continue
        v = torch.ops.aten.convolution_backward(
            some_b.reshape(1, n * out, *b.shape[2:]),
            some_x.reshape(1, -1, *x.shape[2:]),
            x.new_zeros(()).expand(n * out, channels, *kernel),  # asked for, but only its shape is read
            None, stride, padding, dilation, False, [0, 0], n * groups, [False, True, False],
        )[1]  # fmt: skip
        norms.append(torch.linalg.vector_norm(v.reshape(n, -1), dim=1).square())
    return torch.cat(norms)


@_operator.register_fake
def _shape(
    x: Tensor, b: Tensor, stride: list[int], padding: list[int], dilation: list[int], kernel: list[int], groups: int
) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)
