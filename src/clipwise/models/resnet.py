"""Residual networks for small images, as they were published and with enhanced normalisation.

Receives: the number of classes and of channels; the blocks of each stage.
Gives: resnet_gn, He et al.'s CIFAR ResNets with GroupNorm, since BatchNorm mixes the samples of a batch; resnet20_bn,
which keeps it, for public companions; resnet_enhanced, the same networks as Xiao et al. (2023) change them; BLOCKS,
their depths.

All take the shortcut without parameters (He et al.'s option A): every second pixel, zero channels on either side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.models.standardise import Coordinates, StandardisedConv2d

Norm: TypeAlias = Callable[[int], nn.Module]  # channels → a norm of them

GROUPS = 4
WIDTHS = (16, 32, 64)
# depth → blocks of each stage; a block has two weighted layers, and there are two beside the blocks
BLOCKS = {
    14: (2, 2, 2),
    20: (3, 3, 3),
    22: (3, 4, 3),
    26: (4, 4, 4),
    32: (5, 5, 5),
    44: (7, 7, 7),
    56: (9, 9, 9),
}


class _Shortcut(nn.Module):
    """Every ``stride``-th pixel, and zero channels on either side of the image's own."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.stride, self.padding = stride, (outputs - inputs) // 2

    def forward(self, images: Tensor) -> Tensor:
        images = images[:, :, :: self.stride, :: self.stride]
        return F.pad(images, (0, 0, 0, 0, self.padding, self.padding)) if self.padding else images


class _Block(nn.Module):
    """relu(norm(conv relu(norm(conv x))) + shortcut x)."""

    def __init__(self, norm: Norm, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = norm(outputs)
        self.shortcut = _Shortcut(inputs, outputs, stride)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.conv1(images)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.shortcut(images))


class _EnhancedBlock(nn.Module):
    """GN(elu(GN(conv GN(elu(conv x))) + shortcut x)), with standardised weights and norms without parameters."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _standardised(inputs, outputs, stride)
        self.conv2 = _standardised(outputs, outputs, 1)
        self.norm = nn.GroupNorm(GROUPS, outputs, affine=False)  # it has no parameters, so one does for three places
        self.shortcut = _Shortcut(inputs, outputs, stride)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.norm(F.elu(self.conv1(images)))
        hidden = self.norm(self.conv2(hidden)) + self.shortcut(images)
        normalised: Tensor = self.norm(F.elu(hidden))
        return normalised


def _standardised(inputs: int, outputs: int, stride: int) -> nn.Module:
    return StandardisedConv2d(inputs, outputs, 3, stride=stride, form="std")


def _stages(block: Callable[[int, int, int], nn.Module], blocks: Sequence[int]) -> list[nn.Module]:
    """The blocks of all stages; the first of a stage halves the image and widens it, but for the first stage's."""
    layers, inputs = list[nn.Module](), WIDTHS[0]
    for width, count in zip(WIDTHS, blocks, strict=True):
        for _ in range(count):
            layers.append(block(inputs, width, 1 if width == inputs else 2))
            inputs = width
    return layers


def resnet_gn(blocks: Sequence[int], classes: int = 10, channels: int = 3) -> nn.Module:
    """A CIFAR ResNet with BatchNorm replaced by GroupNorm of four groups, otherwise as published."""
    return _published(partial(nn.GroupNorm, GROUPS), blocks, classes, channels)


def _published(norm: Norm, blocks: Sequence[int], classes: int, channels: int) -> nn.Module:
    return _initialised(
        nn.Sequential(
            nn.Conv2d(channels, WIDTHS[0], 3, padding=1, bias=False),
            norm(WIDTHS[0]),
            nn.ReLU(),
            *_stages(partial(_Block, norm), blocks),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(WIDTHS[-1], classes),
        )
    )


def resnet_enhanced(blocks: Sequence[int], classes: int = 10, channels: int = 3) -> nn.Module:
    """Xiao et al.'s normalisation-enhanced ResNet: ELU before GroupNorm, standardised weights and features."""
    features = 4 * WIDTHS[-1]
    return _initialised(
        nn.Sequential(
            _standardised(channels, WIDTHS[0], 1),
            nn.ELU(),
            nn.GroupNorm(GROUPS, WIDTHS[0], affine=False),
            *_stages(_EnhancedBlock, blocks),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            Coordinates(features),
            nn.Linear(features, classes),
        )
    )


def _initialised(model: nn.Module) -> nn.Module:
    """He et al.'s initial weights."""
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, StandardisedConv2d, nn.Linear)):
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    return model


def resnet20_gn(classes: int = 10, channels: int = 3) -> nn.Module:
    """ResNet-20 with BatchNorm replaced by GroupNorm: 269 722 parameters with ten classes and three channels."""
    return resnet_gn(BLOCKS[20], classes, channels)


def resnet20_bn(classes: int = 10, channels: int = 3) -> nn.Module:
    """ResNet-20 as published, with BatchNorm, which ``batch_clipping`` alone can train: 269 722 parameters too."""
    return _published(nn.BatchNorm2d, BLOCKS[20], classes, channels)


def resnet20_enhanced(classes: int = 10, channels: int = 3) -> nn.Module:
    """The enhanced ResNet-20: 270 266 parameters with ten classes and three channels."""
    return resnet_enhanced(BLOCKS[20], classes, channels)
