"""``clipwise predict``: what a finished run's model says about new rows.

Receives: PredictConfig.
Gives: a csv table with one line per row of the file, in its order, or the same as JSON.
"""

from __future__ import annotations

import csv
import io
import shlex
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from clipwise import methods, models
from clipwise.cli.parts import model_of, use_threads
from clipwise.config import PredictConfig, TrainConfig, from_toml, made
from clipwise.data.columns import Values, word
from clipwise.data.unlabelled import Unlabelled, unlabelled
from clipwise.diagnostics.quality import outputs
from clipwise.plain import as_json
from clipwise.report.folder import MODEL, SETTINGS, tensors_in
from clipwise.report.runs import refuse_unfinished
from clipwise.types import InputError, fraction, nearest

PREDICTION = "prediction"


def run(config: PredictConfig) -> str:
    """Prepare the rows as the run's own were, and give what its model says of each."""
    if len(config.run) != 1 or config.data is None:
        got = f"{len(config.run)} folders" if len(config.run) != 1 else "no --data"
        raise InputError(
            f"expected one run's folder and a file, got {got}: write for instance clipwise predict runs/RUN --data "
            "new.csv"
        )
    folder = Path(config.run[0])
    settings = _settings(folder)
    use_threads(settings)
    rows = unlabelled(settings.data, config.data)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # a model with public companions draws them: the same file gets the same answer
        found = outputs(_model(folder, settings, rows), _inputs(settings, rows))
    if not bool(found.isfinite().all()):
        raise InputError(f"the model of {folder} must give finite numbers, got others: its training diverged")
    told = _told(found, rows, config.threshold)
    table = _kept(config, rows, told) | told
    if config.json:
        return as_json([dict(zip(table, line, strict=True)) for line in zip(*table.values(), strict=True)])
    page = io.StringIO()
    writer = csv.writer(page, lineterminator="\n")
    writer.writerow(table)
    writer.writerows(zip(*table.values(), strict=True))
    return page.getvalue()


def _settings(folder: Path) -> TrainConfig:
    refuse_unfinished(folder)
    if not (folder / SETTINGS).is_file():
        raise InputError(
            f"{folder} has no {SETTINGS}: a run made in Python does not keep what its model is made of; build it in "
            f"your program and load {MODEL}"
        )
    return made(TrainConfig, from_toml(TrainConfig, folder / SETTINGS))


def _kept(config: PredictConfig, rows: Unlabelled, told: Collection[str]) -> dict[str, list[Any]]:
    known = {name: cells for name, cells in (rows.columns or {}).items() if name not in told}
    for name in config.keep:
        if name not in known:
            parts = name.split(",")
            hint = nearest(name, known) if known else "leave --keep out"
            hint = f"write --keep {shlex.join(parts)}" if len(parts) > 1 and known.keys() >= set(parts) else hint
            raise InputError(f"{config.data} has no column {name!r} to keep: {hint}")
    return {name: [word(cell) for cell in known[name]] for name in config.keep}


def _inputs(settings: TrainConfig, rows: Unlabelled) -> Tensor:
    """Tokens or numbers, whichever the model takes."""
    if not models.takes_tokens(model_of(settings)):
        return rows.x.float()
    vocabulary = settings.vocabulary or rows.vocabulary
    low, high = rows.x.aminmax()
    if vocabulary is not None and not 0 <= low <= high < vocabulary:
        raise InputError(f"tokens must be 0 to vocabulary − 1 = {vocabulary - 1}, got {int(low)} to {int(high)}")
    return rows.x


def _model(folder: Path, settings: TrainConfig, rows: Unlabelled) -> nn.Module:
    task, classes = ("classes", len(rows.label.names)) if isinstance(rows.label, Values) else ("regression", 1)
    vocabulary = settings.vocabulary or rows.vocabulary
    model = models.build(model_of(settings), tuple(rows.x.shape[1:]), classes, vocabulary, task)
    state = tensors_in(folder / MODEL)
    if companions := methods.parse(settings.method).companions:
        model = models.Accompanied(model, state["public"], companions)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise InputError(
            f"{folder / MODEL} is not of the model that {SETTINGS} says ({error}): restore both"
        ) from error
    return model


def _told(found: Tensor, rows: Unlabelled, threshold: float | None) -> dict[str, list[Any]]:
    """The likeliest class and the probability of each, or the number in the label's own unit.

    A ``threshold`` is the user's: one found here, such as the share of rows of a class, would be one of these rows.
    """
    label = rows.label
    if threshold is not None and not (isinstance(label, Values) and len(label.names) == 2):
        got = f"{len(label.names)} classes" if isinstance(label, Values) else "a regression"
        raise InputError(f"--threshold is for two classes, got {got}: leave it out")
    if not isinstance(label, Values):
        middle, half = (label.high + label.low) / 2, (label.high - label.low) / 2
        return {PREDICTION: _numbers(middle + half * found[:, 0].double())}
    shares = found.double().softmax(1)
    each = {f"p_{name}": _numbers(share) for name, share in zip(label.names, shares.T, strict=True)}
    places = shares.argmax(1) if threshold is None else (shares[:, 1] >= fraction("threshold", threshold)).long()
    return {PREDICTION: [label.names[place] for place in places.tolist()], **each}


def _numbers(values: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]
