"""Streams of known noise, or that note what is drawn.

Receives: what a release asks of a stream.
Gives: noise that is its own scale; how many normals were asked for, and whether they would be rounded.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from clipwise.randomness import SeededStream


class Ones(SeededStream):
    """A stream whose noise is its own scale, and so has its root mean square length in every draw."""

    _noisy_here = SeededStream._noisy_plain  # which asks for the normals

    def _normals(self, count: int, narrow: bool) -> Iterator[tuple[slice, Tensor]]:
        yield slice(0, count), torch.ones(count, dtype=torch.float64)


class Noting(SeededStream):
    """A seeded stream that notes each draw: how many normals, and whether what they are added to is rounded."""

    _noisy_here = SeededStream._noisy_plain

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.drawn: list[tuple[int, bool]] = []

    def _normals(self, count: int, narrow: bool) -> Iterator[tuple[slice, Tensor]]:
        self.drawn.append((count, narrow))
        return super()._normals(count, narrow)
