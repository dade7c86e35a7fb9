"""A figure of an experiment's results, as PNG and SVG.

Receives: the experiment's plot (kind, x and y) and the results with their curves.
Gives: the files' paths; none where the experiment has no plot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from clipwise.experiments.experiment import Experiment
from clipwise.experiments.results import Result

SIZE = (5.6, 3.6)  # inches, of one panel
BINS = 12  # of histograms


def plotted(experiment: Experiment, results: Sequence[Result], folder: Path) -> tuple[Path, ...]:
    """Draw the figure and write it; none where there is none to draw."""
    if experiment.plot is None:
        return ()
    plot = {"curve": "steps", "x": "step", "y": list(experiment.shown), "diagonal": False, "log": [], **experiment.plot}
    drawn = {"lines": _lines, "bars": _bars, "histogram": _histogram, "heatmap": _heatmap}[plot["kind"]]
    figure = drawn(experiment, results, plot)
    paper, _, which = experiment.name.removesuffix(".toml").rpartition("/")
    note = " (small scale: not the paper's setting)" if experiment.reduced else ""
    figure.suptitle(f"{Path(paper).name} {which}: {experiment.title}{note}", fontsize=9, wrap=True)
    figure.tight_layout()
    places = tuple(folder / f"{which}.{ending}" for ending in ("png", "svg"))
    for place in places:
        figure.savefig(place, dpi=150)
    return places


def _panels(count: int) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure  # slow to import, and most commands draw nothing

    across = min(3, max(1, count))
    down = -(-max(1, count) // across)
    figure = Figure(figsize=(SIZE[0] * across, SIZE[1] * down))
    axes = figure.subplots(down, across, squeeze=False)
    for spare in axes.flat[count:]:
        spare.set_visible(False)
    return figure, list(axes.flat[:count])


def _lines(experiment: Experiment, results: Sequence[Result], plot: Mapping[str, Any]) -> Any:
    """A panel for each quantity with a line for each run."""
    figure, axes = _panels(len(plot["y"]))
    for axis, quantity in zip(axes, plot["y"], strict=True):
        for result in results:
            rows = [row for row in result.curves.get(plot["curve"], []) if quantity in row]
            marker = "." if len(rows) < 50 else None
            if rows:
                axis.plot(
                    [row[plot["x"]] for row in rows], [row[quantity] for row in rows], marker=marker, label=result.name
                )
        if plot["diagonal"]:
            axis.plot([0, 1], [0, 1], "k:", linewidth=0.8)
        axis.set_xscale("log" if "x" in plot["log"] else "linear")
        axis.set_yscale("log" if "y" in plot["log"] else "linear")
        axis.set_xlabel(plot["x"])
        axis.set_ylabel(quantity)
        axis.legend(fontsize=7)
    return figure


def _bars(experiment: Experiment, results: Sequence[Result], plot: Mapping[str, Any]) -> Any:
    """A panel for each quantity with a bar for each run, and the paper's number as a line on it."""
    figure, axes = _panels(len(plot["y"]))
    for axis, quantity in zip(axes, plot["y"], strict=True):
        shown = [result for result in results if quantity in result.values]
        axis.barh([r.name for r in shown], [r.values[quantity] for r in shown], xerr=_errors(shown, quantity))
        for place, result in enumerate(shown):
            paper = experiment.expected.get(quantity, {}).get(result.name)
            if paper is not None:
                axis.plot([paper[0], paper[0]], [place - 0.4, place + 0.4], "k-", linewidth=2)
        axis.invert_yaxis()
        marks = "black: the paper's, at full scale" if experiment.reduced else "black: the paper's"
        axis.set_xlabel(f"{quantity} ({marks})" if quantity in experiment.expected else quantity)
    return figure


def _errors(results: Sequence[Result], quantity: str) -> list[float] | None:
    return [r.spread[quantity] for r in results] if all(quantity in r.spread for r in results) else None


def _histogram(experiment: Experiment, results: Sequence[Result], plot: Mapping[str, Any]) -> Any:
    """A panel for each run with the values that its quantities took over the run."""
    figure, axes = _panels(len(results))
    took = {
        result.name: {
            quantity: [row[quantity] for row in result.curves.get(plot["curve"], []) if quantity in row]
            for quantity in plot["y"]
        }
        for result in results
    }
    every = [value for of in took.values() for values in of.values() for value in values]
    low, high = min(every, default=0.0), max(every, default=1.0)
    edges = [low + (high - low) * i / BINS for i in range(BINS)] + [high]  # the same for all, so that bars compare
    for axis, result in zip(axes, results, strict=True):
        for quantity, values in took[result.name].items():
            axis.hist(values, bins=edges, alpha=0.5, label=quantity)
        axis.set_title(result.name, fontsize=8)
        axis.set_ylabel("measurements")
        axis.legend(fontsize=7)
    return figure


def _heatmap(experiment: Experiment, results: Sequence[Result], plot: Mapping[str, Any]) -> Any:
    """A panel for each entry of runs; rows and columns are the two things that it runs over."""
    values = {result.name: result.values[plot["y"][0]] for result in results}
    planned = [run for run in experiment.runs if run.name in values]
    groups = list(dict.fromkeys(run.group for run in planned))
    figure, axes = _panels(len(groups))
    low, high = min(values.values()), max(values.values())
    for axis, group in zip(axes, groups, strict=True):
        own = [run for run in planned if run.group == group]
        down, across = list(own[0].at)[:2]
        rows, columns = (list(dict.fromkeys(run.at[key] for run in own)) for key in (down, across))
        table = [[float("nan")] * len(columns) for _ in rows]
        for run in own:
            i, j = rows.index(run.at[down]), columns.index(run.at[across])
            table[i][j] = values[run.name]
            dark = values[run.name] < (low + high) / 2
            colour = "white" if dark else "black"
            axis.text(j, i, f"{values[run.name]:.3g}", ha="center", va="center", fontsize=7, color=colour)
        axis.imshow(table, vmin=low, vmax=high, cmap="viridis", aspect="auto")
        axis.set_xticks(range(len(columns)), [str(c) for c in columns])
        axis.set_yticks(range(len(rows)), [str(r) for r in rows])
        axis.set_xlabel(across)
        axis.set_ylabel(down)
        head = group.partition("{")[0]  # "DP-PSAC, r = " of "DP-PSAC, r = {r}, …"
        axis.set_title(head.rpartition(",")[0] or head.strip(), fontsize=8)
    return figure
