"""A recurrent network that classifies sequences of tokens.

Receives: sizes.
Gives: lstm_classifier, one nn.LSTM between an embedding and a linear head on the last state.
"""

from __future__ import annotations

from torch import Tensor, nn


class _Classifier(nn.Module):
    """Embedding, LSTM, linear head."""

    def __init__(self, vocabulary: int, width: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, hidden, batch_first=True)
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(tokens))
        logits: Tensor = self.head(states[:, -1])
        return logits


def lstm_classifier(vocabulary: int, width: int = 100, hidden: int = 128, classes: int = 2) -> nn.Module:
    """A text classifier over sequences of any one length."""
    return _Classifier(vocabulary, width, hidden, classes)
