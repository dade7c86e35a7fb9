"""The only door from private to public.

Receives: a PrivateSum, whose sensitivities travel with it, the event with its noise multiplier, and a random stream.
Gives: Released: the noisy sums, and the event that this draw of noise amounts to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import get_args

import torch

from clipwise.randomness import Stream
from clipwise.types import Event, Gradient, InputError, MemoryGaussian, Part, PrivateSum, Refused, Released, positive


def release(
    private: PrivateSum, event: Event, stream: Stream, divisor: float = 1.0, dtype: torch.dtype | None = None
) -> Released:
    """Add noise once and say what it amounts to; gradients come out over a public ``divisor``, counts as they are.

    Guarantees: a block of bound C and share p gets independent Gaussian noise of standard deviation σ C/√p; since the
    shares add up to at most 1, the blocks together are one Gaussian mechanism with noise multiplier σ. The noise is
    drawn and added in float64; only the noisy sum is rounded, to ``dtype`` or the sum's own format. On CUDA it lies in
    memory as the sum does, so that an optimizer meets the parameter's own order.
    """
    _refuse_uncovered(private, event)
    sigma = positive("noise_multiplier", event.noise_multiplier)
    positive("divisor", divisor)
    gradient, deviation = _noisy([part for part in private.parts if not part.is_count], sigma, stream, divisor, dtype)
    counts, _ = _noisy([part for part in private.parts if part.is_count], sigma, stream)
    return Released(gradient, counts, event, deviation)


def _refuse_uncovered(private: PrivateSum, event: Event) -> None:
    """Refuse a sum, or an event, of which there is no proof that the one pays for the other."""
    if type(event) not in get_args(Event):  # a subclass may mean something else
        known = ", ".join(kind.__name__ for kind in get_args(Event))
        raise InputError(f"expected an event of {known}, got {type(event).__name__}")
    if not isinstance(private, PrivateSum):
        raise InputError(f"only a PrivateSum can be released, got {type(private).__name__}")
    covered = event.memory * private.parts[0].bound if isinstance(event, MemoryGaussian) else 0.0
    if not private.memory <= covered * (1 + 1e-9):
        raise Refused(
            f"hidden memory moves this sum by up to {private.memory:g}, and the event covers {covered:g}: write "
            f"MemoryGaussian(noise_multiplier, sampling_rate, memory={private.memory / private.parts[0].bound:g})"
        )


def _noisy(
    parts: Sequence[Part], sigma: float, stream: Stream, divisor: float = 1.0, dtype: torch.dtype | None = None
) -> tuple[Gradient, dict[str, float]]:
    """(value + σ C/√p · z)/divisor for every tensor of these parts, by one call; and the noise's standard deviation."""
    values = {name: value for part in parts for name, value in part.value.items()}
    scales = {name: sigma * part.bound / math.sqrt(part.share) for part in parts for name in part.value}
    noisy = stream.noisy_all(list(values.values()), list(scales.values()), divisor, dtype)
    return dict(zip(values, noisy, strict=True)), {name: scale / divisor for name, scale in scales.items()}
