"""A data set of a user's own, as tests write it in one line.

Receives: how many samples there are, and what makes one of its number.
Gives: Made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.data import Dataset


class Made(Dataset[Any]):
    """So many samples, each made of its number."""

    def __init__(self, samples: int, make: Callable[[int], Any]) -> None:
        self.samples, self.make = samples, make

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> Any:
        return self.make(index)
