"""``clipwise audit``: attacks on methods, or on the configuration of a run, beside what they claim.

Receives: AuditConfig.
Gives: the verdict table, as text or JSON; Finding where a lower bound is above its claim.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

from clipwise import methods
from clipwise.accounting import Ledger
from clipwise.audit import Plan, Roc, Row, audit, coins, logistic_attack, registered, watched
from clipwise.audit.one_run import verdict
from clipwise.audit.verdict import row
from clipwise.cli import Finding
from clipwise.cli.runs import _optimizer, network, splits_for, use_threads
from clipwise.cli.screen import rendered
from clipwise.config import AuditConfig, TrainConfig, from_toml, made
from clipwise.private import make_private
from clipwise.report.folder import LEDGER, MODEL, SETTINGS, STATEMENT
from clipwise.types import InputError

CONFIDENCE = "confidence of all rows together"
RETRAINED = (
    "A finished run cannot be audited after the fact: its method, noise and steps were audited on small problems, "
    "and its network was trained anew by the same method, noise and steps, with mislabelled test rows in its data."
)


@dataclass(frozen=True)
class _Finished:
    """What a run's folder says."""

    path: Path
    settings: TrainConfig
    statement: dict[str, Any]


def run(config: AuditConfig) -> str:
    """Audit, telling on standard error what is being audited."""
    if len(config.run) > 1:
        raise InputError(f"expected one run's folder, got {len(config.run)}: audit them one by one")
    if config.run and config.method:
        raise InputError("expected a run's folder or --method, got both: a run has its own method")
    finished = _read(Path(config.run[0])) if config.run else None
    plan = _plan(config, finished)
    chosen = registered() if not config.method else tuple(methods.parse(text) for text in config.method)
    if finished is not None:
        chosen = (methods.parse(finished.statement["method"]),)
        use_threads(finished.settings)
    else:
        torch.set_num_threads(1)  # the problems are so small that a second thread only waits for the first

    def progress(message: str) -> None:
        if not config.quiet:
            print(message, file=sys.stderr)

    share = 1 if finished is None else 2  # a run's own rows take half of what the confidence leaves
    rows = audit(chosen, replace(plan, confidence=1 - (1 - plan.confidence) / share), progress)
    membership = None
    if finished is not None:
        progress(f"the model of {finished.path}, trained anew with canaries")
        more, membership = _retrained(finished, plan, config.canaries, 1 - (1 - plan.confidence) / share)
        rows = [_ledger(finished), *rows, more]
    text = _json(plan, rows, membership, finished) if config.json else _text(plan, rows, membership, finished)
    if all(each.passed for each in rows):
        return text
    raise Finding(text)


def _plan(config: AuditConfig, finished: _Finished | None) -> Plan:
    given = {name: getattr(config, name) for name in ("noise_multiplier", "sampling_rate", "steps", "delta")}
    if finished is not None:
        for name, value in given.items():
            if value is not None:
                raise InputError(f"a run has its own {name}, got --{name.replace('_', '-')} {value}: leave it out")
        stated = finished.statement
        given = {name: stated[name] for name in ("noise_multiplier", "sampling_rate", "delta")}
        given["steps"] = stated["releases"]
    return Plan(
        **{name: value for name, value in given.items() if value is not None},
        trials=config.trials,
        canaries=config.canaries,
        runs=config.runs,
        confidence=config.confidence,
        noise="secure" if config.noise_seed is None else config.noise_seed,
    )


def _read(path: Path) -> _Finished:
    if not (path / STATEMENT).is_file():
        raise InputError(f"there is no finished run in {path}: expected a folder with {STATEMENT}")
    try:
        statement = json.loads((path / STATEMENT).read_text())
        for name in ("epsilon", "delta", "noise_multiplier", "sampling_rate", "releases", "method", "accountant"):
            statement[name]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path / STATEMENT} is not a run's statement ({error}): train the run again") from error
    return _Finished(path, made(TrainConfig, from_toml(TrainConfig, path / SETTINGS)), statement)


def _ledger(finished: _Finished) -> Row:
    """Whether the statement's ε is what the ledger's releases cost."""
    stated = finished.statement
    with Ledger(finished.path / LEDGER) as ledger:
        spent, releases = ledger.epsilon(stated["delta"], stated["accountant"]), ledger.releases
    passed = releases == stated["releases"] and spent <= stated["epsilon"] * (1 + 1e-9)
    return Row(
        stated["method"], "ledger", stated["epsilon"], spent, spent, passed, f"{releases} releases, added up again"
    )


def _retrained(finished: _Finished, plan: Plan, canaries: int, confidence: float) -> tuple[Row, Roc]:
    """The audit from one run of the same configuration, and membership inference on the run's own model."""
    settings, stated = finished.settings, finished.statement
    splits = splits_for(settings, settings.model or "")
    model, public, splits = network(settings, splits)
    model.load_state_dict(torch.load(finished.path / MODEL, weights_only=True))
    membership = logistic_attack(model, splits.train.data, splits.test.data)
    model, _, _ = network(settings, splits)

    inputs, labels = (t[:canaries] for t in splits.test.data)
    inputs = _shuffled(inputs)
    wrong = (labels + 1 + torch.arange(len(labels)) % (splits.classes - 1)) % splits.classes  # any class but its own
    included = coins(len(labels), plan.noise)
    data = tuple(torch.cat([own, new[included]]) for own, new in zip(splits.train.data, (inputs, wrong), strict=True))
    method = methods.parse(stated["method"])
    private = make_private(
        model,
        _optimizer(settings, [p for p in model.parameters() if p.requires_grad]),
        data,
        method=method,
        noise_multiplier=plan.noise_multiplier,
        delta=plan.delta,
        steps=plan.steps,
        batch=max(1, round(plan.sampling_rate * len(data[0]))),
        chunk=settings.chunk,
        noise=plan.noise,
        accountant=settings.accountant,
        self_test=False,
        post=settings.post,
        public=public,
    )
    device = next(model.parameters()).device
    total = watched(private, (inputs.to(device), wrong.to(device)), len(splits.train))
    bound = verdict(total, included.numpy(), delta=plan.delta, confidence=confidence)
    detail = f"with {len(labels)} canaries, {len(labels) // 5} guesses"
    return row(method, "one run (retrained)", private.epsilon(), bound, detail), membership


def _shuffled(inputs: Tensor) -> Tensor:
    """Each row's entries in an order of their own: strange samples, with gradients of their own."""
    order = torch.rand(inputs.shape, generator=torch.Generator().manual_seed(0)).flatten(1).argsort(1)
    return inputs.flatten(1).gather(1, order).view_as(inputs)


def _text(plan: Plan, rows: list[Row], membership: Roc | None, finished: _Finished | None) -> str:
    table = Table(box=None, pad_edge=False)
    for title in ("method", "audit", "claimed ε", "audited ≥", "could show", "verdict"):
        table.add_column(
            title, justify="right" if title in ("claimed ε", "audited ≥", "could show") else "left", no_wrap=True
        )
    labels = _labels([each.method for each in rows])
    before = ""
    for each in rows:
        numbers = [_number(value) for value in (each.claimed, each.shown, each.ceiling)]
        mark = Text("holds" if each.passed else "FALSE", style="" if each.passed else "bold red")
        table.add_row("" if each.method == before else labels[each.method], each.audit, *numbers, mark)
        before = each.method
    legend = [Text(f"{label}: {method}") for method, label in labels.items() if " " in label]
    wrong = [Text(f"FALSE  {each.method}, {each.audit}: {each.detail}") for each in rows if not each.passed]
    generator = "secure noise" if plan.noise == "secure" else f"seeded noise ({plan.noise})"
    privacy = f"noise multiplier {plan.noise_multiplier:g}, rate {plan.sampling_rate:g}, {plan.steps} steps"
    last = [*legend, *wrong, Text(f"{privacy}, δ = {plan.delta:g}; {plan.confidence:.0%} {CONFIDENCE}; {generator}")]
    if membership is not None:
        last.append(Text(f"membership inference (logistic, on the run's model): {_area(membership)}"))
    if finished is not None:
        last.append(Text(RETRAINED))
    failed = sum(not each.passed for each in rows)
    last.append(Text(f"{failed} of {len(rows)} claims are false" if failed else f"all {len(rows)} claims hold"))
    return rendered(table, Text(""), *last)


def _labels(expressions: list[str]) -> dict[str, str]:
    """A short name for each method: its own, with a number where several have it."""
    found: dict[str, str] = {}
    names = [text.partition("(")[0] for text in dict.fromkeys(expressions)]
    for number, text in enumerate(dict.fromkeys(expressions)):
        name = names[number]
        found[text] = name if names.count(name) == 1 else f"{name} {names[: number + 1].count(name)}"
    return found


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}" if value < 1e4 else "∞"


def _area(roc: Roc) -> str:
    return f"area under the curve {roc.area:.3f}, 95 % in [{roc.low:.3f}, {roc.high:.3f}]; 0.5 is guessing"


def _json(plan: Plan, rows: list[Row], membership: Roc | None, finished: _Finished | None) -> str:
    found: dict[str, Any] = {
        "passed": all(each.passed for each in rows),
        "plan": asdict(plan),
        "rows": [each.as_dict() for each in rows],
    }
    if finished is not None and membership is not None:
        found["run"] = str(finished.path)
        found["note"] = RETRAINED
        found["membership"] = {name: getattr(membership, name) for name in ("area", "low", "high")}
    return json.dumps(found, indent=2, ensure_ascii=False) + "\n"
