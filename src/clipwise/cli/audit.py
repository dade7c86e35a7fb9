"""``clipwise audit``: attacks on methods, or on the configuration of a run, beside what they claim.

Receives: AuditConfig.
Gives: the verdict table, as text or JSON, and for a run also in its folder; Finding where a bound is above its claim.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text

from clipwise import methods
from clipwise.accounting import Ledger
from clipwise.accounting.ledger import counts, listed
from clipwise.audit import AuditPlan, Roc, Verdict, audit, registered
from clipwise.audit.verdict import WHOLE_RUNS
from clipwise.cli import Finding
from clipwise.cli.retrained import Retrained
from clipwise.cli.screen import rendered
from clipwise.config import AuditConfig, TrainConfig, flag, from_toml, made
from clipwise.methods import Method
from clipwise.plain import as_json, bound, no_less, rounded_up
from clipwise.report.folder import AUDIT, LEDGER, MODEL, SETTINGS, STATEMENT, STATEMENT_TEXT, digest, text_in, write
from clipwise.report.runs import (
    RECOUNT,
    TOO_WEAK,
    attacked,
    guessed,
    refuse_unfinished,
    rows_per_person,
    stated_kinds,
    statement_in,
    too_weak,
)
from clipwise.types import InputError, warn, whole

CONFIDENCE = "confidence of all rows together"
# of a statement; the steps are the run's own: the ledger may hold what was released before it, too
NEEDED = (
    *("epsilon", "delta", "noise_multiplier", "sampling_rate", "steps", "releases", "method", "accountant"),
    *("entries", "spent_before"),
)
LABEL = 19  # characters of a method's name in the table, so that it fits into 80
RETRAINED = (
    "A finished run cannot be audited after the fact: its method, noise and steps were audited on small problems, "
    "and its network was trained anew by the same method, noise and steps, with mislabelled test rows in its data."
)
IN_PYTHON = (
    "a run made in Python keeps neither its model nor its data; clipwise.audit.watched audits it in your program"
)


@dataclass(frozen=True)
class _Finished:
    """What a run's folder says."""

    path: Path
    settings: TrainConfig | None  # None for a run made in Python
    statement: dict[str, Any]
    note: str = ""  # what its audit rests on


def run(config: AuditConfig) -> str:
    """Audit, telling on standard error what is being audited."""
    if len(config.run) > 1:
        raise InputError(f"expected one run's folder, got {len(config.run)}: audit them one by one")
    if config.run and config.method:
        raise InputError("expected a run's folder or --method, got both: a run has its own method")
    if whole("shadows", config.shadows, least=0) % 2:
        raise InputError(f"shadows come in pairs, of a half and the rest, got {config.shadows}: write --shadows 8")
    if config.shadows and not config.run:
        raise InputError("shadows are for a finished run, got none: write clipwise audit RUN --shadows 8")
    finished = _read(Path(config.run[0])) if config.run else None
    plan = _plan(config, finished)
    chosen = registered() if not config.method else tuple(methods.parse(text) for text in config.method)
    again: Retrained | None = None
    if finished is not None:
        own = _parsed(finished.statement["method"])
        chosen = () if own is None else (own,)
        again, note = _again(finished, plan, needed=bool(config.shadows))  # now: the attacks before it take minutes
        finished = replace(finished, note=note)
    else:
        torch.set_num_threads(1)  # the problems are so small that a second thread only waits for the first

    def progress(message: str) -> None:
        if not config.quiet:
            print(message, file=sys.stderr)

    share = 1 if again is None else 2  # a run's own rows take half of what the confidence leaves
    rows = audit(chosen, replace(plan, confidence=1 - (1 - plan.confidence) / share), progress) if chosen else []
    if finished is not None:
        rows = [_ledger(finished), *rows]
    membership: dict[str, Roc] = {}
    if finished is not None and again is not None:
        progress(f"the network of {finished.path}, trained anew with canaries")
        rows.append(again.one_run(config.canaries, 1 - (1 - plan.confidence) / share))
        progress("membership inference")
        membership = again.membership(config.shadows, progress)
    values = _json(plan, rows, membership, finished)
    if finished is not None:
        _keep(finished.path / AUDIT, values)
    text = values if config.json else _text(plan, rows, membership, finished)
    if all(each.passed for each in rows):
        return text
    raise Finding(text)


def _keep(place: Path, values: str) -> None:
    """Write the verdict where the report finds it; a warning where that fails, since the verdict is told anyway."""
    try:
        write(place, values)
    except InputError as error:
        warn(str(error))


def _plan(config: AuditConfig, finished: _Finished | None) -> AuditPlan:
    given = {name: getattr(config, name) for name in ("noise_multiplier", "sampling_rate", "steps", "delta")}
    if finished is not None:
        for name, value in given.items():
            if value is not None:
                raise InputError(f"a run has its own {name}, got {flag(name)} {value}: leave it out")
        given = {name: finished.statement[name] for name in given}
    return AuditPlan(
        **{name: value for name, value in given.items() if value is not None},
        trials=config.trials,
        canaries=config.canaries,
        runs=config.runs,
        confidence=config.confidence,
        noise="secure" if config.noise_seed is None else config.noise_seed,
    )


def _read(path: Path) -> _Finished:
    refuse_unfinished(path)
    settings = path / SETTINGS
    known = made(TrainConfig, from_toml(TrainConfig, settings)) if settings.is_file() else None
    return _Finished(path, known, statement_in(path, NEEDED))


def _ledger(finished: _Finished) -> Verdict:
    """Whether the statement, for programs and for people, says what the ledger's releases are and cost."""
    stated, text = finished.statement, finished.path / STATEMENT_TEXT
    with Ledger(finished.path / LEDGER) as ledger:
        rows = rows_per_person(stated)
        spent = ledger.epsilon(stated["delta"], stated["accountant"], rows_per_person=rows)
        releases = ledger.releases
        kinds = counts(listed(ledger.entries))
    claim = f"({rounded_up(stated['epsilon'])}, {no_less(stated['delta'])})-differentially private"
    wrong = []
    if releases != stated["releases"]:
        wrong.append(f"the ledger holds {releases} releases, and {STATEMENT} says {stated['releases']}")
    elif kinds != stated_kinds(stated):
        wrong.append(f"the ledger's releases are of other kinds than {STATEMENT} says")
    if stated.get("model") and (file := finished.path / MODEL).is_file() and digest(file) != stated["model"]:
        wrong.append(f"{MODEL} is another file than the one that {STATEMENT} names by its SHA-256")
    if spent > stated["epsilon"] * (1 + 1e-9):
        wrong.append(f"the ledger's releases cost ε = {rounded_up(spent)}")
    if text.is_file() and not text_in(text).startswith(claim):
        wrong.append(f"{STATEMENT_TEXT} does not say {claim}, as {STATEMENT} does")
    detail = "; ".join(wrong) or f"{releases} releases, added up again"
    return Verdict(stated["method"], RECOUNT, stated["epsilon"], spent, spent, not wrong, detail)


def _again(finished: _Finished, plan: AuditPlan, *, needed: bool) -> tuple[Retrained | None, str]:
    """What trains the run anew, and what its audit rests on; None where that cannot be done, unless it is needed."""
    stated = finished.statement["method"]
    try:
        if _parsed(stated) is None:
            raise InputError(f"its method {stated} is not clipwise's own")
        if finished.settings is None:
            raise InputError(IN_PYTHON)
        return Retrained(finished.path, finished.settings, stated, plan), RETRAINED
    except InputError as error:
        if needed:
            raise InputError(f"--shadows trains the run anew, which cannot be done: {error}") from error
        done = "" if _parsed(stated) is None else ", and its method, noise and steps were audited on small problems"
        return None, f"The run's ledger was added up again{done}. Its network was not trained anew: {error}."


def _parsed(method: str) -> Method | None:
    """The method of a statement; None where it is the user's own."""
    try:
        return methods.parse(method)
    except InputError:
        return None


def _text(plan: AuditPlan, rows: list[Verdict], membership: dict[str, Roc], finished: _Finished | None) -> str:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("method", "audit", "claimed ε", "audited ≥", "could show", "verdict"):
        # in a narrow terminal names go on in the next line: neither a number nor a verdict is ever cut
        table.add_column(
            title,
            justify="right" if title in ("claimed ε", "audited ≥", "could show") else "left",
            no_wrap=title not in ("method", "audit"),
            overflow="fold",
        )
    labels = _labels([each.method for each in rows])
    before = ""
    for each in rows:
        numbers = [bound(each.claimed, up=True), bound(each.shown), bound(each.ceiling)]
        held = f"holds{'*' if too_weak(asdict(each)) else ''}"  # one character: the table has no room for more
        mark = Text(held if each.passed else "FALSE", style="" if each.passed else "bold red")
        table.add_row("" if each.method == before else labels[each.method], each.audit, *numbers, mark)
        before = each.method
    legend = [Text(f"{label}: {method}") for method, label in labels.items() if label[-1].isdigit()]
    legend.append(Text("could show: the ε that the same attack would have shown had it never been wrong"))
    if any(each.passed and too_weak(asdict(each)) for each in rows):
        legend.append(Text(TOO_WEAK))
    wrong = [Text(f"FALSE  {each.method}, {each.audit}: {each.detail}") for each in rows if not each.passed]
    generator = "secure noise" if plan.noise == "secure" else f"seeded noise ({plan.noise})"
    privacy = f"noise multiplier {plan.noise_multiplier:g}, rate {plan.sampling_rate:g}, {plan.steps} steps"
    last = [
        *legend,
        *wrong,
        Text(f"{privacy}, δ = {no_less(plan.delta)}; {plan.confidence:.0%} {CONFIDENCE}; {generator}"),
    ]
    if any(each.audit.startswith(WHOLE_RUNS) for each in rows):
        last.append(Text(f"{WHOLE_RUNS}: {plan.run_steps} steps, δ = {no_less(plan.run_delta)}"))
    last += [Text(f"membership inference, {name}: {guessed(found.as_dict())}") for name, found in membership.items()]
    if finished is not None:
        if (most := rows_per_person(finished.statement)) > 1:
            last.append(Text(f"the ledger’s ε is for whoever has at most {most} samples, an attack’s for one sample"))
        if len(membership) == 1:
            last.append(Text("for the likelihood-ratio attack, which trains more models, write --shadows 8"))
        last += [Text(finished.note), Text(f"kept in {finished.path / AUDIT}, where clipwise report finds it")]
    return rendered(table, Text(""), *last, Text(_concluded(rows)))


def _concluded(rows: list[Verdict]) -> str:
    if failed := sum(not each.passed for each in rows):
        return f"{failed} of {len(rows)} claims {'is' if failed == 1 else 'are'} false"
    if not attacked(map(asdict, rows)):
        return "the ledger agrees with the statement; nothing was attacked"
    return f"all {len(rows)} claims hold"


def _labels(expressions: list[str]) -> dict[str, str]:
    """A short name for each method: its own, with the settings that tell it from others of that name, or a number."""
    found: dict[str, str] = {}
    if any(_parsed(text) is None for text in expressions):  # a run of the user's own method: it stands alone
        return {text: text if len(text) <= LABEL else f"{text[: LABEL - 1]}…" for text in expressions}
    made_of = {text: methods.parse(text) for text in dict.fromkeys(expressions)}
    for text, method in made_of.items():
        same = [other for other in made_of.values() if other.name == method.name]
        differ = [key for key in method.settings if len({str(other.settings.get(key)) for other in same}) > 1]
        label = " ".join([method.name, *(str(method.settings[key]) for key in differ)])
        found[text] = label if len(label) <= LABEL else f"{method.name} {same.index(method) + 1}"
    return found


def _json(plan: AuditPlan, rows: list[Verdict], membership: dict[str, Roc], finished: _Finished | None) -> str:
    found: dict[str, Any] = {
        "passed": all(each.passed for each in rows),
        "plan": asdict(plan),
        "rows": [asdict(each) for each in rows],
    }
    if finished is not None:
        found |= {
            "run": str(finished.path),
            "note": finished.note,
            "membership": {name: roc.as_dict() for name, roc in membership.items()},
        }
    return as_json(found)
