"""What a run is made of, from its settings: data, network, loss, optimizer and schedule by name.

Receives: TrainConfig.
Gives: resolved, the settings with every choice made; model_of, splits_for, network, loss_of, optimizer_of,
scheduler_of, steps_of and spent_before, one part each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from clipwise import methods, models
from clipwise.accounting import Ledger
from clipwise.accounting.calibration import steps_in
from clipwise.config import TrainConfig, Training, one_given
from clipwise.data import Arrays, Splits, load
from clipwise.data.source import parsed
from clipwise.losses import cross_entropy, squared_error
from clipwise.records import Loss
from clipwise.records.trees import tensors
from clipwise.report.folder import LEDGER, STATEMENT
from clipwise.report.runs import refuse_other_releases, statement_in
from clipwise.types import Batch, InputError, fraction, one_of, positive, warn, whole

EPOCHS = 20.0
# data so small that one thread is fastest, unless their columns are texts
SMALL = ("digits", "adult", "wine_red", "california_housing", "csv", "jsonl")
PRECISIONS = ("float32", "bf16")
MEASUREMENTS = 10  # of a run, unless evaluate_every says otherwise
# the network for each data set, unless one is named; mlp for the others
NETWORKS = {
    "digits": "digits_cnn",
    "mnist": "mnist_cnn",
    "fashion_mnist": "mnist_cnn",
    "cifar10": "resnet20_enhanced",
    "cifar100": "resnet20_enhanced",
    "svhn": "resnet20_enhanced",
    "imdb": "gru_enhanced",
    "sst2": "gru_enhanced",
    "text": "gru_enhanced",  # columns of text in a table
    "features": "scattering_linear",
}


def resolved(config: TrainConfig) -> TrainConfig:
    """Every choice that was left open, made: what a run's settings.toml holds."""
    one_given(config, "epsilon", "noise_multiplier", "--epsilon 3")
    if config.epochs is None and config.steps is None:
        config = replace(config, epochs=EPOCHS)
    one_given(config, "epochs", "steps", "--epochs 20")
    one_of("optimizer", config.optimizer, optimizers())
    one_of("schedule", config.schedule, ("constant", "cosine"))
    for name in ("epsilon", "noise_multiplier", "epochs"):
        if (value := getattr(config, name)) is not None:
            positive(name, value)
    fraction("delta", config.delta, open_end=True)
    models.takes_tokens(model_of(config))  # a name that is not known is an error now, before the data are read
    sgd = config.optimizer == "sgd"
    return replace(
        config,
        method=str(methods.parse(config.method)),
        model=model_of(config),
        learning_rate=(0.5 if sgd else 1e-3) if config.learning_rate is None else config.learning_rate,
        momentum=0.9 if sgd and config.momentum is None else config.momentum,
    )


def model_of(config: Training) -> str:
    """The network that the settings name, or the one that fits their data."""
    source = parsed(config.data)
    fitting = next((kind for kind in ("text", "features") if kind in source.options), source.name)
    return config.model or NETWORKS.get(fitting, "mlp")


def use_threads(config: Training) -> None:
    """Give torch its threads; digits and tables are so small that a second one only waits for the first."""
    if config.threads is not None:
        torch.set_num_threads(whole("threads", config.threads))
        return
    source = parsed(config.data)
    if source.name in SMALL and "text" not in source.options:
        torch.set_num_threads(1)


def splits_for(config: Training) -> Splits:
    """The data, as tokens or as numbers, whichever the model takes."""
    splits, model = load(config.data), model_of(config)
    if "person" in parsed(config.data).options and config.rows_per_person == 1:
        warn(
            "person keeps the rows of one person together, but ε is for one row: write --rows-per-person with the most "
            "rows that one person may have, known without counting them in this file"
        )
    vocabulary = config.vocabulary or splits.vocabulary
    if not models.takes_tokens(model):
        if splits.vocabulary is not None:  # of words; whole numbers in an npz may be quantities
            warn(
                f"{model} reads each word's number as a quantity, which it is not, and will learn little: write "
                f"--model {NETWORKS['text']}, or leave --model out"
            )
        return replace(splits, train=_numbers(splits.train), test=_numbers(splits.test)) if splits.tokens else splits
    if not splits.tokens:
        raise InputError(f"{model} takes whole numbers (tokens), got {config.data} with fractions: write --model mlp")
    if vocabulary is not None and vocabulary < (splits.vocabulary or 0):
        raise InputError(
            f"vocabulary must be at least that of the data, {splits.vocabulary}, got {vocabulary}: leave --vocabulary "
            f"out, or write vocabulary={vocabulary} among the options of --data too"
        )
    for part in (splits.train, splits.test):
        low, high = part.data[0].aminmax()
        if vocabulary is not None and not 0 <= low <= high < vocabulary:
            raise InputError(
                f"tokens must be 0 to vocabulary − 1 = {vocabulary - 1}, got {int(low)} to {int(high)}: "
                f"write --vocabulary {int(high) + 1}"
            )
    return splits


def _numbers(part: Arrays) -> Arrays:
    inputs, labels = part.data
    return Arrays((inputs.float(), labels))


def loss_of(splits: Splits, precision: str = "float32") -> Loss:
    """The loss that the data's labels ask for, one value per sample; in bf16 sums and noise stay in float32."""
    loss = squared_error if splits.task == "regression" else cross_entropy
    return loss if one_of("precision", precision, PRECISIONS) == "float32" else partial(_narrow, loss)


def _narrow(loss: Loss, model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast(next(tensors(batch)).device.type, torch.bfloat16):
        return loss(model, batch)


class Network(NamedTuple):
    """A network before training, on its device."""

    model: nn.Module
    public: Tensor | None  # inputs that go through it beside private ones
    splits: Splits  # the data without them


def network(config: TrainConfig, splits: Splits) -> Network:
    """The network that the settings name, for these data."""
    if splits.task == "classes" and splits.classes < 2:
        raise InputError(
            f"y must hold labels of at least two classes, got the label 0 alone in {config.data}: add the others, or "
            "write '?task=regression' for numbers"
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(whole("seed", config.seed, least=0))
        vocabulary = config.vocabulary or splits.vocabulary
        model = models.build(model_of(config), splits.shape, splits.classes, vocabulary, splits.task)
    public, splits = _public(config, splits)
    if public is not None:
        model = models.Accompanied(model, public, methods.parse(config.method).companions)
        if config.data.partition(":")[0] in ("csv", "jsonl", "npz"):
            warn(
                f"--public {config.public} takes so many rows of your own file as public: the model's file holds them "
                "as they are"
            )
    model = model.to(device := _device(config.device))
    if config.compile and device.type == "cuda":  # as convolutions' kernels read weights: a compiler then moves nothing
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return Network(model, public, splits)


def _public(config: TrainConfig, splits: Splits) -> tuple[Tensor | None, Splits]:
    """The first test inputs, where the method asks for public ones, and the data without them."""
    if not methods.parse(config.method).companions:
        return None, splits
    if not 0 < config.public < len(splits.test):
        raise InputError(
            f"batch_clipping needs some of the {len(splits.test)} test inputs as public ones, got {config.public}: "
            "write for instance --public 100"
        )
    inputs, _ = splits.test.rows(torch.arange(config.public))
    return inputs, replace(splits, test=splits.test.take(torch.arange(config.public, len(splits.test))))


def evaluation_samples(config: TrainConfig, splits: Splits) -> int:
    """How many samples measure a run: none that it takes as public."""
    return len(_public(config, splits)[1].test)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        known = device.type in ("cpu", "cuda")
    except RuntimeError:
        known = False
    if not known:
        raise InputError(f"unknown device {name!r}: write cpu, cuda or cuda:1")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"there is no device {name!r} on this machine ({torch.cuda.device_count()} GPUs): write cpu")
    return device


def steps_of(config: TrainConfig, samples: int) -> int:
    """How many steps the settings ask for, on so many samples."""
    if config.steps is not None:
        return whole("steps", config.steps)
    return steps_in(config.epochs or 0, whole("batch", config.batch) / samples)


def measured_every(config: TrainConfig, steps: int) -> int:
    """How many steps lie between two measurements."""
    return (
        -(-steps // MEASUREMENTS) if config.evaluate_every is None else whole("evaluate_every", config.evaluate_every)
    )


def optimizers() -> dict[str, type[Optimizer]]:
    """The optimizers that a name can choose: all of torch.optim that take one dense gradient and no closure."""
    known = {name.lower(): getattr(torch.optim, name) for name in torch.optim.__all__}
    return {
        name: kind
        for name, kind in known.items()
        if isinstance(kind, type)
        and issubclass(kind, Optimizer)
        and name not in {"optimizer", "lbfgs", "sparseadam", "muon"}
    }


def optimizer_of(config: TrainConfig, parameters: Any) -> Optimizer:
    """The optimizer that the settings name, with those of its options that they give."""
    kind = optimizers()[one_of("optimizer", config.optimizer, optimizers())]
    known = inspect.signature(kind).parameters
    given: dict[str, Any] = {"lr": positive("learning_rate", config.learning_rate or 0)}
    for name in ("momentum", "weight_decay"):
        value = getattr(config, name)
        if value is not None and name not in known:
            raise InputError(f"the optimizer {config.optimizer} has no {name}, got {value}: leave it out")
        if value is not None:
            given[name] = value
    try:
        return kind(parameters, **given)
    except ValueError as error:
        raise InputError(f"the optimizer {config.optimizer} refuses its settings ({error}): write others") from error


def scheduler_of(config: TrainConfig, steps: int) -> Callable[[Optimizer], LRScheduler] | None:
    """What makes the schedule that the settings name; none for a constant learning rate."""
    return partial(CosineAnnealingLR, T_max=steps) if config.schedule == "cosine" else None


def spent_before(folders: Sequence[str]) -> Ledger:
    """What earlier uses of the same data released, together."""
    together = Ledger()
    for folder in folders:
        place = Path(folder) / LEDGER if Path(folder).is_dir() else Path(folder)
        if not place.is_file():
            raise InputError(f"there is no {LEDGER} in {folder}: --spent takes folders of earlier runs or advice")
        ledger = Ledger(place)
        if not ledger.releases:
            raise InputError(f"{place} holds no release, so what was spent is lost: restore it, or leave --spent out")
        if (place.parent / STATEMENT).is_file():  # of a finished run
            refuse_other_releases(place.parent, statement_in(place.parent), ledger)
        together.extend(ledger.entries)
    return together
