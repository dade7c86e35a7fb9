"""A named data set in two parts, and rules for choosing rows that look at a row's number alone.

Receives: inputs and labels as tensors.
Gives: Splits; divided, which gives one row in five to the test; taken, the first rows in a fixed order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from clipwise.data.datasets import Arrays, Prepare
from clipwise.types import InputError

Task = Literal["classes", "regression"]


@dataclass(frozen=True)
class Splits:
    """A named data set: ``train`` is private, ``test`` only measures; batches are tuples (x, y).

    With task "regression" y is float32 of shape [n], and a model needs one output.
    """

    name: str
    train: Arrays
    test: Arrays
    classes: int  # 1 for regression: the number of outputs
    shape: tuple[int, ...]  # of one x
    task: Task = "classes"
    vocabulary: int | None = None  # of tokens, where the loader knows it: they are 0 … vocabulary − 1
    unit: float = 1.0  # of a regression's y: what a difference of 1 is in the file's own numbers

    @property
    def tokens(self) -> bool:
        """Whether x are whole numbers, for models of tokens."""
        return not self.train.rows(torch.arange(1))[0].is_floating_point()

    def to(self, device: torch.device) -> Splits:
        """Both parts on that device."""
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def divided(name: str, x: Tensor, y: Tensor, prepare: Prepare | None = None) -> tuple[Arrays, Arrays]:
    """Of every five rows, one for the test: which one is fixed, so that adding a row moves no other row."""
    if len(x) < 5:
        raise InputError(f"{name} must have at least 5 rows to be split, got {len(x)}: add rows, or a test part")
    fives = -(-len(x) // 5)
    chosen = 5 * np.arange(fives) + np.random.RandomState(0).randint(5, size=fives)
    test = torch.zeros(5 * fives, dtype=torch.bool)
    test[torch.from_numpy(chosen)] = True
    test = test[: len(x)]
    return Arrays((x[~test], y[~test]), prepare), Arrays((x[test], y[test]), prepare)


def shuffled(rows: int) -> Tensor:
    """All row numbers in a fixed order that knows nothing of the data.

    Each row number has a key of its own, whatever the number of rows, and the keys are sorted: one more row enters at
    some place, and the others keep theirs.
    """
    return torch.from_numpy(np.argsort(np.random.RandomState(1).random_sample(rows), kind="stable"))


def taken(name: str, part: Arrays, rows: int) -> Arrays:
    """The first ``rows`` rows in the fixed order: fewer rows are a subset of more."""
    if rows > len(part):
        raise InputError(f"{name} must be at most the {len(part)} rows that there are, got {rows}: write less")
    return part.take(shuffled(len(part))[:rows])
