"""Where a GPU may round the factors of a product to TF32: rounded once, to float16, for the norm and for the sum alike.

Receives: the two factors of per-sample gradients, float32 on CUDA.
Gives: rounds: whether the library may round them; halves and halves_by_position: both in float16, with TF32's 11 bits,
and a scale per sample; allowed, forbidden, full_on_cpu, without_cudnn, without_cudnn_if_recurrent: PyTorch's settings.

Left to the library, the factors of the sum, w_i b_i, are rounded otherwise than those of the norm, and where positions
cancel what is summed can be longer than what was measured. Rounded once, they are the same numbers in both; float16 is
read by the kernels at twice the speed of TF32, which would have to keep to three products for a sound norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

HIGHEST = 2.0**14  # where a sample's largest number is brought to: float16 ends just below 2¹⁶
LEAST = 2.0**-100  # nothing that small is worth a scale of its own, which would overflow
LARGEST = 2.0**96  # times a weight it is still finite, and any product that is not zero has an infinite norm
EXPONENT = 0x7F800000  # the bits of a float32 that hold it


def rounds(one: Tensor, other: Tensor, *, convolution: bool) -> bool:
    """Whether a product of these may be computed in TF32, by PyTorch's settings and on this device."""
    if not one.is_cuda or one.dtype != torch.float32 or other.dtype != torch.float32 or not one.numel():
        return False
    return allowed(convolution=convolution) and torch.cuda.get_device_capability(one.device) >= (8, 0)


def allowed(*, convolution: bool) -> bool:
    """PyTorch's setting, which has two names; asked by the one while it was set by the other it is an error."""
    precision = getattr(_settings(convolution), "fp32_precision", None)
    if precision is not None:
        return bool(precision == "tf32")
    return torch.backends.cudnn.allow_tf32 if convolution else torch.backends.cuda.matmul.allow_tf32


@contextmanager
def forbidden() -> Iterator[None]:
    """Float32 products on a GPU are not rounded to TF32, in which two ways of computing one thing differ by 0.3 %."""
    cudnn, cublas = torch.backends.cudnn, torch.backends.cuda.matmul
    try:
        before = cudnn.allow_tf32, cublas.allow_tf32
    except RuntimeError:  # set by the newer name
        with _ieee(_settings(convolution=True), cudnn.rnn, cublas):
            yield
        return
    cudnn.allow_tf32 = cublas.allow_tf32 = False
    try:
        yield
    finally:
        cudnn.allow_tf32, cublas.allow_tf32 = before


@contextmanager
def full_on_cpu() -> Iterator[None]:
    """Float32 products on a processor are float32's: "medium" lets oneDNN round them to bfloat16, where that is fast.

    A norm would then be short by more than the margin, and nothing rounds the sum as it does the norm.
    """
    onednn: Any = torch.backends.mkldnn
    if hasattr(onednn, "matmul"):  # since PyTorch 2.9
        with _ieee(onednn.matmul, onednn.conv, onednn.rnn):
            yield
        return
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def _ieee(*places: Any) -> Iterator[None]:
    before = [place.fp32_precision for place in places]
    for place in places:
        place.fp32_precision = "ieee"
    try:
        yield
    finally:
        for place, precision in zip(places, before, strict=True):
            place.fp32_precision = precision


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Do without cuDNN. Not by ``cudnn.flags``: it sets TF32 and more to its own defaults, and what runs reads them."""
    before = torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    try:
        yield
    finally:
        torch.backends.cudnn.enabled = before


def without_cudnn_if_recurrent(model: nn.Module) -> AbstractContextManager[None]:
    """The same for a model with recurrent layers; others keep it."""
    return without_cudnn() if any(isinstance(m, nn.RNNBase) for m in model.modules()) else nullcontext()


def _settings(convolution: bool) -> Any:
    return getattr(torch.backends.cudnn, "conv", None) if convolution else torch.backends.cuda.matmul


def halves(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both in float16, and the power of two [sample] by which their product is to be multiplied.

    A sample's largest number is brought near float16's largest by a power of two, which is exact. What is 2²⁸ times
    smaller loses bits. What is not finite stays so, and is told from its norm.
    """
    (one, first), (other, second) = ((t, _power(t, *range(1, t.dim()))) for t in (one, other))
    scale = (first / HIGHEST).flatten() * (second / HIGHEST).flatten()
    return (one * (HIGHEST / first)).half(), (other * (HIGHEST / second)).half(), scale.clamp(max=LARGEST)


def halves_by_position(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same for the factors of Σ_s b_s a_sᵀ, [sample, block, position, feature].

    Each position of a is scaled by itself, and its b by the inverse of that before all of b is: no product changes. So
    whatever makes a can also round it, and nothing reads a sample twice to find its largest number first.
    """
    own = _power(a, 3)  # [sample, block, position, 1]
    most = torch.linalg.vector_norm(b, math.inf, dim=3, keepdim=True) * own
    power = _power(most, 1, 2, 3)
    other = b * own * (HIGHEST / power)  # in this order: only what is too large for its norm overflows
    return (a * (HIGHEST / own)).half(), other.half(), power.flatten() / HIGHEST**2


def _power(t: Tensor, *dims: int) -> Tensor:
    """2^⌊log₂ of the largest number along these dimensions⌋, which are kept; 1 where that is not finite."""
    most = torch.linalg.vector_norm(t, math.inf, dim=dims, keepdim=True)
    power = (most.view(torch.int32) & EXPONENT).view(torch.float32)
    return torch.where(power.isfinite(), power, 1.0).clamp(min=LEAST)
