"""The squared norm of every sample's convolution weight gradient, neither unfolded nor written.

Receives: the input x [sample, channel, y, x] and the output gradient b of a 2-d convolution, and its geometry.
Gives: one operator, clipwise::convolution_sq_norm: a Triton kernel on CUDA, its plain twin elsewhere. [sample].

v[o, (dy, dx, c)] = Σ_positions b[position, o] · x[position moved by (dy, dx), c] is a matrix product whose right side
is never formed: a tile of its columns, several taps side by side where channels are few, is read straight from x.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from clipwise.records import planner
from clipwise.types import InputError

if TYPE_CHECKING:  # Triton has no types to check against
    triton: Any
    tl: Any
    constexpr: TypeAlias = Any
else:
    try:
        import triton
        import triton.language as tl
        from triton.language import constexpr
    except ImportError:  # a CPU build of torch comes without it
        triton = tl = None

Ints: TypeAlias = Sequence[int]
_jit: Callable[[Callable[..., Any]], Any] = triton.jit if triton else lambda function: function


def convolution_sq_norm(
    x: Tensor, b: Tensor, stride: Ints, padding: Ints, dilation: Ints, kernel: Ints, groups: int
) -> Tensor:
    """‖v_i‖² of each sample's weight gradient, for x [sample, channel, y, x] and b [sample, output, y, x]. [sample].

    Guarantees: accumulated in float32 or better; float32 operands are never rounded to TF32; no atomics, so within a
    process the same input gives the same bits. Edge cases: float64 gives float64; no samples give an empty result.
    """
    _check(x, b, stride, padding, dilation, kernel, groups)
    if x.is_cuda:  # outside the operator, so that a compiler can write this layout in the first place
        x, b = (t.contiguous(memory_format=torch.channels_last) for t in (x, b))
    return _operator(x, b, stride, padding, dilation, kernel, groups)


def _check(x: Tensor, b: Tensor, stride: Ints, padding: Ints, dilation: Ints, kernel: Ints, groups: int) -> None:
    # The kernel reads wherever these numbers point: they must describe one convolution.
    if x.dim() != 4 or b.dim() != 4 or x.shape[0] != b.shape[0] or x.dtype != b.dtype:
        raise InputError(
            "x and b must be [sample, channel, y, x] with as many samples and one dtype, "
            f"got {tuple(x.shape)} {x.dtype} and {tuple(b.shape)} {b.dtype}"
        )
    if groups < 1 or x.shape[1] % groups or b.shape[1] % groups:
        raise InputError(f"groups must divide {x.shape[1]} input and {b.shape[1]} output channels, got {groups}")
    for axis in (0, 1):
        reach = x.shape[2 + axis] + 2 * padding[axis] - dilation[axis] * (kernel[axis] - 1) - 1
        if reach < 0 or b.shape[2 + axis] != reach // stride[axis] + 1:
            raise InputError(
                f"b must have {reach // stride[axis] + 1} positions along axis {axis} for this x and geometry, "
                f"got {b.shape[2 + axis]}"
            )


def _twin(x: Tensor, b: Tensor, stride: Ints, padding: Ints, dilation: Ints, kernel: Ints, groups: int) -> Tensor:
    """One convolution with a group per sample, whose weight gradient is every sample's own; a few samples at a time."""
    # On CUDA in float64: cuDNN may round float32 to TF32.
    dtype = torch.float64 if x.is_cuda or x.dtype == torch.float64 else torch.float32
    out, channels, area = b.shape[1], x.shape[1] // groups, kernel[0] * kernel[1]
    step = max(1, planner.STREAM_FLOATS // (out * channels * area))
    norms = [x.new_zeros(0, dtype=dtype)]
    for start in range(0, x.shape[0], step):
        some_x, some_b = (t[start : start + step].to(dtype) for t in (x, b))
        n = some_x.shape[0]
        v = torch.ops.aten.convolution_backward(
            some_b.reshape(1, n * out, *b.shape[2:]),
            some_x.reshape(1, n * x.shape[1], *x.shape[2:]),
            some_x.new_zeros(()).expand(n * out, channels, *kernel),  # asked for, but only its shape is read
            None, stride, padding, dilation, False, [0, 0], n * groups, [False, True, False],
        )[1]  # fmt: skip
        norms.append(torch.linalg.vector_norm(v.reshape(n, -1), dim=1).square())
    return torch.cat(norms).to(_result_dtype(x))


def _result_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


_SCHEMA = "(Tensor x, Tensor b, int[] stride, int[] padding, int[] dilation, int[] kernel, int groups) -> Tensor"
_operator = torch.library.custom_op("clipwise::convolution_sq_norm", _twin, mutates_args=(), schema=_SCHEMA)


@_operator.register_fake
def _fake(x: Tensor, b: Tensor, stride: Ints, padding: Ints, dilation: Ints, kernel: Ints, groups: int) -> Tensor:
    return x.new_empty(x.shape[0], dtype=_result_dtype(x))


@_operator.register_kernel("cuda")
def _cuda(x: Tensor, b: Tensor, stride: Ints, padding: Ints, dilation: Ints, kernel: Ints, groups: int) -> Tensor:
    tensor_cores = triton is not None and torch.cuda.get_device_capability(x.device) >= (8, 0)
    if not tensor_cores or x.dtype == torch.float64 or x.shape[0] == 0:
        return _twin(x, b, stride, padding, dilation, kernel, groups)
    x, b = (t.contiguous(memory_format=torch.channels_last) for t in (x, b))
    shape = Shape.of(x, b, stride, padding, dilation, kernel, groups)
    with torch.cuda.device(x.device):
        return launch(x, b, shape, _best(x, b, shape))


@dataclass(frozen=True)
class Shape:
    """One convolution, as the kernel is compiled for it."""

    channels: int
    height: int
    width: int
    outputs: int
    out_width: int
    positions: int
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
    def of(cls, x: Tensor, b: Tensor, stride: Ints, padding: Ints, dilation: Ints, kernel: Ints, groups: int) -> Shape:
        """The same numbers, by name."""
        sizes = (*x.shape[1:], b.shape[1], b.shape[3], b.shape[2] * b.shape[3], groups)
        return cls(*sizes, *kernel, *stride, *padding, *dilation)

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


def candidates(shape: Shape, size: int) -> list[Tile]:
    """Tiles worth trying for operands of ``size`` bytes, the safest first. Few: each is compiled once per shape."""
    block_o = _power(shape.outputs // shape.groups, 16, 128)
    widths = sorted({_power(shape.columns, 16, most) for most in ((64, 128, 256) if size == 2 else (64, 128))})
    swapped = block_o < 64
    block_p = _power(shape.positions, 16, 128 // size)
    tiles = [Tile(block_o, w, block_p, 4 if block_o * w <= 8192 else 8, 3, swapped) for w in widths]
    if swapped:  # not pipelined: the first-level cache serves the taps, which overlap
        tiles.append(Tile(block_o, widths[-1], block_p, 4, 1, swapped))
    if size == 2 and block_o <= 64 and 64 < shape.positions <= 256:
        tiles.append(Tile(block_o, widths[0], _power(shape.positions, 16, 256), 4, 2, swapped))
    if size == 2 and shape.outputs // shape.groups >= 256 and shape.positions <= 64:
        tiles.append(Tile(256, min(128, widths[-1]), block_p, 8, 3, swapped))
    return tiles


def _power(number: int, least: int, most: int) -> int:
    """The next power of two, within limits that are powers of two."""
    return min(most, max(least, 1 << (number - 1).bit_length()))


_tuned: dict[tuple[Shape, torch.dtype, torch.device, int], Tile] = {}


def _best(x: Tensor, b: Tensor, shape: Shape) -> Tile:
    """The fastest tile, measured when a shape is first met; while a CUDA graph is recorded nothing can be timed."""
    key = (shape, x.dtype, x.device, x.shape[0].bit_length())  # few samples may not fill the device: tuned apart
    if key not in _tuned:
        tiles = candidates(shape, x.element_size())
        if torch.cuda.is_current_stream_capturing():
            return tiles[0]
        _tuned[key] = min(tiles, key=lambda tile: milliseconds(lambda: launch(x, b, shape, tile)))
    return _tuned[key]


def milliseconds(call: Callable[[], object], repeats: int = 10, rounds: int = 3) -> float:
    """Device time of one call; infinite where the device cannot hold the tile."""
    try:
        call()
    except triton.runtime.errors.OutOfResources:
        return float("inf")
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # a millisecond in which launches queue up: the device is timed, not Python
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / repeats)
    return min(times)


def launch(x: Tensor, b: Tensor, shape: Shape, tile: Tile, precision: str = "tf32x3") -> Tensor:
    """The kernel with one tile, for channels-last x and b. ``precision`` is Triton's word, for float32 operands."""
    tiles = -(-shape.columns // tile.block_c)
    out_tiles = -(-(shape.outputs // shape.groups) // tile.block_o)
    held = shape.positions <= tile.block_p
    programs = shape.groups * out_tiles * (1 if held else tiles)
    partial = torch.empty(x.shape[0], programs, dtype=torch.float32, device=x.device)
    options = asdict(tile)
    warps, stages = options.pop("warps"), options.pop("stages")
    _kernel[(x.shape[0] * programs,)](
        x, b, partial, **asdict(shape), **options, held=held, tiles=tiles, out_tiles=out_tiles,
        precision=precision, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return partial.sum(1) if programs > 1 else partial[:, 0]


@_jit
def _sums(v, swapped: constexpr):  # type: ignore[no-untyped-def]
    """What is kept of a tile of v: per output channel, Σ v². All that is not linear in v is here."""
    return tl.sum(v * v, axis=0 if swapped else 1)


@_jit
def _kernel(  # type: ignore[no-untyped-def]
    x, b, partial,
    channels: constexpr, height: constexpr, width: constexpr, outputs: constexpr, out_width: constexpr,
    positions: constexpr, groups: constexpr, kernel_y: constexpr, kernel_x: constexpr, stride_y: constexpr,
    stride_x: constexpr, padding_y: constexpr, padding_x: constexpr, dilation_y: constexpr, dilation_x: constexpr,
    block_o: constexpr, block_c: constexpr, block_p: constexpr, swapped: constexpr, held: constexpr,
    tiles: constexpr, out_tiles: constexpr, precision: constexpr,
):  # fmt: skip
    """One program: a sample, a group, a tile of output channels, and one tile of columns (all of them where held)."""
    program = tl.program_id(0)
    own = program if held else program // tiles
    output = own % out_tiles * block_o + tl.arange(0, block_o)[None, :]
    group = own // out_tiles % groups
    sample = (own // (out_tiles * groups)).to(tl.int64)
    x += sample * (height * width * channels) + group * (channels // groups)
    b += sample * (positions * outputs) + group * (outputs // groups)

    within = tl.arange(0, block_p)[:, None]
    v = tl.zeros([block_c, block_o] if swapped else [block_o, block_c], tl.float32)
    sums = tl.zeros([block_o], tl.float32)
    if held:
        real = (within < positions) & (output < outputs // groups)
        some_b = tl.load(b + within * outputs + output, mask=real, other=0.0)
    for step in range(tiles if held else (positions + block_p - 1) // block_p):
        if held:
            position, tile = within, step
        else:
            position, tile = step * block_p + within, program % tiles
            real = (position < positions) & (output < outputs // groups)
            some_b = tl.load(b + position * outputs + output, mask=real, other=0.0)

        column = tl.arange(0, block_c)[None, :]
        inside = position < positions
        if channels // groups % block_c == 0:  # one tap: its place is a scalar
            tap = tile // (channels // groups // block_c)
            channel = tile % (channels // groups // block_c) * block_c + column
        else:
            tap = (tile * block_c + column) // (channels // groups)
            channel = (tile * block_c + column) % (channels // groups)
            inside = inside & (tap < kernel_y * kernel_x)
        down = tap // kernel_x * dilation_y - padding_y
        along = tap % kernel_x * dilation_x - padding_x
        top = position // out_width * stride_y
        left = position % out_width * stride_x
        if padding_y > 0:
            inside = inside & (top + down >= 0) & (top + down < height)
        if padding_x > 0:
            inside = inside & (left + along >= 0) & (left + along < width)
        place = (top * width + left) * channels + ((down * width + along) * channels + channel)
        some_x = tl.load(x + place, mask=inside, other=0.0)

        if held:
            v = tl.zeros([block_c, block_o] if swapped else [block_o, block_c], tl.float32)
        if swapped:
            v = tl.dot(tl.trans(some_x), some_b, v, input_precision=precision)
        else:
            v = tl.dot(tl.trans(some_b), some_x, v, input_precision=precision)
        if held:
            sums += _sums(v, swapped)
    if not held:
        sums = _sums(v, swapped)
    tl.store(partial + program, tl.sum(sums, axis=0))
