"""What a report shows, as values: which numbers of which runs, on which axes. Nothing is drawn here.

Receives: runs as they were recorded.
Gives: Figure values; ``svg`` draws them for the page and ``plots`` for papers, from the same numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from clipwise import methods
from clipwise.report.runs import ROOT_MEAN_SQUARE, Recorded, Values, comparable, own

MANY = 60  # points of a line, beyond which dots would only hide it
FEW = 10  # samples of a bin whose bar is drawn faintly
_FAN = ("5%", "25%", "50%", "75%", "95%")


@dataclass(frozen=True)
class Axis:
    """One axis; without ends it spans what is drawn."""

    label: str
    low: float | None = None
    high: float | None = None
    log: bool = False
    percent: bool = False


@dataclass(frozen=True)
class Line:
    """A run's curve; ``colour`` is the run's number."""

    name: str
    colour: int
    x: tuple[float, ...]
    y: tuple[float, ...]
    dots: bool = True


@dataclass(frozen=True)
class Band:
    """What lies between two curves."""

    colour: int
    x: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    strength: float


@dataclass(frozen=True)
class Bars:
    """A histogram; colour −1 is no run's; what is ``faint`` rests on few samples."""

    colour: int
    edges: tuple[float, ...]
    heights: tuple[float, ...]
    faint: tuple[bool, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A line to hold others against: from one point to another."""

    start: tuple[float, float]
    end: tuple[float, float]


@dataclass(frozen=True)
class Rank:
    """One bar for each run, longest last."""

    names: tuple[str, ...]
    colours: tuple[int, ...]
    values: tuple[float, ...]


Mark: TypeAlias = Line | Band | Bars | Rule | Rank


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x: Axis
    y: Axis
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Figure:
    """One or several panels that are read together."""

    key: str  # of its file
    title: str
    caption: str  # how to read it
    panels: tuple[Panel, ...]


def figures(runs: Sequence[Recorded]) -> list[Figure]:
    """Every figure that the runs have numbers for."""
    made = (quality, same_gradients, kept, agreement, bias, noise, alignment, norms, reliability)
    return [figure for make in made if (figure := make(runs)) is not None]


def quality(runs: Sequence[Recorded]) -> Figure | None:
    """Accuracy, or error, against ε spent."""
    what = "accuracy" if any("accuracy" in run.last for run in runs) else "error"
    lines = _lines(runs, lambda row: row.get(what), lambda row: row.get("epsilon"), lambda run: run.metrics)
    return _one(
        "quality",
        f"{what.capitalize()} for the privacy spent",
        "Each dot is a measurement during training; further left is more private."
        + (" Up is better." if what == "accuracy" else f" The error is {ROOT_MEAN_SQUARE}; down is better."),
        Axis("ε spent"),
        Axis(what, percent=what == "accuracy"),
        lines,
    )


def bias(runs: Sequence[Recorded]) -> Figure | None:
    """Direction error of each run's own method over its steps."""
    return _one(
        "bias",
        "Bias over training",
        "The share of the clipped mean gradient that does not point along the true one, before noise. Lower is better.",
        Axis("step"),
        Axis("off the true direction", low=0.0, percent=True),
        _lines(runs, lambda look: own(look)["direction_error"]),
    )


def noise(runs: Sequence[Recorded]) -> Figure | None:
    """Length of the noise over the length of the clipped mean."""

    def value(look: Values) -> float | None:
        ratio = own(look)["signal_to_noise"]
        return 1 / ratio if ratio else None

    return _one(
        "noise",
        "Noise over training",
        "How many times longer the privacy noise of one step is than the clipped gradient it hides. Lower is better.",
        Axis("step"),
        Axis("noise ÷ gradient", log=True),
        _lines(runs, value),
    )


def alignment(runs: Sequence[Recorded]) -> Figure | None:
    """Cosine of the released gradient with the true mean."""
    lines = _lines(runs, lambda look: own(look)["alignment"])
    least = min((value for line in lines if isinstance(line, Line) for value in line.y), default=0.0)
    return _one(
        "alignment",
        "Bias and noise together",
        "The cosine of what is released with the true gradient: 1 points along it, 0 says nothing. Higher is better.",
        Axis("step"),
        Axis("cosine with the true gradient", low=min(0.0, least)),
        lines,
    )


def same_gradients(runs: Sequence[Recorded]) -> Figure | None:
    """Every method's bias on the same gradients."""
    found = {name: value for name, value in fair(runs, "direction_error").items() if value is not None}
    order = sorted(found, key=lambda name: found[name])
    colours = {run.name: number for number, run in enumerate(runs)}
    if len(order) < 2:
        return None
    looks = sum(len(run.looks) for run in runs)
    rank = Rank(tuple(order), tuple(colours[name] for name in order), tuple(found[name] for name in order))
    return _one(
        "same-gradients",
        "Bias on the same gradients",
        f"Every method was asked about the same {looks} looks, whoever was training. Shorter is better."
        + left_out("Not here", {run.name: run.diverged for run in runs if run.name not in found}),
        Axis("off the true direction", low=0.0, percent=True),
        Axis(""),
        [rank],
    )


def fair(runs: Sequence[Recorded], what: str) -> dict[str, float | None]:
    """The mean of a number of each run's method over the looks of all runs; None unless all looks have it.

    None, too, for a method that changes as it trains, since nobody knows how it would have changed in another run, for
    runs on different data, and for one that diverged.
    """
    looks = [look for run in runs for look in run.looks] if comparable(runs) else []
    found: dict[str, float | None] = {}
    for run in runs:
        seen = [look["methods"].get(run.statement["method"]) for look in looks]
        fixed = run.method.after is None and run.diverged is None
        told = bool(seen) and fixed and all(each is not None for each in seen)
        found[run.name] = sum(each[what] for each in seen) / len(seen) if told else None
    return found


def left_out(where: str, others: Mapping[str, int | None]) -> str:
    """Who is missing from a ranking, and why; ``others`` is each one's name with the step at which it diverged."""
    gone = [name for name, at in others.items() if at is not None]
    alone = [name for name, at in others.items() if at is None]
    said = [f"{', '.join(gone)}, which diverged"] if gone else []
    said += [f"{', '.join(alone)}, which only its own run can tell"] if alone else []
    return f" {where}: {'; '.join(said)}." if said else ""


def kept(runs: Sequence[Recorded]) -> Figure | None:
    """How much of a gradient each method keeps, by its norm, above how the norms are distributed."""
    ended = (run for run in runs if run.looks and run.diverged is None)
    shown = next((run for run in ended if run.looks[-1]["norm_edges"]), None)
    if shown is None:
        return None
    edges, counts = shown.looks[-1]["norm_edges"], shown.looks[-1]["norm_counts"]
    low, high = edges[0], edges[-1]
    if not low < high:
        return None
    lengths = torch.logspace(math.log10(low), math.log10(high), 81, dtype=torch.float64)
    middle = float(shown.looks[-1]["spread"]["quantiles"]["50%"])
    at = torch.tensor([middle], dtype=torch.float64)
    lines: list[Mark] = []
    apart = []
    for number, run in enumerate(runs):
        method = methods.parse(next(iter(run.looks[-1]["methods"]))) if run.looks else run.method
        if method.split is not None:
            apart.append(run.name)  # there is no one norm
            continue
        share = method.weigh(lengths) / (method.weigh(at) if float(method.weigh(at)) > 0 else 1.0)
        there = (share > 0) & share.isfinite()
        if bool(there.any()):
            x, y = tuple(lengths[there].tolist()), tuple(share[there].tolist())
            lines.append(Line(run.name, number, x, y, dots=False))
    if not lines:
        return None
    total = sum(counts)
    across = Axis("length of a sample’s gradient", low, high, log=True)
    level = Rule((low, 1.0), (high, 1.0))
    title = "weight over the median sample’s; dashed: unbiased"
    upper = Panel(title, across, Axis("relative weight", log=True), (level, *lines))
    heights = tuple(count / total for count in counts)
    lower = Panel(
        f"how long gradients were in the end ({shown.name})",
        across,
        Axis("samples", low=0.0, percent=True),
        (Bars(-1, tuple(edges), heights),),
    )
    return Figure(
        "kept",
        "Where the bias comes from",
        "Bias is unequal treatment: a level line would keep every sample’s say in the mean. Where a line falls, long "
        "gradients are held down; where it ends, they are dropped. It matters where many samples are (below)."
        + (f" Not here: {', '.join(apart)}, which clips layer by layer." if apart else ""),
        (upper, lower),
    )


def agreement(runs: Sequence[Recorded]) -> Figure | None:
    """Mean cosine of single gradients with the mean one, by norm, at the last look."""
    lines: list[Mark] = []
    for number, run in enumerate(runs):
        buckets = run.looks[-1]["buckets"] if run.looks and run.diverged is None else []
        if buckets:
            fifths = tuple(float(place) for place in range(1, len(buckets) + 1))
            lines.append(Line(run.name, number, fifths, tuple(b["cosine"] for b in buckets)))
    return _one(
        "agreement",
        "Which samples point the right way",
        "Mean cosine of single gradients with the mean of all at the end, from the fifth of the samples with the "
        "shortest to the longest. Holding down samples that agree with the mean, or lifting others, turns it.",
        Axis("fifth of the samples, by the gradient’s length"),
        Axis("cosine with the mean"),
        lines,
    )


def norms(runs: Sequence[Recorded]) -> Figure | None:
    """How norms spread over the steps of each run, beside the clip norm."""
    shown = [(number, run) for number, run in enumerate(runs) if len(run.looks) > 1]
    if not shown:
        return None
    values = [v for _, run in shown for look in run.looks for k, v in look["spread"]["quantiles"].items() if k in _FAN]
    high = max(values)
    low = max(min((v for v in values if v > 0), default=1e-3), high * 1e-5)  # below that a gradient is as good as zero
    longest = max(float(run.looks[-1]["step"]) for _, run in shown)
    x, y = Axis("step", 0.0, longest), Axis("length", low, high, log=True)
    panels = []
    for number, run in shown:
        steps = tuple(float(look["step"]) for look in run.looks)
        level = {k: tuple(max(low, look["spread"]["quantiles"][k]) for look in run.looks) for k in _FAN}
        marks: list[Mark] = [
            Band(number, steps, level["5%"], level["95%"], 0.16),
            Band(number, steps, level["25%"], level["75%"], 0.3),
            Line("median", number, steps, level["50%"], dots=False),
        ]
        bounds = [_bound(look) for look in run.looks]
        if all(b is not None and low <= b <= high for b in bounds):
            marks += [
                Rule((a, b), (c, d))  # type: ignore[arg-type]
                for a, b, c, d in zip(steps, bounds, steps[1:], bounds[1:], strict=False)
            ]
        panels.append(Panel(run.name, x, y, tuple(marks)))
    return Figure(
        "norms",
        "How long gradients are",
        "Half of the samples’ gradients lie in the dark band, nine in ten in the light one; the line is the median. "
        "What lies above the clip norm (dashed) is shortened or dropped.",
        tuple(panels),
    )


def reliability(runs: Sequence[Recorded]) -> Figure | None:
    """Accuracy against confidence of the final models."""
    panels = []
    for number, run in enumerate(runs):
        if run.calibration is None:
            continue
        bins = run.calibration["bins"]
        edges = (*(b["low"] for b in bins), bins[-1]["high"])
        heights = tuple(b["accuracy"] if b["samples"] else 0.0 for b in bins)
        bars = Bars(number, edges, heights, tuple(b["samples"] < FEW for b in bins))
        title = f"{run.name}: {run.calibration['ece']:.1%} off"
        honest = Rule((0.0, 0.0), (1.0, 1.0))
        ends = {"low": 0.0, "high": 1.0, "percent": True}
        panels.append(Panel(title, Axis("confidence", **ends), Axis("right", **ends), (bars, honest)))  # type: ignore[arg-type]
    if not panels:
        return None
    return Figure(
        "reliability",
        "Are the models as sure as they should be?",
        "Of the predictions made with 80 % confidence, 80 % should be right: bars on the diagonal are honest, below it "
        "the model is too sure, above it too modest. The number is the expected calibration error (ECE); faint bars "
        f"rest on fewer than {FEW} samples.",
        tuple(panels),
    )


def _bound(look: Values) -> float | None:
    """The clip norm of the run's own method at a look, where it has one for all layers and is a threshold."""
    method = methods.parse(next(iter(look["methods"])))
    return method.bound if method.split is None and method.unit == 1 else None


def _lines(
    runs: Sequence[Recorded],
    y: Callable[[Values], Any],
    x: Callable[[Values], Any] = lambda look: look["step"],
    rows: Callable[[Recorded], Sequence[Values]] = lambda run: run.looks,
) -> list[Mark]:
    """A line for each run, over the steps of its looks unless ``x`` and ``rows`` say otherwise."""
    found: list[Mark] = []
    for number, run in enumerate(runs):
        points = [(x(row), y(row)) for row in rows(run)]
        points = [(float(a), float(b)) for a, b in points if a is not None and b is not None and math.isfinite(b)]
        if points:
            few = len(points) <= MANY
            found.append(Line(run.name, number, tuple(a for a, _ in points), tuple(b for _, b in points), dots=few))
    return found


def _one(key: str, title: str, caption: str, x: Axis, y: Axis, marks: Sequence[Mark]) -> Figure | None:
    return Figure(key, title, caption, (Panel("", x, y, tuple(marks)),)) if marks else None
