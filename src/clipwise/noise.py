"""The only door from private to public.

Receives: a PrivateSum, whose sensitivities travel with it, the event with its noise multiplier, and a random stream.
Gives: Released: the noisy sums, and the event that this draw of noise amounts to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

import torch

from clipwise.randomness import Stream, add_scaled
from clipwise.types import (
    Event,
    Gradient,
    InputError,
    MemoryGaussian,
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
    _refuse_uncovered(private, event)
    sigma = positive("noise_multiplier", event.noise_multiplier)
    positive("divisor", divisor)
    deviation: dict[str, float] = {}
    pieces: dict[bool, list[_Piece]] = {False: [], True: []}  # by whether they are on CUDA
    for part in private.parts:
        scale = sigma * part.bound / math.sqrt(part.share)
        for cuda, some in pieces.items():
            own = {name: value for name, value in part.value.items() if value.is_cuda == cuda}
            if own:
                some.append(_Piece(own, scale, *((1.0, None) if part.is_count else (divisor, dtype)), part.is_count))
        if not part.is_count:
            deviation.update(dict.fromkeys(part.value, scale / divisor))
    gradient: Gradient = {}
    counts: Gradient = {}
    for piece, noisy in (*_noisy_here(pieces[False], stream), *_noisy_on_cuda(pieces[True], stream)):
        (counts if piece.is_count else gradient).update(noisy)
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


@dataclass(frozen=True)
class _Piece:
    """What one part has on CUDA, or elsewhere, to be released as (value + scale · z)/divisor."""

    values: Gradient
    scale: float
    divisor: float
    dtype: torch.dtype | None  # None: each value's own
    is_count: bool

    @property
    def narrow(self) -> bool:
        """Whether every result is rounded to less than float64."""
        own = {value.dtype for value in self.values.values()}
        return torch.float64 not in (own if self.dtype is None else {self.dtype})


def _noisy_here(pieces: Sequence[_Piece], stream: Stream) -> Iterator[tuple[_Piece, Gradient]]:
    for narrow in (True, False):
        # one draw for them all, since a stream is fastest in long pieces; and one sum for each part
        some = [piece for piece in pieces if piece.narrow == narrow]
        sizes = [sum(value.numel() for value in piece.values.values()) for piece in some]
        draws = stream.normal([sum(sizes)], narrow).split(sizes) if some else ()
        for piece, normals in zip(some, draws, strict=True):
            whole = torch.cat([value.flatten() for value in piece.values.values()])
            noisy = add_scaled(whole, normals, piece.scale, piece.divisor, piece.dtype)
            each = zip(piece.values.items(), noisy.split([v.numel() for v in piece.values.values()]), strict=True)
            yield piece, {name: own.view(v.shape).to(piece.dtype or v.dtype) for (name, v), own in each}


def _noisy_on_cuda(pieces: Sequence[_Piece], stream: Stream) -> Iterator[tuple[_Piece, Gradient]]:
    for is_count in (False, True):  # each by one launch: they share their divisor and their format
        some = [piece for piece in pieces if piece.is_count == is_count]
        if some:
            names = [name for piece in some for name in piece.values]
            values = [value for piece in some for value in piece.values.values()]
            scales = [piece.scale for piece in some for _ in piece.values]
            noisy = stream.noisy_all(values, scales, some[0].divisor, some[0].dtype)
            yield some[0], dict(zip(names, noisy, strict=True))
