"""The only door from private to public.

Receives: a PrivateSum, whose sensitivities travel with it, the noise multiplier, and a random stream.
Gives: Released: the noisy sums, and the event that this draw of noise amounts to.
"""

from __future__ import annotations

import math

from clipwise.randomness import Stream, add_scaled
from clipwise.types import Event, Gradient, InputError, PoissonGaussian, PrivateSum, Released, positive


def release(private: PrivateSum, event: Event, stream: Stream) -> Released:
    """Add noise once and say what it amounts to.

    Guarantees: a block of bound C and share p gets independent Gaussian noise of standard deviation σ C/√p; since the
    shares add up to at most 1, the blocks together are one Gaussian mechanism with noise multiplier σ. The noise is
    drawn and added in float64; only the noisy sum is rounded.
    """
    if type(event) is not PoissonGaussian:
        raise InputError(f"expected the event PoissonGaussian, got {type(event).__name__}")
    sigma = positive("noise_multiplier", event.noise_multiplier)
    if not isinstance(private, PrivateSum):
        raise InputError(f"only a PrivateSum can be released, got {type(private).__name__}")
    gradient: Gradient = {}
    counts: Gradient = {}
    # one draw for everything outside CUDA, where a stream is fastest in long pieces
    sizes = [v.numel() for part in private.parts for v in part.value.values() if not v.is_cuda]
    normals = iter(stream.normal([sum(sizes)]).split(sizes))
    for part in private.parts:
        scale = sigma * part.bound / math.sqrt(part.share)
        into = counts if part.is_count else gradient
        for name, value in part.value.items():
            into[name] = stream.noisy(value, scale) if value.is_cuda else add_scaled(value, next(normals), scale)
    return Released(gradient, counts, event)
