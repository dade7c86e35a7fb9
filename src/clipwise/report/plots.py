"""The report's figures for papers: PNG and SVG files, drawn by matplotlib.

Receives: Figure values and a folder.
Gives: the files' paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clipwise.report.figures import Axis, Band, Bars, Figure, Line, Mark, Rank
from clipwise.report.look import HUES
from clipwise.report.svg import formatted, ticks

PLAIN = "#9a9993"


def plotted(figures: Sequence[Figure], folder: Path) -> list[Path]:
    """Draw every figure twice: pixels and vectors."""
    from matplotlib import rc_context  # slow to import, and most commands draw nothing

    folder.mkdir(parents=True, exist_ok=True)
    style: dict[Any, Any] = {
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
        "svg.fonttype": "none",  # text stays text
    }
    places = []
    with rc_context(style):
        for figure in figures:
            drawing = _drawn(figure)
            for ending in ("png", "svg"):
                places.append(folder / f"{figure.key}.{ending}")
                drawing.savefig(places[-1], dpi=200)
    return places


def _drawn(figure: Figure) -> Any:
    from matplotlib.figure import Figure as Drawing  # not by pyplot, which would open a window where a program has some

    count = len(figure.panels)
    across = 1 if figure.key == "kept" else min(4, count)
    down = -(-count // across)
    size = (5.2, 3.4) if count == 1 else (5.2, 2.4 * down) if across == 1 else (2.4 * across, 2.3 * down)
    drawing = Drawing(figsize=size, layout="constrained")
    axes = drawing.subplots(down, across, squeeze=False)
    for spare in axes.flat[count:]:
        spare.set_visible(False)
    for panel, ax in zip(figure.panels, axes.flat, strict=False):
        for mark in panel.marks:
            _mark(ax, mark)
        _axis(ax, "x", panel.x)
        _axis(ax, "y", panel.y)
        ax.set_title(panel.title, fontsize=8, loc="left")
        if sum(isinstance(mark, Line) for mark in panel.marks) > 1:
            ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.01, 1.0))  # beside the lines, never on them
    drawing.suptitle(figure.title, fontsize=10)
    return drawing


def _mark(ax: Any, mark: Mark) -> None:
    if isinstance(mark, Rank):
        ax.barh(mark.names, mark.values, color=[_colour(c) for c in mark.colours])
        ax.invert_yaxis()
    elif isinstance(mark, Line):
        style = "-" if mark.colour < len(HUES) else "--"
        ax.plot(mark.x, mark.y, style, color=_colour(mark.colour), label=mark.name, marker="." if mark.dots else None)
    elif isinstance(mark, Band):
        ax.fill_between(mark.x, mark.low, mark.high, color=_colour(mark.colour), alpha=mark.strength, linewidth=0)
    elif isinstance(mark, Bars):
        widths = [high - low for low, high in zip(mark.edges, mark.edges[1:], strict=False)]
        strength = [0.35 if faint else 1.0 for faint in mark.faint or (False,) * len(widths)]
        colours = [(_colour(mark.colour), each) for each in strength]
        ax.bar(mark.edges[:-1], mark.heights, widths, align="edge", color=colours, edgecolor="white")
    else:
        ax.plot(*zip(mark.start, mark.end, strict=True), color="#52514e", linestyle="--", linewidth=0.9)


def _axis(ax: Any, which: str, axis: Axis) -> None:
    from matplotlib import ticker

    if axis.log:
        getattr(ax, f"set_{which}scale")("log")
    getattr(ax, f"set_{which}label")(axis.label)
    getattr(ax, f"set_{which}lim")(axis.low, axis.high)
    if axis.log:  # the page's ticks: within less than a factor of ten matplotlib writes 2.4 × 10⁰ over its neighbour
        span = replace(axis, low=(ends := getattr(ax, f"get_{which}lim")())[0], high=ends[1])
        places, line = ticks(span, 4), getattr(ax, f"{which}axis")
        line.set_major_locator(ticker.FixedLocator(places))
        line.set_major_formatter(ticker.FixedFormatter([formatted(place, span) for place in places]))
        line.set_minor_formatter(ticker.NullFormatter())
    if axis.percent:
        getattr(ax, f"{which}axis").set_major_formatter(ticker.PercentFormatter(1.0))


def _colour(number: int) -> str:
    return PLAIN if number < 0 else HUES[number % len(HUES)]
