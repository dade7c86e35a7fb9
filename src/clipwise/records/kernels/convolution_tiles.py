"""How a convolution's kernels are launched: its shape, the tiles that are worth trying, and the kernels themselves.

Receives: channels-last x and b of one convolution, its Shape, and a Tile.
Gives: Shape, Tile, candidates and total_candidates; launch, launch_dense and launch_total: squared norms, written
gradients and weighted sums by Triton, which ``convolution`` makes operators of.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from clipwise.jit import constexpr, jit, tl
from clipwise.records.kernels.tiles import power

Ints: TypeAlias = Sequence[int]


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

    @property
    def gradient(self) -> tuple[int, int, int, int]:
        """The size of one unit's gradient: [output, y, x, channel]."""
        return self.outputs, self.kernel_y, self.kernel_x, self.channels // self.groups


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
