"""Poisson draws: which samples take part in a step, and in what pieces they are read.

Receives: the data set's size, the sampling rate and a random stream.
Gives: indices, every sample in with probability ``rate`` independently of all else; chunks that fit memory;
largest_batch, which nearly no draw exceeds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from clipwise.randomness import Stream
from clipwise.types import InputError, positive, whole

CHUNK = 256  # rows that are read, and go through a model, at a time, unless somebody says otherwise
_BLOCK = 1 << 20  # uniforms held at a time: 8 MiB whatever the size of the data set


def poisson(size: int, rate: float, stream: Stream) -> Tensor:
    """The indices of one Poisson draw, ascending.

    *Guarantees.* Each of the ``size`` samples is in with probability ``rate``, rounded down by less than 2⁻⁵³ since
    the ledger says no more, independently of the others and of earlier draws.
    *Edge cases.* A draw may be empty, and then it still counts as a step; at rate 1 every sample is in.
    """
    whole("size", size)
    if positive("sampling_rate", rate) > 1:
        raise InputError(
            f"sampling_rate must be at most 1, got {rate!r}: the expected batch must not exceed the {size} samples"
        )
    return torch.cat(
        [
            (stream.uniform(min(_BLOCK, size - start)).add_(2.0**-53) <= rate).nonzero().view(-1) + start
            for start in range(0, size, _BLOCK)
        ]
    )


def largest_batch(expected: float) -> int:
    """The expected batch and four of its deviations: nearly no draw is larger."""
    return math.ceil(expected + 4 * math.sqrt(expected))


def chunks(indices: Tensor, most: int) -> Iterator[Tensor]:
    """The indices in order, in pieces of at most ``most``; an empty draw gives one empty piece."""
    return iter(torch.split(indices, whole("chunk", most)))


def units(indices: Tensor, count: int, most: int, stream: Stream) -> Iterator[tuple[Tensor, Tensor]]:
    """Units of several samples: each sample draws one of ``count`` by itself, whoever else was drawn.

    *Guarantees.* Adding a sample changes the unit that it joins and no other. Pieces are (samples, keep), both
    [unit, place] of at most ``most`` places where units allow it; a place that nobody took repeats a sample, with keep
    False. *Edge cases.* An empty draw gives one empty piece; units that nobody joined are left out.
    """
    if not len(indices):
        yield indices.reshape(0, 1), indices.new_zeros(0, 1, dtype=torch.bool)
        return
    tags = (stream.uniform(len(indices)) * max(1, count)).long()
    sizes = tags.unique(return_counts=True)[1].tolist()
    groups = indices[tags.argsort(stable=True)].split(sizes)  # ascending tags; in a group, samples as they were
    piece: list[Tensor] = []
    for group in sorted(groups, key=len, reverse=True):  # by size, so that few places stay empty
        if piece and (len(piece) + 1) * len(piece[0]) > most:
            yield _padded(piece)
            piece = []
        piece.append(group)
    yield _padded(piece)


def _padded(groups: list[Tensor]) -> tuple[Tensor, Tensor]:
    sizes = groups[0].new_tensor([len(group) for group in groups])
    keep = torch.arange(len(groups[0]), device=sizes.device) < sizes[:, None]
    padded = torch.stack([group[:1] for group in groups]).repeat(1, len(groups[0]))
    padded[keep] = torch.cat(groups)
    return padded, keep
