"""Vocabulary of the whole package: what flows between modules, and the errors they raise.

Receives: nothing; it imports nothing of clipwise, and torch only for type checkers.
Gives: Gradient, Event, PrivateSum, Released, Citation, one-line validators, and warn.
"""

from __future__ import annotations

import difflib
import math
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

# what DiceSGD's feedback remembers (docs/dicesgd.md)
Memory = Literal["full", "none", "blocks", "bounded"]
# parameter name → tensor of that parameter's shape
Gradient: TypeAlias = "dict[str, Tensor]"
# whatever a data set gives for several samples: a tensor, or tuples, lists and mappings of tensors, rows first
Batch: TypeAlias = Any


class InputError(ValueError):
    """Bad input: the message is one line with what was expected, what was got and what to write."""


class Refused(InputError):
    """Something that would train without the privacy it states; the message says what to write instead."""


def warn(message: str) -> None:
    """A warning that points to the line outside this package which led to it."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == __package__:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


@dataclass(frozen=True)
class PoissonGaussian:
    """One release: every sample joined with probability ``sampling_rate``, then Gaussian noise.

    ``noise_multiplier`` is the noise's standard deviation over the joint sensitivity.
    """

    noise_multiplier: float
    sampling_rate: float


@dataclass(frozen=True)
class Gaussian:
    """One release in which everyone takes part, such as statistics of the data before training; ``what`` names it."""

    noise_multiplier: float
    what: str


@dataclass(frozen=True)
class MemoryGaussian:
    """One release of a Poisson-sampled sum together with a bounded function of all earlier draws, which is hidden.

    ``noise_multiplier`` is the noise's standard deviation over the sampled sum's sensitivity; ``memory``, in units of
    that sensitivity, is how far the hidden part can move, whoever is drawn now.
    """

    noise_multiplier: float
    sampling_rate: float
    memory: float


@dataclass(frozen=True)
class BlockGaussian:
    """One release of a block, in which each sample can be drawn once, with probability ``sampling_rate``.

    ``noise_multiplier`` is over the joint sensitivity of everything that this one draw moves, in this block and later:
    the release that ``begins`` a block pays for all of it.
    """

    noise_multiplier: float
    sampling_rate: float
    begins: bool


# Everything that a release can be. Accounting refuses what is not in this union.
Event: TypeAlias = PoissonGaussian | Gaussian | MemoryGaussian | BlockGaussian


@dataclass(frozen=True)
class Part:
    """One block of a private sum: adding or removing one sample moves ``value`` by at most ``bound``.

    ``share`` is this block's part of the privacy loss: its noise is σ·bound/√share. One block has share 1.
    """

    value: Gradient
    bound: float
    share: float
    is_count: bool = False  # not a part of the gradient but a count that a method asked for beside it


@dataclass(frozen=True)
class PrivateSum:
    """A secret: sums over the batch with their sensitivities. Only ``noise.release`` accepts it.

    ``memory`` is how far what earlier batches left in the sum can move it besides: then only MemoryGaussian will do.
    ``residual`` is Σ_i (1 − w_i) v_i, what clipping cut off, where a method feeds it back: never released itself.
    """

    parts: tuple[Part, ...]
    memory: float = 0.0
    residual: Gradient | None = None

    def __post_init__(self) -> None:
        """Refuse bounds and shares under which the joint noise would be too small."""
        total = sum(part.share for part in self.parts)
        if not (self.parts and total <= 1 + 1e-9 and all(part.share > 0 for part in self.parts)):  # NaN is neither
            raise Refused(
                f"the shares of a private sum must be positive and add up to at most 1, got {total:.6g}: "
                "per-block bounds need their joint sensitivity"
            )
        for part in self.parts:
            positive("bound", part.bound)
        if at_least_zero("memory", self.memory) and len(self.parts) > 1:
            raise Refused("a sum with memory must be one block, since its memory has one bound: write one clip norm")


@dataclass(frozen=True)
class Released:
    """Public: noisy sums and the event that the noise's draw amounts to."""

    gradient: Gradient  # the noisy sum, over the divisor that was asked for
    counts: Gradient  # noisy counts that a method asked for beside it
    event: Event
    deviation: Mapping[str, float]  # the noise's standard deviation in each entry


@dataclass(frozen=True)
class Citation:
    """Where a method comes from."""

    key: str
    authors: str
    title: str
    venue: str
    year: int
    kind: Literal["inproceedings", "article", "misc"] = "inproceedings"

    def bibtex(self) -> str:
        """One BibTeX entry; where it appeared stands in the field that its kind has for it."""
        place = {"inproceedings": "booktitle", "article": "journal", "misc": "howpublished"}[self.kind]
        return (
            f"@{self.kind}{{{self.key},\n  author = {{{self.authors}}},\n  title = {{{self.title}}},\n"
            f"  {place} = {{{self.venue}}},\n  year = {{{self.year}}},\n}}"
        )


def _finite(value: object) -> bool:
    """Whether it is a number that a float can hold."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # a whole number may be larger than any float
        return False


def positive(name: str, value: float) -> float:
    """The value, if it is a finite number above zero."""
    if not _finite(value) or value <= 0:
        raise InputError(f"{name} must be a number above 0, got {value!r}")
    return float(value)


def at_least_zero(name: str, value: float) -> float:
    """The value, if it is a finite number of at least zero."""
    if not _finite(value) or value < 0:
        raise InputError(f"{name} must be a number of at least 0, got {value!r}")
    return float(value)


def fraction(name: str, value: float, *, open_end: bool = False) -> float:
    """The value, if it is in (0, 1], or in (0, 1) where ``open_end``."""
    positive(name, value)
    if value > 1 or (open_end and value >= 1):
        raise InputError(f"{name} must be above 0 and {'below' if open_end else 'at most'} 1, got {value!r}")
    return float(value)


def whole(name: str, value: int, *, least: int = 1) -> int:
    """The value, if it is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(value)


def one_of(name: str, value: str, known: Iterable[str] | Mapping[str, object]) -> str:
    """The value, if it is known; the error names the nearest known one."""
    names = list(known)
    if value not in names:
        raise InputError(f"unknown {name} {value!r}: {nearest(value, names)}")
    return value


def nearest(word: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?``, or the whole list when nothing is near."""
    names = sorted(known)
    close = difflib.get_close_matches(str(word), names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"write one of {', '.join(names)}"
