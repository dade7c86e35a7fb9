"""What the numbers of several runs say, in a few sentences and a table.

Receives: runs as they were recorded.
Gives: Row for each run, and answer: who is least biased and why, in sentences whose names stand between asterisks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from clipwise.plain import rounded_up
from clipwise.report.figures import fair
from clipwise.report.runs import Recorded, comparable, own

APART = "These runs are of different data or tasks, so nothing here ranks them; each for itself:"
NEAR = 0.05  # of bias: who is nearer than that to the least is named beside it


@dataclass(frozen=True)
class Row:
    """One run in numbers; None is what nobody measured. Everything but ε, δ and the releases is not private."""

    name: str
    method: str
    rival: bool  # whether all runs had the same data and task, so that they can be ranked
    epsilon: float
    delta: float
    releases: int
    accuracy: float | None
    error: float | None  # of a regression, in the place of the accuracy
    bias: float | None  # direction error, mean over the run's own looks: 0 is unbiased
    same_bias: float | None  # the same, over the looks of all runs: the same gradients for every method
    noise: float | None  # length of the noise over that of the clipped mean, geometric mean over looks
    alignment: float | None  # cosine of what is released with the true mean, mean over looks
    clipped: float | None  # share of samples that were shortened, mean over looks
    same_clipped: float | None  # the same, over the looks of all runs
    spread: float | None  # weight of a short gradient (5 % quantile) over that of a long one (95 %); 1 is equal
    unseen: str  # state of the method that no look at gradients shows, such as its feedback
    ece: float | None
    audit: bool | None  # whether every claim held

    @property
    def said(self) -> str:
        """The name as a sentence has it, between asterisks."""
        return f"*{self.name.replace('*', '∗')}*"


def rows(runs: Sequence[Recorded]) -> list[Row]:
    """The runs in numbers."""
    same, clipped, rival = fair(runs, "direction_error"), fair(runs, "clipped"), comparable(runs)
    return [
        Row(
            name=run.name,
            method=run.statement["method"],
            rival=rival,
            epsilon=run.statement["epsilon"],
            delta=run.statement["delta"],
            releases=run.statement["releases"],
            accuracy=run.last.get("accuracy"),
            error=run.last.get("error"),
            bias=_mean(run, "direction_error"),
            same_bias=same[run.name],
            noise=_noise(run),
            alignment=_mean(run, "alignment"),
            clipped=_mean(run, "clipped"),
            same_clipped=clipped[run.name],
            spread=_spread(run, runs),
            unseen=next((own(look)["unseen"] for look in run.looks), ""),
            ece=None if run.calibration is None else run.calibration["ece"],
            audit=None if run.audit is None else bool(run.audit["passed"]),
        )
        for run in runs
    ]


def answer(found: Sequence[Row]) -> list[str]:
    """The answer, its reason, and what it leaves open."""
    if len(found) == 1:
        return _single(found[0])
    if not all(row.rival for row in found):
        return [APART, *(sentence for row in found for sentence in _single(row)[:1])]
    shared = [row for row in found if row.same_bias is not None]
    measured = shared if len(shared) > 1 else [row for row in found if row.bias is not None]

    def bias(row: Row) -> float:
        return (row.same_bias if len(shared) > 1 else row.bias) or 0.0

    if len(measured) < 2:
        return _quality(found, None)
    least, *others = sorted(measured, key=bias)
    most = others[-1]
    near = [f"{row.said} ({bias(row):.0%})" for row in others[:-1] if bias(row) < bias(least) + NEAR]
    close = f" Close behind: {', '.join(near)}." if near else ""
    points = f"{bias(least):.0%} of its clipped mean gradient points away from the true one"
    end = f"The most biased is {most.said} with {bias(most):.0%}."
    if len(shared) > 1:
        said = [f"{least.said} is the least biased: {points}.{close} {end}", _reason(least, most)]
    else:
        said = [
            f"Over its own run {least.said} was the least biased: {points}.{close} {end}",
            "Each run had gradients of its own, so this does not rank the methods: clipwise compare asks them all "
            "about the same gradients.",
        ]
    quiet = _best(found, lambda row: row.noise, min)
    if quiet is not None and least.noise is not None and quiet is not least:
        said.append(
            f"Less bias can mean more noise: with {least.said} one step’s noise is {least.noise:.2g} times as long "
            f"as the gradient it hides, with {quiet.said}, the least noisy, {quiet.noise:.2g} times."
        )
    return [*said, *_quality(found, _best(found, lambda row: row.alignment, max))]


def ranking(found: Sequence[Row]) -> str:
    """Every method's bias on the same gradients, least first; nothing where fewer than two have one."""
    known = sorted((row.same_bias, row.name) for row in found if row.same_bias is not None)
    if len(known) < 2:
        return ""
    others = [row.name for row in found if row.same_bias is None]
    alone = f" Not ranked: {', '.join(others)}, which only its own run can tell." if others else ""
    return (
        f"On the same gradients, least biased first: {', '.join(f'{name} {bias:.1%}' for bias, name in known)}.{alone}"
    )


def told(found: Sequence[Row]) -> list[str]:
    """The answer as plain text, what an audit refuted first."""
    return [text.replace("*", "") for text in (refuted(found), *answer(found)) if text]


def refuted(found: Sequence[Row]) -> str:
    """What to know before anything else: whose ε an audit found to be false."""
    false = [row.said for row in found if row.audit is False]
    return f"An audit shows that the ε claimed of {', '.join(false)} is FALSE: do not rely on it." if false else ""


def _single(row: Row) -> list[str]:
    reached = ""
    if row.accuracy is not None:
        reached = f" reached {row.accuracy:.1%} accuracy"
    elif row.error is not None:
        reached = f" ended with an error of {row.error:.4g}"
    said = [f"{row.said}{reached or ' was trained'} at ε = {rounded_up(row.epsilon)}, δ = {row.delta:g}."]
    if row.bias is not None and row.clipped is not None:
        said.append(
            f"{row.bias:.1%} of its clipped mean gradient points away from the true one, and {row.clipped:.0%} of the "
            "samples are shortened: means over the run."
        )
    return said


def _reason(least: Row, most: Row) -> str:
    if least.spread is not None and most.spread is not None and 1.2 * least.spread < most.spread:
        mild, harsh = (_times(row.spread or 1.0) for row in (least, most))
        return (
            f"Why: it treats samples more equally. With {least.said} a short gradient weighs {mild} times as much "
            f"as a long one, with {most.said} {harsh} times; unclipped, all weigh the same."
        )
    few, many = least.same_clipped or least.clipped, most.same_clipped or most.clipped
    if few is not None and many is not None and few < many:
        return (
            f"Why: it leaves more samples as they are. It shortens {few:.0%} of them, {most.said} {many:.0%}, and "
            "what is cut off long gradients is missing from the mean."
        )
    return "Why: “Where the bias comes from” shows how unequally each method treats samples."


def _quality(found: Sequence[Row], truest: Row | None) -> list[str]:
    """Who is best where bias and noise meet, and who is most accurate."""
    best, nearest = _best(found, lambda row: row.accuracy, max), _best(found, lambda row: row.error, min)
    said = []
    if truest is not None:
        said.append(f"With bias and noise together, what {truest.said} releases points best along the true gradient.")
    if best is not None:
        also = "also " if best is truest else ""
        said.append(
            f"The most accurate model is {also}{best.said}’s: {best.accuracy:.1%} at ε = {rounded_up(best.epsilon)}."
        )
    elif nearest is not None:
        also = "also " if nearest is truest else ""
        said.append(
            f"The least error is {also}{nearest.said}’s: {nearest.error:.4g} at ε = {rounded_up(nearest.epsilon)}."
        )
    return [" ".join([*said, "One run each: small differences are chance."])] if said else []


def _best(found: Sequence[Row], value: Callable[[Row], float | None], pick: Callable[..., Row]) -> Row | None:
    known = [row for row in found if value(row) is not None and math.isfinite(value(row) or 0.0)]
    return pick(known, key=value) if known else None


def _mean(run: Recorded, name: str) -> float | None:
    seen = [own(look)[name] for look in run.looks]
    return sum(seen) / len(seen) if seen and all(each is not None for each in seen) else None


def _noise(run: Recorded) -> float | None:
    seen = [own(look)["signal_to_noise"] for look in run.looks]
    return math.exp(-sum(map(math.log, seen)) / len(seen)) if seen and all(seen) else None


def _spread(run: Recorded, runs: Sequence[Recorded]) -> float | None:
    """How unequally the run's method weighs samples, geometric mean over all looks; None where some are dropped."""
    method = run.method
    quantiles = [look["spread"]["quantiles"] for other in runs for look in other.looks]
    if method.split is not None or method.after is not None or not quantiles:
        return None
    short, long = (method.weigh(torch.tensor([q[k] for q in quantiles], dtype=torch.float64)) for k in ("5%", "95%"))
    ratio = float((short / long).log().mean().exp())
    return ratio if math.isfinite(ratio) else None


def _times(value: float) -> str:
    """Two digits, without an exponent."""
    return f"{float(f'{value:.2g}'):,.0f}" if value >= 10 else f"{value:.2g}"
