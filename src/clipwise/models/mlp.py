"""A fully connected network.

Receives: sizes.
Gives: mlp, one hidden layer over flattened inputs.
"""

from __future__ import annotations

from torch import nn


def mlp(inputs: int, hidden: int = 64, classes: int = 10) -> nn.Module:
    """One hidden layer with tanh, whose bounded activations keep per-sample gradients bounded too."""
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, hidden), nn.Tanh(), nn.Linear(hidden, classes))
