"""What is known of a network beside its code: which samples it takes, its size, and where it comes from.

Receives: the shape of one sample.
Gives: Network, one entry of the table of networks, with its Standard data; fits, from a shape to a builder's sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import nn

from clipwise.types import Citation

Shape: TypeAlias = tuple[int, ...]
# the shape of one sample → the builder's arguments that it decides, or None where it does not fit
Fit: TypeAlias = Callable[[Shape], dict[str, int] | None]


@dataclass(frozen=True)
class Standard:
    """Data that networks are made for; ``vocabulary`` is None where samples are not tokens."""

    name: str
    shape: Shape  # of one sample
    classes: int
    vocabulary: int | None = None


@dataclass(frozen=True)
class Network:
    """A builder, the samples that it takes, and its size for the data that it was made for."""

    make: Callable[..., nn.Module]
    takes: str  # the shape of one sample, in words
    fit: Fit
    data: Standard
    parameters: int  # with them
    paper: Citation | None = None


def exactly(*shape: int) -> Fit:
    """Samples of one shape alone, which leaves nothing to decide."""
    return lambda sides: {} if sides == shape else None


def images(least: int) -> Fit:
    """Images of any number of channels whose sides are at least so long."""
    return lambda sides: {"channels": sides[0]} if len(sides) == 3 and min(sides[1:]) >= least else None


def flattened(sides: Shape) -> dict[str, int] | None:
    """Samples of any shape."""
    return {"inputs": math.prod(sides)} if sides else None


def sequence(sides: Shape) -> dict[str, int] | None:
    """Tokens, in any number."""
    return {} if len(sides) == 1 else None


def sized_sequence(sides: Shape) -> dict[str, int] | None:
    """Tokens, in a number that the builder needs to know."""
    return {"length": sides[0]} if len(sides) == 1 else None


def square(sides: Shape) -> dict[str, int] | None:
    """Square images."""
    return {"channels": sides[0], "side": sides[1]} if len(sides) == 3 and sides[1] == sides[2] else None
