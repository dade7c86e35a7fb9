"""The only door from private to public.

Receives: a PrivateSum, whose sensitivities travel with it, the noise multiplier, and a random stream.
Gives: Released: the noisy sums, and the event that this draw of noise amounts to.
"""

from __future__ import annotations

import math

import torch

from clipwise.randomness import Stream, add_scaled
from clipwise.types import (
    BlockGaussian,
    Event,
    Gaussian,
    Gradient,
    InputError,
    MemoryGaussian,
    PoissonGaussian,
    PrivateSum,
    Refused,
    Released,
    positive,
)

EVENTS = (PoissonGaussian, Gaussian, MemoryGaussian, BlockGaussian)


def release(
    private: PrivateSum, event: Event, stream: Stream, divisor: float = 1.0, dtype: torch.dtype | None = None
) -> Released:
    """Add noise once and say what it amounts to; gradients come out over a public ``divisor``, counts as they are.

    Guarantees: a block of bound C and share p gets independent Gaussian noise of standard deviation σ C/√p; since the
    shares add up to at most 1, the blocks together are one Gaussian mechanism with noise multiplier σ. The noise is
    drawn and added in float64; only the noisy sum is rounded, to ``dtype`` or the sum's own format.
    """
    if type(event) not in EVENTS:  # a subclass may mean something else
        names = ", ".join(kind.__name__ for kind in EVENTS)
        raise InputError(f"expected an event of {names}, got {type(event).__name__}")
    sigma = positive("noise_multiplier", event.noise_multiplier)
    positive("divisor", divisor)
    if not isinstance(private, PrivateSum):
        raise InputError(f"only a PrivateSum can be released, got {type(private).__name__}")
    covered = event.memory * private.parts[0].bound if isinstance(event, MemoryGaussian) else 0.0
    if not private.memory <= covered * (1 + 1e-9):
        raise Refused(
            f"hidden memory moves this sum by up to {private.memory:g}, and the event covers {covered:g}: write "
            f"MemoryGaussian(noise_multiplier, sampling_rate, memory={private.memory / private.parts[0].bound:g})"
        )
    gradient: Gradient = {}
    counts: Gradient = {}
    scales: dict[tuple[bool, str], float] = {}  # a parameter may have a count's name
    # one draw for everything outside CUDA, where a stream is fastest in long pieces; and one sum for each part
    here = [{name: v for name, v in part.value.items() if not v.is_cuda} for part in private.parts]
    sizes = [sum(v.numel() for v in values.values()) for values in here]
    draws = stream.normal([sum(sizes)]).split(sizes)
    for part, values, normals in zip(private.parts, here, draws, strict=True):
        scale = sigma * part.bound / math.sqrt(part.share)
        scales.update({(part.is_count, name): scale for name in part.value})
        if values:
            into, over = (counts, (1.0, None)) if part.is_count else (gradient, (divisor, dtype))
            whole = torch.cat([value.flatten() for value in values.values()])
            pieces = add_scaled(whole, normals, scale, *over).split([v.numel() for v in values.values()])
            for (name, value), piece in zip(values.items(), pieces, strict=True):
                into[name] = piece.view(value.shape).to(over[1] or value.dtype)
    for is_count, into, over in ((False, gradient, (divisor, dtype)), (True, counts, (1.0, None))):
        on_cuda = {n: v for p in private.parts if p.is_count == is_count for n, v in p.value.items() if v.is_cuda}
        if on_cuda:
            own = [scales[is_count, name] for name in on_cuda]
            into.update(zip(on_cuda, stream.noisy_all(list(on_cuda.values()), own, *over), strict=True))
    return Released(gradient, counts, event, {name: scales[False, name] / divisor for name in gradient})
