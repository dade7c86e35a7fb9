"""What tests of kernels share: where a kernel runs, and random convolutions."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from clipwise.jit import triton

Pair = tuple[int, int]

CUDA = torch.cuda.is_available()
INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if CUDA and not INTERPRETED else "cpu"
kernel_runs = pytest.mark.skipif(
    not (INTERPRETED or (CUDA and triton is not None)), reason="needs CUDA, or Triton's interpreter"
)


def images(
    n: int,
    channels: int,
    size: Pair,
    outputs: int,
    kernel: Pair,
    stride: Pair = (1, 1),
    padding: Pair = (0, 0),
    dilation: Pair = (1, 1),
    *,
    decades: int = 1,
) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients of a convolution in float64, samples from so many decades below 1 to above it."""
    random = torch.Generator().manual_seed(7 * n + channels + outputs)
    out = [(size[i] + 2 * padding[i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in (0, 1)]
    scales = torch.logspace(-decades, decades, n, dtype=torch.float64).reshape(-1, 1, 1, 1)
    x = scales * torch.randn(n, channels, *size, generator=random, dtype=torch.float64)
    return x, 0.3 + torch.randn(n, outputs, *out, generator=random, dtype=torch.float64)
