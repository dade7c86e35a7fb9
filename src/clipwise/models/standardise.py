"""Layers that standardise their weights, and vectors that are standardised sample by sample.

Receives: sizes, and which published form of standardisation.
Gives: StandardisedConv2d, a convolution whose weight is standardised at every use, and Coordinates.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clipwise.records.standardise import standardise


class StandardisedConv2d(nn.Module):
    """A convolution with a square kernel that keeps the size at stride 1, its weight standardised in ``form``.

    ``affine`` adds a gain and a bias for each output channel (De et al. 2022); without it there is only the weight.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, form: str, affine: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, kernel, kernel))
        self.gain = nn.Parameter(torch.ones(outputs)) if affine else None
        self.bias = nn.Parameter(torch.zeros(outputs)) if affine else None
        self.stride, self.padding, self.form = stride, kernel // 2, form
        nn.init.kaiming_normal_(self.weight)  # only its direction matters: the scale is standardised away

    def forward(self, images: Tensor) -> Tensor:
        """[sample, inputs, height, width] → [sample, outputs, …]."""
        weight = standardise(self.weight, self.gain, form=self.form)
        return F.conv2d(images, weight, self.bias, self.stride, self.padding)

    def extra_repr(self) -> str:
        """The sizes and the form, for print."""
        outputs, inputs, kernel, _ = self.weight.shape
        return f"{inputs}, {outputs}, kernel={kernel}, stride={self.stride}, form={self.form!r}"


class Coordinates(nn.Module):
    """Each vector standardised over its coordinates: (v − mean)/√(var + 1e-5), with the unbiased variance.

    The epsilon stands under the root, because the std of a constant vector has no gradient.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, vectors: Tensor) -> Tensor:
        """[..., width], standardised over the last dimension."""
        # layer_norm divides by the biased variance, which is (width − 1)/width of the unbiased one
        ratio = (self.width - 1) / self.width
        return math.sqrt(ratio) * F.layer_norm(vectors, (self.width,), eps=1e-5 * ratio)
