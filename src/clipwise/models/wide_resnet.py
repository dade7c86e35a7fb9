"""Wide residual networks with standardised weights.

Receives: depth and width; the number of classes and of channels.
Gives: wide_resnet, De et al.'s network: activation, GroupNorm, then a convolution with gain and bias.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.models.standardise import StandardisedConv2d

GROUPS = 16
FIRST = 16  # channels after the first convolution


class _Layer(nn.Module):
    """conv(GN(relu x)), with the weight standardised and an affine norm."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, inputs)
        self.conv = _convolution(inputs, outputs, kernel, stride)

    def forward(self, images: Tensor) -> Tensor:
        convolved: Tensor = self.conv(self.norm(F.relu(images)))
        return convolved


class _Block(nn.Module):
    """Two layers and a shortcut; a stage's first block has a 1×1 layer in the shortcut, with a norm of its own."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(_Layer(inputs, outputs, stride=stride), _Layer(outputs, outputs))
        self.shortcut = nn.Identity() if inputs == outputs else _Layer(inputs, outputs, kernel=1, stride=stride)

    def forward(self, images: Tensor) -> Tensor:
        total: Tensor = self.layers(images) + self.shortcut(images)
        return total


def _convolution(inputs: int, outputs: int, kernel: int, stride: int) -> nn.Module:
    return StandardisedConv2d(inputs, outputs, kernel, stride=stride, form="variance", affine=True)


def wide_resnet(depth: int, width: int, classes: int, channels: int) -> nn.Module:
    """WRN-depth-width, where (depth − 4)/6 blocks make a stage."""
    blocks, inputs = list[nn.Module](), FIRST
    for outputs, stride in ((16 * width, 1), (32 * width, 2), (64 * width, 2)):
        for block in range((depth - 4) // 6):
            blocks.append(_Block(inputs, outputs, stride if block == 0 else 1))
            inputs = outputs
    head = nn.Linear(inputs, classes)
    nn.init.kaiming_normal_(head.weight, nonlinearity="linear")  # variance 1/fan_in
    nn.init.zeros_(head.bias)
    return nn.Sequential(
        _convolution(channels, FIRST, 3, 1),
        *blocks,
        nn.ReLU(),
        nn.GroupNorm(GROUPS, inputs),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        head,
    )


def wrn_16_4(classes: int = 10, channels: int = 3) -> nn.Module:
    """De et al.'s WRN-16-4: 2 753 818 parameters with ten classes and three channels."""
    return wide_resnet(16, 4, classes, channels)


def wrn_40_4(classes: int = 10, channels: int = 3) -> nn.Module:
    """De et al.'s WRN-40-4, their best network from scratch on CIFAR-10."""
    return wide_resnet(40, 4, classes, channels)
