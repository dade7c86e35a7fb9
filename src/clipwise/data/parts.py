"""Samples that hold what others hold, as copies: windows that slide over a series, and pairs of people.

Receives: data sets, of which the first samples are compared.
Gives: warn_of_parts.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipwise.data.copies import TELLING, telling, tensors_of
from clipwise.data.datasets import Arrays, RowDataset, Samples
from clipwise.types import warn

OF_ARRAYS, OF_SAMPLES = 256, 64  # samples that are looked at; others have to be read
Part = NDArray[np.float32]


def warn_of_parts(data: RowDataset, seeded: Callable[[int], object]) -> None:
    """Warn where a sample holds a part of another one: a window further on, or another place in a pair or triplet.

    Edge cases: what every sample holds in the same place is a constant. In large data that are in no order, partners
    that are drawn at random are seldom among so few samples.
    """
    samples = _first(data, seeded)
    if (found := _partner(samples) or _window(samples)) is not None:
        sample, of, how = found
        warn(f"sample {sample} of the data holds what sample {of} holds, number for number: {how}")


PAIRED = (
    "in pairs or triplets of samples one person moves the terms of all that they are in, and ε is for one; put each "
    "person into one sample, or compare with public samples"
)
SLIDING = (
    "if windows slide over a series, what one person gave stands in several rows, and ε is for one; cut windows that "
    "do not overlap, or write rows_per_person=in how many they may be"
)


def _first(data: RowDataset, seeded: Callable[[int], object]) -> list[list[Part]]:
    """The parts of the first samples that are fractions."""
    if isinstance(data, Arrays):
        items = [data[i] for i in range(min(len(data), OF_ARRAYS))]
    elif isinstance(data, Samples):
        seeded(0)
        items = [data.dataset[i] for i in range(min(len(data), OF_SAMPLES))]
    else:
        return []
    return [[_numbers(part) for part in tensors_of(item) if part.is_floating_point()] for item in items]


def _numbers(part: Tensor) -> Part:
    found: Part = part.detach().to("cpu", torch.float32).contiguous().numpy()
    return found


def _partner(samples: list[list[Part]]) -> tuple[int, int, str] | None:
    known: dict[int, tuple[int, int]] = {}  # the sample that holds it, and where
    for sample, parts in enumerate(samples):
        for place, part in enumerate(parts):
            of, there = known.setdefault(hash(part.tobytes()), (sample, place))
            if of != sample and there != place and telling(part):
                return sample, of, PAIRED
    return None


def _window(samples: list[list[Part]]) -> tuple[int, int, str] | None:
    """A sample in whose first part another one's begins, further on."""
    firsts = [(sample, parts[0]) for sample, parts in enumerate(samples) if parts and parts[0].ndim and parts[0].size]
    begin = {hash(part[: _steps(part)].tobytes()): sample for sample, part in firsts}
    for sample, part in firsts:
        steps = _steps(part)
        for start in range(1, len(part) - steps + 1):
            piece = part[start : start + steps]
            of = begin.get(hash(piece.tobytes()), sample)
            if of != sample and telling(piece):
                return sample, of, SLIDING
    return None


def _steps(part: Part) -> int:
    """Of a series, so many as tell two apart."""
    return -(-TELLING // part[0].size)
