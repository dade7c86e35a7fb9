"""``clipwise compare``: the same model trained by several methods, from the same initial weights.

Receives: CompareConfig.
Gives: one run's folder per method, a table of accuracy, ε and clipping bias as text or JSON, and report.html.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from rich.table import Table
from rich.text import Text

from clipwise import methods
from clipwise.cli.parts import evaluated, resolved, splits_for, use_threads
from clipwise.cli.runs import new_folder, run_one, warn_of
from clipwise.cli.screen import Bar, rendered
from clipwise.cli.stopping import Stopped, again, resumed
from clipwise.config import CompareConfig, TrainConfig, Training, to_toml
from clipwise.data import Splits
from clipwise.plain import as_json, rounded_up
from clipwise.report import epsilon_together, own, read, write_report
from clipwise.report.answer import ACCURACY, RunNumbers, best, in_numbers, ranking
from clipwise.report.folder import CHECKPOINT, SETTINGS, STATEMENT, RunFolder
from clipwise.report.runs import Recorded, short
from clipwise.types import InputError

NOTE = (
    "This comparison is not private. Accuracy and bias are measured on evaluation data, which no ε covers; choosing "
    "the best method by this table is a choice that the ε of its run does not cover: towards the training data it "
    "costs the ε of all runs together."
)


@dataclass(frozen=True)
class Compared:
    """One row of the table."""

    method: str
    accuracy: float
    epsilon: float
    bias: float | None  # direction error at the final model: 0 is unbiased; None where nobody looked
    mean_bias: float | None  # over all looks
    clipped: float | None  # share of samples that were shortened, at the final model
    seconds: float | None  # of this call; None for a run that was finished before
    folder: str
    baseline: float | None  # accuracy of always saying the most frequent class
    diverged: int | None  # the step at which the run was first seen without finite numbers
    best: bool  # the most accurate as it is printed, unless all are alike


def run(config: CompareConfig) -> str:
    """Train every method, or those that are left, and lay the results side by side."""
    if config.resume is not None:
        config = resumed(config, config.resume)
    if not config.methods:
        raise InputError("expected at least one method, got none: write for instance --methods 'flat; psac'")
    try:
        plans = [(text, resolved(_plan(config, text))) for text in config.methods]
    except InputError as error:
        hint = "; methods are separated by ';'" if len(config.methods) == 1 and "," in config.methods[0] else ""
        raise InputError(f"{error}{hint}") from error
    use_threads(config)
    splits = splits_for(plans[0][1])
    if splits.task == "regression":
        raise InputError(f"compare measures accuracy, and {config.data} has numbers for labels: write clipwise train")
    folder = Path(config.resume or config.folder or new_folder(f"compare-{short(config.data)}"))
    if config.resume is None:
        RunFolder(folder).write(SETTINGS, to_toml(config))
    try:
        times = _made(config, plans, splits, folder)
    except BaseException as error:
        if config.resume is None and not any(place.is_dir() for place in folder.iterdir()):  # bad input leaves none
            (folder / SETTINGS).unlink()
            folder.rmdir()
        elif isinstance(error, KeyboardInterrupt):
            raise Stopped(f"stopped; nothing is lost: write {again(config, folder)}") from None
        raise
    runs = read(times)
    found = in_numbers(runs)
    most = best(found, ACCURACY)
    rows = [
        _compared(text, run, row, times[run.path], row in most)
        for (text, _), run, row in zip(plans, runs, found, strict=True)
    ]
    warn_of(found)
    page, together = write_report(runs, folder)[0], epsilon_together(runs)
    if config.json or config.json_lines:
        values = {"folder": str(folder), "report": str(page), "delta": config.delta, "note": NOTE}
        values |= {"epsilon_of_all_runs": together, "runs": [asdict(row) for row in rows]}
        return as_json(values, indent=None if config.json_lines else 2)
    samples = " or ".join(map(str, sorted({evaluated(plan, splits) for _, plan in plans})))
    return "" if config.quiet else _table(rows, ranking(found), together, config.delta, samples, page)


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
            begun = replace(plan, resume=str(place)) if (place / CHECKPOINT).is_file() else plan
            finished = run_one(begun, splits, place, bar, beside=chosen, command=again(config, folder))
            times[place] = seconds = time.monotonic() - start
            if not config.quiet and not sys.stderr.isatty():
                print(f"{text}: accuracy {finished.metrics[-1]['accuracy']:.1%}, {seconds:.1f} s", file=sys.stderr)
    return times


def _compared(text: str, run: Recorded, row: RunNumbers, seconds: float | None, most: bool) -> Compared:
    """One run as a row of the table; a model that diverged has no bias in the end."""
    last = own(run.looks[-1]) if run.looks and run.diverged is None else {}
    return Compared(
        method=text,
        accuracy=run.last["accuracy"],
        epsilon=row.epsilon,
        bias=last.get("direction_error"),
        mean_bias=row.bias,
        clipped=last.get("clipped"),
        seconds=None if seconds is None else round(seconds, 3),
        folder=str(run.path),
        baseline=row.baseline,
        diverged=row.diverged,
        best=most,
    )


def _plan(config: CompareConfig, text: str) -> TrainConfig:
    """The settings of one method's run: ``method`` or ``method @ learning rate``."""
    shared = {each.name: getattr(config, each.name) for each in fields(Training)}
    method, at, rate = text.partition("@")
    plan = TrainConfig(**shared, method=method.strip())
    if not at:
        return plan
    try:
        return replace(plan, learning_rate=float(rate))
    except ValueError:
        raise InputError(f"expected METHOD @ LEARNING RATE, got {text!r}: write for instance flat @ 0.5") from None


def _table(rows: list[Compared], ranked: str, together: float, delta: float, samples: str, page: Path) -> str:
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("method", vertical="bottom", overflow="fold")
    for name in ("accuracy", "ε", "own\nbias", "own mean\nbias", "clipped", "time"):
        table.add_column(name, justify="right", vertical="bottom", no_wrap=True)
    table.add_column("", vertical="bottom")
    for row in rows:
        table.add_row(
            Text(row.method),
            f"{row.accuracy:.1%}",
            rounded_up(row.epsilon),
            *("–" if x is None else f"{x:.1%}" for x in (row.bias, row.mean_bias)),
            "–" if row.clipped is None else f"{row.clipped:.0%}",
            "–" if row.seconds is None else f"{row.seconds:.1f} s",
            "most accurate" if row.best else "diverged" if row.diverged is not None else "",
            style="bold" if row.best else "",
        )
    shown = rendered(
        table,
        "",
        f"δ = {delta:g}. Own bias: share of the clipped mean gradient that does not lie along the true one, at the "
        "final model and averaged over the run; clipped: share of samples shortened at the final model.",
        "Each run had gradients of its own, so own bias does not rank the methods.",
        *([ranked] if ranked else []),
        f"One run each, measured on {samples} samples: small differences are chance; repeat it to see how large.",
        f"{NOTE} That is {rounded_up(together)}.",
    )
    return f"{shown}Runs written to {page.parent}\nOpen {page} in a browser: which method is less biased, and why.\n"
