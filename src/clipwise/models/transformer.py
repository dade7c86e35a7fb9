"""A small transformer that classifies sequences of tokens.

Receives: sizes.
Gives: small_transformer, made of PyTorch's own encoder layers and a position table that is a bare parameter.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from clipwise.types import InputError


class _Positions(nn.Module):
    """Adds a learned vector to each position."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.table = nn.Parameter(0.02 * torch.randn(length, width))

    def forward(self, hidden: Tensor) -> Tensor:
        tokens, length = hidden.shape[1], self.table.shape[0]
        if tokens > length:
            raise InputError(f"the model was built for at most {length} tokens, got {tokens}: write length={tokens}")
        return hidden + self.table[:tokens]


class _Classifier(nn.Module):
    """Encoder layers between an embedding and a linear head on the mean over positions."""

    def __init__(self, vocabulary: int, width: int, depth: int, heads: int, classes: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = _Positions(length, width)
        self.layers = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(width, heads, dim_feedforward=4 * width, dropout=0.0, batch_first=True)
                for _ in range(depth)
            )
        )
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.layers(self.positions(self.embedding(tokens)))
        logits: Tensor = self.head(hidden.mean(dim=1))
        return logits


def small_transformer(
    vocabulary: int, width: int = 128, depth: int = 2, heads: int = 4, classes: int = 2, length: int = 64
) -> nn.Module:
    """A text classifier over at most ``length`` tokens; dropout is 0, because noise is regularisation enough."""
    return _Classifier(vocabulary, width, depth, heads, classes, length)
