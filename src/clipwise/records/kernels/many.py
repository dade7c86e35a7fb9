"""What kernels for many linear layers at once share: which factors they take, and where each of them lies.

Receives: layer inputs and output gradients [unit, position, feature], of as many units and positions each.
Gives: takes, check, fit: whether they can have a part; written_places: their addresses, where a kernel reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from clipwise.jit import jit, tl, triton
from clipwise.records.kernels.gram import HALF
from clipwise.types import InputError

BATCH = 16  # places of tensors that are written down by one launch


def takes(a: Tensor, b: Tensor) -> bool:
    """Whether a layer's factors [unit, position, feature] can have a part: rows begin where 16 bytes can be read.

    Tiles are fetched by the device itself, as Hopper's GPUs do and later ones.
    """
    able = triton is not None and a.is_cuda and torch.cuda.get_device_capability(a.device) >= (9, 0)
    return able and a.dtype in HALF and a.dtype == b.dtype and _readable(a) and _readable(b)


def _readable(t: Tensor) -> bool:
    after = len(t) == 1 or t.stride(0) == t.shape[1] * t.stride(1)  # units follow each other without gaps
    return t.numel() > 0 and t.stride(2) == 1 and t.stride(1) % 8 == 0 and t.stride(1) >= t.shape[2] and after


def check(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    """Refuse what is not a pair of factors for each layer: a kernel reads wherever these numbers point."""
    if not a or len(a) != len(b):
        raise InputError(f"expected as many a as b, and at least one, got {len(a)} and {len(b)}")
    for t in chain(a, b):
        if t.dim() != 3 or t.shape[:2] != a[0].shape[:2] or t.dtype != a[0].dtype:
            raise InputError("expected factors of one format with as many units and positions each")


def fit(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Whether a kernel can read all of them where they lie."""
    return all(map(takes, a, b)) and not any(t.data_ptr() % 16 for t in chain(a, b))


def written_places(a: Sequence[Tensor], b: Sequence[Tensor]) -> Tensor:
    """The addresses of a and b of each layer, one after the other.

    Written by a kernel: one that is recorded would read a copy from the host again at every replay.
    """
    factors = [t for pair in zip(a, b, strict=True) for t in pair]
    count = -(-len(factors) // BATCH) * BATCH
    factors += [factors[-1]] * (count - len(factors))
    places = torch.empty(count, dtype=torch.long, device=a[0].device)
    for first in range(0, count, BATCH):
        _places_kernel[(1,)](places, first, *factors[first : first + BATCH])
    if places.is_cuda:
        triton.set_allocator(_scratch)
    return places


def _scratch(size: int, alignment: int, stream: int | None) -> Tensor:
    """Where Triton keeps its descriptions of tensors while a kernel runs."""
    return torch.empty(size, dtype=torch.int8, device="cuda")


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
