"""Streams of known noise, or that note what is drawn.

Receives: what a release asks of a stream.
Gives: noise that is its own scale; how many normals were asked for, and whether they would be rounded.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from clipwise.randomness import SeededStream

Take = Callable[[slice, NDArray[np.float64]], None]


class Ones(SeededStream):
    """A stream whose noise is its own scale, and so has its root mean square length in every draw."""

    def _draw(self, count: int, narrow: bool, take: Take) -> None:
        take(slice(0, count), np.ones(count))


class Noting(SeededStream):
    """A seeded stream that notes each draw: how many normals, and whether what they are added to is rounded."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.drawn: list[tuple[int, bool]] = []

    def _draw(self, count: int, narrow: bool, take: Take) -> None:
        self.drawn.append((count, narrow))
        super()._draw(count, narrow, take)
