"""Settings of every command: frozen dataclasses ↔ TOML.

Receives: a TOML file, and values given on the command line, which win over it.
Gives: the settings, with every key known and every value of its type; ``to_toml`` writes them again.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from clipwise.types import InputError, nearest


def option(help: str, default: Any, *, group: str = "training", kept: bool = True, positional: bool = False) -> Any:
    """A field with its help text.

    ``kept`` fields define a run and are written into its settings; the others say how and where it runs.
    """
    return field(default=default, metadata={"help": help, "group": group, "kept": kept, "positional": positional})


# what several commands say alike
ACCOUNTANT = "pld, which is tight, or rdp"
ROWS_PER_PERSON = "how many samples may be one person's: ε then holds for all of them together"
THREADS = "processor threads; one for digits and tables, torch's choice otherwise"


@dataclass(frozen=True, kw_only=True)
class Output:
    """What every command can be told about its output."""

    json: bool = option("print the result as JSON on standard output", False, group="output", kept=False)

    @property
    def spoken(self) -> frozenset[str]:
        """The settings that ``made`` was given, also where they are the default; none where it did not make these."""
        return vars(self).get("_spoken", frozenset())


@dataclass(frozen=True, kw_only=True)
class Training(Output):
    """What a private run is made of beside its method."""

    data: str = option(
        "digits, a set from its files (mnist, fashion_mnist, cifar10, cifar100, svhn, imdb, sst2, adult, wine_red or "
        "california_housing, then :DIR), or a file of yours: npz:PATH with arrays x, y and perhaps x_test, y_test, "
        "'csv:PATH?label=NAME:low|high', 'jsonl:PATH?…'; '?train=2000&test=1000' takes a part",
        "digits",
    )
    model: str | None = option(
        "the network, see clipwise models, with options as in 'mlp(hidden=32)'; one that fits unless given", None
    )
    vocabulary: int | None = option("number of different tokens, for models of tokens", None)
    epsilon: float | None = option("the privacy to keep; the noise is calibrated to it", None, group="privacy")
    noise_multiplier: float | None = option("the noise over the sensitivity, instead of epsilon", None, group="privacy")
    delta: float = option("the δ of (ε, δ); below one over the number of samples", 1e-5, group="privacy")
    accountant: str = option(ACCOUNTANT, "pld", group="privacy")
    rows_per_person: int = option(ROWS_PER_PERSON, 1, group="privacy")
    noise_seed: int | None = option(
        "seeded noise, for tests only: whoever knows the seed can subtract it", None, group="privacy"
    )
    spent: tuple[str, ...] = option(
        "folders of earlier uses of the same data, such as an advice's: their releases count towards epsilon",
        (),
        group="privacy",
    )
    self_test: bool = option("check the gradients of a few samples before training", True, group="privacy")
    epochs: float | None = option("passes over the data in expectation; 20 unless steps are given", None)
    steps: int | None = option("number of steps, instead of epochs", None)
    batch: int = option("expected number of samples in a step", 256)
    chunk: int | None = option(
        "rows that go through the model at a time; 256 unless given, as many as fit on a GPU", None
    )
    optimizer: str = option("an optimizer of torch.optim by its name: sgd, adam, adamw, rmsprop, …", "sgd")
    learning_rate: float | None = option("0.5 for sgd and 0.001 for others unless given", None)
    momentum: float | None = option("0.9 for sgd unless given", None)
    weight_decay: float | None = option("the optimizer's own unless given", None)
    schedule: str = option("of the learning rate: constant, or cosine, which falls to zero", "cosine")
    post: str | None = option(
        "filter of released gradients before the optimizer, such as 'heavy_ball(0.9)'; none unless given", None
    )
    public: int = option("test inputs taken as public, for batch_clipping; they are no longer tested on", 0)
    average: float | None = option("decay of a moving average of the weights, such as 0.95; none unless given", None)
    evaluate_every: int | None = option("steps between measurements; a tenth of the run unless given", None)
    diagnose_every: int | None = option(
        "steps between looks at what clipping does to the gradients of evaluation samples, for clipwise report; a "
        "tenth of the run, and with clipwise train at least 50, unless given; 0 for none",
        None,
    )
    tensorboard: bool = option("write the curves into the run's folder for TensorBoard too", False, kept=False)
    device: str = option("where the model is trained: cpu, cuda or cuda:1", "cpu", kept=False)
    precision: str = option("what the model computes in: float32, or bf16, which a GPU does faster", "float32")
    compile: bool = option("compile the step for a fixed chunk: a minute or more at the start, then faster", False)
    seed: int = option("seed of the initial weights; the noise does not follow it", 0)
    threads: int | None = option(THREADS, None, kept=False)
    quiet: bool = option("print nothing but errors and warnings", False, group="output", kept=False)
    json_lines: bool = option(
        "print each measurement as a line of JSON while it trains, and the result as the last line",
        False,
        group="output",
        kept=False,
    )


@dataclass(frozen=True, kw_only=True)
class TrainConfig(Training):
    """Settings of ``clipwise train``."""

    method: str = option("the clipping method: a name, or a call such as 'psac(clip_norm=1.0, r=0.1)'", "flat")
    folder: str | None = option(
        "where to write the run; runs/DATA-METHOD-TIME unless given", None, group="output", kept=False
    )
    resume: str | None = option("continue the interrupted run in this folder", None, group="output", kept=False)


@dataclass(frozen=True, kw_only=True)
class CompareConfig(Training):
    """Settings of ``clipwise compare``."""

    methods: tuple[str, ...] = option(
        "methods separated by ';', each perhaps with its learning rate, as in 'psac; global_(10.0) @ 0.02'; 'no "
        "privacy' among them measures the same network trained without it, which no ε covers",
        ("flat", "automatic", "psac", "normalised", "global_(10.0) @ 0.02", "adaptive", "layerwise"),
    )
    folder: str | None = option(
        "where to write the runs; runs/compare-DATA-TIME unless given", None, group="output", kept=False
    )
    resume: str | None = option(
        "continue the interrupted comparison in this folder; finished runs are kept", None, group="output", kept=False
    )


@dataclass(frozen=True, kw_only=True)
class CalibrateConfig(Output):
    """Settings of ``clipwise calibrate``."""

    epsilon: float | None = option("find the noise multiplier that keeps this", None, group="privacy")
    noise_multiplier: float | None = option("find the ε that this costs", None, group="privacy")
    delta: float = option("the δ of (ε, δ)", 1e-5, group="privacy")
    sampling_rate: float | None = option("the expected batch over the number of samples", None, group="privacy")
    samples: int | None = option("number of samples, with batch instead of sampling-rate", None, group="privacy")
    batch: int | None = option("expected number of samples in a step", None, group="privacy")
    steps: int | None = option("number of steps", None, group="privacy")
    epochs: float | None = option("passes over the data in expectation, instead of steps", None, group="privacy")
    method: str | None = option(
        "the clipping method, as for clipwise train; one with feedback takes another noise, and samples and batch",
        None,
        group="privacy",
    )
    accountant: str = option(ACCOUNTANT, "pld", group="privacy")
    rows_per_person: int = option(ROWS_PER_PERSON, 1, group="privacy")


@dataclass(frozen=True, kw_only=True)
class PredictConfig(Output):
    """Settings of ``clipwise predict``."""

    run: tuple[str, ...] = option("the folder of a finished run", (), group="what", positional=True)
    data: str | None = option(
        "the file with the new rows, of the kind that the run was trained on; it needs no label", None, group="what"
    )
    threshold: float | None = option(
        "of two classes, predict the second from this probability of it on, such as 0.1 where it is rare; the likelier "
        "one unless given",
        None,
        group="output",
    )
    keep: tuple[str, ...] = option(
        "columns of the file to put in front of the predictions, such as a number by which rows are known",
        (),
        group="output",
    )


@dataclass(frozen=True, kw_only=True)
class ReportConfig(Output):
    """Settings of ``clipwise report``."""

    runs: tuple[str, ...] = option(
        "folders of finished runs, or of comparisons, which hold several", (), group="what", positional=True
    )
    folder: str | None = option(
        "where to write the report; the run's or comparison's own folder unless given, runs/report-TIME for several",
        None,
        group="output",
    )


@dataclass(frozen=True, kw_only=True)
class AdviseConfig(Output):
    """Settings of ``clipwise advise``."""

    data: str = option("the private data, as for clipwise train", "digits", group="what")
    model: str | None = option("the network, see clipwise models; one that fits unless given", None, group="what")
    vocabulary: int | None = option("number of different tokens, for models of tokens", None, group="what")
    public: str | None = option(
        "public data of the same kind to look at in its place, written like --data; random inputs unless given",
        None,
        group="what",
    )
    spend: float | None = option(
        "look at the private data instead: release a noisy histogram of gradient norms that costs this ε",
        None,
        group="privacy",
    )
    spent: tuple[str, ...] = option(
        "folders of earlier uses of the same data: their releases count towards epsilon", (), group="privacy"
    )
    epsilon: float | None = option("of the planned run; 3 unless given", None, group="privacy")
    noise_multiplier: float | None = option("of the planned run, instead of epsilon", None, group="privacy")
    delta: float = option("the δ of (ε, δ)", 1e-5, group="privacy")
    accountant: str = option(ACCOUNTANT, "pld", group="privacy")
    rows_per_person: int = option(ROWS_PER_PERSON, 1, group="privacy")
    noise_seed: int | None = option("seeded noise for --spend, for tests only", None, group="privacy")
    epochs: float | None = option("of the planned run; 20 unless steps are given", None, group="planned run")
    steps: int | None = option("of the planned run, instead of epochs", None, group="planned run")
    batch: int = option("expected number of samples in a step of the planned run", 256, group="planned run")
    chunk: int | None = option("rows that go through the model at a time", None, group="work")
    samples: int = option("of the proxy that are looked at", 512, group="work")
    warm_up: int = option("ordinary steps on public data, to look at a model that has learnt", 100, group="work")
    device: str = option("cpu, cuda or cuda:1", "cpu", group="work")
    threads: int | None = option(THREADS, None, group="work")
    seed: int = option("seed of the initial weights and of random inputs", 0, group="work")
    folder: str | None = option("where to write the advice; runs/advise-DATA-TIME unless given", None, group="output")


@dataclass(frozen=True, kw_only=True)
class BenchConfig(Output):
    """Settings of ``clipwise bench``."""

    rows: tuple[str, ...] = option("models to measure; all unless given", (), group="measuring")
    columns: tuple[str, ...] = option("libraries to measure; all unless given", (), group="measuring")
    rounds: int = option("timed steps per cell", 11, group="measuring")
    batch: int | None = option("batch of every row; each row's own unless given", None, group="measuring")
    memory: bool = option("measure peak memory", True, group="measuring")
    threads: int | None = option("processor threads; torch's choice unless given", None, group="measuring")
    device: str = option("cpu or cuda, each with rows and columns of its own", "cpu", group="measuring")
    precisions: tuple[str, ...] = option("on CUDA: bf16, tf32, float32", ("bf16", "tf32"), group="measuring")
    methods: tuple[str, ...] = option(
        "methods to measure beside flat, such as psac or 'bam(flat())'", (), group="measuring"
    )
    compile: bool = option("on CUDA: compile the methods' steps, as train --compile does", False, group="measuring")
    diagnostics: bool = option("measure what a look at the gradients every 50 steps costs", False, group="measuring")
    profile: bool = option("name each row's slowest layers", False, group="measuring")


@dataclass(frozen=True, kw_only=True)
class ReproduceConfig(Output):
    """Settings of ``clipwise reproduce``."""

    experiments: tuple[str, ...] = option(
        "such as paper4/table2, or TOML files of yours", (), group="what", positional=True
    )
    list: bool = option("list the experiments", False, group="what", kept=False)
    scale: str = option(
        "small: minutes on two processor cores, on a part of the data; full: the paper's", "small", group="what"
    )
    only: tuple[str, ...] = option(
        "runs to make, by name or pattern such as 'psac*'; all unless given", (), group="what"
    )
    model: str | None = option("a network in the place of the experiment's own", None, group="what")
    seeds: int | None = option("runs of each kind, to average; the scale's own unless given", None, group="what")
    set: tuple[str, ...] = option(
        "settings of clipwise train in the place of the experiment's, such as epochs=2 chunk=2048 compile=true",
        (),
        group="what",
    )
    data_dir: str = option("the folder that holds the data sets, each in a folder of its name", "data", group="where")
    device: str = option("where models are trained: cpu, cuda or cuda:1", "cpu", group="where", kept=False)
    threads: int | None = option("processor threads; torch's choice unless given", None, group="where", kept=False)
    folder: str | None = option(
        "where to write results, plots and runs; runs/EXPERIMENT-SCALE-TIME unless given",
        None,
        group="output",
        kept=False,
    )
    resume: str | None = option(
        "continue the interrupted experiment in this folder; finished runs are kept", None, group="output", kept=False
    )
    quiet: bool = option("print nothing but errors and warnings", False, group="output", kept=False)


@dataclass(frozen=True, kw_only=True)
class CiteConfig(Output):
    """Settings of ``clipwise cite``."""

    methods: tuple[str, ...] = option("methods to cite; all unless given", (), group="methods", positional=True)


@dataclass(frozen=True, kw_only=True)
class AuditConfig(Output):
    """Settings of ``clipwise audit``."""

    run: tuple[str, ...] = option(
        "the folder of a finished run, to audit its method, noise and model", (), group="what", positional=True
    )
    method: tuple[str, ...] = option("methods to audit, such as flat 'bam(psac())'; all unless given", (), group="what")
    noise_multiplier: float | None = option("the noise over the sensitivity; 1 unless given", None, group="privacy")
    sampling_rate: float | None = option("of the steps that are composed; 0.1 unless given", None, group="privacy")
    steps: int | None = option("that are composed; 100 unless given", None, group="privacy")
    delta: float | None = option("the δ of (ε, δ); 1e-5 unless given", None, group="privacy")
    confidence: float = option("of all lower bounds together", 0.95, group="privacy")
    trials: int = option("looks at canaries in each step audit", 64_000, group="work")
    canaries: int = option("of the audit from one run", 1000, group="work")
    runs: int = option("whole runs with a canary, and as many without, where methods have memory", 600, group="work")
    shadows: int = option(
        "models to train on halves of a run's data, for the likelihood-ratio attack; 0: none", 0, group="work"
    )
    noise_seed: int | None = option("seeded noise, to repeat an audit; secure noise unless given", None, group="work")
    quiet: bool = option("print no progress", False, group="output")


C = TypeVar("C", bound=Output)

# setting → others that say the same thing in another way: a layer that has it drops them from the layers below, so that
# --epochs on the command line replaces the file's steps
INSTEAD = {
    "epsilon": ("noise_multiplier",),
    "noise_multiplier": ("epsilon",),
    "epochs": ("steps",),
    "steps": ("epochs",),
    "sampling_rate": ("samples", "batch"),
    "samples": ("sampling_rate",),
    "batch": ("sampling_rate",),
}
# type → how a message calls it, and an example
WORDS: dict[type, tuple[str, str]] = {
    str: ("text", '"flat"'),
    int: ("a whole number", "100"),
    float: ("a number", "0.5"),
    bool: ("true or false", "true"),
    tuple: ("a list of texts", '["flat", "psac"]'),
}


def flag(name: str) -> str:
    """A field's option on the command line."""
    return "--" + name.replace("_", "-")


def kinds(settings: type[Output]) -> dict[str, type]:
    """The type of each field, without its None: str, int, float, bool, or tuple for a list of texts."""
    found = {}
    for name, hint in typing.get_type_hints(settings).items():
        options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        found[name] = typing.get_origin(options[0]) or options[0]
    return found


def made(settings: type[C], *layers: Mapping[str, Any]) -> C:
    """The settings from checked values; a later layer wins over an earlier one."""
    values: dict[str, Any] = {}
    for layer in layers:
        dropped = {other for name in layer for other in INSTEAD.get(name, ())}
        values = {name: value for name, value in values.items() if name not in dropped} | dict(layer)
    found = settings(**values)
    vars(found)["_spoken"] = frozenset(values)  # no field: it is not part of what the settings are
    return found


def one_given(config: Output, first: str, second: str, example: str) -> None:
    """Refuse settings that give both of two alternatives, or neither."""
    given = [name for name in (first, second) if getattr(config, name) is not None]
    if len(given) != 1:
        both = "both" if given else "neither"
        raise InputError(f"expected either {flag(first)} or {flag(second)}, got {both}: write for instance {example}")


def from_toml(settings: type[Output], path: str | Path) -> dict[str, Any]:
    """The values of a TOML file, checked; a key that is not a setting is an error that names the nearest one."""
    try:
        values = tomllib.loads(Path(path).read_bytes().decode())
    except OSError as error:
        raise InputError(
            f"cannot read {path} ({error.strerror or error}): give a TOML file, such as the settings.toml of a run"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} must be TOML, got {error}: write lines such as epsilon = 3") from error
    return checked(settings, values, str(path))


def checked(settings: type[Output], values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values, if each is a setting and of its type; ``where`` is what a message calls the place they stand in."""
    known = kinds(settings)
    for key in values:
        if key not in known:
            raise InputError(f"unknown key {key!r} in {where}: {nearest(key, known)}")
    return {key: _checked(f"{key} in {where}", known[key], value) for key, value in values.items()}


def _checked(name: str, kind: type, value: Any) -> Any:
    if kind is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        expected, example = WORDS[kind]
        example = f'["{value}"]' if kind is tuple and isinstance(value, str) else example
        raise InputError(f"{name} must be {expected}, got {value!r}: write {name.split()[0]} = {example}")
    return value


def to_toml(config: Output) -> str:
    """The settings that define a run, as TOML; what is None is left out, since TOML has no word for it."""
    kept = [each.name for each in dataclasses.fields(config) if each.metadata["kept"]]
    values = {name: getattr(config, name) for name in kept}
    return "".join(f"{name} = {_toml(value)}\n" for name, value in values.items() if value is not None)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        # TOML's strings are JSON's, except that it also wants the delete character escaped
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    return repr(value)
