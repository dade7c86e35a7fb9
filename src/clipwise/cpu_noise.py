"""Gaussian noise on a CPU in one pass, by compiled code (``cpu_noise.c``), where a compiler was there to build it.

Receives: tensors with their scales, and block by block the words of a cipher.
Gives: built: whether the code is there; Table: tensors to which it adds noise, for results in float32; at_once, which
does so in several threads.

Where it is not, ``randomness`` does the same with PyTorch's operations, in several times the time (decision 3).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
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


def at_once(work: Callable[[], None], threads: int) -> None:
    """Call ``work`` in so many threads, or in this one alone; what it raises is raised here.

    They are PyTorch's: after an operation its threads spin for milliseconds, and for as long one of our own would wait
    for a core. Where OpenMP is not GNU's, as on Windows, they cannot be had.
    """
    failed: list[BaseException] = []

    def kept(_: object) -> None:
        try:
            work()
        except BaseException as error:  # a callback's would only be printed, and Ctrl-C lost
            failed.append(error)

    if threads > 1 and _parallel is not None:
        _parallel(ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kept), None, threads, 0)
    else:
        kept(None)
    if failed:
        raise failed[0]


def _openmp() -> Any:
    """What runs a function in all threads of the OpenMP that PyTorch uses; None where that is another's."""
    try:
        return ctypes.CDLL(None).GOMP_parallel  # PyTorch has made its symbols everybody's
    except (OSError, AttributeError, TypeError):
        return None


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
_parallel = _openmp()


def built() -> bool:
    """Whether the code is there."""
    return _add is not None


class Table:
    """Tensors, and beside them the results, (value + scale · z)/divisor in float32, computed in float64."""

    def __init__(self, values: Sequence[Tensor], scales: Sequence[float], divisor: float) -> None:
        self.wide = any(value.dtype != torch.float32 for value in values)
        kind = torch.float64 if self.wide else torch.float32
        self.values = [value.detach().to("cpu", kind).contiguous() for value in values]
        self.out = [torch.empty(value.shape, dtype=torch.float32, device="cpu") for value in values]
        self.count, self.factor = 0, 1.0 / divisor
        rows = []
        for value, out, scale in zip(self.values, self.out, scales, strict=True):
            size = value.numel()
            rows.append(_Row(value.data_ptr(), out.data_ptr(), self.count, size, scale))
            self.count += size
        self.rows = (_Row * len(rows))(*rows)

    def add(self, words: NDArray[np.int32], piece: slice) -> int:
        """Write these of the results, of five words for every two; how many they are. Threads may do so at once."""
        count = piece.stop - piece.start
        if len(words) != 5 * ((count + 1) // 2) or not 0 <= piece.start < piece.stop <= self.count:
            raise ValueError(
                f"expected words for some of {self.count} numbers, five for every two: got {len(words)} for "
                f"{piece.start} to {piece.stop}"
            )
        _add(words.ctypes.data, piece.start, count, self.rows, self.wide, self.factor)
        return count
