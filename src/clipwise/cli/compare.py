"""``clipwise compare``: the same model trained by several methods, from the same initial weights.

Receives: CompareConfig.
Gives: one run's folder per method, a table of accuracy or error, ε and clipping bias as text or JSON, and report.html;
of the same network without privacy, where that is asked for, no folder and no model but its last measurement alone.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from clipwise import methods
from clipwise.cli.parts import evaluation_samples, resolved, splits_for, use_threads
from clipwise.cli.runs import new_folder, run_one, warn_of, without_privacy
from clipwise.cli.screen import Bar, quality, rendered
from clipwise.cli.stopping import begun, resume_command, resumed
from clipwise.config import CompareConfig, TrainConfig, Training, to_toml
from clipwise.data import Splits
from clipwise.plain import as_json, no_less, rounded_up
from clipwise.report import epsilon_together, own, read, write_report
from clipwise.report.answer import (
    ACCURACY,
    ERROR,
    ROC_AUC,
    RunNumbers,
    always_the_same,
    best,
    chance,
    in_numbers,
    judged,
    privacy_costs,
    ranking,
)
from clipwise.report.folder import (
    CHECKPOINT,
    SETTINGS,
    STATEMENT,
    WITHOUT,
    RunFolder,
    measurements,
    refuse_unfit,
    write,
)
from clipwise.report.runs import ROOT_MEAN_SQUARE, Recorded, short
from clipwise.report.statement import for_whom
from clipwise.types import InputError

NOTE = (
    "This comparison is not private. Accuracy and bias are measured on evaluation data, which no ε covers; choosing "
    "the best method by this table is a choice that the ε of its run does not cover: towards the training data it "
    "costs the ε of all runs together."
)
UNCOVERED = "what was trained without privacy is covered by no ε, so show this only to whoever may see the data."
TOP = {ACCURACY: "Most accurate", ERROR: "Least error", ROC_AUC: "Highest ROC AUC"}
NO_PRIVACY = "no privacy"  # in the place of a method; it has a space, so that it can never be one


@dataclass(frozen=True)
class Compared:
    """One row of the table."""

    method: str
    accuracy: float | None
    error: float | None  # of a regression, in the place of the accuracy
    epsilon: float
    bias: float | None  # direction error at the final model: 0 is unbiased; None where nobody looked
    mean_bias: float | None  # over all looks
    clipped: float | None  # share of samples that were shortened, at the final model
    seconds: float | None  # of this call; None for a run that was finished before
    folder: str
    roc_auc: float | None  # of two classes, however rare one of them is
    baseline: float | None  # accuracy, or error, of always saying the most frequent class, or the mean
    diverged: int | None  # the step at which the run was first seen without finite numbers
    best: bool  # the most accurate, of the least error or of the highest ROC AUC, as printed, unless all are alike


def run(config: CompareConfig) -> str:
    """Train every method, or those that are left, and lay the results side by side."""
    if config.resume is not None:
        config = resumed(config, config.resume)
    private = [text for text in config.methods if not _plain(text)]
    if not private:
        raise InputError("expected at least one method, got none: write for instance --methods 'flat; psac'")
    try:
        plans = [(text, resolved(_settings_of(config, text))) for text in private]
        ordinary = [(text, resolved(_settings_of(config, text))) for text in config.methods if _plain(text)]
    except InputError as error:
        hint = "; methods are separated by ';'" if len(config.methods) == 1 and "," in config.methods[0] else ""
        hint = "; training without privacy is written 'no privacy'" if "privacy" in str(error).lower() else hint
        raise InputError(f"{error}{hint}") from error
    use_threads(config)
    folder = Path(config.resume or config.folder or new_folder(f"compare-{short(config.data)}"))
    if config.resume is None:
        refuse_unfit(folder)  # now, before the data are read
    splits = splits_for(plans[0][1])
    if config.resume is None:
        RunFolder(folder).write(SETTINGS, to_toml(config))
    with begun(config, folder):
        times = _made(config, plans, splits, folder)
        without = _without(config, ordinary, splits, folder)
    runs = read(times)
    found = in_numbers(runs)
    most = best(found, judged(found))
    rows = [
        _compared(text, run, row, times[run.path], row in most)
        for (text, _), run, row in zip(plans, runs, found, strict=True)
    ]
    warn_of(found)
    page, together = write_report(runs, folder)[0], epsilon_together(runs)
    if config.json or config.json_lines:
        values = {"folder": str(folder), "report": str(page), "delta": config.delta, "note": NOTE}
        values["rows_per_person"] = config.rows_per_person
        values |= {"epsilon_of_all_runs": together, "runs": [asdict(row) for row in rows], "no_privacy": without}
        return as_json(values, indent=None if config.json_lines else 2)
    at = f"δ = {no_less(config.delta)}{for_whom(config.rows_per_person)}"
    samples = " or ".join(map(str, sorted({evaluation_samples(plan, splits) for _, plan in plans})))
    return "" if config.quiet else _table(rows, without, found, together, at, samples, page)


def _made(
    config: CompareConfig, plans: Sequence[tuple[str, TrainConfig]], splits: Splits, folder: Path
) -> dict[Path, float | None]:
    """Each method's run, by its folder, with its seconds; none for one that was finished before, which is kept."""
    times: dict[Path, float | None] = {}
    chosen = [methods.parse(plan.method) for _, plan in plans]
    with Bar(quiet=config.quiet, lines=config.json_lines) as bar:
        for number, ((text, plan), method) in enumerate(zip(plans, chosen, strict=True), start=1):
            place = folder / f"{number}-{method.name.strip('_')}"
            times[place] = None
            if (place / STATEMENT).is_file():
                continue
            start = time.monotonic()
            bar.begin(f"{text:<{max(map(len, config.methods))}}")
            going = replace(plan, resume=str(place)) if (place / CHECKPOINT).is_file() else plan
            finished = run_one(going, splits, place, bar, beside=chosen, command=resume_command(config, folder))
            times[place] = seconds = time.monotonic() - start
            _tell(config, text, finished.metrics[-1], seconds)
    return times


def _tell(config: CompareConfig, text: str, row: Mapping[str, Any], seconds: float) -> None:
    """One line for what was trained just now, where no terminal shows the bar."""
    if not config.quiet and not sys.stderr.isatty():
        print(f"{text}: {' '.join(quality(row))}, {seconds:.1f} s", file=sys.stderr)


def _without(
    config: CompareConfig, plans: Sequence[tuple[str, TrainConfig]], splits: Splits, folder: Path
) -> list[dict[str, Any]]:
    """What the same network reaches without privacy, once for each text that asked for it; only that is kept."""
    found: list[dict[str, Any]] = list(measurements(folder / WITHOUT))
    with Bar(quiet=config.quiet) as bar:
        for text, plan in plans:
            if any(row["method"] == text for row in found):
                continue
            bar.begin(text)
            start = time.monotonic()
            row: dict[str, Any] = {
                "method": text,
                **without_privacy(plan, splits, bar),
                "seconds": round(time.monotonic() - start, 3),
            }
            found.append(row)
            write(folder / WITHOUT, "".join(as_json(each, indent=None) for each in found))
            _tell(config, text, row, row["seconds"])
    return found


def _compared(text: str, run: Recorded, row: RunNumbers, seconds: float | None, most: bool) -> Compared:
    """One run as a row of the table; a model that diverged has no bias in the end."""
    last = own(run.looks[-1]) if run.looks and run.diverged is None else {}
    return Compared(
        method=text,
        accuracy=row.accuracy,
        error=row.error,
        epsilon=row.epsilon,
        bias=last.get("direction_error"),
        mean_bias=row.bias,
        clipped=last.get("clipped"),
        seconds=None if seconds is None else round(seconds, 3),
        folder=str(run.path),
        roc_auc=row.roc_auc,
        baseline=row.baseline,
        diverged=row.diverged,
        best=most,
    )


def _plain(text: str) -> bool:
    """Whether this asks for training without privacy."""
    return text.partition("@")[0].split() == NO_PRIVACY.split()


def _settings_of(config: CompareConfig, text: str) -> TrainConfig:
    """The settings of one method's run: ``method`` or ``method @ learning rate``; no privacy has no method."""
    shared = {each.name: getattr(config, each.name) for each in fields(Training)}
    method, at, rate = text.partition("@")
    plan = TrainConfig(**shared) if _plain(text) else TrainConfig(**shared, method=method.strip())
    if not at:
        return plan
    try:
        return replace(plan, learning_rate=float(rate))
    except ValueError:
        raise InputError(f"expected METHOD @ LEARNING RATE, got {text!r}: write for instance flat @ 0.5") from None


def _table(
    rows: list[Compared],
    without: list[dict[str, Any]],
    found: list[RunNumbers],
    together: float,
    at: str,
    samples: str,
    page: Path,
) -> str:
    name, of = ("error", ERROR) if rows[0].accuracy is None else ("accuracy", ACCURACY)
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("method", vertical="bottom", overflow="fold")
    areas = ("ROC\nAUC",) if any(row.roc_auc is not None for row in rows) else ()
    for title in (name, *areas, "ε", "own\nbias", "own mean\nbias", "clipped", "time"):
        table.add_column(title, justify="right", vertical="bottom", no_wrap=True)
    for row in rows:
        table.add_row(
            Text(row.method),
            of.shown(getattr(row, name)),
            *("–" if row.roc_auc is None else ROC_AUC.shown(row.roc_auc) for _ in areas),
            rounded_up(row.epsilon),
            *("–" if x is None else f"{x:.1%}" for x in (row.bias, row.mean_bias)),
            "–" if row.clipped is None else f"{row.clipped:.0%}",
            "–" if row.seconds is None else f"{row.seconds:.1f} s",
            style="bold" if row.best else "",
        )
    for plain in without:
        plains = (ROC_AUC.shown(plain["roc_auc"]) if "roc_auc" in plain else "–" for _ in areas)
        seen = (of.shown(plain[name]), *plains, "none", "–", "–", "–", f"{plain['seconds']:.1f} s")
        table.add_row(Text(plain["method"]), *seen)
    lost = [row.method for row in rows if row.diverged is not None]
    lost += [plain["method"] for plain in without if not math.isfinite(plain["loss"])]
    top = ", ".join(row.method for row in rows if row.best)
    ranked = ranking(found)
    lines = [
        f"{TOP[judged(found)]}: {top}." if top else "",
        *always_the_same(found),
        f"Diverged: {', '.join(lost)}: write a smaller learning rate behind @." if lost else "",
        *(text.replace("*", "") for text in privacy_costs(found)),
        f"{at}. Own bias: share of the clipped mean gradient that does not lie along the true one, at the "
        "final model and averaged over the run; clipped: share of samples shortened at the final model; "
        "time: the first run’s holds what the others share, such as finding the noise.",
        f"Error: {ROOT_MEAN_SQUARE}." if name == "error" else "",
        "Each run had gradients of its own, so own bias does not rank the methods.",
        ranked,
        *(text.replace("*", "") for text in chance(found)),
        f"Measured on {samples} samples. Name a method twice or more often to see how large chance is.",
        f"{NOTE} That is {rounded_up(together)}{f'; {UNCOVERED}' if without else '.'}",
    ]
    shown = rendered(table, "", *(Text(line) for line in lines if line))
    return f"{shown}Runs written to {page.parent}\nOpen {page} in a browser: which method is less biased, and why.\n"
