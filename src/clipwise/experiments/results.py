"""What came out of an experiment, beside what the paper says.

Receives: the rows and final numbers of each run.
Gives: Result for each run, averaged over seeds; Compared, the lines of the table "measured | paper".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clipwise.experiments.experiment import Experiment
from clipwise.experiments.measures import Curve
from clipwise.plain import four_digits, rounded_up


@dataclass(frozen=True)
class Result:
    """One run. ``values`` are final ones; with the prefix mean_ they are averages over the run's measurements."""

    name: str
    private: bool
    values: Mapping[str, float]
    spread: Mapping[str, float]  # standard deviation over seeds; empty where there is one
    curves: Mapping[str, Curve]  # of the first seed; "steps" has a row for each measurement
    seconds: float
    refused: str = ""  # why there is nothing, where training this way would not have the privacy it states


@dataclass(frozen=True)
class Line:
    """One quantity of one run: measured, and what the paper has, where it says."""

    run: str
    quantity: str
    measured: float
    measured_spread: float | None
    paper: float | None
    paper_spread: float | None

    @property
    def difference(self) -> float | None:
        """Measured less paper."""
        return None if self.paper is None else self.measured - self.paper


def summary(steps: Curve, final: Mapping[str, float]) -> dict[str, float]:
    """The last row of a run, the averages of its rows, and what was measured at the end."""
    columns = [name for name in (steps[-1] if steps else {}) if name != "step"]
    means = {f"mean_{name}": statistics.fmean(row[name] for row in steps if name in row) for name in columns}
    return {**means, **(steps[-1] if steps else {}), **final}


def averaged(name: str, private: bool, seeds: Sequence[tuple[dict[str, float], dict[str, Curve], float]]) -> Result:
    """One result from the (values, curves, seconds) of several seeds: means and standard deviations."""
    first = seeds[0]
    columns = {key: [values[key] for values, _, _ in seeds] for key in first[0]}
    spread = {key: statistics.stdev(of) for key, of in columns.items()} if len(seeds) > 1 else {}
    values = {key: statistics.fmean(of) for key, of in columns.items()}
    return Result(name, private, values, spread, first[1], sum(seconds for _, _, seconds in seeds))


def compared(experiment: Experiment, results: Sequence[Result]) -> list[Line]:
    """The lines of the table: every shown quantity that a run has."""
    lines = []
    for result in results:
        for quantity in experiment.shown:
            if quantity not in result.values:
                continue
            paper, spread = experiment.expected.get(quantity, {}).get(result.name, (None, None))
            measured = result.values[quantity]
            lines.append(Line(result.name, quantity, measured, result.spread.get(quantity), paper, spread))
    return lines


PERCENT = ("accuracy", "ece", "mce", "confidence", "clipped", "off_direction")


def formatted(quantity: str, value: float | None, *, signed: bool = False) -> str:
    """A number for people: shares in percent, an ε rounded up, others with four digits."""
    if value is None or math.isnan(value):
        return "—"
    sign = "+" if signed else ""
    plain = quantity.removeprefix("mean_").removeprefix("train_")
    if any(plain == name or plain.startswith(f"{name}_") for name in PERCENT):
        return f"{100 * value:{sign}.2f} %"
    if signed:
        return f"{value:+.4g}"
    return rounded_up(value) if quantity == "epsilon" else four_digits(value)
