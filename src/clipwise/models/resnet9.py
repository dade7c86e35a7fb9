"""A residual network of nine layers with ScaleNorm.

Receives: the number of classes and of channels.
Gives: resnet9, Klause et al.'s network, which normalises once more after each residual addition.
"""

from __future__ import annotations

from torch import Tensor, nn

GROUPS = 32


def _layer(inputs: int, outputs: int, *, pool: bool = False) -> nn.Sequential:
    """Convolution, GroupNorm, Mish, and perhaps a pool that halves the image."""
    layers = (
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.GroupNorm(min(GROUPS, outputs), outputs),
        nn.Mish(),
    )
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


class _Residual(nn.Module):
    """GN(x + layer(layer(x))): the norm after the addition is ScaleNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(_layer(width, width), _layer(width, width))
        self.scale_norm = nn.GroupNorm(min(GROUPS, width), width)

    def forward(self, images: Tensor) -> Tensor:
        normalised: Tensor = self.scale_norm(images + self.layers(images))
        return normalised


def resnet9(classes: int = 10, channels: int = 3) -> nn.Module:
    """Klause et al.'s ResNet-9: 2 448 714 parameters with ten classes and three channels."""
    return nn.Sequential(
        _layer(channels, 64),
        _layer(64, 128, pool=True),
        _Residual(128),
        _layer(128, 256, pool=True),
        _layer(256, 256, pool=True),
        _Residual(256),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, classes),
    )
