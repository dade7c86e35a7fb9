"""Weighted sums of the per-sample gradients of many linear layers, by one launch: Σ_i w_i Σ_s b_is a_isᵀ for each.

Receives: each layer's inputs a [unit, position, p] and output gradients b [unit, position, q], in half precision, all
of as many units and positions, and weights [layer, unit].
Gives: the operator clipwise::outer_totals: a Triton kernel on GPUs that fetch tiles by themselves (Hopper and later), a
plain twin elsewhere.

One layer alone has too few tiles to keep a large device busy, or has to be summed in parts that are then added. All
layers' tiles together fill it, whatever the layers' sizes. As in ``convolution``, w_i multiplies the finished v_i: no
product with it is rounded to the format of a and b.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from clipwise.jit import constexpr, jit, tl
from clipwise.records.kernels.many import check, fit, written_places
from clipwise.records.kernels.tiles import best_tile, like_random
from clipwise.types import InputError


def outer_totals(a: Sequence[Tensor], b: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """Σ_i w_i v_i of each layer, float32. [q, p] each.

    Guarantees: summed in float32, each v_i before its weight; no atomics, so that within a process the same input gives
    the same bits. Edge cases: a unit that is not finite spoils the sums even with weight 0: mask it first.
    """
    check(a, b)
    if weights.shape != (len(a), len(a[0])):
        raise InputError(f"expected weights [layer, unit], {len(a)} × {len(a[0])}, got {tuple(weights.shape)}")
    sizes = [(y.shape[2], x.shape[2]) for x, y in zip(a, b, strict=True)]
    pieces = _operator(list(a), list(b), weights).split([q * p for q, p in sizes])
    return [piece.view(size) for piece, size in zip(pieces, sizes, strict=True)]


def _twin(a: Sequence[Tensor], b: Sequence[Tensor], weights: Tensor) -> Tensor:
    """In float64, where half precision's products are exact. All layers' sums, one after the other."""
    sums = [
        torch.einsum("nsq,nsp->qp", y.double() * w.double()[:, None, None], x.double())
        for x, y, w in zip(a, b, weights, strict=True)
    ]
    return torch.cat([total.flatten() for total in sums]).float()


_operator = torch.library.custom_op(
    "clipwise::outer_totals", _twin, mutates_args=(), schema="(Tensor[] a, Tensor[] b, Tensor weights) -> Tensor"
)  # of one result: those of an operator may not share memory


@_operator.register_fake
def _fake(a: list[Tensor], b: list[Tensor], weights: Tensor) -> Tensor:
    return a[0].new_empty(sum(x.shape[2] * y.shape[2] for x, y in zip(a, b, strict=True)), dtype=torch.float32)


@_operator.register_kernel("cuda")
def _cuda(a: list[Tensor], b: list[Tensor], weights: Tensor) -> Tensor:
    if not fit(a, b):
        return _twin(a, b, weights)
    weights = weights.float().contiguous()
    shapes = tuple((x.shape[2], y.shape[2], x.stride(1), y.stride(1)) for x, y in zip(a, b, strict=True))
    with torch.cuda.device(a[0].device):
        what = ("totals", a[0].shape[1], shapes)
        tile = best_tile(what, a[0], candidates(a[0].shape[1]), functools.partial(_agrees, a[0]), launch, a, b, weights)
        return launch(a, b, weights, tile)


def _agrees(like: Tensor, tile: Tile) -> bool:
    """Whether a tile gives what float64 gives for two small random layers: a compiler of kernels can be wrong too."""
    n, positions = min(3, like.shape[0]), like.shape[1]
    a = [like_random(like.new_empty(n, positions, p)) for p in (136, 40)]
    b = [like_random(like.new_empty(n, positions, q)).flip(2) for q in (72, 264)]
    weights = like_random(like.new_empty(2, n, dtype=torch.float32))
    expected = _twin(a, b, weights)
    return bool((launch(a, b, weights, tile) - expected).norm() <= 1e-3 * expected.norm())


@dataclass(frozen=True)
class Tile:
    """What one program takes at a time: a choice of speed, never of result (but for the last bits)."""

    block_q: int
    block_p: int
    deep: int  # positions
    warps: int
    stages: int


def candidates(positions: int) -> list[Tile]:
    """Tiles worth trying: a thread holds two accumulators, one unit's product and the sum."""
    if positions <= 64:
        return [Tile(128, 128, 16 if positions <= 16 else 32 if positions <= 32 else 64, 8, 4)]
    if positions <= 128:
        return [Tile(128, 128, 128, 8, 3), Tile(128, 128, 64, 8, 4)]
    return [Tile(128, 128, 64, 8, 4), Tile(128, 128, 32, 8, 6), Tile(128, 128, 128, 8, 3)]


def launch(a: Sequence[Tensor], b: Sequence[Tensor], weights: Tensor, tile: Tile) -> Tensor:
    """The kernel with one tile, for float32 weights. All layers' sums, one after the other."""
    units, positions = a[0].shape[:2]
    device = a[0].device
    lines, tiles = _lines(
        tuple((x.shape[2], y.shape[2], x.stride(1) // 8, y.stride(1) // 8) for x, y in zip(a, b, strict=True)),
        tile.block_p,
        tile.block_q,
        device,
    )
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 5
    parts = max(
        1, min(processors // tiles, units)
    )  # of the units, where layers are too few or small for all processors
    size = sum(x.shape[2] * y.shape[2] for x, y in zip(a, b, strict=True))
    room = torch.empty(parts, size, dtype=torch.float32, device=device)
    options = asdict(tile)
    warps, stages = options.pop("warps"), options.pop("stages")
    _totals_kernel[(min(tiles * parts, processors),)](
        a[0], written_places(a, b), lines, weights, room, len(a), tiles, tiles * parts, size, units, -(-units // parts),
        positions=positions, **options, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return room.sum(0) if parts > 1 else room[0]


@functools.cache  # for ever: a recorded launch reads its table again at every replay
def _lines(
    shapes: tuple[tuple[int, int, int, int], ...], block_p: int, block_q: int, device: torch.device
) -> tuple[Tensor, int]:
    """[p, q, row's stride of a and of b in eighths, place of the result, first tile] of each layer; how many tiles."""
    lines, place, tiles = [], 0, 0
    for p, q, stride_a, stride_b in shapes:
        lines.append([p, q, stride_a, stride_b, place, tiles])
        place += p * q
        tiles += -(-p // block_p) * -(-q // block_q)
    return torch.tensor(lines, dtype=torch.long).to(device), tiles


# Triton compiles sizes divisible by 16 once more unless told, and a Poisson sample has another size at every step
@jit(do_not_specialize=["layers", "tiles", "work", "size", "units", "units_each"])  # type: ignore[untyped-decorator]
def _totals_kernel(  # type: ignore[no-untyped-def]
    like, places, lines, weights, room, layers, tiles, work, size, units, units_each,
    positions: constexpr, block_q: constexpr, block_p: constexpr, deep: constexpr,
):  # fmt: skip
    """One program: one tile of one layer's sum over some units after another. ``like`` is there for the format."""
    steps: constexpr = (positions + deep - 1) // deep
    task = tl.program_id(0)
    while task < work:
        tile = task % tiles
        part = task // tiles
        start = tl.minimum(part * units_each, units)
        stop = tl.minimum(start + units_each, units)
        low, high = 0, layers  # the last layer that begins at this tile or before
        while high - low > 1:
            middle = (low + high) // 2
            later = tl.load(lines + 6 * middle + 5) > tile
            low, high = tl.where(later, low, middle), tl.where(later, middle, high)
        a = tl.load(places + 2 * low).to(like.dtype)
        b = tl.load(places + 2 * low + 1).to(like.dtype)
        line = lines + 6 * low
        p, q = tl.load(line).to(tl.int32), tl.load(line + 1).to(tl.int32)
        row_a, row_b = tl.load(line + 2) * 8, tl.load(line + 3) * 8
        own = tile - tl.load(line + 5).to(tl.int32)
        # eight tiles down, then along: programs side by side share rows of b and columns of a
        across = (p + block_p - 1) // block_p * 8
        top = own // across * 8
        high_q = tl.minimum((q + block_q - 1) // block_q - top, 8)
        first_q = (top + own % across % high_q) * block_q
        first_p = own % across // high_q * block_p
        # positions beyond a unit's last are read as zeros
        all_a = tl.make_tensor_descriptor(a, [units, positions, p], [positions * row_a, row_a, 1], [1, deep, block_p])
        all_b = tl.make_tensor_descriptor(b, [units, positions, q], [positions * row_b, row_b, 1], [1, deep, block_q])
        total = tl.zeros([block_q, block_p], tl.float32)
        if steps == 1:
            for unit in range(start, stop):
                some_a = all_a.load([unit, 0, first_p]).reshape(deep, block_p)
                some_b = all_b.load([unit, 0, first_q]).reshape(deep, block_q)
                total += tl.load(weights + low * units + unit) * tl.dot(tl.trans(some_b), some_a)
        else:  # one loop over all: two would wait for memory at the beginning of every unit
            v = tl.zeros([block_q, block_p], tl.float32)
            for step in range(start * steps, stop * steps):
                unit = step // steps
                some_a = all_a.load([unit, step % steps * deep, first_p]).reshape(deep, block_p)
                some_b = all_b.load([unit, step % steps * deep, first_q]).reshape(deep, block_q)
                v = tl.dot(tl.trans(some_b), some_a, v)
                if step % steps == steps - 1:
                    total += tl.load(weights + low * units + unit) * v
                    v = tl.zeros([block_q, block_p], tl.float32)
        rows = first_q + tl.arange(0, block_q)[:, None]
        columns = first_p + tl.arange(0, block_p)[None, :]
        out = room + part.to(tl.int64) * size + tl.load(line + 4) + rows.to(tl.int64) * p + columns
        tl.store(out, total, mask=(rows < q) & (columns < p))
        task += tl.num_programs(0)
