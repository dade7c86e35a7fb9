"""Where a GPU may round the factors of a product to TF32: rounded once, to float16, for the norm and for the sum alike.

Receives: the two factors of per-sample gradients, float32 on CUDA.
Gives: rounds: whether the library may round them; halves: both in float16, with TF32's 11 bits, and a scale per sample.

Left to the library, the factors of the sum, w_i b_i, are rounded otherwise than those of the norm, and where positions
cancel what is summed can be longer than what was measured. Rounded once, they are the same numbers in both; float16 is
read by the kernels at twice the speed of TF32, which would have to keep to three products for a sound norm.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

HIGHEST = 2.0**14  # where a sample's largest number is brought to: float16 ends just below 2¹⁶
LEAST = 2.0**-100  # nothing that small is worth a scale of its own, which would overflow
EXPONENT = 0x7F800000  # the bits of a float32 that hold it


def rounds(one: Tensor, other: Tensor, *, convolution: bool) -> bool:
    """Whether a product of these may be computed in TF32, by PyTorch's settings and on this device."""
    if not one.is_cuda or one.dtype != torch.float32 or other.dtype != torch.float32:
        return False
    allowed = torch.backends.cudnn.allow_tf32 if convolution else torch.backends.cuda.matmul.allow_tf32
    return allowed and torch.cuda.get_device_capability(one.device) >= (8, 0)


def halves(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both in float16, and the power of two [sample] by which their product is to be multiplied."""
    (one, first), (other, second) = _halve(one), _halve(other)
    return one, other, (first * second).clamp(max=torch.finfo(torch.float32).max)


def _halve(t: Tensor) -> tuple[Tensor, Tensor]:
    """A sample's largest number is brought near float16's largest by a power of two, which is exact.

    What is 2²⁸ times smaller loses bits. What is not finite stays so, and is told from its norm.
    """
    most = torch.linalg.vector_norm(t, math.inf, dim=tuple(range(1, t.dim())))
    power = (most.view(torch.int32) & EXPONENT).view(torch.float32)  # 2^⌊log₂ most⌋
    power = torch.where(power.isfinite(), power, 1.0).clamp(min=LEAST)
    return (t * (HIGHEST / power).reshape(-1, *(1,) * (t.dim() - 1))).half(), power / HIGHEST
