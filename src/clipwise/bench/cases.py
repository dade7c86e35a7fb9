"""The rows of the bench: a model, a fixed random batch, and the settings that every column shares.

Receives: names of rows.
Gives: CASES and GPU_CASES (name → Case), and Case, from which a column makes its step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.models import gru, lstm_classifier, mnist_cnn, resnet20_gn, small_transformer, vit_small

VOCABULARY = 10_000
GPT2_VOCABULARY = 50_257


def on_gpu(device: str) -> bool:
    """Whether this device has the rows and columns of a GPU."""
    return device.split(":")[0] == "cuda"


@dataclass(frozen=True)
class Case:
    """One row: every column trains the same initial model on the same batch with the same settings.

    ``vocabulary`` is the number of different tokens, or 0 where samples are images of ``shape``; ``next_token``: each
    token's label is the next one, and a sample's loss is the mean over its tokens.
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
    next_token: bool = False
    device: str = "cpu"
    narrow: bool = False  # bfloat16 autocast
    compile: bool = False  # the steps of methods

    def model(self) -> nn.Module:
        """A fresh model, the same at each call and in each process; the caller's random state is kept."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return self.factory().to(self.device)

    def data(self) -> tuple[Tensor, Tensor]:
        """Random inputs and labels, the same at each call."""
        generator = torch.Generator().manual_seed(1)
        size = (self.batch, *self.shape)
        if self.vocabulary:
            inputs = torch.randint(self.vocabulary, size, generator=generator)
        else:
            inputs = torch.randn(size, generator=generator)
        labels = inputs[:, 1:] if self.next_token else torch.randint(self.classes, (self.batch,), generator=generator)
        return inputs.to(self.device), labels.to(self.device)

    def losses(self, model: nn.Module, batch: Any) -> Tensor:
        """One cross-entropy per sample, in the case's precision."""
        with self.precision():
            return losses(model, batch)

    def precision(self) -> torch.autocast:
        """What the model computes in, as a context: bfloat16 where the case is ``narrow``."""
        return torch.autocast(self.device.split(":")[0], torch.bfloat16, enabled=self.narrow)


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One cross-entropy per sample."""
    inputs, labels = batch
    each = F.cross_entropy(model(inputs), labels, reduction="none")
    return each if each.dim() == 1 else each.flatten(1).mean(1)


CASES: dict[str, Case] = {
    "mnist_cnn": Case("MNIST CNN", 256, (1, 28, 28), mnist_cnn, 10),
    "resnet20_gn": Case("ResNet-20 GroupNorm", 64, (3, 32, 32), resnet20_gn, 10),
    "small_transformer": Case(
        "transformer, 64 tokens", 64, (64,), partial(small_transformer, VOCABULARY), 2, VOCABULARY
    ),
    "lstm": Case("LSTM, 50 tokens", 64, (50,), partial(lstm_classifier, VOCABULARY), 2, VOCABULARY),
}


class _Wide(nn.Module):
    """A block of a wide residual network with plain convolutions, since Opacus knows no standardised ones."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(16, inputs), nn.Conv2d(inputs, outputs, 3, stride, 1)
        self.norm2, self.conv2 = nn.GroupNorm(16, outputs), nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm1(F.relu(x))
        beside = x if self.shortcut is None else self.shortcut(hidden)
        moved: Tensor = self.conv2(self.norm2(F.relu(self.conv1(hidden))))
        return beside + moved


def _wrn_16_4() -> nn.Module:
    layers, inputs = [nn.Conv2d(3, 16, 3, 1, 1)], 16
    blocks = list[nn.Module](layers)
    for outputs, stride in ((64, 1), (128, 2), (256, 2)):
        for first in (True, False):
            blocks.append(_Wide(inputs, outputs, stride if first else 1))
            inputs = outputs
    end = (nn.ReLU(), nn.GroupNorm(16, inputs), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, 10))
    return nn.Sequential(*blocks, *end)


class _Language(nn.Module):
    """GPT-2 small with its tied head: the logits of every next token. [sample, token kind, place]."""

    def __init__(self) -> None:
        super().__init__()
        library: Any = import_module("transformers")
        still = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        self.body = library.GPT2LMHeadModel(library.GPT2Config(use_cache=False, **still))

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.body(input_ids=tokens).logits
        return logits[:, :-1].transpose(1, 2)


_gpt2 = partial(Case, factory=_Language, classes=GPT2_VOCABULARY, vocabulary=GPT2_VOCABULARY, next_token=True)
GPU_CASES: dict[str, Case] = {
    "mnist_cnn": Case("MNIST CNN", 2000, (1, 28, 28), mnist_cnn, 10),
    "resnet20_gn": Case("ResNet-20 GroupNorm", 1000, (3, 32, 32), resnet20_gn, 10),
    "wrn_16_4": Case("WRN-16-4 GroupNorm", 512, (3, 32, 32), _wrn_16_4, 10),
    "vit_small": Case("ViT-small, 224²", 128, (3, 224, 224), partial(vit_small, 224, classes=1000), 1000),
    "gpt2_128": _gpt2("GPT-2 small, 128 tokens", 32, (128,)),
    "gpt2_1024": _gpt2("GPT-2 small, 1024 tokens", 8, (1024,)),
    "gru": Case("GRU, 256 tokens", 2000, (256,), partial(gru, VOCABULARY), 2, VOCABULARY),
}
