"""Small convolutional networks for grey images.

Receives: the number of classes.
Gives: mnist_cnn for 1×28×28 images, digits_cnn for the embedded 1×8×8 digits.
"""

from __future__ import annotations

from torch import nn


def mnist_cnn(classes: int = 10) -> nn.Module:
    """Tramèr and Boneh's MNIST network (ICLR 2021): 26 010 parameters with ten classes."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=2),  # [16, 13, 13]
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),  # [32, 5, 5]
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )


def digits_cnn(classes: int = 10) -> nn.Module:
    """A network for 1×8×8 digits: 2 762 parameters, because noise grows with their number and the data are few."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.Tanh(),
        nn.AvgPool2d(2),  # [16, 4, 4]
        nn.Flatten(),
        nn.Linear(256, classes),
    )
