"""An experiment: what a figure or table shows, the runs that show it, and what the paper says came out.

Receives: the name of an experiment that comes with the package, or the path of a TOML file; the scale.
Gives: Experiment, with every run written out and every key known.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clipwise.experiments.claims import evaluated, fits
from clipwise.methods import citations
from clipwise.types import InputError, nearest, one_of

SCALES = ("small", "full")
HOME = Path(__file__).parent
PAPERS = {  # what an experiment's name begins with
    "paper0": citations.XIAO_2023,
    "paper1": citations.ZHANG_2024_DICE,
    "paper2": citations.BU_2023_CONVERGENCE,
    "paper3": citations.KNOLLE_2023,
    "paper4": citations.XIA_2023,
}
BIAS = ("cosine", "bias", "off_direction", "clipped")  # also of each method in compare, with its label behind
BUCKETS = tuple(f"bucket_{fifth}" for fifth in range(1, 6))
# measure → its quantities: of the final model, or while it trains, and then also averaged as mean_…
MEASURES = {
    "train": ("train_accuracy", "train_loss"),
    "gradients": ("norm_25", "norm_75", "mean_norm", "sampling_noise", *BUCKETS, *BIAS),
    "calibration": ("ece", "mce", "nll", "confidence"),
    "membership": ("auc", "auc_low", "auc_high"),
    "window": ("noise_of_one", "noise_of_window", "noise_if_independent"),
}
AT_THE_END = ("calibration", "membership", "window")
ALWAYS = ("step", "epsilon", "accuracy", "error", "loss", "baseline")
OF_A_PROBLEM = ("step", "weight", "error")
OF_WEIGHTS = ("largest_weight", "norm_of_largest", "weight_of_tiny", "weight_of_large")
PLOTS = ("lines", "bars", "histogram", "heatmap")
# key → its type; what is a table or a list in TOML is one here
TOP: dict[str, type] = {
    "title": str,
    "shows": str,  # what the paper's figure or table is, in which setting
    "settings": dict,  # of every run: what ``clipwise train`` takes
    "noise_free": bool,  # whether the runs are analyses without noise, which have no ε
    "weights": bool,  # nothing is trained: the methods' weight functions are drawn
    "problem": dict,  # a small data set written out here: x, y, start, optimum and perhaps huber
    "measures": list,
    "samples": int,  # training samples that gradients, training accuracy and membership are measured on; 0: a batch
    "window": int,  # last iterates between which the independence of sampling noise is measured
    "compare": dict,  # label → method that is looked at beside the run's own
    "shown": list,  # quantities in the table
    "runs": list,
    "expected": dict,  # quantity → run → the paper's number, or [number, spread]
    "claims": list,
    "plot": dict,
    "small": dict,
    "full": dict,
}
ENTRY: dict[str, type] = {
    "name": str,
    "settings": dict,
    "over": dict,
    "noise_free": bool,
    "small": dict,
    "full": dict,
}
PART: dict[str, type] = {
    "note": str,  # how this scale differs from the paper's setting
    "settings": dict,
    "over": dict,  # other values for what entries run over
    "runs": list,  # patterns of the runs that are made
    "seeds": int,
    "samples": int,
}
CLAIM: dict[str, type] = {"says": str, "check": str}
PLOT: dict[str, type] = {"kind": str, "curve": str, "x": str, "y": list, "diagonal": bool, "log": list}
PROBLEM: dict[str, type] = {"x": list, "y": list, "start": float, "optimum": float, "huber": float}


@dataclass(frozen=True)
class Planned:
    """One run: its settings are those of ``clipwise train``."""

    name: str
    group: str  # the entry of the file that it comes from
    at: Mapping[str, Any]  # where it stands in what the entry runs over
    settings: Mapping[str, Any]
    noise_free: bool


@dataclass(frozen=True)
class Claim:
    """What the paper says of the measurements: in words, and as an expression over quantities of runs."""

    says: str
    check: str


@dataclass(frozen=True)
class Experiment:
    """A figure or a table at one scale."""

    name: str
    title: str
    shows: str
    scale: str
    reduced: bool  # whether the runs are smaller or fewer than the paper's
    note: str
    runs: tuple[Planned, ...]
    seeds: int
    samples: int
    window: int
    measures: tuple[str, ...]
    compare: Mapping[str, str]
    shown: tuple[str, ...]
    expected: Mapping[str, Mapping[str, tuple[float, float | None]]]  # quantity → run → number and spread
    claims: tuple[Claim, ...]
    plot: Mapping[str, Any] | None
    problem: Mapping[str, Any] | None
    weights: bool

    @property
    def reads_data(self) -> bool:
        """Whether its runs are on data sets, and not on a problem written out or on none."""
        return not (self.problem or self.weights)


def known() -> dict[str, str]:
    """The experiments that come with the package, and their titles."""
    files = sorted(HOME.glob("*/*.toml"))
    return {file.relative_to(HOME).with_suffix("").as_posix(): _parsed(file)["title"] for file in files}


def read(name: str, scale: str) -> Experiment:
    """The experiment of that name, or in that TOML file, at that scale."""
    one_of("scale", scale, SCALES)
    file = Path(name) if name.endswith(".toml") else HOME / f"{name}.toml"
    if not name.endswith(".toml"):
        one_of("experiment", name, known())
    raw = _checked(_parsed(file), TOP, name, ("title", "shows", "runs", "shown"))
    part = _checked(raw.get(scale, {}), PART, f"{scale} of {name}")
    for measure in raw.get("measures", []):
        one_of(f"measure in {name},", measure, MEASURES)
    plot = raw.get("plot")
    if plot is not None:
        one_of(f"kind of plot in {name},", _checked(plot, PLOT, f"plot of {name}").get("kind", ""), PLOTS)
    if "problem" in raw:
        _checked(raw["problem"], PROBLEM, f"problem of {name}")
    runs = tuple(_runs(raw, part, scale, name))
    names = [run.name for run in runs]
    if not runs or len(set(names)) < len(names):
        raise InputError(f"{name} must have runs with names of their own at scale {scale}, got {names}")
    _check_names(raw, name)
    return Experiment(
        name=name,
        title=raw["title"],
        shows=raw["shows"],
        scale=scale,
        reduced=scale != "full" and runs != tuple(_runs(raw, raw.get("full", {}), "full", name)),
        note=part.get("note", ""),
        runs=runs,
        seeds=part.get("seeds", 1),
        samples=part.get("samples", raw.get("samples", 512)),
        window=raw.get("window", 0),
        measures=tuple(raw.get("measures", ())),
        compare=raw.get("compare", {}),
        shown=tuple(raw["shown"]),
        expected={
            quantity: {run: _number(value) for run, value in of.items()}
            for quantity, of in raw.get("expected", {}).items()
        },
        claims=tuple(_claims(raw, name)),
        plot=plot,
        problem=raw.get("problem"),
        weights=raw.get("weights", False),
    )


def only(experiment: Experiment, patterns: Sequence[str]) -> tuple[Planned, ...]:
    """The runs whose names fit one of the patterns; all where there is none."""
    found = tuple(
        run for run in experiment.runs if not patterns or any(fits(run.name, pattern) for pattern in patterns)
    )
    if not found:
        names = ", ".join(repr(run.name) for run in experiment.runs)  # there may be commas in them
        raise InputError(f"no run of {experiment.name} is called {' or '.join(patterns)}: write one of {names}")
    return found


def _parsed(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_bytes().decode())
    except OSError as error:
        raise InputError(f"cannot read {file} ({error.strerror or error}): write --list to see experiments") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{file} must be TOML, got {error}") from error


def _checked(
    values: Mapping[str, Any], kinds: Mapping[str, type], where: str, needed: Sequence[str] = ()
) -> dict[str, Any]:
    for key, value in values.items():
        if key not in kinds:
            raise InputError(f"unknown key {key!r} in {where}: {nearest(key, kinds)}")
        if not isinstance(value, kinds[key]) and not (kinds[key] is float and type(value) is int):
            raise InputError(f"{key} in {where} must be a {kinds[key].__name__}, got {value!r}")
    for key in needed:
        if key not in values:
            raise InputError(f"{where} must say its {key}, got none: write for instance {key} = …")
    return dict(values)


def _check_names(raw: Mapping[str, Any], name: str) -> None:
    """Refuse quantities that nothing measures, and runs that no scale makes, wherever the file speaks of them."""
    runs = list(dict.fromkeys(run.name for scale in SCALES for run in _runs(raw, raw.get(scale, {}), scale, name)))
    known = _quantities(raw)

    def check(quantity: str, where: str) -> None:
        needed = next((measure for measure, of in MEASURES.items() if quantity.removeprefix("mean_") in of), None)
        if needed is not None and needed not in raw.get("measures", []):
            raise InputError(f"{quantity} in {where} of {name} is not measured: write measures = [{needed!r}, …]")
        one_of(f"quantity in {where} of {name},", quantity, known)

    def find(quantity: str, pattern: str) -> list[float]:
        check(quantity, "a claim")
        named = [run for run in runs if fits(run, pattern)]
        if not named:
            raise InputError(f"no run of {name} is called {pattern!r}, as a claim says: {nearest(pattern, runs)}")
        return [1.0] * len(named)

    for quantity in raw["shown"]:
        check(quantity, "shown")
    for quantity, of in raw.get("expected", {}).items():
        check(quantity, "expected")
        for run in of:
            one_of(f"run in expected.{quantity} of {name},", run, runs)
    for claim in _claims(raw, name):
        evaluated(claim.check, find)
    plot = raw.get("plot", {})
    for quantity in plot.get("y", []) if plot.get("curve", "steps") == "steps" else []:
        check(quantity, "plot")


def _quantities(raw: Mapping[str, Any]) -> set[str]:
    """Everything that a claim, a table or a plot of this experiment can speak of."""
    if raw.get("weights"):
        return set(OF_WEIGHTS)
    seen, final = set(OF_A_PROBLEM if "problem" in raw else ALWAYS), set[str]()
    seen |= {f"{text}_{label}" for label in raw.get("compare", {}) for text in BIAS}
    for measure in raw.get("measures", []):
        (final if measure in AT_THE_END else seen).update(MEASURES[measure])
    return seen | final | {f"mean_{text}" for text in seen - {"step"}}


def _claims(raw: Mapping[str, Any], name: str) -> Iterator[Claim]:
    for claim in raw.get("claims", []):
        yield Claim(**_checked(claim, CLAIM, f"a claim of {name}", tuple(CLAIM)))


def _runs(raw: Mapping[str, Any], part: Mapping[str, Any], scale: str, name: str) -> Iterator[Planned]:
    for entry in raw["runs"]:
        entry = _checked(entry, ENTRY, f"a run of {name}", ("name",))
        over = {key: part.get("over", {}).get(key, values) for key, values in entry.get("over", {}).items()}
        settings = {
            **raw.get("settings", {}),
            **part.get("settings", {}),
            **entry.get("settings", {}),
            **entry.get(scale, {}),
        }
        for values in itertools.product(*over.values()):
            at = dict(zip(over, values, strict=True))
            run = Planned(
                name=str(_filled(entry["name"], at)),
                group=entry["name"],
                at=at,
                settings={key: _filled(value, at) for key, value in settings.items()},
                noise_free=entry.get("noise_free", raw.get("noise_free", False)),
            )
            if "runs" not in part or any(fits(run.name, pattern) for pattern in part["runs"]):
                yield run


def _filled(value: Any, at: Mapping[str, Any]) -> Any:
    """The value with {key} replaced; a text that is nothing but {key} becomes that value, of its own type."""
    if not isinstance(value, str):
        return value
    for key, given in at.items():
        if value == f"{{{key}}}":
            return given
        value = value.replace(f"{{{key}}}", str(given))
    return value


def _number(value: Any) -> tuple[float, float | None]:
    return (float(value[0]), float(value[1])) if isinstance(value, list) else (float(value), None)
