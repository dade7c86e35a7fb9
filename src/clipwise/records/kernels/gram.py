"""The squared norm of every sample's Σ_s b_s a_sᵀ from two Gram matrices: ‖v_i‖² = ⟨A Aᵀ, B Bᵀ⟩.

Receives: a [sample, block, position, p] and b [sample, block, position, q].
Gives: gram_sq_norm: plain torch, or for half-precision CUDA tensors one kernel that computes both products of a tile,
multiplies them and keeps only sums, so neither matrix is written and nothing is widened in memory. [sample].
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial

import torch
from torch import Tensor

from clipwise.jit import constexpr, jit, tl, triton
from clipwise.records.kernels.tiles import best_tile, like_random, power

HALF = (torch.bfloat16, torch.float16)
EVEN = 8  # features in half precision that a GPU reads at once, 16 bytes
SLACK = 4 * torch.finfo(torch.float32).eps
MOST_PAIRS = 1 << 14  # tiles of a sample whose sums one program adds up


def gram_sq_norm(a: Tensor, b: Tensor) -> Tensor:
    """⟨A Aᵀ, B Bᵀ⟩ per sample, in float32 or better.

    Guarantees: not under-estimated. Where positions cancel, rounding is relative to (Σ_s ‖a_s‖‖b_s‖)², not to the
    result, so that much is added: a few units of the last place of it, nothing to notice unless the sum cancels. So is
    what underflows in one Gram matrix, times the other (``lost``): a zero gradient has a norm of about 1e-17 · ‖a‖.
    """
    half = a.dtype == b.dtype and a.dtype in HALF
    if a.is_cuda and half and a.shape[1] == 1 and a.shape[2] > 1:
        return _operator(*(aligned(t[:, 0]) for t in (a, b)))
    return _twin(a, b)


def lost(features: int, dtype: torch.dtype = torch.float32) -> float:
    """κ with 4 eps (κ Σ_s ‖a_s‖)² = tiny · features · (Σ_s ‖a_s‖)²: what b Bᵀ of so many features may lose, times a aᵀ.

    Products below the smallest normal number may count as zero. Beside an a of 1e19 that is not nothing.
    """
    return math.sqrt(torch.finfo(dtype).tiny * features / (4 * torch.finfo(dtype).eps))


def aligned(rows: Tensor) -> Tensor:
    """[…, feature] contiguous, zero features added up to a multiple of EVEN."""
    rest = -rows.shape[-1] % EVEN
    return torch.nn.functional.pad(rows, (0, rest)) if rest else rows.contiguous()


def _twin(a: Tensor, b: Tensor) -> Tensor:
    a, b = (t.float() if t.dtype in HALF else t for t in (a, b))
    if a.shape[2] == 1:  # one position: ‖b aᵀ‖ = ‖a‖‖b‖, and nothing can cancel; squares may underflow
        one, other = (t.square().sum(3) + t.shape[3] * torch.finfo(t.dtype).tiny for t in (a, b))
        return (one * other).sum((1, 2))
    aa = a @ a.transpose(2, 3)
    bb = b @ b.transpose(2, 3)
    one, other = (gram.diagonal(dim1=2, dim2=3).clamp(min=0).sqrt() for gram in (aa, bb))
    lengths = one * other + lost(b.shape[3], a.dtype) * one + lost(a.shape[3], a.dtype) * other
    slack = 4 * torch.finfo(a.dtype).eps * lengths.sum(2).square()
    return ((aa * bb).sum((2, 3)).clamp(min=0) + slack).sum(1)


def exact(a: Tensor, b: Tensor) -> Tensor:
    """The same in float64, where half precision's products are exact, of one block: a [sample, position, p]."""
    return _twin(a[:, None].double(), b[:, None].double()).float()


_operator = torch.library.custom_op(
    "clipwise::gram_sq_norm", exact, mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor"
)


@_operator.register_fake
def _fake(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], dtype=torch.float32)


@_operator.register_kernel("cuda")
def _cuda(a: Tensor, b: Tensor) -> Tensor:
    able = triton is not None and torch.cuda.get_device_capability(a.device) >= (8, 0)
    if not able or a.dtype not in HALF or a.shape[0] == 0:  # float32 would be rounded to TF32
        return exact(a, b)
    a, b = a.contiguous(), b.contiguous()
    tiles = candidates(a.shape[1])
    with torch.cuda.device(a.device):
        return launch(
            a, b, best_tile(("gram", a.shape[1:], b.shape[1:]), a, tiles, partial(_agrees, a, b), launch, a, b)
        )


def _agrees(a: Tensor, b: Tensor, tile: Tile) -> bool:
    some = like_random(a[:2]), like_random(b[:2])
    expected = exact(*some)
    return bool((launch(*some, tile) - expected).norm() <= 1e-3 * expected.norm())


@dataclass(frozen=True)
class Tile:
    """What one program takes at a time: a choice of speed, never of result (but for the last bits)."""

    block: int  # positions, of the rows and of the columns of both Gram matrices
    deep: int  # features
    warps: int
    stages: int


def candidates(positions: int) -> list[Tile]:
    """Tiles worth trying: small ones make more programs, large ones read less."""
    tiles = [Tile(64, 64, 4, 4), Tile(128, 64, 8, 3), Tile(32, 128, 4, 4)]
    most = power(positions, 16, 128)
    return [tile for tile in tiles if tile.block <= most] or [Tile(most, 64, 4, 4)]


def launch(a: Tensor, b: Tensor, tile: Tile) -> Tensor:
    """The kernel with one tile, for contiguous a [sample, position, p] and b [sample, position, q]."""
    side = -(-a.shape[1] // tile.block)
    pairs = side * (side + 1) // 2  # both matrices are symmetric: tiles on and below the diagonal are enough
    sums = torch.empty(2, a.shape[0], pairs, dtype=torch.float32, device=a.device)
    options = asdict(tile)
    warps, stages = options.pop("warps"), options.pop("stages")
    _kernel[(a.shape[0] * pairs,)](
        a, b, sums, a.shape[0] * pairs, positions=a.shape[1], p=a.shape[2], q=b.shape[2], pairs=pairs, slack=SLACK,
        lost_a=lost(a.shape[2]), lost_b=lost(b.shape[2]), **options, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return added_up(*sums.unbind(0))


def added_up(products: Tensor, lengths: Tensor) -> Tensor:
    """A sample's result from what its programs stored, [sample, pair]: by one launch, or by none. [sample]."""
    samples, pairs = products.shape
    if pairs == 1:  # the program has finished it
        return products[:, 0]
    if pairs > MOST_PAIRS:  # more than one program of the kernel below holds
        products, lengths = products.sum(1), lengths.sum(1)
        return torch.where(products < 0, 0.0, products) + SLACK * lengths.square()
    out = torch.empty(samples, dtype=torch.float32, device=products.device)
    _add_up_kernel[(samples,)](products, lengths, out, pairs=pairs, block=power(pairs, 16, MOST_PAIRS), slack=SLACK)
    return out


@jit
def finished(products, lengths, slack: constexpr):  # type: ignore[no-untyped-def]
    """‖v‖² with what rounding may have taken. NaN stays; −∞ becomes 0, but then the square overflows, too."""
    return tl.where(products < 0.0, 0.0, products) + slack * (lengths * lengths)


@jit
def _add_up_kernel(products, lengths, out, pairs: constexpr, block: constexpr, slack: constexpr):  # type: ignore[no-untyped-def]
    """One program: a sample."""
    sample = tl.program_id(0)
    pair = tl.arange(0, block)
    own = sample.to(tl.int64) * pairs + pair
    product = tl.sum(tl.load(products + own, mask=pair < pairs, other=0.0))
    length = tl.sum(tl.load(lengths + own, mask=pair < pairs, other=0.0))
    tl.store(out + sample, finished(product, length, slack))


@jit
def tile_of(pair):  # type: ignore[no-untyped-def]
    """Row and column of a tile on or below the diagonal: pair = down (down + 1)/2 + along."""
    down = 0
    row = 1
    while row * (row + 1) // 2 <= pair:
        down += 1
        row += 1
    return down, pair - down * (down + 1) // 2


@jit
def gram_tile(  # type: ignore[no-untyped-def]
    rows, down, along, positions: constexpr, features: constexpr, block: constexpr, deep: constexpr
):  # fmt: skip
    """Tile (down, along) of the Gram matrix of rows [position, feature]; read once where it is the only one."""
    product = tl.zeros([block, block], tl.float32)
    feature = tl.arange(0, deep)
    first = down * block + tl.arange(0, block)
    second = along * block + tl.arange(0, block)
    for start in range(0, features, deep):
        real = start + feature < features
        left = tl.load(
            rows + first[:, None] * features + (start + feature)[None, :],
            mask=(first < positions)[:, None] & real[None, :],
            other=0.0,
        )
        if positions <= block:
            product = tl.dot(left, tl.trans(left), product)
        else:
            right = tl.load(
                rows + second[:, None] * features + (start + feature)[None, :],
                mask=(second < positions)[:, None] & real[None, :],
                other=0.0,
            )
            product = tl.dot(left, tl.trans(right), product)
    return product


@jit
def _kernel(  # type: ignore[no-untyped-def]
    a, b, partial, programs, positions: constexpr, p: constexpr, q: constexpr, pairs: constexpr, slack: constexpr,
    lost_a: constexpr, lost_b: constexpr, block: constexpr, deep: constexpr,
):  # fmt: skip
    """One program: a sample, and one tile of both its Gram matrices."""
    program = tl.program_id(0)
    sample = (program // pairs).to(tl.int64)
    down, along = tile_of(program % pairs)
    aa = gram_tile(a + sample * (positions * p), down, along, positions, p, block, deep)
    bb = gram_tile(b + sample * (positions * q), down, along, positions, q, block, deep)
    keep_tile(partial, program, programs, aa, bb, down == along, lost_a, lost_b, pairs, slack, block)


@jit
def keep_tile(  # type: ignore[no-untyped-def]
    sums, place, programs, aa, bb, diagonal, lost_a, lost_b, pairs: constexpr, slack: constexpr, block: constexpr
):  # fmt: skip
    """Store what is kept of a tile of both Gram matrices: ⟨aa, bb⟩ and, for rounding, Σ_s ‖a_s‖‖b_s‖."""
    products = tl.where(diagonal, 1.0, 2.0) * tl.sum(aa * bb)
    # the lengths from the diagonals, and with them what either matrix may have lost
    same = tl.arange(0, block)[:, None] == tl.arange(0, block)[None, :]
    one, other = tl.sqrt(tl.maximum(aa, 0.0)), tl.sqrt(tl.maximum(bb, 0.0))
    lengths = tl.sum(tl.where(same, one * other + lost_b * one + lost_a * other, 0.0))
    if pairs == 1:
        tl.store(sums + place, finished(products, lengths, slack))
    else:
        tl.store(sums + place, products)
        tl.store(sums + programs + place, tl.where(diagonal, lengths, 0.0))
