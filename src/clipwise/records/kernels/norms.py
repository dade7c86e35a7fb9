"""The squared norms of the per-sample gradients of many linear layers, by Gram matrices and by one launch.

Receives: each layer's inputs a [unit, position, p] and output gradients b [unit, position, q], in half precision, all
of as many units and positions.
Gives: the operator clipwise::outer_gram_sq_norms: a Triton kernel on GPUs that fetch tiles by themselves (Hopper and
later), a plain twin elsewhere.

It is ``gram`` for all layers at once: a layer of few samples has too few tiles to keep a large device busy.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import asdict

import torch
from torch import Tensor

from clipwise.jit import constexpr, jit, tl
from clipwise.records.kernels import gram
from clipwise.records.kernels.gram import SLACK, Tile, added_up, keep_tile, lost, tile_of
from clipwise.records.kernels.many import check, fit, written_places
from clipwise.records.kernels.tiles import best_tile, like_random, power


def outer_gram_sq_norms(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """‖Σ_s b_is a_isᵀ‖² of each layer and unit, float32. [layer, unit].

    Guarantees: those of ``gram_sq_norm``; no atomics, so that within a process the same input gives the same bits.
    """
    check(a, b)
    return _operator(list(a), list(b))


def _twin(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    return torch.stack([gram.exact(x, y) for x, y in zip(a, b, strict=True)])


_operator = torch.library.custom_op(
    "clipwise::outer_gram_sq_norms", _twin, mutates_args=(), schema="(Tensor[] a, Tensor[] b) -> Tensor"
)


@_operator.register_fake
def _fake(a: list[Tensor], b: list[Tensor]) -> Tensor:
    return a[0].new_empty(len(a), len(a[0]), dtype=torch.float32)


@_operator.register_kernel("cuda")
def _cuda(a: list[Tensor], b: list[Tensor]) -> Tensor:
    if not fit(a, b):
        return _twin(a, b)
    shapes = tuple((x.shape[2], y.shape[2], x.stride(1), y.stride(1)) for x, y in zip(a, b, strict=True))
    with torch.cuda.device(a[0].device):
        tiles, right = candidates(a[0].shape[1]), functools.partial(_agrees, a[0])
        return launch(a, b, best_tile(("norms", a[0].shape[1], shapes), a[0], tiles, right, launch, a, b))


def _agrees(like: Tensor, tile: Tile) -> bool:
    """Whether a tile gives what float64 gives for two small random layers: a compiler of kernels can be wrong too."""
    n, positions = min(3, like.shape[0]), like.shape[1]
    a, b = ([like_random(like.new_empty(n, positions, size)) for size in sizes] for sizes in ((136, 40), (72, 264)))
    expected = _twin(a, b)
    return bool((launch(a, b, tile) - expected).norm() <= 1e-3 * expected.norm())


def candidates(positions: int) -> list[Tile]:
    """Tiles worth trying: small ones make more programs, large ones read less."""
    tiles = [Tile(64, 64, 4, 4), Tile(128, 64, 8, 4), Tile(64, 128, 4, 3), Tile(128, 128, 8, 3)]
    most = power(positions, 16, 128)
    return [tile for tile in tiles if tile.block <= most] or [Tile(most, 64, 4, 4)]


def launch(a: Sequence[Tensor], b: Sequence[Tensor], tile: Tile) -> Tensor:
    """The kernel with one tile. [layer, unit]."""
    units, positions = a[0].shape[:2]
    side = -(-positions // tile.block)
    pairs = side * (side + 1) // 2  # both matrices are symmetric: tiles on and below the diagonal are enough
    shapes = tuple((x.shape[2], y.shape[2], x.stride(1) // 8, y.stride(1) // 8) for x, y in zip(a, b, strict=True))
    sums = torch.empty(2, len(a) * units, pairs, dtype=torch.float32, device=a[0].device)
    options = asdict(tile)
    warps, stages = options.pop("warps"), options.pop("stages")
    programs = len(a) * units * pairs
    _norms_kernel[(programs,)](
        a[0], written_places(a, b), _lines(shapes, a[0].device), sums, programs, units, positions=positions,
        pairs=pairs, slack=SLACK, lost_each=lost(1), **options, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return added_up(*sums.unbind(0)).view(len(a), units)


@functools.cache  # for ever: a recorded launch reads its table again at every replay
def _lines(shapes: tuple[tuple[int, int, int, int], ...], device: torch.device) -> Tensor:
    """[layer, p, q, row's stride of a and of b in eighths], the longest first: none is left to run alone."""
    longest = sorted(range(len(shapes)), key=lambda layer: -sum(shapes[layer][:2]))
    return torch.tensor([[layer, *shapes[layer]] for layer in longest], dtype=torch.long).to(device)


@jit
def _gram_tile(  # type: ignore[no-untyped-def]
    rows, unit, down, along, units, features, stride, positions: constexpr, block: constexpr, deep: constexpr
):  # fmt: skip
    """Tile (down, along) of one unit's Gram matrix; read once where it is the only one."""
    # positions and features beyond the last are read as zeros
    every = tl.make_tensor_descriptor(
        rows, [units, positions, features], [positions * stride, stride, 1], [1, block, deep]
    )
    product = tl.zeros([block, block], tl.float32)
    for start in range(0, features, deep):
        left = every.load([unit, down * block, start]).reshape(block, deep)
        if positions <= block:
            product = tl.dot(left, tl.trans(left), product)
        else:
            right = every.load([unit, along * block, start]).reshape(block, deep)
            product = tl.dot(left, tl.trans(right), product)
    return product


# Triton compiles sizes divisible by 16 once more unless told, and a Poisson sample has another size at every step
@jit(do_not_specialize=["programs", "units"])  # type: ignore[untyped-decorator]
def _norms_kernel(  # type: ignore[no-untyped-def]
    like, places, lines, sums, programs, units, positions: constexpr, pairs: constexpr, slack: constexpr,
    lost_each: constexpr, block: constexpr, deep: constexpr,
):  # fmt: skip
    """One program: a layer, a unit, and one tile of both its Gram matrices. ``like`` is there for the format."""
    program = tl.program_id(0)
    line = lines + program // (units * pairs) * 5
    layer = tl.load(line)
    unit = program % (units * pairs) // pairs
    down, along = tile_of(program % pairs)
    p, q = tl.load(line + 1).to(tl.int32), tl.load(line + 2).to(tl.int32)
    a = tl.load(places + 2 * layer).to(like.dtype)
    b = tl.load(places + 2 * layer + 1).to(like.dtype)
    aa = _gram_tile(a, unit, down, along, units, p, tl.load(line + 3) * 8, positions, block, deep)
    bb = _gram_tile(b, unit, down, along, units, q, tl.load(line + 4) * 8, positions, block, deep)
    lost_a, lost_b = lost_each * tl.sqrt(p.to(tl.float32)), lost_each * tl.sqrt(q.to(tl.float32))
    place = (layer * units + unit) * pairs + program % pairs
    keep_tile(sums, place, programs, aa, bb, down == along, lost_a, lost_b, pairs, slack, block)
