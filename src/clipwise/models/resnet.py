"""Residual networks for colour images.

Receives: the number of classes and of channels.
Gives: resnet20_gn, He et al.'s CIFAR ResNet-20 with GroupNorm, since BatchNorm mixes the samples of a batch.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

GROUPS = 4


class _Block(nn.Module):
    """Two 3×3 convolutions and a shortcut without parameters (He et al.'s option A)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, outputs)
        self.stride = stride
        self.padding = (outputs - inputs) // 2  # zero channels on either side of the shortcut

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(images)))
        hidden = self.norm2(self.conv2(hidden))
        shortcut = images[:, :, :: self.stride, :: self.stride]
        if self.padding:
            shortcut = F.pad(shortcut, (0, 0, 0, 0, self.padding, self.padding))
        return F.relu(hidden + shortcut)


def resnet20_gn(classes: int = 10, channels: int = 3) -> nn.Module:
    """ResNet-20 with BatchNorm replaced by GroupNorm: 269 722 parameters with ten classes and three channels."""
    layers: list[nn.Module] = [
        nn.Conv2d(channels, 16, 3, padding=1, bias=False),
        nn.GroupNorm(GROUPS, 16),
        nn.ReLU(),
    ]
    width = 16
    for outputs, stride in ((16, 1), (32, 2), (64, 2)):
        for block in range(3):
            layers.append(_Block(width, outputs, stride if block == 0 else 1))
            width = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, classes))
