"""Small convolutional networks.

Receives: the number of classes.
Gives: mnist_cnn and opacus_mnist for 1×28×28 images, cifar_cnn and cifar_tutorial for 3×32×32, digits_cnn for 1×8×8.
"""

from __future__ import annotations

from torch import nn


def mnist_cnn(classes: int = 10) -> nn.Module:
    """Tramèr and Boneh's MNIST network (ICLR 2021): 26 010 parameters with ten classes."""
    return _two_convolutions(classes, padding=2, activation=nn.Tanh)


def opacus_mnist(classes: int = 10) -> nn.Module:
    """The network of Opacus's MNIST example: the same sizes, but padding 3 and ReLU."""
    return _two_convolutions(classes, padding=3, activation=nn.ReLU)


def _two_convolutions(classes: int, padding: int, activation: type[nn.Module]) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=padding),  # [16, 13, 13], or 14 with padding 3
        activation(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),  # [32, 5, 5]
        activation(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        activation(),
        nn.Linear(32, classes),
    )


def cifar_cnn(classes: int = 10) -> nn.Module:
    """Tramèr and Boneh's CIFAR-10 network (ICLR 2021): 550 570 parameters with ten classes."""
    layers: list[nn.Module] = []
    inputs = 3
    for width in (32, 64, 128):
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.Tanh()]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
        inputs = width
    return nn.Sequential(
        *layers,
        nn.Flatten(),  # [128 · 4 · 4]
        nn.Linear(2048, 128),
        nn.Tanh(),
        nn.Linear(128, classes),
    )


def cifar_tutorial(classes: int = 10) -> nn.Module:
    """The CIFAR-10 network of PyTorch's tutorial, which Bu et al. (2023) train: 62 006 parameters with ten classes."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5),  # [6, 28, 28]
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),  # [16, 10, 10]
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
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
