"""``clipwise reproduce``: a figure or table of the papers, repeated and held against what they say.

Receives: ReproduceConfig.
Gives: for each experiment a folder with results.json, a plot and the runs; a table "measured | paper" and its claims.
"""

from __future__ import annotations

import itertools
import json
import re
import time
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from clipwise import methods, models, postprocess
from clipwise.cli.parts import (
    loss_of,
    measured_every,
    model_of,
    network,
    optimizer_of,
    resolved,
    scheduler_of,
    splits_for,
    steps_of,
)
from clipwise.cli.runs import new_folder, run_one
from clipwise.cli.screen import Bar, rendered
from clipwise.cli.stopping import begun, resume_command, resumed
from clipwise.config import ReproduceConfig, TrainConfig, checked, made, to_toml
from clipwise.data import Arrays, Splits
from clipwise.data.source import parsed
from clipwise.diagnostics import quality
from clipwise.engine import ChunkEngine
from clipwise.experiments import Experiment, Planned, Result, averaged, compared, descend, holds, known, measures, read
from clipwise.experiments.experiment import PAPERS, only
from clipwise.experiments.measures import Curve
from clipwise.experiments.noise_free import NOT_PRIVATE, AfterStep
from clipwise.experiments.plot import plotted
from clipwise.experiments.problem import place, posed
from clipwise.experiments.results import formatted, summary
from clipwise.methods import Engine, Method
from clipwise.plain import as_json, with_nan
from clipwise.records import Capture, Loss, device_of
from clipwise.records.trees import on_device
from clipwise.report import RunFolder
from clipwise.report.folder import CHECKPOINT, SETTINGS, measurements, text_in, write
from clipwise.sampling import CHUNK
from clipwise.types import Gradient, InputError, Refused, whole

SMALL = "Small scale: another data size, length or network than the paper's, so only the claims compare."
READS_DATA = "Gradients, training accuracy and membership are read from the training data: not private."
Curves = dict[str, Curve]


def run(config: ReproduceConfig) -> str:
    """List the experiments, or make them one after another."""
    if config.list:
        return _listed(config)
    if config.resume is not None:
        config = resumed(config, config.resume)
    if not config.experiments:
        raise InputError("expected an experiment such as paper4/table2, got none: write clipwise reproduce --list")
    if config.threads is not None:
        torch.set_num_threads(whole("threads", config.threads))
    # all of them, before the first takes hours
    planned = {name: read(name, config.scale) for name in config.experiments}
    answers = [_made(replace(config, experiments=(name,)), one, len(planned) > 1) for name, one in planned.items()]
    if config.json:
        found = [values for values, _ in answers]
        return as_json(found[0] if len(found) == 1 else found)
    return "" if config.quiet else "\n".join(text for _, text in answers)


def _listed(config: ReproduceConfig) -> str:
    """The experiments by their papers, with the data that each reads."""
    titles = known()
    if config.json:
        return as_json(titles)
    table = Table(box=None, pad_edge=False, show_header=False)
    for paper, names in itertools.groupby(titles, lambda name: name.partition("/")[0]):
        of = PAPERS[paper]
        table.add_row(paper, Text(f"{of.authors.partition(',')[0]} et al. {of.year}: {of.title}", style="bold"))
        for name in names:
            table.add_row(f"  {name}", Text(f"{titles[name]} [{_read_by(read(name, config.scale))}]"))
    return rendered(table)


def _read_by(experiment: Experiment) -> str:
    """The data sets that its runs read, as ``--data-dir`` holds them."""
    if not experiment.reads_data:
        return "no data"
    texts = (str(one.settings.get("data", "digits")) for one in experiment.runs)
    return ", ".join(dict.fromkeys(parsed(text).name for text in texts))


def _made(config: ReproduceConfig, experiment: Experiment, beside: bool) -> tuple[dict[str, Any], str]:
    """One experiment, in a folder of its own; ``beside`` others, which go to the same place."""
    seeds = experiment.seeds if config.seeds is None else whole("seeds", config.seeds)
    runs = only(experiment, config.only)
    short = experiment.name.removesuffix(".toml").replace("/", "-").strip("-.")
    study = _Study(config, experiment)
    for one in runs:  # what is wrong with the last run is said before the first takes hours
        plan = study.settings_of(one, 0)
        methods.parse(plan.method)
        if experiment.reads_data:
            study.splits(plan)
    if config.resume is not None:
        study.folder = Path(config.resume)
    else:
        where = Path(config.folder or new_folder(f"{short}-{experiment.scale}"))
        study.folder = RunFolder(where / short if config.folder and beside else where).path
        write(study.folder / SETTINGS, to_toml(config))
    with begun(config, study.folder):
        results = _results(study, runs, seeds)
    values = _values(study, results, seeds, plotted(experiment, results, study.folder))
    _keep(study, values)
    return values, _text(study, results, values)


def _results(study: _Study, runs: Sequence[Planned], seeds: int) -> list[Result]:
    config, experiment = study.config, study.experiment
    results: list[Result] = []
    with Bar(quiet=config.quiet) as bar:
        for number, one in enumerate(runs, start=1):
            private = experiment.reads_data and not one.noise_free
            found = []
            try:
                for seed in range(seeds):
                    bar.begin(one.name)
                    found.append(study.once(one, number, seed, bar))
                results.append(averaged(one.name, private, found))
            except Refused as refusal:  # what a paper does may have no proof; the other runs still tell something
                results.append(Result(one.name, private, {}, {}, {}, 0.0, str(refusal)))
            _keep(study, _values(study, results, seeds, ()))  # whatever stops the next run
    return results


def _keep(study: _Study, values: Mapping[str, Any]) -> None:
    write(study.folder / "results.json", as_json(values))


@dataclass
class _Study:
    """What the runs of an experiment share: data that is read once, and how a model is looked at."""

    config: ReproduceConfig
    experiment: Experiment
    folder: Path = Path()
    loaded: dict[tuple[str, bool], Splits] = field(default_factory=dict)  # by name, and whether as tokens

    @property
    def changed(self) -> dict[str, Any]:
        """What --set puts in the place of the experiment's settings."""
        return checked(TrainConfig, dict(_setting(text) for text in self.config.set), "--set")

    def once(self, one: Planned, number: int, seed: int, bar: Bar) -> tuple[dict[str, float], Curves, float]:
        """One run: its final numbers, its curves and its seconds; what was finished before is read."""
        kept = self.folder / f"{number}-{seed}.json"
        settings = to_toml(self.settings_of(one, seed))
        if kept.is_file():
            found = with_nan(json.loads(text_in(kept)))
            if found["settings"] != settings:
                raise InputError(
                    f"the run {one.name!r} in {self.folder} was made with other settings than the experiment has now: "
                    "make the experiment in a new folder"
                )
            return found["values"], found["curves"], found["seconds"]
        began = time.monotonic()
        values, curves = self.run(one, number, seed, bar)
        seconds = time.monotonic() - began
        write(kept, as_json({"settings": settings, "values": values, "curves": curves, "seconds": seconds}))
        return values, curves, seconds

    def run(self, one: Planned, number: int, seed: int, bar: Bar) -> tuple[dict[str, float], Curves]:
        """One run: its final numbers and its curves; a private one goes on from its checkpoint."""
        if self.experiment.weights:
            final, curve = measures.weights(methods.parse(str(one.settings["method"])))
            return final, {"weights": curve}
        plan = self.settings_of(one, seed)
        if self.experiment.problem is not None:
            return self._posed(plan)
        splits = self.splits(plan)
        if one.noise_free:
            return self._noise_free(plan, splits)
        place = self.folder / f"{number}-{seed}"
        while place.exists() and not (place / CHECKPOINT).is_file():  # nothing to go on from: its ledger stays
            place = place.with_name(f"{place.name}-again")
        seen = place.with_suffix(".jsonl")  # what is measured beside the run's own file of measurements
        rows = {row["step"]: row for row in measurements(seen)}
        keys = self._keys(plan, splits)

        def look(model: nn.Module, method: Method, step: int) -> None:
            engine = ChunkEngine(Capture(model, loss_of(splits)), keys)
            rows[step] = {"step": step, **self._look(model, splits, keys, method, engine)}
            write(seen, "".join(as_json(row, indent=None) for row in rows.values()))

        plan = resolved(plan)
        if (place / CHECKPOINT).is_file():
            plan = replace(plan, resume=str(place))
        done = run_one(plan, splits, place, bar, look, command=resume_command(self.config, self.folder))
        steps: Curve = [dict(measured) | rows.get(measured["step"], {}) for measured in done.metrics]
        final, curves = self._end(done.model, splits, len(keys))
        return summary(steps, final), {"steps": steps, **curves}

    def settings_of(self, one: Planned, seed: int) -> TrainConfig:
        """The run's settings, with what the command line says about where it runs."""
        given = checked(TrainConfig, one.settings, f"the run {one.name!r} of {self.experiment.name}")
        budget = {"epsilon", "noise_multiplier"} & {*given, *self.changed}
        if (one.noise_free or self.experiment.problem is not None) and budget:
            raise InputError(f"the run {one.name!r} is without noise and can have no epsilon: leave it out")
        own: dict[str, Any] = {
            "seed": seed,
            "device": self.config.device,
            "quiet": self.config.quiet,
            "diagnose_every": 0,
        }
        if self.config.model is not None:
            own["model"] = self.config.model
        plan = made(TrainConfig, given, self.changed, own)
        return replace(plan, data=_placed(plan.data, self.config.data_dir))

    def splits(self, plan: TrainConfig) -> Splits:
        """The run's data, read once for all runs."""
        key = plan.data, models.takes_tokens(model_of(plan))
        if key not in self.loaded:
            self.loaded[key] = splits_for(plan)
        return self.loaded[key]

    def _keys(self, plan: TrainConfig, splits: Splits) -> Tensor:
        """The training samples that are looked at."""
        return torch.arange(min(self.experiment.samples or plan.batch, len(splits.train)))

    def _look(self, model: nn.Module, splits: Splits, keys: Tensor, method: Method, engine: Engine) -> dict[str, float]:
        """What is measured while a run goes on, beside test accuracy."""
        row: dict[str, float] = {}
        if "train" in self.experiment.measures:
            seen = quality(model, splits.train.take(keys))
            row |= {f"train_{name}": value for name, value in seen.items()}
        if "gradients" in self.experiment.measures:
            with torch.random.fork_rng(devices=[]):
                few = on_device(splits.train.rows(keys), device_of(model))
                compare = {label: methods.parse(text) for label, text in self.experiment.compare.items()}
                row |= measures.gradients(engine, few, method, compare)
        return row

    def _end(self, model: nn.Module, splits: Splits, samples: int) -> tuple[dict[str, float], Curves]:
        """What is measured of the final model."""
        final: dict[str, float] = {}
        curves: Curves = {}
        if "calibration" in self.experiment.measures:
            found, curves["reliability"] = measures.calibrated(model, splits.test)
            final |= found
        if "membership" in self.experiment.measures:
            found, curves["roc"] = measures.attacked(model, splits.train, splits.test, samples)
            final |= found
        return final, curves

    def _noise_free(self, plan: TrainConfig, splits: Splits) -> tuple[dict[str, float], Curves]:
        model = network(plan, splits).model  # a run without noise takes no public inputs
        splits = splits.to(device_of(model))
        method, steps = methods.parse(plan.method), steps_of(plan, len(splits.train))
        every = measured_every(plan, steps)
        keys = self._keys(plan, splits)
        rows: Curve = []

        def look(step: int, engine: Callable[[Tensor], Engine]) -> None:
            if step % every == 0 or step == steps:
                seen = quality(model, splits.test)
                rows.append({"step": float(step), **seen, **self._look(model, splits, keys, method, engine(keys))})

        iterates = _descended(plan, model, loss_of(splits), splits.train, look, self.experiment.window)
        final, curves = self._end(model, splits, len(keys))
        if "window" in self.experiment.measures:
            few = splits.train.rows(keys)
            found, curves["window"] = measures.window(ChunkEngine(Capture(model, loss_of(splits)), keys), few, iterates)
            final |= found
        return summary(rows, final), {"steps": rows, **curves}

    def _posed(self, plan: TrainConfig) -> tuple[dict[str, float], Curves]:
        problem = self.experiment.problem
        assert problem is not None  # the caller looked
        model, loss, data = posed(problem)
        rows: Curve = [{"step": 0.0, **place(model, problem)}]

        def look(step: int, _: Any) -> None:
            rows.append({"step": float(step), **place(model, problem)})

        _descended(plan, model, loss, data, look)
        return summary(rows, {}), {"steps": rows}


def _descended(
    plan: TrainConfig, model: nn.Module, loss: Loss, data: Arrays, after_step: AfterStep, keep: int = 0
) -> tuple[Gradient, ...]:
    """Train without noise as the settings say; gives the last ``keep`` iterates."""
    steps = steps_of(plan, len(data))
    optimizer, schedule = optimizer_of(plan, model.parameters()), scheduler_of(plan, steps)
    return descend(
        model,
        loss,
        data,
        methods.parse(plan.method),
        optimizer,
        steps=steps,
        batch=plan.batch,
        seed=plan.seed,
        chunk=plan.chunk or CHUNK,
        scheduler=None if schedule is None else schedule(optimizer),
        post=None if plan.post is None else postprocess.parse(plan.post),
        keep=keep,
        after_step=after_step,
    )


def _setting(text: str) -> tuple[str, Any]:
    """``chunk=2048`` as in TOML; what is no value there is a text: ``model=mlp(hidden=8)``."""
    name, sign, value = (part.strip() for part in text.partition("="))
    if not (name and sign and value):
        raise InputError(f"expected a setting such as epochs=2, got {text!r}: write --set epochs=2 chunk=512")
    try:
        return name, tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name, value


def _placed(data: str, folder: str) -> str:
    """``cifar10?train=2000`` in the folder of data sets; DIR stands for that folder in a longer name."""
    name, mark, options = data.partition("?")
    if name == "digits":
        return data
    return data.replace("DIR", folder) if ":" in name else f"{name}:{Path(folder) / name}{mark}{options}"


def _values(study: _Study, results: list[Result], seeds: int, plots: tuple[Path, ...]) -> dict[str, Any]:
    """Everything, as plain values."""
    experiment = study.experiment
    measured = {result.name: result.values for result in results}
    claims = [{**asdict(claim), "holds": holds(claim.check, measured)} for claim in experiment.claims]
    return {
        "experiment": experiment.name,
        "title": experiment.title,
        "shows": experiment.shows,
        "scale": experiment.scale,
        "note": experiment.note,
        "seeds": seeds,
        "set": study.changed,
        "folder": str(study.folder),
        "plots": [str(plot) for plot in plots],
        "lines": [{**asdict(line), "difference": line.difference} for line in compared(experiment, results)],
        "claims": claims,
        "runs": [
            {
                "name": result.name,
                "private": result.private,
                "note": "" if result.private else NOT_PRIVATE,
                "refused": result.refused,
                "values": result.values,
                "spread": result.spread,
                "seconds": round(result.seconds, 3),
                "settings": dict(next(run.settings for run in experiment.runs if run.name == result.name)),
                "curves": result.curves,
            }
            for result in results
        ],
    }


def _text(study: _Study, results: list[Result], values: Mapping[str, Any]) -> str:
    experiment = study.experiment
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    planned = {run.name: run for run in experiment.runs}
    table.add_column("run")
    # of other data or another network than the paper's, a difference would say nothing, and names may mislead
    if experiment.reduced:
        table.add_column("data")
    table.add_column("quantity", no_wrap=True)
    # an experiment of one's own, and a figure without numbers, have nothing beside what was measured
    shown = 1 if not experiment.expected else 2 if experiment.reduced else 3
    for name in ("measured", "paper", "difference")[:shown]:
        table.add_column(name, justify="right", no_wrap=True)
    before = ""
    for line in compared(experiment, results):
        cells = [
            _with_spread(line.quantity, line.measured, line.measured_spread),
            _with_spread(line.quantity, line.paper, line.paper_spread),
            formatted(line.quantity, line.difference, signed=True),
        ]
        data = re.split("[:?]", study.settings_of(planned[line.run], 0).data)[0]
        first = [Text("" if line.run == before else name) for name in (line.run, data)]
        table.add_row(*first[: 1 + experiment.reduced], line.quantity, *cells[:shown])
        before = line.run
    for result in results:
        if result.refused:
            table.add_row(Text(result.name), *[""] * experiment.reduced, "refused")
    marks = {True: "✓", False: "✗", None: "?"}
    parts: list[Any] = [Text(f"{experiment.name}: {experiment.title}", style="bold"), Text(experiment.shows), "", table]
    parts += ["", *(Text(f"{marks[claim['holds']]} {claim['says']}") for claim in values["claims"])]
    if not experiment.expected and not experiment.name.endswith(".toml"):
        parts.append(Text("The paper's text states no number for this: its shape only."))
    if any(claim["holds"] is None for claim in values["claims"]):
        parts.append(Text("?: not measured at this scale, or left out by --only."))
    parts += [Text(f"{result.name} was refused: {result.refused}") for result in results if result.refused]
    parts += [Text(note) for note in _notes(study, results)]
    return f"{rendered(*parts)}Written to {values['folder']}\n"


def _notes(study: _Study, results: list[Result]) -> list[str]:
    """What a reader must know about the numbers."""
    experiment = study.experiment
    notes = [SMALL] if experiment.reduced else []
    notes += [experiment.note] if experiment.note else []
    notes += [f"Set by --set: {', '.join(study.config.set)}."] if study.config.set else []
    free = [result.name for result in results if not result.private]
    if free and not experiment.weights:
        which = "every run" if len(free) == len(results) else "; ".join(free)  # a name may hold commas
        notes.append(f"{NOT_PRIVATE.capitalize()}: {which}.")
    if set(experiment.measures) - {"calibration"}:
        notes.append(READS_DATA)
    return notes


def _with_spread(quantity: str, value: float | None, spread: float | None) -> str:
    text = formatted(quantity, value)
    return text if spread is None else f"{text.removesuffix(' %')} ± {formatted(quantity, spread)}"
