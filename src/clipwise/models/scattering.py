"""Tramèr and Boneh's small networks on scattering features.

Receives: the shape of images, or of features made beforehand (``clipwise.data.scattering``).
Gives: scattering_linear, scattering_cnn and scattering_mnist_cnn; transformable, the shapes that they take.
"""

from __future__ import annotations

from torch import nn

from clipwise.data.scattering import CHANNELS, STEP, Scattering, fits

GROUPS = 27


def transformable(sides: tuple[int, ...]) -> dict[str, int] | None:
    """The sizes of images that can be transformed, or of features that already are; None for other shapes."""
    if len(sides) != 3:
        return None
    channels, *size = sides
    fitting = channels % CHANNELS == 0 or fits(*size)
    return {"channels": channels, "height": size[0], "width": size[1]} if fitting else None


def _front(channels: int, height: int, width: int, groups: int) -> tuple[list[nn.Module], int, int, int]:
    """What stands before a head, and the size of the features: images are transformed, features taken as they are.

    The norm is each sample's own, over groups of channels, so that no statistics of the data are needed.
    """
    first = list[nn.Module]()
    if channels % CHANNELS:
        first = [Scattering(height, width)]
        channels, height, width = CHANNELS * channels, height // STEP, width // STEP
    return [*first, nn.GroupNorm(groups, channels, affine=False)], channels, height, width


def scattering_linear(channels: int, height: int, width: int, classes: int = 10, groups: int = GROUPS) -> nn.Module:
    """Tramèr and Boneh's linear classifier: 155 530 parameters for CIFAR-10, 39 700 for MNIST."""
    front, channels, height, width = _front(channels, height, width, groups)
    return nn.Sequential(*front, nn.Flatten(), nn.Linear(channels * height * width, classes))


def scattering_cnn(channels: int, height: int, width: int, classes: int = 10, groups: int = GROUPS) -> nn.Module:
    """Tramèr and Boneh's CIFAR-10 network on scattering features: 187 210 parameters there."""
    front, channels, height, width = _front(channels, height, width, groups)
    return nn.Sequential(
        *front,
        nn.Conv2d(channels, 64, 3, padding=1),
        nn.Tanh(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(64 * (height // 2) * (width // 2), classes),
    )


def scattering_mnist_cnn(channels: int, height: int, width: int, classes: int = 10, groups: int = GROUPS) -> nn.Module:
    """Tramèr and Boneh's MNIST network on scattering features: 33 066 parameters there."""
    front, channels, height, width = _front(channels, height, width, groups)
    return nn.Sequential(
        *front,
        nn.Conv2d(channels, 16, 3, stride=2, padding=1),
        nn.Tanh(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(32 * -(-height // 2) * -(-width // 2), 32),
        nn.Tanh(),
        nn.Linear(32, classes),
    )
