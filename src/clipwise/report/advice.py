"""One page about an advice: what to begin with, why, what it cost, and the command to write.

Receives: Advice, and the figures that show it.
Gives: the page; the figures; ``numbers`` and ``cost``, which the terminal says too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from clipwise.advice import Comparison, Option, named
from clipwise.plain import rounded_up
from clipwise.report.figures import Axis, Bars, Figure, Line, Panel, Rule
from clipwise.report.page import TOGGLE, document, figure_html

COLUMNS = ("clip norm", "alignment", "bias", "noise", "clipped")


@dataclass(frozen=True)
class Advice:
    """What to write, and why."""

    method: str
    clip_norm: float
    reason: str
    measured_on: str
    command: str
    options: tuple[Option, ...] = ()  # the best first
    epsilon_spent: float = 0.0  # of the private data, for this advice
    epsilon_with_run: float | None = None  # of this advice and the planned run together


def page(title: str, advice: Advice, figures: Sequence[Figure]) -> str:
    """The page as HTML."""
    charts = "".join(figure_html(figure) for figure in figures)
    return document(
        title,
        f"<header><p class=brand>clipwise advise</p>{TOGGLE}<h1>{escape(title)}</h1>"
        f"<p class=sub>Measured on {escape(advice.measured_on)}.</p></header><main>"
        "<section class=answer aria-label='The advice'>"
        f"<p class=lead-in>Begin with <b>{escape(advice.method)}</b>.</p><p>{escape(advice.reason)}</p>"
        f"<p class=warn>{escape(cost(advice))}</p>{_typed(advice.command)}</section>"
        f"<section><div class=pair>{charts}</div></section>{_table(advice)}</main>",
    )


def cost(advice: Advice) -> str:
    """What was read of the private data, and what that cost."""
    if not advice.epsilon_spent:
        return "Nothing was read of the private data but its shape and size: no privacy was spent."
    spent, together = rounded_up(advice.epsilon_spent), rounded_up(advice.epsilon_with_run or 0.0)
    return (
        f"This advice cost ε = {spent} of the private data, as the ledger beside it records. With "
        f"the run below it is {together} together: --spent makes that run count both."
    )


def numbers(each: Option) -> tuple[str, ...]:
    """An option under COLUMNS."""
    clip = "any" if each.scale_free else f"{each.clip_norm:g}"
    return clip, f"{each.alignment:.3f}", f"{each.bias:.1%}", f"{each.noise:.3g}", f"{each.clipped:.0%}"


def figures(found: Comparison) -> list[Figure]:
    """How true a release would be at each clip norm, and how long gradients are."""
    lines = [
        Line(named(family), number, found.clips, values)
        for number, (family, values) in enumerate(found.alignment.items())
    ]
    clip, top = found.pick.clip_norm, max(value for line in lines for value in line.y)
    x, y = Axis("clip norm", log=True), Axis("cosine of the release with the true gradient", 0.0, 1.06 * top)
    alignment = Figure(
        "advice",
        "How true a release would be",
        "Noise pulls a line down where the clip norm is large, bias where it is small. A level line is a method whose "
        "clip norm only scales the step. Dashed: the advice. Higher is better.",
        (Panel("", x, y, (*lines, Rule((clip, 0.0), (clip, 1.06 * top)))),),
    )
    return [alignment, lengths(found.norm_edges, found.norm_counts, clip)]


def lengths(edges: Sequence[float], counts: Sequence[float], clip: float) -> Figure:
    """How long gradients are, beside the clip norm that is advised."""
    total = sum(counts) or 1.0
    heights = tuple(count / total for count in counts)
    panel = Panel(
        "",
        Axis("length of a sample’s gradient", log=True),
        Axis("samples", low=0.0, percent=True),
        (Bars(-1, tuple(edges), heights), Rule((clip, 0.0), (clip, max(heights, default=1.0)))),
    )
    caption = "Dashed: the clip norm that is advised. Longer gradients than that are shortened."
    return Figure("norms", "How long gradients are", caption, (panel,))


def _typed(command: str) -> str:
    """The command for a page, whose lines break before an option and not within its name."""
    words = re.sub(r"(--[a-z-]+)", r"<span class=word>\1</span>", escape(command))
    return f"<pre tabindex=0>{words}</pre>"


def _table(advice: Advice) -> str:
    if not advice.options:
        return ""
    heads = "<th scope=col>method</th>" + "".join(f"<th scope=col class=num>{name}</th>" for name in COLUMNS)
    lines = "".join(
        f"<tr{' class=best' if each.method == advice.method else ''}><th scope=row>{escape(named(each.method))}</th>"
        + "".join(f"<td class=num>{number}</td>" for number in numbers(each))
        + "</tr>"
        for each in advice.options
    )
    return (
        "<section><h2>Each method at its best clip norm</h2><p class=sub>Alignment is the cosine of what would be "
        "released with the true gradient; bias, the share of the clipped mean that is off the true direction; noise, "
        "its length over that of the clipped mean. Means over looks; bold is the advice.</p>"
        "<div class=scroll role=region aria-label='Each method at its best clip norm' tabindex=0>"
        f"<table><thead><tr>{heads}</tr></thead><tbody>{lines}</tbody></table></div></section>"
    )
