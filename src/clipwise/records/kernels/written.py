"""What gradients in half precision are written by and read with, on a GPU: no wide copy, no number rounded twice.

Receives: a layer's factors [sample, position, feature]; or rows of half precision, with or without weights.
Gives: outer_dense: every sample's Σ_s b_s a_sᵀ in its factors' format; rows_total: Σ_i w_i v_i; positions_total: each
sample's sum over positions. Operators that compilers see as one node, and do not take apart or pad.
"""

from __future__ import annotations

import torch
from torch import Tensor

from clipwise.jit import constexpr, jit, tl, triton
from clipwise.records import forms
from clipwise.records.kernels.tiles import power

TILE = 4096  # numbers that a program reads at once, of as many rows as that makes
NARROW, WIDE = 32, 512  # of each row
LONG, FEW = 1024, 8  # of rows with weights: eight numbers for each thread, which adds up the rows alone
PROCESSORS = 132  # of a large device
PROGRAMS = 8 * PROCESSORS  # what is read must be under way before it is needed


def outer_dense(a: Tensor, b: Tensor) -> Tensor:
    """Σ_s b_s a_sᵀ of a [sample, position, p] and b [sample, position, q], rounded once, to their format.

    Rows may have gaps between them, as padded ones have. Gives [sample, q, p].
    """
    return _outer(a, b)


def rows_total(rows: Tensor, weights: Tensor) -> Tensor:
    """Σ_i w_i v_i of rows [sample, number], accumulated in float32: no weight is rounded to their format. [number].

    Rows may have gaps between them.
    Guarantees: no atomics, so that the same input gives the same bits. Edge cases: no samples give zeros.
    """
    return _total(rows[None], weights.float()[None].contiguous())[0]


def positions_total(rows: Tensor) -> Tensor:
    """Σ_s b_s of rows [sample, position, feature], accumulated in float32. [sample, feature].

    A compiler would add up while it computes the rows, in an order that makes reading them slow.
    """
    return _total(rows, None)


def _twin_outer(a: Tensor, b: Tensor) -> Tensor:
    return b.mT @ a


def _twin_total(rows: Tensor, weights: Tensor | None) -> Tensor:
    # a few numbers at a time, of all rows
    step = max(1, forms.CUDA_STREAM_FLOATS // max(1, rows.shape[0] * rows.shape[1]))
    parts = (some.float() for some in rows.split(step, 2))
    if weights is None:
        return torch.cat([some.sum(1) for some in parts], 1)
    return torch.cat([torch.einsum("ij,ijk->ik", weights, some) for some in parts], 1)


_outer = torch.library.custom_op(
    "clipwise::outer_dense", _twin_outer, mutates_args=(), schema="(Tensor a, Tensor b) -> Tensor"
)
_total = torch.library.custom_op(
    "clipwise::rows_total", _twin_total, mutates_args=(), schema="(Tensor rows, Tensor? weights) -> Tensor"
)


@_outer.register_fake
def _fake_outer(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[2], a.shape[2])


@_total.register_fake
def _fake_total(rows: Tensor, weights: Tensor | None) -> Tensor:
    return rows.new_empty(rows.shape[0], rows.shape[2], dtype=torch.float32)


@_total.register_kernel("cuda")
def _cuda_total(rows: Tensor, weights: Tensor | None) -> Tensor:
    return _twin_total(rows, weights) if triton is None or not rows.numel() else launch_total(rows, weights)


def launch_total(rows: Tensor, weights: Tensor | None) -> Tensor:
    """The kernel, for rows [batch, row, number] and float32 weights [batch, row]."""
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    batch, count, size = rows.shape
    block, rows_each = (LONG, FEW) if weights is not None else _short(batch, count, size)
    across, tiles = -(-size // block), -(-count // rows_each)
    parts = max(1, min(tiles, PROCESSORS // (across * batch)))  # of the rows, each with a sum of its own
    each = -(-tiles // parts) * rows_each
    warps = 8 if weights is None and across * batch * parts < PROGRAMS * 2 // 3 else 4
    out = torch.empty(batch, parts, size, dtype=torch.float32, device=rows.device)
    with torch.cuda.device_of(rows):
        _total_kernel[(across * batch, parts)](  # only the first may be large
            rows, rows if weights is None else weights, out, count, size, each, rows.stride(0), rows.stride(1),
            weighted=weights is not None, rows_each=rows_each, block=block, num_warps=warps,
        )  # fmt: skip
    return out.sum(1) if parts > 1 else out[:, 0]


def _short(batch: int, count: int, size: int) -> tuple[int, int]:
    """How many numbers, and of how many rows, a program reads at once where there are many rows."""
    least = min(WIDE, max(NARROW, TILE // power(count, 1, TILE)))  # so that no tile has more rows than there are
    block = WIDE
    while block > least and batch * -(-size // block) < PROGRAMS:
        block //= 2
    return block, TILE // block


@jit
def _total_kernel(  # type: ignore[no-untyped-def]
    rows, weights, out, count, size, each, batch_step, row_step,
    weighted: constexpr, rows_each: constexpr, block: constexpr,
):  # fmt: skip
    """One program: some numbers of a row, and their sum over some of the rows."""
    across, part = tl.cdiv(size, block), tl.program_id(1)
    number, batch = tl.program_id(0) % across * block + tl.arange(0, block), (tl.program_id(0) // across).to(tl.int64)
    row = part * each + tl.arange(0, rows_each)
    last = tl.minimum(part * each + each, count)
    rows += batch * batch_step
    total = tl.zeros([rows_each, block], tl.float32)
    for _ in range(0, each, rows_each):
        place = row.to(tl.int64)[:, None] * row_step + number[None, :]
        value = tl.load(rows + place, mask=(row < last)[:, None] & (number < size)[None, :], other=0.0).to(tl.float32)
        if weighted:
            weight = tl.load(weights + batch * count + row, mask=row < last, other=0.0)
            value *= weight[:, None]
        total += value
        row += rows_each
    out += (batch * tl.num_programs(1) + part) * size
    tl.store(out + number, tl.sum(total, axis=0), mask=number < size)
