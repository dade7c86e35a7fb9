"""The only door from private to public.

Receives: a PrivateSum, whose sensitivities travel with it, the event with its noise multiplier, and a random stream.
Gives: Released: the noisy sums, and the event that this draw of noise amounts to.
"""

from __future__ import annotations

import math
from typing import get_args

import torch
from torch import Tensor

from clipwise.randomness import Stream, add_scaled
from clipwise.types import (
    Event,
    Gradient,
    InputError,
    MemoryGaussian,
    Part,
    PrivateSum,
    Refused,
    Released,
    positive,
)


def release(
    private: PrivateSum, event: Event, stream: Stream, divisor: float = 1.0, dtype: torch.dtype | None = None
) -> Released:
    """Add noise once and say what it amounts to; gradients come out over a public ``divisor``, counts as they are.

    Guarantees: a block of bound C and share p gets independent Gaussian noise of standard deviation σ C/√p; since the
    shares add up to at most 1, the blocks together are one Gaussian mechanism with noise multiplier σ. The noise is
    drawn and added in float64; only the noisy sum is rounded, to ``dtype`` or the sum's own format. On CUDA it lies in
    memory as the sum does, so that an optimizer meets the parameter's own order.
    """
    if type(event) not in get_args(Event):  # a subclass may mean something else
        known = ", ".join(kind.__name__ for kind in get_args(Event))
        raise InputError(f"expected an event of {known}, got {type(event).__name__}")
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
    deviation: dict[str, float] = {}
    on_cuda: dict[bool, tuple[list[str], list[Tensor], list[float]]] = {False: ([], [], []), True: ([], [], [])}
    elsewhere: dict[bool, list[tuple[Part, float, Gradient]]] = {True: [], False: []}  # by whether results are narrow
    for part in private.parts:
        scale = sigma * part.bound / math.sqrt(part.share)
        names, values, scales = on_cuda[part.is_count]
        here: Gradient = {}
        for name, value in part.value.items():
            if value.is_cuda:
                names.append(name)
                values.append(value)
                scales.append(scale)
            else:
                here[name] = value
        if here:
            own = part.is_count or dtype is None  # the values' own formats
            formats = {value.dtype for value in here.values()} if own else {dtype}
            elsewhere[torch.float64 not in formats].append((part, scale, here))
        if not part.is_count:
            deviation.update(dict.fromkeys(part.value, scale / divisor))
    for narrow, some in elsewhere.items():
        # one draw for everything outside CUDA, where a stream is fastest in long pieces; and one sum for each part
        sizes = [sum(v.numel() for v in here.values()) for _, _, here in some]
        draws = stream.normal([sum(sizes)], narrow).split(sizes) if some else ()
        for (part, scale, here), normals in zip(some, draws, strict=True):
            into, over = (counts, (1.0, None)) if part.is_count else (gradient, (divisor, dtype))
            whole = torch.cat([value.flatten() for value in here.values()])
            pieces = add_scaled(whole, normals, scale, *over).split([v.numel() for v in here.values()])
            for (name, value), piece in zip(here.items(), pieces, strict=True):
                into[name] = piece.view(value.shape).to(over[1] or value.dtype)
    for is_count, (names, values, scales) in on_cuda.items():
        if names:
            into, over = (counts, (1.0, None)) if is_count else (gradient, (divisor, dtype))
            into.update(zip(names, stream.noisy_all(values, scales, *over), strict=True))
    return Released(gradient, counts, event, deviation)
