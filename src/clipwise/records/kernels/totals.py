"""Weighted sums of the per-sample gradients of many linear layers, by one launch: Σ_i w_i Σ_s b_is a_isᵀ for each.

Receives: each layer's inputs a [unit, position, p] and output gradients b [unit, position, q], in half precision, all
of as many units and positions, and weights [layer, unit].
Gives: the operator clipwise::outer_totals: a Triton kernel on GPUs that fetch tiles by themselves (Hopper and later), a
plain twin elsewhere; ``takes`` says whether two factors can have a part in it.

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

from clipwise.records.kernels.gram import HALF
from clipwise.records.kernels.tiles import best_tile, constexpr, jit, like_random, tl, triton
from clipwise.types import InputError

BATCH = 16  # places of layers that are written down by one launch


def outer_totals(a: Sequence[Tensor], b: Sequence[Tensor], weights: Tensor) -> list[Tensor]:
    """Σ_i w_i v_i of each layer, float32. [q, p] each.

    Guarantees: summed in float32, each v_i before its weight; no atomics, so that within a process the same input gives
    the same bits. Edge cases: a unit that is not finite spoils the sums even with weight 0: mask it first.
    """
    if not a or len(a) != len(b) or weights.shape != (len(a), len(a[0])):
        raise InputError(
            f"expected as many a as b and weights [layer, unit], got {len(a)}, {len(b)} and {tuple(weights.shape)}"
        )
    for one, other in zip(a, b, strict=True):  # the kernel reads wherever these numbers point
        if (
            one.shape[:2] != a[0].shape[:2]
            or other.shape[:2] != a[0].shape[:2]
            or {one.dtype, other.dtype} != {a[0].dtype}
        ):
            raise InputError("expected factors of one format with as many units and positions each")
    sizes = [(y.shape[2], x.shape[2]) for x, y in zip(a, b, strict=True)]
    pieces = _operator(list(a), list(b), weights).split([q * p for q, p in sizes])
    return [piece.view(size) for piece, size in zip(pieces, sizes, strict=True)]


def takes(a: Tensor, b: Tensor) -> bool:
    """Whether a layer's factors [unit, position, feature] can have a part: rows begin where 16 bytes can be read."""
    able = triton is not None and a.is_cuda and torch.cuda.get_device_capability(a.device) >= (9, 0)
    return able and a.dtype in HALF and a.dtype == b.dtype and _readable(a) and _readable(b)


def _readable(t: Tensor) -> bool:
    after = len(t) == 1 or t.stride(0) == t.shape[1] * t.stride(1)  # units follow each other without gaps
    return t.numel() > 0 and t.stride(2) == 1 and t.stride(1) % 8 == 0 and t.stride(1) >= t.shape[2] and after


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
    if not all(map(takes, a, b)) or any(t.data_ptr() % 16 for t in (*a, *b)):
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
    # Addresses are written by a kernel: one that is recorded would read a copy from the host again at every replay.
    count = -(-2 * len(a) // BATCH) * BATCH
    places = torch.empty(count, dtype=torch.long, device=device)
    factors = [t for pair in zip(a, b, strict=True) for t in pair]
    factors += [factors[-1]] * (count - len(factors))
    for first in range(0, count, BATCH):
        _places_kernel[(1,)](places, first, *factors[first : first + BATCH])
    if device.type == "cuda":
        triton.set_allocator(_scratch)
    options = asdict(tile)
    warps, stages = options.pop("warps"), options.pop("stages")
    _totals_kernel[(min(tiles * parts, processors),)](
        a[0], places, lines, weights, room, len(a), tiles, tiles * parts, size, units, -(-units // parts),
        positions=positions, **options, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return room.sum(0) if parts > 1 else room[0]


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Where Triton keeps its descriptions of tensors while a kernel runs."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


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


@jit
def _places_kernel(  # type: ignore[no-untyped-def]
    places, first, t0, t1, t2, t3, t4, t5, t6, t7, t8, t9, t10, t11, t12, t13, t14, t15
):  # fmt: skip
    """Write down where tensors lie."""
    tl.store(places + first + 0, t0.to(tl.int64))
    tl.store(places + first + 1, t1.to(tl.int64))
    tl.store(places + first + 2, t2.to(tl.int64))
    tl.store(places + first + 3, t3.to(tl.int64))
    tl.store(places + first + 4, t4.to(tl.int64))
    tl.store(places + first + 5, t5.to(tl.int64))
    tl.store(places + first + 6, t6.to(tl.int64))
    tl.store(places + first + 7, t7.to(tl.int64))
    tl.store(places + first + 8, t8.to(tl.int64))
    tl.store(places + first + 9, t9.to(tl.int64))
    tl.store(places + first + 10, t10.to(tl.int64))
    tl.store(places + first + 11, t11.to(tl.int64))
    tl.store(places + first + 12, t12.to(tl.int64))
    tl.store(places + first + 13, t13.to(tl.int64))
    tl.store(places + first + 14, t14.to(tl.int64))
    tl.store(places + first + 15, t15.to(tl.int64))


# else sizes divisible by 16 are compiled once more, and a Poisson sample has another size at every step
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
