"""Figures drawn as SVG for a page: small, without scripts, and coloured by the page's own light or dark.

Receives: a Panel and the size to draw it in.
Gives: SVG text; a run's marks are in a group with ``data-run``, whose colour is one of the page's ``--s0`` … ``--s7``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from decimal import Decimal
from html import escape

from clipwise.report.figures import Axis, Band, Bars, Line, Mark, Panel, Rank, Rule
from clipwise.report.look import HUES  # runs beyond them begin again, dashed

LETTER = 7.6  # width of a letter, about, where the page writes large
LABEL = 15  # least distance of two labels at line ends
LONGEST = 20  # letters of a label
FAINT = ' opacity="0.35"'


def drawn(panel: Panel, width: int, height: int, *, labelled: bool = True, about: str = "") -> str:
    """One panel; with ``labelled`` each line's name stands at its end."""
    if panel.marks and isinstance(panel.marks[0], Rank):
        return _ranked(panel, panel.marks[0], width, about)
    return _Canvas(panel, width, height, labelled).drawn(about)


def stacked(panels: Sequence[Panel], width: int, heights: Sequence[int]) -> str:
    """Panels below each other, whose axes begin and end at the same places."""
    canvases = [_Canvas(panel, width, height, True) for panel, height in zip(panels, heights, strict=True)]
    left, right = max(canvas.left for canvas in canvases), min(canvas.right for canvas in canvases)
    for canvas in canvases:
        canvas.left, canvas.right = left, right
    return "".join(canvas.drawn("") for canvas in canvases)


class _Canvas:
    """Where things are while one panel is drawn."""

    def __init__(self, panel: Panel, width: int, height: int, labelled: bool) -> None:
        self.panel, self.width, self.height = panel, width, height
        self.heading = panel.title or panel.y.label
        self.lines = [mark for mark in panel.marks if isinstance(mark, Line)]
        self.labelled = labelled and bool(self.lines)
        self.x = _spanned(panel.x, [v for mark in panel.marks for v in _xs(mark)])
        self.y = _spanned(panel.y, [v for mark in panel.marks for v in _ys(mark)], room=0.06)
        self.y_ticks, self.x_ticks = ticks(self.y, 5), ticks(self.x, 5 if width > 300 else 3)
        named = max((len(_short(line.name)) for line in self.lines), default=0) if self.labelled else 0
        self.right = width - (22 + LETTER * named if named else 12)
        self.left = 14 + LETTER * max(len(formatted(t, self.y)) for t in self.y_ticks) if self.y_ticks else 20
        self.top, self.bottom = (32.0 if self.heading else 10.0), height - 42.0

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Where a point is."""
        across, up = share(x, self.x), share(y, self.y)
        return (
            round(self.left + across * (self.right - self.left), 1),
            round(self.bottom - up * (self.bottom - self.top), 1),
        )

    def drawn(self, about: str) -> str:
        label = escape(about or self.heading, quote=True)
        parts = [
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{label}" class="chart">',
            *self._axes(),
            *(part for mark in self.panel.marks for part in self._mark(mark)),
            *(self._names() if self.labelled else ()),
            "</svg>",
        ]
        return "".join(parts)

    def _axes(self) -> Iterator[str]:
        if self.heading:
            fitting = _short(self.heading, int(self.width / LETTER))
            yield f'<text x="{0 if self.panel.title else 2}" y="13" class="head">{escape(fitting)}</text>'
        for tick in self.y_ticks:
            _, y = self.at(self.x.low or 0.0, tick)
            yield f'<line x1="{self.left:.1f}" x2="{self.right:.1f}" y1="{y}" y2="{y}" class="grid"/>'
            yield f'<text x="{self.left - 7:.1f}" y="{y + 4.5:.1f}" class="tick end">{formatted(tick, self.y)}</text>'
        base = self.bottom
        yield f'<line x1="{self.left:.1f}" x2="{self.right:.1f}" y1="{base}" y2="{base}" class="axis"/>'
        for tick in self.x_ticks:
            x, _ = self.at(tick, self.y.low or 0.0)
            yield f'<text x="{x}" y="{base + 18}" class="tick mid">{formatted(tick, self.x)}</text>'
        middle = max((self.left + self.right) / 2, LETTER * len(self.panel.x.label) / 2)
        yield f'<text x="{middle:.1f}" y="{self.height - 6}" class="label mid">{escape(self.panel.x.label)}</text>'

    def _mark(self, mark: Mark) -> Iterator[str]:
        if isinstance(mark, Line):
            points = [self.at(x, y) for x, y in zip(mark.x, mark.y, strict=True)]
            dash = ' stroke-dasharray="6 4"' if mark.colour >= len(HUES) else ""
            path = " ".join(f"{x},{y}" for x, y in points)
            dots = "".join(
                f'<circle cx="{x}" cy="{y}" r="3"><title>{escape(mark.name)}: {formatted(a, self.x, 3)}, '
                f"{formatted(b, self.y, 3)}</title></circle>"
                for (x, y), a, b in zip(points, mark.x, mark.y, strict=True)
                if mark.dots
            )
            yield f'{_group(mark.colour)}<polyline points="{path}"{dash}/>{dots}</g>'
        elif isinstance(mark, Band):
            points = [*zip(mark.x, mark.high, strict=True), *reversed(list(zip(mark.x, mark.low, strict=True)))]
            path = " ".join("{},{}".format(*self.at(x, y)) for x, y in points)
            yield f'{_group(mark.colour)}<polygon points="{path}" fill-opacity="{mark.strength}"/></g>'
        elif isinstance(mark, Bars):
            yield _group(mark.colour)
            faint, floor = mark.faint or (False,) * len(mark.heights), self.y.low or 0.0
            for low, high, value, light in zip(mark.edges, mark.edges[1:], mark.heights, faint, strict=False):
                (x1, y), (x2, _) = self.at(low, max(value, floor)), self.at(high, floor)
                if value > 0:
                    size = f'width="{max(0.5, x2 - x1 - 1):.1f}" height="{self.bottom - y:.1f}"'
                    yield f'<rect x="{x1 + 0.5:.1f}" y="{y}" {size}{FAINT if light else ""}/>'
            yield "</g>"
        elif isinstance(mark, Rule):
            (x1, y1), (x2, y2) = self.at(*mark.start), self.at(*mark.end)
            yield f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="rule"/>'

    def _names(self) -> Iterator[str]:
        """Each line's name beside its end, moved apart where they would lie on each other, with a dot of its colour."""
        ends = [(self.at(line.x[-1], line.y[-1]), line) for line in self.lines]
        places = _apart([y for (_, y), _ in ends], self.top, self.bottom)
        for ((x, y), line), place in zip(ends, places, strict=True):
            yield _group(line.colour)
            if abs(place - y) > 3 or self.right - x > 3:
                yield f'<polyline class="lead" points="{x},{y} {self.right + 7:.1f},{place:.1f}"/>'
            yield f'<circle cx="{self.right + 9:.1f}" cy="{place:.1f}" r="3.5"/>'
            yield f'<text x="{self.right + 16:.1f}" y="{place + 4.5:.1f}" class="name">{escape(_short(line.name))}'
            yield f"<title>{escape(line.name)}</title></text></g>"


def _ranked(panel: Panel, rank: Rank, width: int, about: str) -> str:
    """A bar for each name, its value at its end."""
    row = 34
    height = 30 + row * len(rank.names)
    left = 10 + LETTER * max(len(_short(name)) for name in rank.names)
    right, most = width - 58.0, max(rank.values) or 1.0
    axis = replace(panel.x, low=0.0, high=most)
    parts = [f'<text x="2" y="13" class="head">{escape(panel.x.label)}</text>']
    for place, (name, colour, value) in enumerate(zip(rank.names, rank.colours, rank.values, strict=True)):
        y = 30 + row * place
        length = max(1.0, (right - left) * value / most)
        parts.append(
            f'{_group(colour)}<text x="{left - 8:.1f}" y="{y + 15}" class="name end">{escape(_short(name))}</text>'
            f'<rect x="{left:.1f}" y="{y}" width="{length:.1f}" height="20" rx="3"/>'
            f'<text x="{left + length + 7:.1f}" y="{y + 15}" class="name">{formatted(value, axis, 1)}</text></g>'
        )
    label = escape(about or panel.x.label, quote=True)
    return f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{label}" class="chart">{"".join(parts)}</svg>'


def _group(colour: int) -> str:
    if colour < 0:
        return '<g class="s plain">'
    return f'<g class="s" data-run="{colour}" style="--c:var(--s{colour % len(HUES)})">'


def _short(name: str, longest: int = LONGEST) -> str:
    """Both ends of a long name: its beginning says which method, its end what tells it from another."""
    half = longest // 2
    return name if len(name) <= longest else f"{name[: longest - half]}…{name[1 - half :]}"


def _apart(places: list[float], top: float, bottom: float) -> list[float]:
    """The places, moved so that neighbours are LABEL apart and all are within, in the same order."""
    order = sorted(range(len(places)), key=lambda i: places[i])
    gap = min(LABEL, (bottom - top) / max(1, len(places) - 1)) if len(places) > 1 else LABEL
    found = [min(max(places[i], top), bottom) for i in order]
    for i in range(1, len(found)):
        found[i] = max(found[i], found[i - 1] + gap)
    over = found[-1] - bottom if found else 0.0
    if over > 0:
        found[-1] = bottom
        for i in range(len(found) - 2, -1, -1):
            found[i] = min(found[i], found[i + 1] - gap)
    moved = dict(zip(order, found, strict=True))
    return [moved[i] for i in range(len(places))]


def _xs(mark: Mark) -> Iterable[float]:
    if isinstance(mark, (Line, Band)):
        return mark.x
    if isinstance(mark, Bars):
        return mark.edges
    return (mark.start[0], mark.end[0]) if isinstance(mark, Rule) else ()


def _ys(mark: Mark) -> Iterable[float]:
    if isinstance(mark, Line):
        return mark.y
    if isinstance(mark, Band):
        return (*mark.low, *mark.high)
    if isinstance(mark, Bars):
        return mark.heights
    return (mark.start[1], mark.end[1]) if isinstance(mark, Rule) else ()


def _spanned(axis: Axis, values: list[float], room: float = 0.0) -> Axis:
    """The axis with both ends: its own, or those of the values with a little room."""
    known = [v for v in values if math.isfinite(v) and (v > 0 or not axis.log)] or [1.0]
    low, high = min(known), max(known)
    if axis.log:
        ratio = max(high / low, 1.2) ** room
        low, high = low / ratio, high * ratio
    else:
        more = (high - low or abs(high) or 1.0) * room
        low, high = low - more, high + more
    low, high = axis.low if axis.low is not None else low, axis.high if axis.high is not None else high
    if high <= low:
        high = low * 1.5 if axis.log else low + 1.0
    return replace(axis, low=low, high=high)


def share(value: float, axis: Axis) -> float:
    """How far along the axis a value is: 0 at its low end, 1 at its high one."""
    low, high = axis.low or 0.0, axis.high or 0.0
    if axis.log:
        value, low, high = (math.log10(max(v, 1e-300)) for v in (value, low, high))
    return min(1.03, max(-0.03, (value - low) / (high - low)))


def ticks(axis: Axis, wanted: int) -> list[float]:
    """About so many round numbers on the axis."""
    low, high = axis.low or 0.0, axis.high or 0.0
    if axis.log:
        first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
        for digits in ((1, 2, 5), (1, 3), (1,)):
            round_ = [d * 10.0**k for k in range(first, last + 1) for d in digits]
            found = [tick for tick in round_ if low * 0.9999999 <= tick <= high * 1.0000001]
            if 1 < len(found) <= wanted + 1:
                return found
        decades = [10.0**k for k in range(first, last + 1) if low <= 10.0**k <= high]
        if len(decades) < 2:  # so short an axis is nearly a linear one
            return [tick for tick in ticks(replace(axis, log=False), wanted) if low <= tick <= high]
        return decades[:: -(-len(decades) // wanted)]
    rough = (high - low) / wanted
    unit = 10.0 ** math.floor(math.log10(rough))
    fine = (1, 2, 5, 10) if axis.percent and unit < 0.1 else (1, 2, 2.5, 5, 10)  # no 2.5 %, which would read 2 %
    step = next(unit * k for k in fine if unit * k >= rough * 0.999)
    near = 0.02 * (high - low) / step  # so that ε = 2.9996, where a run ends, has its 3
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + near) + 1)]


def formatted(value: float, axis: Axis, digits: int | None = None) -> str:
    """A number as the axis writes it; ``digits`` for a value that is read and not a tick."""
    if axis.percent:
        span = (axis.high or 0.0) - (axis.low or 0.0)
        decimals = max(0, -2 - math.floor(math.log10(span / 4.5))) if digits is None else 1
        return f"{value:.{decimals}%}"
    text = f"{value:.{digits or 4}g}"
    low, high = axis.low or 0.0, axis.high or 0.0
    if max(abs(low), abs(high)) < 1e6 and (not axis.log or low >= 1e-4):  # one way for all numbers of an axis
        return f"{Decimal(text):f}"
    return f"{value:.0e}" if digits is None and axis.log else text
