"""Which method and clip norm to begin with: by the gradients of a public proxy, or by private norms through noise.

Receives: per-sample gradients that may be looked at; or a model, its loss and private data.
Gives: compared, methods at many clip norms with the one to begin with and why; histogram, the private norms' counts,
which only ``noise.release`` makes public, and median, the clip norm that follows from them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from clipwise.data import RowDataset
from clipwise.diagnostics import Diagnosis, measure
from clipwise.methods import METHODS, Method
from clipwise.records import Loss, SampleGradients, device_of, per_sample
from clipwise.records.trees import on_device
from clipwise.sampling import CHUNK, chunks
from clipwise.types import InputError, Part, PrivateSum

FAMILIES = ("flat", "automatic", "psac", "normalised", "global_")  # the simplest first
EDGES = tuple(10 ** (k / 4) for k in range(-12, 13))  # 0.001 … 1000, fixed before any norm was seen
CLOSE = 0.03  # of the best alignment: what is nearer than that is as good


@dataclass(frozen=True)
class Option:
    """A method with its best clip norm, and what it did to the gradients: means over looks."""

    method: str
    clip_norm: float
    alignment: float  # cosine of what would be released with the true mean: bias and noise in one number
    bias: float  # share of the clipped mean that is off the true direction
    noise: float  # over the clipped mean's length
    clipped: float
    scale_free: bool  # whether the clip norm changes nothing but the length of the step


@dataclass(frozen=True)
class Comparison:
    """What looks at gradients say about methods and clip norms."""

    clips: tuple[float, ...]
    alignment: Mapping[str, tuple[float, ...]]  # family → at each of the clip norms, mean over looks
    options: tuple[Option, ...]  # each family at its best clip norm
    looks: int
    norm_edges: tuple[float, ...]  # of the last look
    norm_counts: tuple[int, ...]

    @property
    def best(self) -> Option:
        """Whose releases would point best along the true gradient."""
        return max(self.options, key=lambda option: option.alignment)

    @property
    def pick(self) -> Option:
        """What to begin with: the simplest of those that are as good as the best."""
        return next(option for option in self.options if option.alignment >= (1 - CLOSE) * self.best.alignment)

    @property
    def reason(self) -> str:
        """Why, in a few sentences."""
        pick, best, name = self.pick, self.best, named(self.pick.method)
        looks = f"{self.looks} {'look' if self.looks == 1 else 'looks'}"
        tried = f"{len(self.options)} methods at {len(self.clips)} clip norms ({looks})"
        points = f"what it would release has a cosine of {pick.alignment:.3f} with the true gradient"
        first = f"{name} at {pick.clip_norm:g}: {points}, the best of {tried}."
        if best is not pick:
            first = (
                f"{name} at {pick.clip_norm:g}: {points}. Of {tried} the best is {named(best.method)} with "
                f"{best.alignment:.3f}; {name} is as good, within {CLOSE:.0%}, and simpler."
            )
        parts = (
            f"{pick.bias:.0%} of its clipped mean is off the true direction, and noise is {pick.noise:.3g} times as "
            "long."
        )
        worst = min(option.alignment for option in self.options)
        alike = (
            f" No method stands out: at their best clip norms all are within {CLOSE:.0%}; the learning rate matters "
            "more."
            if len(self.options) > 1 and worst >= (1 - CLOSE) * best.alignment
            else ""
        )
        free = " Its clip norm only scales the step: leave it and tune the learning rate." if pick.scale_free else ""
        return f"{first} {parts}{alike}{free}"


def compared(looks: Iterable[SampleGradients], *, noise_multiplier: float, expected_batch: float) -> Comparison:
    """Every family at clip norms that fit the first look's gradients, as they would be released at this noise.

    The looks may come while a model is being trained on public data: each is measured before the next is asked for.
    """
    clips: tuple[float, ...] = ()
    seen: list[Diagnosis] = []
    for gradients in looks:
        clips = clips or _clips(measure(gradients, [], data="public").norm_edges)
        tried = [method for family in FAMILIES for method in _with(family, clips)]
        seen.append(
            measure(gradients, tried, data="public", noise_multiplier=noise_multiplier, expected_batch=expected_batch)
        )
    if not seen:
        raise InputError("expected gradients to look at, got none: give at least one look")
    rows = {
        family: [_row(method, clip, seen) for method, clip in zip(_with(family, clips), clips, strict=True)]
        for family in FAMILIES
    }
    return Comparison(
        clips=clips,
        alignment={family: tuple(row.alignment for row in own) for family, own in rows.items()},
        options=tuple(_best(own) for own in rows.values()),
        looks=len(seen),
        norm_edges=tuple(seen[-1].norm_edges),
        norm_counts=tuple(seen[-1].norm_counts),
    )


def histogram(model: nn.Module, loss: Loss, data: RowDataset, chunk: int = CHUNK) -> PrivateSum:
    """How many samples' norms lie below EDGES, in each of its bins, and above; not finite ones are in none.

    A sample is in one bin at most, so that adding or removing it moves one count by one: sensitivity 1.
    """
    total = torch.zeros(len(EDGES) + 1, dtype=torch.float64, device="cpu")
    edges, device = torch.tensor(EDGES, dtype=torch.float64, device="cpu"), device_of(model)
    for rows in chunks(torch.arange(len(data), device="cpu"), chunk):
        batch = on_device(data.rows(rows), device)
        norms = per_sample(model, loss, batch).norms().flatten().double().cpu()
        total += torch.bincount(torch.bucketize(norms[norms.isfinite()], edges), minlength=len(total)).double()
    return PrivateSum((Part({"counts": total}, 1.0, 1.0),))


def median(counts: Tensor) -> float:
    """The norm that half of the samples do not exceed, to two digits: within its bin as if norms were even there."""
    half = float(counts.sum()) / 2
    below = 0.0
    for low, high, inside in zip((EDGES[0], *EDGES), (*EDGES, EDGES[-1]), counts.tolist(), strict=True):
        if below + inside >= half:
            within = (half - below) / inside if inside > 0 else 1.0
            return float(f"{low * (high / low) ** within:.2g}")
        below += inside
    return EDGES[-1]


def named(method: str) -> str:
    """A method's name from its expression."""
    return method.partition("(")[0].strip("_")


def _clips(edges: Sequence[float]) -> tuple[float, ...]:
    """1 and 3 times powers of ten, from far below the longest gradient before training to what it may grow to."""
    if not edges:
        raise InputError("every gradient of the proxy is zero, so that there is nothing to clip: choose another model")
    known = [digit * 10.0**k for k in range(-9, 9) for digit in (1, 3)]
    return tuple(float(f"{clip:.1g}") for clip in known if edges[-1] / 300 <= clip <= 30 * edges[-1])


def _with(family: str, clips: Sequence[float]) -> list[Method]:
    return [METHODS[family](clip_norm=clip) for clip in clips]


def _row(method: Method, clip: float, looks: Sequence[Diagnosis]) -> Option:
    """A method at one clip norm."""
    seen = [look.methods[str(method)].whole for look in looks]
    return Option(
        method=str(method),
        clip_norm=clip,
        alignment=_mean([bias.alignment or 0.0 for bias in seen]),
        bias=_mean([bias.direction_error for bias in seen]),
        noise=_mean([bias.noise / bias.length if bias.noise and bias.length else math.inf for bias in seen]),
        clipped=_mean([bias.clipped for bias in seen]),
        scale_free=False,
    )


def _best(rows: Sequence[Option]) -> Option:
    """A family's best clip norm: where what is released points along the true mean, on average over looks."""
    alignments = [row.alignment for row in rows]
    most = max(alignments)
    if min(alignments) > (1 - 1e-3) * most:  # any will do: the nearest to 1, whose step is easiest to think about
        return replace(min(rows, key=lambda row: abs(math.log(row.clip_norm))), scale_free=True)
    # the largest of those that are as good: it bends the gradient least
    return [row for row in rows if row.alignment >= (1 - CLOSE) * most][-1]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
