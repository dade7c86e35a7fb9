"""Gaussian noise on a CPU in one pass, by compiled code (``cpu_noise.c``), where a compiler was there to build it.

Receives: tensors with their scales, and block by block the words of a cipher.
Gives: built: whether the code is there; Table: tensors to which it adds noise, for results in float32.

Where it is not, ``randomness`` does the same with PyTorch's operations, in more than twice the time (decision 3).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class _Row(ctypes.Structure):
    """A tensor as the code reads it."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("first", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("scale", ctypes.c_double),
    )


def _loaded() -> Any:
    """The code's one function; None where it was not built, or not for this machine."""
    found = find_spec("clipwise._cpu_noise")
    if found is None or found.origin is None:
        return None
    try:
        add = ctypes.CDLL(found.origin).clipwise_noisy
    except (OSError, AttributeError):
        return None
    add.restype = None
    words, start, count, tensors = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.POINTER(_Row)
    add.argtypes = [words, start, count, tensors, ctypes.c_int, ctypes.c_double]
    return add


_add = _loaded()


def built() -> bool:
    """Whether the code is there."""
    return _add is not None


class Table:
    """Tensors, and behind one another the results, (value + scale · z)/divisor in float32, computed in float64."""

    def __init__(self, values: Sequence[Tensor], scales: Sequence[float], divisor: float) -> None:
        self.shapes, self.devices = [value.shape for value in values], [value.device for value in values]
        self.wide = any(value.dtype != torch.float32 for value in values)
        kind = torch.float64 if self.wide else torch.float32
        self.values = [value.detach().to("cpu", kind).contiguous() for value in values]
        self.sizes = [value.numel() for value in values]
        self.count, self.divisor = sum(self.sizes), divisor
        self.out = torch.empty(self.count, dtype=torch.float32, device="cpu")
        rows, first = [], 0
        for value, size, scale in zip(self.values, self.sizes, scales, strict=True):
            rows.append(_Row(value.data_ptr(), self.out.data_ptr() + 4 * first, first, size, scale))
            first += size
        self.rows = (_Row * len(rows))(*rows)

    def add(self, words: NDArray[np.int32], piece: slice) -> int:
        """Write these of the results, of five words for every two; how many they are. Threads may do so at once."""
        count = piece.stop - piece.start
        if len(words) != 5 * ((count + 1) // 2) or not 0 <= piece.start < piece.stop <= self.count:
            raise ValueError(
                f"expected words for some of {self.count} numbers, five for every two: got {len(words)} for "
                f"{piece.start} to {piece.stop}"
            )
        _add(words.ctypes.data, piece.start, count, self.rows, self.wide, self.divisor)
        return count

    def results(self) -> list[Tensor]:
        """What was written, as the tensors were."""
        pieces = zip(self.out.split(self.sizes), self.shapes, self.devices, strict=True)
        return [piece.view(shape).to(device) for piece, shape, device in pieces]
