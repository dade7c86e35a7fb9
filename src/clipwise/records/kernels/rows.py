"""Rows of many tensors set to zero in place, by one launch that costs nothing where there is none to set.

Receives: tensors that stay where they are, such as the results of a CUDA graph, with a row for each sample; then, as
often as one likes, which rows to keep.
Gives: ZeroRows, a Triton kernel behind a table of the tensors' places; ``zero_rows`` makes one where that is possible.

A sample that is not finite must add exactly nothing to a sum, and nothing is 0 · inf. Asking the device whether there
is such a sample would make the host wait in every step; this kernel lets the device see to it itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from clipwise.jit import constexpr, jit, tl, triton

AXES = 7  # the bytes of a number, and those of a tensor
BLOCK = 1024
PROGRAMS = 264  # two for each processor of a large device: they seldom have anything to do


class ZeroRows:
    """Sets rows of all these tensors to zero: call it with a mask of the rows to keep, bool [row]."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)  # kept alive, for the table points at them
        lines = [_line(t) for t in self.tensors]
        self._table = torch.tensor(lines, dtype=torch.long).to(self.tensors[0].device)

    def __call__(self, keep: Tensor) -> None:
        """Zero where not ``keep``; a CUDA graph can record it."""
        with torch.cuda.device_of(keep):
            _zero_kernel[(PROGRAMS,)](self._table, keep, len(self.tensors), len(keep), axes=AXES, block=BLOCK)


def zero_rows(tensors: Sequence[Tensor], rows: int, beside: Iterable[Tensor]) -> ZeroRows | None:
    """What sets some of so many rows to zero; None where it cannot, or could touch the memory of those ``beside``.

    Whole numbers are left as they are: they are always finite.
    """
    floats = [t for t in tensors if t.is_floating_point() and t.numel()]
    taken = {t.untyped_storage().data_ptr() for t in beside}
    if triton is None or not floats or not all(t.is_cuda and len(t) == rows and _apart(t) for t in floats):
        return None
    if len({t.device for t in floats}) > 1:
        return None
    return None if any(t.untyped_storage().data_ptr() in taken for t in floats) else ZeroRows(floats)


def _apart(t: Tensor) -> bool:
    """Whether no number of a tensor is in two places, as it is where a row is repeated."""
    filled = 1
    for stride, size in sorted(zip(t.stride(), t.shape, strict=True)):
        if size > 1:
            if stride < filled:
                return False
            filled += stride * (size - 1)
    return 1 <= t.dim() < AXES


def _line(t: Tensor) -> list[int]:
    """[address, bytes in all, (size, stride in bytes) of each axis from the bytes of a number to the rows]."""
    width = t.element_size()
    axes = [(width, 1), *((size, stride * width) for size, stride in zip(t.shape[::-1], t.stride()[::-1], strict=True))]
    axes += [(1, 0)] * (AXES - len(axes))
    return [t.data_ptr(), t.numel() * width, *(number for axis in axes for number in axis)]


@jit
def _zero_kernel(table, keep, tensors, rows, axes: constexpr, block: constexpr):  # type: ignore[no-untyped-def]
    """Every program looks for a row to set first: mostly there is none, and it is done."""
    lost, row = 0, 0
    while row < rows:
        some = row + tl.arange(0, block)
        lost += tl.sum((tl.load(keep + some, mask=some < rows, other=1) == 0).to(tl.int32))
        row += block
    if lost > 0:
        k = 0
        while k < tensors:
            line = table + k * (2 * axes + 2)
            place, size = tl.load(line).to(tl.pointer_type(tl.int8)), tl.load(line + 1)
            start = tl.program_id(0).to(tl.int64) * block
            while start < size:
                number = start + tl.arange(0, block)
                lost_here = tl.load(keep + number // (size // rows), mask=number < size, other=1) == 0
                if tl.sum(lost_here.to(tl.int32)) > 0:
                    offset = tl.zeros([block], tl.int64)
                    for axis in tl.static_range(axes):
                        length = tl.load(line + 2 + 2 * axis)
                        offset += number % length * tl.load(line + 3 + 2 * axis)
                        number = number // length
                    tl.store(place + offset, tl.zeros([block], tl.int8), mask=lost_here)
                start += tl.num_programs(0) * block
            k += 1
