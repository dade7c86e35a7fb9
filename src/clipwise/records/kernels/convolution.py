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

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from clipwise.records import planner
from clipwise.records.kernels.tiles import best_tile, constexpr, jit, like_random, power, tl, triton
from clipwise.types import InputError

Ints: TypeAlias = Sequence[int]


def convolution_sq_norm(
    x: Tensor, b: Tensor, stride: Ints, padding: Ints, dilation: Ints, kernel: Ints, groups: int, probes: int = 1
) -> Tensor:
    """‖v_i‖² of each unit's weight gradient, for x [image, channel, y, x] and b [image, output, y, x]. [unit].

    Guarantees: accumulated in float32 or better; float32 operands are never rounded to TF32; no atomics, so within a
    process the same input gives the same bits. Edge cases: float64 gives float64; no samples give an empty result.
    """
    _check(x, b, stride, padding, dilation, kernel, groups, probes)
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
    _check(x, b, stride, padding, dilation, kernel, groups, probes)
    v = _dense(*_laid_out(x, b), stride, padding, dilation, kernel, groups, probes, dtype or _result_dtype(x))
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
    _check(x, b, stride, padding, dilation, kernel, groups, probes)
    if weights.shape != (x.shape[0] // probes,):
        raise InputError(f"weights must be one for each of {x.shape[0] // probes} units, got {tuple(weights.shape)}")
    total = _total(*_laid_out(x, b), weights, stride, padding, dilation, kernel, groups, probes)
    return total.permute(0, 3, 1, 2)


def _laid_out(x: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Channels last on CUDA; outside the operators, so that a compiler can write this layout in the first place."""
    if not x.is_cuda:
        return x, b
    return x.contiguous(memory_format=torch.channels_last), b.contiguous(memory_format=torch.channels_last)


def _check(
    x: Tensor, b: Tensor, stride: Ints, padding: Ints, dilation: Ints, kernel: Ints, groups: int, probes: int
) -> None:
    # The kernel reads wherever these numbers point: they must describe one convolution.
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


def _twin_sq_norm(
    x: Tensor, b: Tensor, stride: Ints, padding: Ints, dilation: Ints, kernel: Ints, groups: int, probes: int = 1
) -> Tensor:
    """Written out, a few units at a time."""
    step = probes * max(1, planner.STREAM_FLOATS // (b.shape[1] * x.shape[1] // groups * kernel[0] * kernel[1]))
    norms = [x.new_zeros(0, dtype=_result_dtype(x))]
    for start in range(0, x.shape[0], step):
        rows = slice(start, start + step)
        v = _twin_dense(x[rows], b[rows], stride, padding, dilation, kernel, groups, probes)
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
    result = dtype or _result_dtype(x)
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


def _twin_total(
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
    """Σ w_i v_i of the written gradients, a few units at a time. [output, y, x, channel]."""
    step = max(1, planner.STREAM_FLOATS // (b.shape[1] * x.shape[1] // groups * kernel[0] * kernel[1]))
    total = x.new_zeros(b.shape[1], *kernel, x.shape[1] // groups, dtype=_result_dtype(x))
    for start in range(0, len(weights), step):
        rows = slice(start * probes, (start + step) * probes)
        v = _twin_dense(x[rows], b[rows], stride, padding, dilation, kernel, groups, probes)
        w = weights[start : start + step].to(v.dtype)
        total += torch.tensordot(w, v, 1)
    return total


def _result_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


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
def _fake_sq_norm(
    x: Tensor, b: Tensor, stride: Ints, padding: Ints, dilation: Ints, kernel: Ints, groups: int, probes: int
) -> Tensor:
    return x.new_empty(x.shape[0] // probes, dtype=_result_dtype(x))


@_dense.register_fake
def _fake_dense(
    x: Tensor,
    b: Tensor,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    kernel: Ints,
    groups: int,
    probes: int,
    dtype: torch.dtype,
) -> Tensor:
    return x.new_empty(x.shape[0] // probes, b.shape[1], *kernel, x.shape[1] // groups, dtype=dtype)


@_total.register_fake
def _fake_total(
    x: Tensor,
    b: Tensor,
    weights: Tensor,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    kernel: Ints,
    groups: int,
    probes: int,
) -> Tensor:
    return x.new_empty(b.shape[1], *kernel, x.shape[1] // groups, dtype=_result_dtype(x))


def _by_twin(x: Tensor) -> bool:
    """Whether CUDA tensors go through the twin too: no tensor cores, float64, or nothing to do."""
    able = triton is not None and torch.cuda.get_device_capability(x.device) >= (8, 0)
    return not able or x.dtype == torch.float64 or x.shape[0] == 0


@_sq_norm.register_kernel("cuda")
def _cuda_sq_norm(
    x: Tensor, b: Tensor, stride: Ints, padding: Ints, dilation: Ints, kernel: Ints, groups: int, probes: int
) -> Tensor:
    if _by_twin(x):
        return _twin_sq_norm(x, b, stride, padding, dilation, kernel, groups, probes)
    x, b = _laid_out(x, b)
    shape = Shape.of(x, b, stride, padding, dilation, kernel, groups, probes)
    tiles = candidates(shape, x.element_size())
    with torch.cuda.device(x.device):
        right = partial(_agrees, x, b, lambda v: v.square().flatten(1).sum(1), launch, shape)
        return launch(x, b, shape, best_tile(("norm", shape), x, tiles, right, launch, x, b, shape))


@_dense.register_kernel("cuda")
def _cuda_dense(
    x: Tensor,
    b: Tensor,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    kernel: Ints,
    groups: int,
    probes: int,
    dtype: torch.dtype,
) -> Tensor:
    if _by_twin(x):
        return _twin_dense(x, b, stride, padding, dilation, kernel, groups, probes, dtype)
    x, b = _laid_out(x, b)
    shape = Shape.of(x, b, stride, padding, dilation, kernel, groups, probes)
    tiles, run = candidates(shape, x.element_size()), partial(launch_dense, dtype=dtype)
    with torch.cuda.device(x.device):
        right = partial(_agrees, x, b, lambda v: v, run, shape)
        v = run(x, b, shape, best_tile(("dense", shape, dtype), x, tiles, right, run, x, b, shape))
    return v.view(-1, shape.outputs, *kernel, shape.channels // groups)


@_total.register_kernel("cuda")
def _cuda_total(
    x: Tensor,
    b: Tensor,
    weights: Tensor,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    kernel: Ints,
    groups: int,
    probes: int,
) -> Tensor:
    if _by_twin(x):
        return _twin_total(x, b, weights, stride, padding, dilation, kernel, groups, probes)
    x, b = _laid_out(x, b)
    shape = Shape.of(x, b, stride, padding, dilation, kernel, groups, probes)
    arguments = (x, b, weights.float().contiguous(), shape)
    tiles = total_candidates(shape, x.element_size())
    with torch.cuda.device(x.device):
        right = partial(_agrees, x, b, lambda v: v.sum(0), _launch_sum, shape)
        out = launch_total(*arguments, best_tile(("total", shape), x, tiles, right, launch_total, *arguments))
    return out.view(shape.outputs, *kernel, shape.channels // groups)


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


@dataclass(frozen=True)
class Shape:
    """One convolution, as the kernel is compiled for it."""

    channels: int
    height: int
    width: int
    outputs: int
    out_width: int
    positions: int  # of one image
    probes: int  # images of one unit
    groups: int
    kernel_y: int
    kernel_x: int
    stride_y: int
    stride_x: int
    padding_y: int
    padding_x: int
    dilation_y: int
    dilation_x: int

    @classmethod
    def of(
        cls,
        x: Tensor,
        b: Tensor,
        stride: Ints,
        padding: Ints,
        dilation: Ints,
        kernel: Ints,
        groups: int,
        probes: int = 1,
    ) -> Shape:
        """The same numbers, by name."""
        sizes = (*x.shape[1:], b.shape[1], b.shape[3], b.shape[2] * b.shape[3], probes, groups)
        return cls(*sizes, *kernel, *stride, *padding, *dilation)

    @property
    def rows(self) -> int:
        """Rows of one unit's product: the positions of all its images."""
        return self.probes * self.positions

    @property
    def columns(self) -> int:
        """Columns of one group's gradient: taps × channels."""
        return self.kernel_y * self.kernel_x * self.channels // self.groups


@dataclass(frozen=True)
class Tile:
    """What one program takes at a time: a choice of speed, never of result (but for the last bits)."""

    block_o: int  # output channels
    block_c: int  # columns
    block_p: int  # positions; where all fit, b is read once and the program walks through the columns
    warps: int
    stages: int
    # Hopper's tensor cores want 64 rows: few output channels are better the columns of the product.
    swapped: bool


@functools.lru_cache(maxsize=4096)
def candidates(shape: Shape, size: int) -> list[Tile]:
    """Tiles worth trying for operands of ``size`` bytes, the safest first. Few: each is compiled once per shape."""
    block_o = power(shape.outputs // shape.groups, 16, 128)
    widths = sorted({power(shape.columns, 16, most) for most in ((64, 128, 256) if size == 2 else (64, 128))})
    swapped = block_o < 64
    block_p = power(shape.rows, 16, 128 // size)
    tiles = [Tile(block_o, w, block_p, 4 if block_o * w <= 8192 else 8, 3, swapped) for w in widths]
    if swapped:  # not pipelined: the first-level cache serves the taps, which overlap
        tiles.append(Tile(block_o, widths[-1], block_p, 4, 1, swapped))
    if size == 2 and block_o <= 64 and 64 < shape.rows <= 256:
        tiles.append(Tile(block_o, widths[0], power(shape.rows, 16, 256), 4, 2, swapped))
    if size == 2 and shape.outputs // shape.groups >= 256 and shape.rows <= 64:
        tiles.append(Tile(256, min(128, widths[-1]), block_p, 8, 3, swapped))
    return tiles


@functools.lru_cache(maxsize=4096)
def total_candidates(shape: Shape, size: int) -> list[Tile]:
    """The same for the weighted sum, which holds two accumulators: one unit's product, and the sum."""
    block_o = power(shape.outputs // shape.groups, 16, 128)
    swapped = block_o < 64
    tiles = []
    for most in (128, 64):
        width = power(shape.columns, 16, most)
        for long in (128, 64) if size == 2 and shape.rows > 64 else (64,):
            block_p = power(shape.rows, 16, long * 2 // size)
            stages = 3 if (block_o + width) * block_p * size <= 65536 else 2
            tiles.append(Tile(block_o, width, block_p, 8 if block_o * width > 8192 else 4, stages, swapped))
    if size == 2 and min(shape.outputs // shape.groups, shape.columns) >= 256:
        tiles += [Tile(128, 128, 64, 8, 4, swapped=False), Tile(128, 256, 64, 16, 3, swapped=False)]
    return list(dict.fromkeys(tiles))


def launch(x: Tensor, b: Tensor, shape: Shape, tile: Tile, precision: str = "tf32x3") -> Tensor:
    """‖v_i‖² with one tile, for channels-last x and b. ``precision`` is Triton's word, for float32 operands."""
    programs = _programs(shape, tile, write=False)
    sums = torch.empty(x.shape[0] // shape.probes, programs, dtype=torch.float32, device=x.device)
    _each(x, b, sums, shape, tile, precision, write=False)
    return sums.sum(1) if programs > 1 else sums[:, 0]


def launch_dense(
    x: Tensor, b: Tensor, shape: Shape, tile: Tile, precision: str = "tf32x3", dtype: torch.dtype = torch.float32
) -> Tensor:
    """v_i with one tile, rounded to ``dtype``. [unit, output, column]."""
    v = torch.empty(x.shape[0] // shape.probes, shape.outputs, shape.columns, dtype=dtype, device=x.device)
    _each(x, b, v, shape, tile, precision, write=True)
    return v


def _each(x: Tensor, b: Tensor, out: Tensor, shape: Shape, tile: Tile, precision: str, *, write: bool) -> None:
    _each_kernel[(x.shape[0] // shape.probes * _programs(shape, tile, write),)](
        x, b, out, **_options(shape, tile), held=_held(shape, tile, write), tiles=-(-shape.columns // tile.block_c),
        out_tiles=_out_tiles(shape, tile), precision=precision, write=write,
    )  # fmt: skip


def launch_total(x: Tensor, b: Tensor, weights: Tensor, shape: Shape, tile: Tile, precision: str = "tf32x3") -> Tensor:
    """Σ w_i v_i with one tile, for float32 weights. [output, column]."""
    units, tiles = x.shape[0] // shape.probes, -(-shape.columns // tile.block_c)
    programs = shape.groups * _out_tiles(shape, tile) * tiles
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
    parts = _parts(programs, units, processors)
    out = torch.empty(parts, shape.outputs, shape.columns, dtype=torch.float32, device=x.device)
    _total_kernel[(programs * parts,)](
        x, b, weights, out, units, -(-units // parts), **_options(shape, tile), tiles=tiles,
        out_tiles=_out_tiles(shape, tile), precision=precision,
    )  # fmt: skip
    return out.sum(0) if parts > 1 else out[0]


@functools.lru_cache(maxsize=4096)  # the host has less time for a launch than the device takes for a small layer
def _options(shape: Shape, tile: Tile) -> Mapping[str, int]:
    """Both as the kernels' options."""
    options = asdict(shape) | asdict(tile)
    return options | {"num_warps": options.pop("warps"), "num_stages": options.pop("stages")}


def _held(shape: Shape, tile: Tile, write: bool) -> bool:
    """Whether one program holds all of b's positions and walks through the columns.

    Not where it would write: with Triton 3.6 a store in that loop wrote wrong numbers for some tiles.
    """
    return shape.rows <= tile.block_p and not write


def _programs(shape: Shape, tile: Tile, write: bool) -> int:
    """Programs for one unit."""
    walked = 1 if _held(shape, tile, write) else -(-shape.columns // tile.block_c)
    return shape.groups * _out_tiles(shape, tile) * walked


def _out_tiles(shape: Shape, tile: Tile) -> int:
    return -(-(shape.outputs // shape.groups) // tile.block_o)


def _parts(programs: int, units: int, processors: int) -> int:
    """Into how many parts of the units a sum is split: the fewest that keep the device's processors busy."""
    for parts in range(1, units + 1):
        waves = programs * parts / processors
        if waves >= 1 and waves / -(-programs * parts // processors) >= 0.8:
            return parts
    return max(1, units)


@jit
def _sums(v, swapped: constexpr):  # type: ignore[no-untyped-def]
    """What is kept of a tile of v: per output channel, Σ v². All that is not linear in v is here."""
    return tl.sum(v * v, axis=0 if swapped else 1)


@jit
def _patches(  # type: ignore[no-untyped-def]
    x, position, tile,
    channels: constexpr, height: constexpr, width: constexpr, out_width: constexpr, positions: constexpr,
    probes: constexpr, groups: constexpr, kernel_y: constexpr, kernel_x: constexpr, stride_y: constexpr,
    stride_x: constexpr, padding_y: constexpr, padding_x: constexpr, dilation_y: constexpr, dilation_x: constexpr,
    block_c: constexpr,
):  # fmt: skip
    """One unit's unfolded input at these positions: one tile of columns, read straight from x."""
    column = tl.arange(0, block_c)[None, :]
    inside = position < probes * positions
    if channels // groups % block_c == 0:  # one tap: its place is a scalar
        tap = tile // (channels // groups // block_c)
        channel = tile % (channels // groups // block_c) * block_c + column
    else:
        tap = (tile * block_c + column) // (channels // groups)
        channel = (tile * block_c + column) % (channels // groups)
        inside = inside & (tap < kernel_y * kernel_x)
    down = tap // kernel_x * dilation_y - padding_y
    along = tap % kernel_x * dilation_x - padding_x
    if probes > 1:
        x += position // positions * (height * width * channels)  # which of the unit's images
        position = position % positions
    top = position // out_width * stride_y
    left = position % out_width * stride_x
    if padding_y > 0:
        inside = inside & (top + down >= 0) & (top + down < height)
    if padding_x > 0:
        inside = inside & (left + along >= 0) & (left + along < width)
    place = (top * width + left) * channels + ((down * width + along) * channels + channel)
    return tl.load(x + place, mask=inside, other=0.0)


@jit
def _product(some_b, some_x, v, swapped: constexpr, precision: constexpr):  # type: ignore[no-untyped-def]
    """V += bᵀ x, or its transpose."""
    if swapped:
        v = tl.dot(tl.trans(some_x), some_b, v, input_precision=precision)
    else:
        v = tl.dot(tl.trans(some_b), some_x, v, input_precision=precision)
    return v


@jit
def _store(  # type: ignore[no-untyped-def]
    out, v, first_output, tile, outputs: constexpr, columns: constexpr,
    block_o: constexpr, block_c: constexpr, swapped: constexpr,
):  # fmt: skip
    """Write a tile of one group's v to out [output, column]."""
    if swapped:
        output = first_output + tl.arange(0, block_o)[None, :]
        column = tile * block_c + tl.arange(0, block_c)[:, None]
    else:
        output = first_output + tl.arange(0, block_o)[:, None]
        column = tile * block_c + tl.arange(0, block_c)[None, :]
    tl.store(out + output.to(tl.int64) * columns + column, v, mask=(output < outputs) & (column < columns))


@jit
def _each_kernel(  # type: ignore[no-untyped-def]
    x, b, out,
    channels: constexpr, height: constexpr, width: constexpr, outputs: constexpr, out_width: constexpr,
    positions: constexpr, probes: constexpr, groups: constexpr, kernel_y: constexpr, kernel_x: constexpr,
    stride_y: constexpr, stride_x: constexpr, padding_y: constexpr, padding_x: constexpr, dilation_y: constexpr,
    dilation_x: constexpr, block_o: constexpr, block_c: constexpr, block_p: constexpr, swapped: constexpr,
    held: constexpr, tiles: constexpr, out_tiles: constexpr, precision: constexpr, write: constexpr,
):  # fmt: skip
    """One program: a unit, a group, a tile of output channels, and one tile of columns (all of them where held)."""
    program = tl.program_id(0)
    own = program if held else program // tiles
    first_output = own % out_tiles * block_o
    output = first_output + tl.arange(0, block_o)[None, :]
    group = own // out_tiles % groups
    unit = (own // (out_tiles * groups)).to(tl.int64)
    columns: constexpr = kernel_y * kernel_x * (channels // groups)
    x += unit * (probes * height * width * channels) + group * (channels // groups)
    b += unit * (probes * positions * outputs) + group * (outputs // groups)
    if write:
        out += (unit * outputs + group * (outputs // groups)) * columns

    within = tl.arange(0, block_p)[:, None]
    v = tl.zeros([block_c, block_o] if swapped else [block_o, block_c], tl.float32)
    sums = tl.zeros([block_o], tl.float32)
    if held:
        real = (within < probes * positions) & (output < outputs // groups)
        some_b = tl.load(b + within * outputs + output, mask=real, other=0.0)
    for step in range(tiles if held else (probes * positions + block_p - 1) // block_p):
        if held:
            position, tile = within, step
        else:
            position, tile = step * block_p + within, program % tiles
            real = (position < probes * positions) & (output < outputs // groups)
            some_b = tl.load(b + position * outputs + output, mask=real, other=0.0)
        some_x = _patches(
            x, position, tile, channels, height, width, out_width, positions, probes, groups, kernel_y, kernel_x,
            stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x, block_c,
        )  # fmt: skip
        if held:
            v = tl.zeros([block_c, block_o] if swapped else [block_o, block_c], tl.float32)
        v = _product(some_b, some_x, v, swapped, precision)
        if held:
            sums += _sums(v, swapped)
    if write:
        _store(out, v, first_output, program % tiles, outputs // groups, columns, block_o, block_c, swapped)
    else:
        if not held:
            sums = _sums(v, swapped)
        tl.store(out + program, tl.sum(sums, axis=0))


@jit
def _total_kernel(  # type: ignore[no-untyped-def]
    x, b, weights, out, units, units_each,
    channels: constexpr, height: constexpr, width: constexpr, outputs: constexpr, out_width: constexpr,
    positions: constexpr, probes: constexpr, groups: constexpr, kernel_y: constexpr, kernel_x: constexpr,
    stride_y: constexpr, stride_x: constexpr, padding_y: constexpr, padding_x: constexpr, dilation_y: constexpr,
    dilation_x: constexpr, block_o: constexpr, block_c: constexpr, block_p: constexpr, swapped: constexpr,
    tiles: constexpr, out_tiles: constexpr, precision: constexpr,
):  # fmt: skip
    """One program: a group, a tile of output channels, a tile of columns, and the sum over some of the units."""
    program = tl.program_id(0)
    tile = program % tiles
    own = program // tiles
    first_output = own % out_tiles * block_o
    output = first_output + tl.arange(0, block_o)[None, :]
    group = own // out_tiles % groups
    part = (own // (out_tiles * groups)).to(tl.int64)
    columns: constexpr = kernel_y * kernel_x * (channels // groups)
    x += group * (channels // groups)
    b += group * (outputs // groups)
    out += (part * outputs + group * (outputs // groups)) * columns

    within = tl.arange(0, block_p)[:, None]
    total = tl.zeros([block_c, block_o] if swapped else [block_o, block_c], tl.float32)
    for unit in range(part * units_each, tl.minimum(part * units_each + units_each, units)):
        own_x = x + unit * (probes * height * width * channels)
        own_b = b + unit * (probes * positions * outputs)
        v = tl.zeros([block_c, block_o] if swapped else [block_o, block_c], tl.float32)
        for step in range((probes * positions + block_p - 1) // block_p):
            position = step * block_p + within
            real = (position < probes * positions) & (output < outputs // groups)
            some_b = tl.load(own_b + position * outputs + output, mask=real, other=0.0)
            some_x = _patches(
                own_x, position, tile, channels, height, width, out_width, positions, probes, groups, kernel_y,
                kernel_x, stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x, block_c,
            )  # fmt: skip
            v = _product(some_b, some_x, v, swapped, precision)
        total += tl.load(weights + unit) * v
    _store(out, total, first_output, tile, outputs // groups, columns, block_o, block_c, swapped)
