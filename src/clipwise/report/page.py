"""One page about many runs: report.html, which opens from disk and needs nothing else, and the same as report.json.

Receives: runs as they were recorded, and a folder.
Gives: write_report: the paths of the page, the JSON and the plots; document: the frame of any such page.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path

from clipwise.methods import papers
from clipwise.plain import as_json, bound, no_less, rounded_up
from clipwise.report.answer import (
    ACCURACY,
    ALIGNMENT,
    ERROR,
    ROC_AUC,
    Quantity,
    RunNumbers,
    alarms,
    answer,
    best,
    in_numbers,
    told,
)
from clipwise.report.figures import Figure, Line, Rank, figures
from clipwise.report.folder import write
from clipwise.report.look import HUES, SCRIPT, STYLE
from clipwise.report.plots import plotted
from clipwise.report.runs import (
    ROOT_MEAN_SQUARE,
    TOO_WEAK,
    Recorded,
    attacked,
    comparable,
    epsilon_together,
    guessed,
    rows_per_person,
    short,
    too_weak,
)
from clipwise.report.statement import counted, for_whom
from clipwise.report.svg import drawn, stacked
from clipwise.types import InputError

PAGE, NUMBERS, PLOTS = "report.html", "report.json", "plots"
NOT_PRIVATE = (
    "Not private: for the owner of the data only. Accuracy, bias, norms and calibration were measured on evaluation "
    "samples, which no ε covers. What ε covers is the training data."
)
BIAS = (
    "Clipping shortens long gradients, so that no sample counts for too much. The mean of what is left may point "
    "elsewhere than the true one: that is its bias."
)
UNCOVERED = (
    "The number that was reached without privacy is made of the training data and covered by no ε: show it only to "
    "whoever may see the data."
)
NOTHING = "Nothing was measured of these runs but their privacy."
SMALL, WIDE, TALL = (210, 190), (420, 290), 440  # a panel of many, one alone, and two that stand on each other


def write_report(runs: Sequence[Recorded], folder: Path, *, plots: bool = False) -> list[Path]:
    """Write the page, the JSON and, where ``plots`` are asked for, PNG and SVG files."""
    shown = figures(runs)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"cannot create the folder {folder} ({error.strerror or error}): choose another") from error
    places = [write(folder / PAGE, page(runs, shown)), write(folder / NUMBERS, _json(runs, shown))]
    return places + (plotted(shown, folder / PLOTS) if plots else [])


def page(runs: Sequence[Recorded], shown: Sequence[Figure]) -> str:
    """The page as HTML."""
    found, by_key = in_numbers(runs), {figure.key: figure for figure in shown}
    body = [
        f"<header><p class=brand>clipwise report</p>{TOGGLE}<h1>{escape(_title(runs))}</h1>",
        f"<p class=sub>{escape(_setting(runs))}</p></header><main>",
        _answer(found, by_key.get("same-gradients")),
        _table(found),
        _section("Why methods differ" if len(runs) > 1 else "What clipping does", by_key, ("kept", "agreement")),
        _section("Over training", by_key, ("quality", "bias", "noise", "alignment")),
        _section("Gradients and confidence", by_key, ("norms", "reliability")),
        _privacy(runs),
        _citations(runs),
        "</main>",
    ]
    return document(_title(runs), "".join(body))


def document(title: str, body: str) -> str:
    """A whole page with this body; nothing in it is fetched from anywhere."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<style>{STYLE}{_emphasis(body)}</style></head><body>{body}<script>{SCRIPT}</script></body></html>\n"
    )


TOGGLE = '<button id=theme type=button aria-label="Switch between light and dark">Light / dark</button>'


def figure_html(figure: Figure) -> str:
    """A figure with its title and how to read it."""
    many = len(figure.panels) > 1 and figure.key != "kept"
    if figure.key == "kept":
        charts = stacked(figure.panels, WIDE[0], (WIDE[1], TALL - WIDE[1]))
    elif many:
        charts = "".join(
            drawn(panel, *SMALL, labelled=False, about=f"{figure.title}: {panel.title}") for panel in figure.panels
        )
    else:
        height = TALL if figure.key == "agreement" else WIDE[1]
        charts = drawn(figure.panels[0], WIDE[0], height, about=f"{figure.title}. {_ends(figure)}")
    return (
        f'<figure id="{figure.key}"{" class=many" if many else ""}><figcaption><h3>{escape(figure.title)}</h3>'
        f"<p>{escape(figure.caption)}</p></figcaption><div class=charts>{charts}</div></figure>"
    )


def _answer(found: Sequence[RunNumbers], bars: Figure | None) -> str:
    """Who is least biased and why, in words, beside a bar for each method."""
    first, *more = answer(found) or [NOTHING]
    return (
        "".join(f"<p class=false><strong>{escape(text)}</strong></p>" for text in alarms(found))
        + "<section class=answer aria-label='The answer'>"
        f"<p class=lead-in>{_marked(first)}</p>"
        f"{figure_html(bars) if bars is not None else ''}"
        "<div class=more>"
        + (f"<p class=sub>{BIAS}</p>" if any(row.bias is not None for row in found) else "")
        + "".join(f"<p>{_marked(text)}</p>" for text in more)
        + f"</div><p class=warn><strong>Note.</strong> {escape(NOT_PRIVATE)}</p></section>"
    )


def _section(title: str, known: Mapping[str, Figure], keys: Iterable[str]) -> str:
    inside = "".join(figure_html(known[key]) for key in keys if key in known)
    return f"<section><h2>{escape(title)}</h2><div class=pair>{inside}</div></section>" if inside else ""


def _ends(figure: Figure) -> str:
    """What the lines end at, for those who do not see them."""
    said = []
    for mark in figure.panels[0].marks:
        if isinstance(mark, Line) and mark.dots:
            said.append(f"{mark.name} {mark.y[-1]:.3g}")
        elif isinstance(mark, Rank):
            said += [f"{name} {value:.3g}" for name, value in zip(mark.names, mark.values, strict=True)]
    return f"{figure.panels[0].y.label or figure.panels[0].x.label} in the end: {', '.join(said)}." if said else ""


# ------------------------------------------------------------------------------------------------------- the table


@dataclass(frozen=True)
class _Column:
    title: str
    about: str
    of: Quantity


def _columns(found: Sequence[RunNumbers]) -> list[_Column]:
    several, share = len(found) > 1, "{:.1%}".format
    every = [
        _Column("accuracy", "of the final model", ACCURACY),
        _Column("ROC AUC", "of two classes; 0.5 is guessing", ROC_AUC),
        _Column("error", ROOT_MEAN_SQUARE, ERROR),
        _Column("ε", "spent, at the run’s δ", Quantity(lambda row: row.epsilon, rounded_up)),
        _Column("bias", "on the same gradients", Quantity(lambda row: row.same_bias if several else None, share, min)),
        _Column("own bias", "in its own run", Quantity(lambda row: row.bias, share, min)),
        _Column("noise", "over the gradient’s length", Quantity(lambda row: row.noise, "{:.2f}".format, min)),
        _Column("alignment", "of releases with the true gradient", ALIGNMENT),
        _Column("clipped", "share of samples shortened", Quantity(lambda row: row.clipped, "{:.0%}".format)),
        _Column("ECE", "calibration error", Quantity(lambda row: row.ece, share, min)),
    ]
    return [column for column in every if any(column.of.value(row) is not None for row in found)]


def _table(found: Sequence[RunNumbers]) -> str:
    columns, ranked = _columns(found), len(found) > 1 and all(row.rival for row in found)
    first = {column.title: best(found, column.of) if ranked else [] for column in columns}
    heads = "<th scope=col aria-sort=none><button type=button>method</button></th>" + "".join(
        f"<th scope=col aria-sort=none class=num><button type=button>{escape(c.title)}</button>"
        f"<small>{escape(c.about)}</small></th>"
        for c in columns
    )
    lines = []
    for number, row in enumerate(found):
        cells = []
        for column in columns:
            value = column.of.value(row)
            if value is None or not math.isfinite(value):
                cells.append("<td class=num data-v=''>–</td>")
                continue
            mark = " best" if row in first[column.title] else ""
            cells.append(f'<td class="num{mark}" data-v="{value!r}">{column.of.shown(value)}</td>')
        verdict = "" if row.audit is None else " · audit: FALSE claim"
        if row.audit:
            verdict = " · audited" if row.attacked else " · ledger recounted"
        verdict += "" if row.diverged is None else f" · <strong>diverged at step {row.diverged}</strong>"
        lines.append(
            f'<tr data-run="{number}"><th scope=row data-v="{escape(row.name, quote=True)}">{_swatch(number)}'
            f'<a href="#run-{number}">{_breakable(row.name)}</a><small>{_breakable(row.method)}{verdict}</small></th>'
            f"{''.join(cells)}</tr>"
        )
    return (
        "<section><h2>The runs in numbers</h2>"
        "<p class=sub>Choose a column’s title to sort by it"
        + ("; bold is the best of its column. " if ranked else ". ")
        + (MEANS if any(row.bias is not None for row in found) else "")
        + "".join(
            f" No look sees the {row.unseen} of {escape(row.name)}, so its bias is shown without."
            for row in found
            if row.unseen
        )
        + "</p>"
        "<div class=scroll role=region aria-label='The runs in numbers' tabindex=0>"
        f"<table id=runs><thead><tr>{heads}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></section>"
    )


MEANS = (
    "Bias is the share of the clipped mean gradient that points away from the true one. Bias, noise, alignment and "
    "clipped are means over looks at gradients during training. Own bias depends on how far the run got: one that "
    "stays at the start has long, clear gradients, and little bias."
)


def _breakable(text: str) -> str:
    """Text that may go on in the next line after a bracket, a comma or a sign, as HTML."""
    return re.sub(r"([(,_])", r"\1<wbr>", escape(text))


def _swatch(number: int) -> str:
    return f'<i class=swatch style="--c:var(--s{number % len(HUES)})"></i>'


# ----------------------------------------------------------------------------------- privacy, audit and citations


def _privacy(runs: Sequence[Recorded]) -> str:
    said = []
    if len(runs) > 1 and len({run.data for run in runs}) == 1:
        delta = max(run.statement["delta"] for run in runs)
        rows = max(rows_per_person(run.statement) for run in runs)
        said.append(
            "<p>Each ε covers its own run. Choosing among the runs by what this page shows of them is a choice that no "
            "single run’s ε covers: towards the training data it costs the ε of all of them together, "
            f"<strong>{rounded_up(epsilon_together(runs))}</strong> at δ = {no_less(delta)}{for_whom(rows)}.</p>"
        )
    if any(run.without for run in runs):
        said.append(f"<p>{UNCOVERED}</p>")
    for number, run in enumerate(runs):
        stated = run.statement
        said.append(
            f'<details id="run-{number}"{" open" if len(runs) == 1 else ""}><summary>{_swatch(number)}'
            f"{escape(run.name)}: ε = {rounded_up(stated['epsilon'])}, δ = {no_less(stated['delta'])}, "
            f"{counted(stated)}</summary>"
            f"<pre tabindex=0>{escape(run.stated.strip() or json.dumps(dict(stated), indent=1))}</pre>"
            f"<p class=sub>From {escape(str(run.path))}</p>{_audit(run)}</details>"
        )
    return f"<section><h2>Privacy statements and audits</h2>{''.join(said)}</section>"


def _audit(run: Recorded) -> str:
    if run.audit is None:
        command = f"clipwise audit {shlex.quote(str(run.path))}"
        return (
            "<p>Not audited. To attack this run’s configuration and hold what that shows against its ε, write "
            f"<code>{escape(command)}</code></p>"
        )
    rows = run.audit["rows"]
    lines = "".join(
        f"<tr><th scope=row>{escape(str(row['audit']))}</th>"
        + "".join(
            f"<td class=num>{bound(row.get(name), up=name == 'claimed')}</td>"
            for name in ("claimed", "shown", "ceiling")
        )
        + f"<td>{'<strong>FALSE</strong>' if not row['passed'] else 'holds*' if too_weak(row) else 'holds'}</td></tr>"
        for row in rows
    )
    weak = f" {TOO_WEAK}." if any(row["passed"] and too_weak(row) for row in rows) else ""
    verdict = "every claim holds" if attacked(rows) else "the ledger agrees with the statement; nothing was attacked"
    if not run.audit["passed"]:
        verdict = "<strong>a claim is FALSE</strong>"
    guesses = "".join(
        f"<p>Membership inference, {escape(name)}: {escape(guessed(roc))}.</p>"
        for name, roc in run.audit.get("membership", {}).items()
    )
    return (
        f"<p>Audit: {verdict}. An attack’s lower bound on ε must not be above what is claimed; <em>could show</em> is "
        f"the ε that it would have shown had it never been wrong.{weak} {escape(str(run.audit.get('note', '')))}</p>"
        "<div class=scroll role=region aria-label='Audit' tabindex=0><table><thead><tr><th scope=col>audit</th>"
        "<th scope=col class=num>claimed ε</th><th scope=col class=num>shown ≥</th>"
        "<th scope=col class=num>could show</th>"
        f"<th scope=col>verdict</th></tr></thead><tbody>{lines}</tbody></table></div>{guesses}"
    )


def _citations(runs: Sequence[Recorded]) -> str:
    items = "".join(
        f"<details><summary>{escape(', '.join(names))}: {escape(paper.title)} ({paper.year})</summary>"
        f"<pre tabindex=0>{escape(paper.bibtex())}</pre></details>"
        for paper, names in papers(run.method for run in runs).items()
    )
    return f"<section><h2>What to cite</h2>{items}</section>"


# ---------------------------------------------------------------------------------------------------------- words


def _title(runs: Sequence[Recorded]) -> str:
    places = list(dict.fromkeys(run.data for run in runs if run.data))
    where = f" on {short(places[0])}" if len(places) == 1 else ""
    if len(runs) == 1:
        return f"A private run with {runs[0].name}{where}"
    if not all(run.looks for run in runs) or not comparable(runs) or any(run.diverged is not None for run in runs):
        return f"{len(runs)} private runs{where}"
    what = "clipping methods" if len({run.method.name for run in runs}) == len(runs) else "runs"
    return f"Which of {len(runs)} {what} bends the gradient least{where}?"


def _setting(runs: Sequence[Recorded]) -> str:
    """What all runs share."""
    first, said = runs[0], []
    for name in ("data", "model"):
        values = {(run.settings or {}).get(name) for run in runs}
        if len(values) == 1 and None not in values:
            said.append(str(values.pop()))
    if len(counts := {counted(run.statement) for run in runs}) == 1:
        said += counts
    for name, text in (
        ("expected_batch", "{:g} samples a step expected".format),
        ("delta", lambda delta: f"δ = {no_less(delta)}"),
    ):
        if len({run.statement.get(name) for run in runs}) == 1 and name in first.statement:
            said.append(text(first.statement[name]))
    looks = next((run.looks[-1] for run in runs if run.looks), None)
    if looks is not None:
        said.append(f"gradients of {looks['samples']} {looks['data']} samples")
    return " · ".join(said)


def _marked(text: str) -> str:
    """Names between asterisks stand out."""
    pieces = escape(text).split("*")
    return "".join(f"<b>{piece}</b>" if number % 2 else piece for number, piece in enumerate(pieces))


def _emphasis(body: str) -> str:
    """While one run is pointed at, the others fade."""
    runs = dict.fromkeys(re.findall(r'data-run="(\d+)"', body))
    return "".join(f'[data-on="{n}"] .chart .s[data-run="{n}"]{{opacity:1}}' for n in runs)


def _json(runs: Sequence[Recorded], shown: Sequence[Figure]) -> str:
    found = in_numbers(runs)
    values = {
        "note": NOT_PRIVATE,
        "not_private": True,
        "answer": told(found),
        "runs": [
            {
                **asdict(row),
                "folder": str(run.path),
                "settings": run.settings,
                "statement": run.statement,
                "metrics": run.metrics,
                "calibration": run.calibration,
                "audit": run.audit,
            }
            for run, row in zip(runs, found, strict=True)
        ],
        "figures": [asdict(figure) for figure in shown],
        "citations": [
            asdict(paper) | {"methods": names} for paper, names in papers(run.method for run in runs).items()
        ],
    }
    return as_json(values, indent=1)
