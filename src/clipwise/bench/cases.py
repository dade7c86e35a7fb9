"""The rows of the bench: a model, a fixed random batch, and the settings that every column shares.

Receives: names of rows.
Gives: CASES (name → Case), and Case, from which a column makes its step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.models import lstm_classifier, mnist_cnn, resnet20_gn, small_transformer

VOCABULARY = 10_000


@dataclass(frozen=True)
class Case:
    """One row: every column trains the same initial model on the same batch with the same settings.

    ``vocabulary`` is the number of different tokens, or 0 where samples are images of ``shape``.
    """

    title: str
    batch: int
    shape: tuple[int, ...]  # of one sample
    factory: Callable[[], nn.Module]
    classes: int
    vocabulary: int = 0
    clip_norm: float = 1.0
    noise_multiplier: float = 1.0
    learning_rate: float = 0.01

    def model(self) -> nn.Module:
        """A fresh model, the same at each call and in each process; the caller's random state is kept."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.factory()

    def data(self) -> tuple[Tensor, Tensor]:
        """Random inputs and labels, the same at each call."""
        generator = torch.Generator().manual_seed(1)
        size = (self.batch, *self.shape)
        if self.vocabulary:
            inputs = torch.randint(self.vocabulary, size, generator=generator)
        else:
            inputs = torch.randn(size, generator=generator)
        return inputs, torch.randint(self.classes, (self.batch,), generator=generator)


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One cross-entropy per sample."""
    inputs, labels = batch
    return F.cross_entropy(model(inputs), labels, reduction="none")


CASES: dict[str, Case] = {
    "mnist_cnn": Case("MNIST CNN", 256, (1, 28, 28), mnist_cnn, 10),
    "resnet20_gn": Case("ResNet-20 GroupNorm", 64, (3, 32, 32), resnet20_gn, 10),
    "small_transformer": Case(
        "transformer, 64 tokens", 64, (64,), partial(small_transformer, VOCABULARY), 2, VOCABULARY
    ),
    "lstm": Case("LSTM, 50 tokens", 64, (50,), partial(lstm_classifier, VOCABULARY), 2, VOCABULARY),
}
