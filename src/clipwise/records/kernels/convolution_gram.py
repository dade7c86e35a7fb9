"""The squared norm of every sample's convolution weight gradient from two Gram matrices of positions, never unfolded.

Receives: the inputs x [sample, channel, y, x] and output gradients b of a 2-d convolution of one group, its geometry.
Gives: the operator clipwise::convolution_gram_sq_norm: Triton kernels on CUDA for half precision, a plain twin
elsewhere; ``possible`` and ``gram_cost`` for whoever chooses a form. [sample].

v = Σ_s b_s a_sᵀ, where a_s is the patch of x under output position s, so ‖v‖² = Σ_{s,t} ⟨b_s, b_t⟩ ⟨a_s, a_t⟩. Patches
are made of positions of x: ⟨a_s, a_t⟩ = Σ_tap X[s + tap, t + tap] with X the Gram matrix of x's own positions and zero
outside. A tap moves both indices alike: its reads of X lie at one constant distance from the first tap's. X is written
in float32, on and below its diagonal, and read back while the caches still hold it; nothing else is.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from clipwise.jit import constexpr, jit, tl, triton
from clipwise.records import forms
from clipwise.records.kernels.convolution import check, exact, result_dtype
from clipwise.records.kernels.convolution_tiles import Ints, Shape
from clipwise.records.kernels.gram import HALF, SLACK, added_up, aligned, finished, gram_tile, lost, tile_of
from clipwise.records.kernels.tiles import best_tile, like_random, power
from clipwise.types import InputError

MOST_INPUTS = 256  # positions of x: with more, X soon costs as much as what it replaces
MOST_TAPS = 30  # in a row: their bits are one number
# Matrices X of so many bytes are written before they are read: a part of the second-level cache of a large GPU (50 MB),
# so that they never reach the device's memory, and enough samples to fill it.
SCRATCH_BYTES = 1 << 25
# What reading and adding an element of X counts, in multiplications: by data sheets, not measured, a processor reads 32
# in the time in which its tensor cores multiply about a thousand.
READ = 32


def convolution_gram_sq_norm(
    x: Tensor,
    b: Tensor,
    stride: Ints,
    padding: Ints,
    dilation: Ints,
    kernel: Ints,
    groups: int = 1,
    probes: int = 1,
) -> Tensor:
    """‖v_i‖² of each sample's weight gradient, for x [sample, channel, y, x] and b [sample, output, y, x]. [sample].

    Guarantees: those of ``gram_sq_norm``: not under-estimated, rounding where positions cancel is added; accumulated in
    float32 or better; no atomics, so within a process the same input gives the same bits.
    Edge cases: float64 gives float64; several groups, or several images of one unit, are refused.
    """
    if groups != 1 or probes != 1:
        raise InputError(f"groups and probes must be 1 for the Gram form of a convolution, got {groups} and {probes}")
    check(x, b, stride, padding, dilation, kernel, groups, probes)
    return _operator(x, b, stride, padding, dilation, kernel)


def possible(x: Tensor, kernel: Ints, groups: int = 1, probes: int = 1) -> bool:
    """Whether the kernels can be used for operands in half precision: elsewhere the operator gives the same, slowly."""
    able = triton is not None and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 0)
    few = x.shape[2] * x.shape[3] <= MOST_INPUTS and kernel[1] <= MOST_TAPS
    return able and few and groups == probes == 1 and len(x) > 0


def gram_cost(inputs: int, channels: int, positions: int, outputs: int, taps: int) -> int:
    """Multiplications for one sample: both Gram matrices on and below the diagonal, and reads of X counted as such.

    ``inputs`` and ``positions``: of x and of b.
    """
    block_x, block = power(inputs, 16, 64), power(positions, 16, 64)
    matrix, other = _pairs(inputs, block_x) * block_x**2, _pairs(positions, block) * block**2
    return matrix * channels + other * (outputs + READ * taps)


def _twin(x: Tensor, b: Tensor, stride: Ints, padding: Ints, dilation: Ints, kernel: Ints) -> Tensor:
    """The same form in float64, a few samples at a time."""
    shape = Shape.of(x, b, stride, padding, dilation, kernel, 1)
    inputs, taps = shape.height * shape.width, _taps(shape).to(x.device)
    norms = [x.new_zeros(0, dtype=torch.float64)]
    step = max(1, forms.STREAM_FLOATS // (inputs + 1) ** 2)
    for rows in zip(x.split(step), b.split(step), strict=True):
        some_x, some_b = (t.double().flatten(2) for t in rows)
        xx = torch.nn.functional.pad(some_x.mT @ some_x, (0, 1, 0, 1))  # the last row and column: outside
        bb = some_b.mT @ some_b
        aa = torch.zeros_like(bb)
        for places in taps:
            aa += xx[:, places[:, None], places]
        lengths = (aa.diagonal(dim1=1, dim2=2) * bb.diagonal(dim1=1, dim2=2)).sqrt().sum(1)
        slack = 4 * torch.finfo(result_dtype(x)).eps * lengths.square()  # also more than the result's own rounding
        norms.append((aa * bb).sum((1, 2)).clamp(min=0) + slack)
    return torch.cat(norms).to(result_dtype(x))


def _taps(s: Shape) -> Tensor:
    """Which position of x each tap reads for each position of b; their number stands for outside. [tap, position]."""
    position = torch.arange(s.positions)
    tap = torch.arange(s.kernel_y * s.kernel_x)[:, None]
    y = position // s.out_width * s.stride_y + tap // s.kernel_x * s.dilation_y - s.padding_y
    x = position % s.out_width * s.stride_x + tap % s.kernel_x * s.dilation_x - s.padding_x
    inside = (y >= 0) & (y < s.height) & (x >= 0) & (x < s.width)
    return torch.where(inside, y * s.width + x, s.height * s.width)


_operator = torch.library.custom_op(
    "clipwise::convolution_gram_sq_norm",
    _twin,
    mutates_args=(),
    schema="(Tensor x, Tensor b, int[] stride, int[] padding, int[] dilation, int[] kernel) -> Tensor",
)


@_operator.register_fake
def _fake(x: Tensor, b: Tensor, stride: Ints, padding: Ints, dilation: Ints, kernel: Ints) -> Tensor:
    return x.new_empty(x.shape[0], dtype=result_dtype(x))


@_operator.register_kernel("cuda")
def _cuda(x: Tensor, b: Tensor, stride: Ints, padding: Ints, dilation: Ints, kernel: Ints) -> Tensor:
    if x.dtype not in HALF or not possible(x, kernel):
        return _twin(x, b, stride, padding, dilation, kernel)
    x, b = rows(x), rows(b)
    shape = Shape.of(_images(x), _images(b), stride, padding, dilation, kernel, 1)
    tiles, right = candidates(shape), partial(_agrees, x, b, shape)
    with torch.cuda.device(x.device):
        return launch(x, b, shape, best_tile(("convolution gram", shape), x, tiles, right, launch, x, b, shape))


def rows(t: Tensor) -> Tensor:
    """[sample, channel, y, x] as [sample, y, x, channel], contiguous, zero channels added up to a multiple of eight.

    Channels last of such a number are not copied.
    """
    return aligned(t.permute(0, 2, 3, 1))


def _images(t: Tensor) -> Tensor:
    return t.permute(0, 3, 1, 2)


def _agrees(x: Tensor, b: Tensor, shape: Shape, tile: Tile) -> bool:
    """Whether a tile gives the norm of the gradients written in float64, for random samples.

    As many as fill the device a few times, where there are: what programs do at once must not matter.
    """
    x, b = like_random(x[:256]), like_random(b[:256])
    found = launch(x, b, shape, tile)
    few = [0, len(found) // 2, len(found) - 1]
    expected = exact(_images(x[few]), _images(b[few]), shape).square().flatten(1).sum(1)
    right = (found[few] - expected).norm() <= 1e-3 * expected.norm()
    return bool(right) and torch.equal(found, launch(x, b, shape, tile))


@dataclass(frozen=True)
class Tile:
    """What one program takes at a time: a choice of speed, never of result (but for the last bits)."""

    block_x: int  # positions of x, of the rows and of the columns of X
    block: int  # the same of b
    deep: int  # channels
    warps: int
    stages: int
    fused: bool  # one program writes a sample's whole X and reads it back; otherwise each has a launch


def candidates(shape: Shape) -> list[Tile]:
    """Tiles worth trying, the safest first. Few: each is compiled once per shape."""
    inputs, positions = shape.height * shape.width, shape.positions
    block_x, block = power(inputs, 16, 64), power(positions, 16, 64)
    warps = max(1, max(block_x, block) ** 2 // 1024)
    tiles = [Tile(block_x, block, 64, 2 * warps, 3, fused=False)]
    if max(inputs, positions) <= 64:
        how = ((64, warps, 3), (64, 2 * warps, 3), (128, 2 * warps, 2))  # deep, warps, stages
        return tiles + [Tile(block_x, block, *rest, fused=True) for rest in how]
    tiles += [
        Tile(block_x, min(32, block), 64, 4, 3, fused=False),
        Tile(block_x, min(32, block), 128, 4, 2, fused=False),
    ]
    return [*tiles, Tile(power(inputs, 16, 128), block, 64, 8, 3, fused=False)]


def launch(x: Tensor, b: Tensor, shape: Shape, tile: Tile) -> Tensor:
    """The kernels with one tile, for x [sample, y, x, channel] and b alike as ``rows`` gives them.

    Samples are taken in pieces whose matrices X fit ``SCRATCH_BYTES``.
    """
    inputs, n = shape.height * shape.width, x.shape[0]
    input_pairs, pairs = _pairs(inputs, tile.block_x), _pairs(shape.positions, tile.block)
    fit = SCRATCH_BYTES // (4 * inputs**2)
    step = min(n, max(4, fit - fit % 4))  # by fours: each piece's sums begin at 16 bytes, and kernels are compiled once
    xx = torch.empty(step, inputs, inputs, dtype=torch.float32, device=x.device)
    products, lengths = (torch.empty(n, pairs, dtype=torch.float32, device=x.device) for _ in range(2))
    how = {"deep": tile.deep, "num_warps": tile.warps, "num_stages": tile.stages}
    geometry = asdict(shape)
    for name in ("groups", "probes"):
        del geometry[name]
    for start in range(0, n, step):
        some_x, some_b, some_products, some_lengths = (t[start : start + step] for t in (x, b, products, lengths))
        if not tile.fused:
            _input_kernel[(len(some_x) * input_pairs,)](
                some_x, xx, inputs=inputs, channels=shape.channels, pairs=input_pairs, block=tile.block_x, **how
            )
        _norm_kernel[(len(some_x) * pairs,)](
            some_x, some_b, xx, some_products, some_lengths, **geometry, pairs=pairs, block_x=tile.block_x,
            block=tile.block, fused=tile.fused, slack=SLACK, lost_a=lost(shape.columns), lost_b=lost(shape.outputs),
            **how,
        )  # fmt: skip
    return added_up(products, lengths)


def _pairs(positions: int, block: int) -> int:
    """Tiles on and below the diagonal of a symmetric matrix."""
    side = -(-positions // block)
    return side * (side + 1) // 2


@jit
def _write(xx, product, down, along, inputs: constexpr, block: constexpr):  # type: ignore[no-untyped-def]
    """A tile of X to xx [position, position]."""
    first = down * block + tl.arange(0, block)[:, None]
    second = along * block + tl.arange(0, block)[None, :]
    tl.store(xx + first * inputs + second, product, mask=(first < inputs) & (second < inputs))


@jit
def _input_kernel(  # type: ignore[no-untyped-def]
    x, xx, inputs: constexpr, channels: constexpr, pairs: constexpr, block: constexpr, deep: constexpr
):  # fmt: skip
    """One program: a sample, and one tile of its X."""
    program = tl.program_id(0)
    sample = (program // pairs).to(tl.int64)
    down, along = tile_of(program % pairs)
    product = gram_tile(x + sample * (inputs * channels), down, along, inputs, channels, block, deep)
    _write(xx + sample * (inputs * inputs), product, down, along, inputs, block)


@jit
def _inside(first, size: constexpr, kernel: constexpr, dilation: constexpr):  # type: ignore[no-untyped-def]
    """Which taps from a first place on lie inside, as bits."""
    bits = tl.zeros_like(first)
    for tap in tl.static_range(kernel):
        bits |= tl.where((first + tap * dilation >= 0) & (first + tap * dilation < size), 1 << tap, 0)
    return bits


@jit
def _norm_kernel(  # type: ignore[no-untyped-def]
    x, b, xx, out, out_lengths,
    channels: constexpr, height: constexpr, width: constexpr, outputs: constexpr, out_width: constexpr,
    positions: constexpr, kernel_y: constexpr, kernel_x: constexpr, stride_y: constexpr, stride_x: constexpr,
    padding_y: constexpr, padding_x: constexpr, dilation_y: constexpr, dilation_x: constexpr,
    pairs: constexpr, block_x: constexpr, block: constexpr, deep: constexpr, fused: constexpr, slack: constexpr,
    lost_a: constexpr, lost_b: constexpr,
):  # fmt: skip
    """One program: a sample, and one tile of the Gram matrices of its patches and of its output gradients."""
    program = tl.program_id(0)
    sample = (program // pairs).to(tl.int64)
    inputs: constexpr = height * width
    xx += sample * (inputs * inputs)
    if fused:
        product = gram_tile(x + sample * (inputs * channels), 0, 0, inputs, channels, block_x, deep)
        _write(xx, product, 0, 0, inputs, block_x)
        tl.debug_barrier()  # what other threads of this program wrote is read below

    # All is symmetric, and X written only below its diagonal: t ≤ s. Moved alike, they keep their order. What lies side
    # by side in memory is the first axis: Triton then lets neighbouring threads read neighbours, for any geometry.
    down, along = tile_of(program % pairs)
    t = along * block + tl.arange(0, block)[:, None]
    s = down * block + tl.arange(0, block)[None, :]
    wanted = (t <= s) & (s < positions)
    t_y = t // out_width * stride_y - padding_y
    t_x = t % out_width * stride_x - padding_x
    s_y = s // out_width * stride_y - padding_y
    s_x = s % out_width * stride_x - padding_x
    places = (s_y * width + s_x) * inputs + (t_y * width + t_x)
    # Bit k: the k-th tap of a row lies inside for both. One test for each read, instead of four.
    columns = _inside(t_x, width, kernel_x, dilation_x) & _inside(s_x, width, kernel_x, dilation_x)
    columns = tl.where(wanted, columns, 0)
    aa = tl.zeros([block, block], tl.float32)
    for row in tl.range(kernel_y, num_stages=1):
        y = row * dilation_y
        inside = (t_y + y >= 0) & (t_y + y < height) & (s_y + y >= 0) & (s_y + y < height)
        taps = tl.where(inside, columns, 0)
        first = xx + y * width * (inputs + 1) + places
        for column in tl.static_range(kernel_x):
            aa += tl.load(first + column * dilation_x * (inputs + 1), mask=(taps & (1 << column)) != 0, other=0.0)

    bb = gram_tile(b + sample * (positions * outputs), along, down, positions, outputs, block, deep)
    same = t == s
    # Where t > s nothing was read: the other factor is not multiplied with 0 there, since it may be infinite.
    products = tl.sum(tl.where(wanted, aa * bb * tl.where(same, 1.0, 2.0), 0.0))
    lengths = 0.0
    if down == along:  # ‖a_s‖‖b_s‖, from the diagonals, and what either matrix may have lost
        a_sq = tl.maximum(tl.sum(tl.where(same, aa, 0.0), axis=1), 0.0)
        b_sq = tl.maximum(tl.sum(tl.where(same, bb, 0.0), axis=1), 0.0)
        a_sq, b_sq = tl.sqrt(a_sq), tl.sqrt(b_sq)
        lengths = tl.sum(a_sq * b_sq + lost_b * a_sq + lost_a * b_sq)
    if pairs == 1:
        products = finished(products, lengths, slack)
    tl.store(out + program, products)
    tl.store(out_lengths + program, lengths)
