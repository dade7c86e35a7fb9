"""Finished runs, read back from their folders.

Receives: folders: of runs, or of comparisons, which hold several.
Gives: Recorded for each run, under a short name of its own; what their own method did, and their ε together.
"""

from __future__ import annotations

import json
import math
import shlex
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clipwise import methods
from clipwise.accounting import Ledger, spent
from clipwise.accounting.ledger import counts, listed
from clipwise.methods import Method
from clipwise.plain import rounded_up
from clipwise.report.folder import (
    AUDIT,
    CALIBRATION,
    CHECKPOINT,
    DIAGNOSTICS,
    LEDGER,
    METRICS,
    SETTINGS,
    STATEMENT,
    STATEMENT_TEXT,
    WITHOUT,
    lines,
    measurements,
    text_in,
)
from clipwise.types import InputError, warn

SLACK = 1e-3  # of ε: another version's grid may round up a little further
NEEDED = ("epsilon", "delta", "accountant", "method", "releases")  # of a statement
BRIEF = 60  # letters that may tell two runs apart in a name, which charts write beside their bars
ROOT_MEAN_SQUARE = "root mean squared, in the label’s own unit"  # what the error of a regression is
RECOUNT = "ledger"  # of an audit's rows the one that adds up and attacks nothing
TOO_WEAK = "holds*: too weak to refute, since even that is less than the claim"
Values = Mapping[str, Any]


@dataclass(frozen=True)
class Recorded:
    """What one run's folder holds."""

    path: Path
    name: str  # short, and no other run's
    statement: Values
    metrics: tuple[Values, ...]
    looks: tuple[Values, ...] = ()  # diagnostics, of those with a finite gradient; not private
    diverged: int | None = None  # the step at which its numbers were first seen not to be finite
    calibration: Values | None = None
    audit: Values | None = None
    settings: Values | None = None
    stated: str = ""  # the statement for people
    without: tuple[Values, ...] = ()  # measurements of the same network without privacy, in the same comparison

    @property
    def method(self) -> Method:
        """The method that it began with."""
        said = self.statement["method"].partition("; from step ")[0]
        try:
            return methods.parse(said)
        except InputError as error:  # one of the user's own
            raise InputError(
                f"no page can be made of {self.path}, whose method {said} is not clipwise's own: in a program that has "
                f"it, write clipwise.METHODS[name] = its function, and then clipwise.cli.main(), which is this command"
            ) from error

    @property
    def last(self) -> Values:
        """The last measurement."""
        return self.metrics[-1] if self.metrics else {}

    @property
    def data(self) -> str | None:
        """The data's name, where the settings are kept."""
        return None if self.settings is None else self.settings.get("data")


def within(path: Path) -> list[Path]:
    """The folders of finished runs right inside this one."""
    return sorted(place.parent for place in path.glob(f"*/{STATEMENT}"))


def unfinished(path: Path, expected: str) -> InputError:
    """The error for a folder that is no finished run's."""
    begun = [place.parent for place in (path / CHECKPOINT, *sorted(path.glob(f"*/{CHECKPOINT}"))) if place.is_file()]
    hint = f"write {resuming(begun[0])}, which was interrupted" if begun else expected
    return InputError(f"there is no finished run in {path}: {hint}")


def refuse_unfinished(path: Path) -> None:
    """Refuse a folder that is not that of one finished run."""
    if not (path / STATEMENT).is_file():
        several = " or ".join(map(str, within(path)))
        raise unfinished(
            path, f"write one of its runs, {several}" if several else f"expected a folder with {STATEMENT}"
        )


def resuming(run: Path) -> str:
    """What to write to go on with this run, or with the comparison or experiment that it is a part of."""
    command = command_of(run.parent)
    if command in ("compare", "reproduce"):
        return f"clipwise {command} --resume {shlex.quote(str(run.parent))}"
    if (run / CHECKPOINT).is_file() and not (run / SETTINGS).is_file():  # made in Python: no command knows its model
        return f"clipwise.train(…, folder={str(run)!r}, resume=True)"
    return f"clipwise train --resume {shlex.quote(str(run))}"


def command_of(folder: Path) -> str | None:
    """The command whose settings this folder holds: train, compare or reproduce; None where it holds none of these.

    Not by its other files: a run that was stopped in its first step has no ledger yet, as a comparison has none.
    """
    lines = text_in(folder / SETTINGS).split("\n")
    known = {"method": "train", "methods": "compare", "experiments": "reproduce"}  # a setting that only they have
    return next((known[name] for name in (line.partition(" = ")[0] for line in lines) if name in known), None)


def read(paths: Iterable[str | Path]) -> list[Recorded]:
    """The runs in these folders, in their order; a folder that is not a run's stands for the runs right inside it."""
    found: list[Path] = []
    for path in map(Path, paths):
        inside = [path] if (path / STATEMENT).is_file() else within(path)
        if not inside:
            raise unfinished(path, f"expected a folder with {STATEMENT}, or one with runs")
        found += [place for place in inside if place not in found]
        _warn_of_unfinished(path)
    if not found:
        raise InputError(
            "expected the folder of at least one run, got none: write for instance clipwise report runs/RUN"
        )
    return _named([_read(place) for place in found])


def _warn_of_unfinished(path: Path) -> None:
    begun, finished = ({place.parent.name for place in path.glob(f"*/{name}")} for name in (CHECKPOINT, STATEMENT))
    unfinished = sorted(begun - finished)
    if unfinished:
        warn(
            f"in {path}, {', '.join(unfinished)} did not finish: what such a run released, and what was seen of it, is "
            f"in no number of this report, nor in the ε of all runs; resume it first: {resuming(path / unfinished[0])}"
        )


def own(look: Values) -> Values:
    """What the run's own method did in a look: it stands first."""
    return next(iter(look["methods"].values()))


def blind(look: Values) -> bool:
    """Whether no sample of a look had a finite gradient: its zeros are not measured, and belong in no mean."""
    return bool(look["non_finite"] == look["samples"])


def too_weak(row: Values) -> bool:
    """Whether this row of an audit could not have refuted the claim, however well its attack went."""
    claimed, ceiling = row.get("claimed"), row.get("ceiling")
    return row["audit"] != RECOUNT and claimed is not None and ceiling is not None and bool(ceiling < claimed)


def attacked(rows: Iterable[Values]) -> bool:
    """Whether these rows of an audit attack anything: adding a ledger up again does not."""
    return any(row["audit"] != RECOUNT for row in rows)


def guessed(roc: Values) -> str:
    """How well a membership inference told members from others, in words."""
    found = f"; {roc['tpr_at_1%']:.1%} of the members at 1% false alarms" if "tpr_at_1%" in roc else ""
    return f"area {roc['area']:.3f}, 95% in [{roc['low']:.3f}, {roc['high']:.3f}], 0.5 is guessing{found}"


def short(data: str) -> str:
    """The data's name without its folder and options, for titles and file names."""
    head = data.partition("?")[0]
    return Path(head.partition(":")[2]).stem or head


def comparable(runs: Sequence[Recorded]) -> bool:
    """Whether the runs had the same data and task: others cannot be ranked."""
    return len({(run.data, "error" in run.last) for run in runs}) == 1


def epsilon_together(runs: Sequence[Recorded]) -> float:
    """ε of all runs, at their largest δ: what is seen of them all, such as which was best, is made of all releases."""
    entries = [entry for run in runs for entry in Ledger(run.path / LEDGER).entries]
    accountants = {run.statement["accountant"] for run in runs}
    return spent(
        entries,
        max(run.statement["delta"] for run in runs),
        "rdp" if accountants == {"rdp"} else "pld",
        rows_per_person=max(rows_per_person(run.statement) for run in runs),
    )


def rows_per_person(statement: Values) -> int:
    """How many samples the statement's ε holds for together: one where it was written before it said so."""
    return int(statement.get("rows_per_person", 1))


def _read(place: Path) -> Recorded:
    statement = statement_in(place)
    try:
        metrics, looks = measurements(place / METRICS), lines(place / DIAGNOSTICS)
        found = Recorded(
            path=place,
            name="",
            statement=statement,
            metrics=tuple(metrics),
            looks=tuple(look for look in looks if not blind(look)),
            diverged=_diverged(metrics, looks),
            calibration=_json(place / CALIBRATION),
            audit=_json(place / AUDIT),
            settings=tomllib.loads(text_in(place / SETTINGS)) if (place / SETTINGS).is_file() else None,
            stated=text_in(place / STATEMENT_TEXT),
            without=tuple(measurements(place.parent / WITHOUT)),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{place} is not a run's folder as clipwise writes it ({error}): train the run again"
        ) from error
    ledger = Ledger(place / LEDGER)  # ε of several runs is made of ledgers
    if ledger.releases != statement["releases"]:
        raise InputError(
            f"the ledger in {place} holds {ledger.releases} releases, expected the {statement['releases']} of the "
            f"statement: restore the run's {LEDGER}"
        )
    refuse_other_releases(place, statement, ledger)
    rows = rows_per_person(statement)
    cost = ledger.epsilon(statement["delta"], statement["accountant"], rows_per_person=rows)
    if cost > (1 + SLACK) * statement["epsilon"]:
        raise InputError(
            f"the releases in the ledger of {place} cost ε = {rounded_up(cost)}, and its statement says "
            f"{rounded_up(statement['epsilon'])}: restore the run's {STATEMENT}"
        )
    return found


def statement_in(place: Path, needed: Iterable[str] = NEEDED) -> dict[str, Any]:
    """The statement in a run's folder, if it says all that is needed."""
    try:
        found: dict[str, Any] = json.loads(text_in(place / STATEMENT))
        for name in needed:
            found[name]
        stated_kinds(found)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{place / STATEMENT} is not as clipwise writes it ({error}): restore it, or train the run again"
        ) from error
    return found


def refuse_other_releases(place: Path, statement: Values, ledger: Ledger) -> None:
    """Refuse a ledger that lacks releases of which the folder's statement speaks, such as that of another run."""
    if lost := stated_kinds(statement) - counts(listed(ledger.entries)):
        raise InputError(
            f"the ledger in {place} lacks {lost.total()} releases that the statement names, such as {next(iter(lost))}:"
            f" restore the run's {LEDGER}"
        )


def stated_kinds(statement: Values) -> Counter[str]:
    """How many releases of each kind a statement names; none where it was written before they stood in it."""
    return counts([*statement.get("entries", ()), *statement.get("spent_before", ())])


def _diverged(metrics: Sequence[Values], looks: Sequence[Values]) -> int | None:
    """The first step after which the loss, or every gradient, was not finite: what comes later is no better."""
    lost = [row["step"] for row in metrics if not math.isfinite(row.get("loss", 0.0))]
    lost += [look["step"] for look in looks if blind(look)]
    return min(lost, default=None)


def _json(place: Path) -> Any:
    return json.loads(text_in(place)) if place.is_file() else None


def _named(runs: list[Recorded]) -> list[Recorded]:
    """The method's name; where several runs have it, with what tells them apart; the folder's name as the last way."""
    names = [run.method.name.strip("_") for run in runs]
    for way in (_apart, _placed):
        for name in {name for name in names if names.count(name) > 1}:
            same = [number for number, each in enumerate(names) if each == name]
            for number, more in zip(same, way([runs[n] for n in same]), strict=True):
                names[number] = f"{name} {more}".strip()
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def _apart(runs: Sequence[Recorded]) -> list[str]:
    """What tells runs of one method apart: its settings, or else the run's; nothing where neither does so briefly."""
    for facts in ([_settings(run.method) for run in runs], [dict(run.settings or {}) for run in runs]):
        keys = dict.fromkeys(key for each in facts for key in each)
        differing = [key for key in keys if len({str(each.get(key)) for each in facts}) > 1]
        told = [", ".join(f"{key}={each[key]}" for key in differing if key in each) for each in facts]
        if len(differing) < 3 and len(set(told)) == len(runs) and max(map(len, told)) <= BRIEF:
            return told
    return [""] * len(runs)


def _settings(method: Method) -> dict[str, Any]:
    """The method's settings and, behind them, those of a method that it wraps."""
    inside = [_settings(value) for value in method.settings.values() if isinstance(value, Method)]
    own = {key: value.name if isinstance(value, Method) else value for key, value in method.settings.items()}
    return own | {key: value for each in inside for key, value in each.items() if key not in own}


def _placed(runs: Sequence[Recorded]) -> list[str]:
    places = [run.path.name for run in runs]
    return places if len(set(places)) == len(places) else [str(run.path) for run in runs]
