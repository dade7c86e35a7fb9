"""``clipwise train``: one private run.

Receives: TrainConfig.
Gives: the run's folder, and a summary as text or JSON.
"""

from __future__ import annotations

import time
from pathlib import Path

from rich.table import Table
from rich.text import Text

from clipwise import methods
from clipwise.cli.parts import evaluation_samples, resolved, splits_for, use_threads
from clipwise.cli.runs import new_folder, run_one, warn_of
from clipwise.cli.screen import Bar, quality, rendered
from clipwise.cli.stopping import resumed
from clipwise.config import TrainConfig
from clipwise.plain import as_json, four_digits, no_less, rounded_up
from clipwise.report import read
from clipwise.report.answer import in_numbers
from clipwise.report.folder import refuse_unfit
from clipwise.report.runs import ROOT_MEAN_SQUARE, short
from clipwise.report.statement import counted
from clipwise.training import Run


def run(config: TrainConfig) -> str:
    """Train, or go on training, and say what came of it."""
    config = resolved(config) if config.resume is None else resumed(config, config.resume)
    use_threads(config)
    name = methods.parse(config.method).name
    folder = Path(config.resume or config.folder or new_folder(f"{short(config.data)}-{name.strip('_')}"))
    if config.resume is None:
        refuse_unfit(folder)  # now, before the data are read
    splits = splits_for(config)
    start = time.monotonic()
    with Bar(quiet=config.quiet, lines=config.json_lines) as bar:
        bar.begin(name)
        finished = run_one(config, splits, folder, bar)
    warn_of(in_numbers(read([folder])))
    if config.json or config.json_lines:
        indent = None if config.json_lines else 2
        return as_json(_values(config, finished, time.monotonic() - start), indent)
    return "" if config.quiet else _summary(finished, evaluation_samples(config, splits), time.monotonic() - start)


def _values(config: TrainConfig, finished: Run, seconds: float) -> dict[str, object]:
    return {
        "folder": str(finished.folder),
        **finished.metrics[-1],
        "delta": config.delta,
        "seconds": round(seconds, 3),
        "statement": finished.statement.as_dict(),
    }


def _summary(finished: Run, samples: int, seconds: float) -> str:
    stated, last = finished.statement, finished.metrics[-1]
    seeded = ": for tests, anyone with the seed can subtract it" if stated.seeded else ""
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=len("written to"))
    table.add_row("method", Text(stated.method))
    name, value = quality(last)
    over = "of" if name == "accuracy" else f"({ROOT_MEAN_SQUARE}) on"
    table.add_row(name, f"[bold]{value}[/] {over} {samples} evaluation samples")
    if "baseline" in last:  # without it an accuracy says little where classes are unbalanced
        same = f"{last['baseline']:.1%} by always saying the most frequent class"
        if name == "error":
            same = f"{four_digits(last['baseline'])} by always saying the mean of their labels"
        table.add_row("baseline", same)
    if "roc_auc" in last:
        table.add_row("ROC AUC", f"{last['roc_auc']:.3f} between the two classes; 0.5 is guessing")
    table.add_row(
        "privacy",
        f"[bold]ε = {rounded_up(stated.epsilon)}[/] at δ = {no_less(stated.delta)}, {counted(stated.as_dict())}",
    )
    table.add_row("noise", f"multiplier {stated.noise_multiplier:g}, generator {stated.generator}{seeded}")
    table.add_row("time", f"{seconds:.1f} s")
    return f"{rendered(table)}written to  {finished.folder}\n"
