"""One run from its settings: data, model and optimizer by name, and the folder.

Receives: TrainConfig.
Gives: run_one, the finished Run; what it is made of, for the commands that need a part of it.
"""

from __future__ import annotations

import datetime
import inspect
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from clipwise import methods, models, training
from clipwise.accounting import Ledger
from clipwise.accounting.calibration import steps_in
from clipwise.cli.screen import Bar
from clipwise.cli.stopping import again, patient, resumable
from clipwise.config import TrainConfig, Training, one_given, to_toml
from clipwise.data import Arrays, Splits, load
from clipwise.data.source import parsed
from clipwise.diagnostics import Monitor, calibration, predicted
from clipwise.diagnostics.quality import baseline, scored
from clipwise.losses import cross_entropy, squared_error
from clipwise.methods import Method
from clipwise.plain import as_json
from clipwise.private import Private
from clipwise.records import Loss, device_of
from clipwise.records.trees import tensors
from clipwise.report.answer import RunNumbers, alarms
from clipwise.report.folder import CALIBRATION, LEDGER, write
from clipwise.start import Privacy
from clipwise.types import Batch, InputError, fraction, one_of, positive, whole

EPOCHS = 20.0
SMALL = ("digits", "adult", "wine_red", "california_housing", "csv", "jsonl")  # unless they are texts
PRECISIONS = ("float32", "bf16")
MEASUREMENTS = 10  # of a run, unless evaluate_every says otherwise
LOOKED_AT = 256  # test samples whose gradients are diagnosed, at most; no more than a batch, and at least 64
LOOKS_APART = 50  # steps at least, so that looks cost little
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
}

# (model, the method as it is at this step) → what else to measure; called at each measurement
AtMeasurement = Callable[[nn.Module, Method], None]


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
    source = parsed(config.data)
    model = config.model or NETWORKS.get("text" if "text" in source.options else source.name, "mlp")
    models.takes_tokens(model)  # a name that is not known is an error now, before the data are read
    sgd = config.optimizer == "sgd"
    return replace(
        config,
        method=str(methods.parse(config.method)),
        model=model,
        learning_rate=(0.5 if sgd else 1e-3) if config.learning_rate is None else config.learning_rate,
        momentum=0.9 if sgd and config.momentum is None else config.momentum,
    )


def use_threads(config: Training) -> None:
    """Give torch its threads; digits and tables are so small that a second one only waits for the first."""
    if config.threads is not None:
        torch.set_num_threads(whole("threads", config.threads))
        return
    source = parsed(config.data)
    if source.name in SMALL and "text" not in source.options:
        torch.set_num_threads(1)


def new_folder(name: str) -> Path:
    """A folder under runs that does not exist yet, with the time in its name."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    tries = (Path("runs", f"{name}-{now}{suffix}") for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    return next(place for place in tries if not place.exists())


def splits_for(config: Training, model: str) -> Splits:
    """The data, as tokens or as numbers, whichever the model takes."""
    splits = load(config.data)
    vocabulary = config.vocabulary or splits.vocabulary
    if not models.takes_tokens(model):
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


def loss_of(splits: Splits, precision: str = "float32") -> Loss:
    """The loss that the data's labels ask for, one value per sample; in bf16 sums and noise stay in float32."""
    loss = squared_error if splits.task == "regression" else cross_entropy
    return loss if one_of("precision", precision, PRECISIONS) == "float32" else partial(_narrow, loss)


def _narrow(loss: Loss, model: nn.Module, batch: Batch) -> Tensor:
    with torch.autocast(next(tensors(batch)).device.type, torch.bfloat16):
        return loss(model, batch)


def measured(splits: Splits, model: nn.Module) -> dict[str, float]:
    """What a run writes down about its test data: accuracy and mean loss, or the root of the mean squared error.

    ``baseline`` is the accuracy or error of always saying the most frequent class, or the mean, of the test data.
    """
    found, wanted = predicted(model, splits.test)
    seen, same = scored(found, wanted), baseline(wanted)
    if splits.task == "classes":
        return {**seen, "baseline": same}
    return {"error": splits.unit * seen["loss"] ** 0.5, **seen, "baseline": splits.unit * same**0.5}


def run_one(
    config: TrainConfig,
    splits: Splits,
    folder: Path,
    bar: Bar,
    at_measurement: AtMeasurement | None = None,
    beside: Sequence[Method] = (),
    command: str | None = None,
) -> training.Run:
    """Train as the resolved settings say, resuming where ``config.resume``; diagnose ``beside`` other methods too.

    ``command`` is what to write to go on, where that is not ``clipwise train --resume``.
    *Guarantees*: Ctrl-C waits for the end of the step, so that the checkpoint holds every release that the ledger has;
    a second one does not wait.
    """
    if whole("batch", config.batch) > (samples := len(splits.train)):
        raise InputError(
            f"batch must be at most the {samples} samples of the data, got {config.batch}: write for instance "
            f"--batch {max(1, samples // 2)}"
        )
    model, public, splits = network(config, splits)
    splits = splits.to(device_of(model))
    steps = steps_of(config, len(splits.train))
    every = measured_every(config, steps)
    # a comparison is made of looks; in other runs they are multiples of the measurements, and so far apart
    apart = every if beside else every * -(-LOOKS_APART // every)
    with patient(bar) as heard:
        progress = _Progress(bar, heard, None if at_measurement is None else partial(at_measurement, model))
        with resumable(folder, lambda: progress.done, steps, command or again(config, folder)):
            finished = training.train(
                model,
                loss_of(splits, config.precision),
                splits.train,
                optimizer=partial(optimizer_of, config),
                scheduler=scheduler_of(config, steps),
                evaluate=partial(measured, splits),
                evaluate_every=every,
                average=config.average,
                folder=folder,
                resume=config.resume is not None,
                progress=progress,
                settings=to_toml(config),
                monitor=_monitor(config, splits, apart, beside),
                tensorboard=config.tensorboard,
                **_privacy(config, steps, public),
            )
    if splits.task == "classes":
        _calibrated(finished.model, splits, folder)
    return finished


@dataclass
class _Progress:
    """What happens after each step: it is shown, what was measured is handed on, and Ctrl-C is heard."""

    bar: Bar
    heard: threading.Event
    at_measurement: Callable[[Method], None] | None
    done: int = 0

    def __call__(self, private: Private, row: Mapping[str, float]) -> None:
        self.done = private.steps_taken
        self.bar(self.done, private.steps, row)
        if self.at_measurement is not None and row.get("step") == self.done:  # measured just now
            self.at_measurement(private.method)
        if self.heard.is_set() and self.done < private.steps:
            raise KeyboardInterrupt


def _privacy(config: TrainConfig, steps: int, public: Tensor | None) -> Privacy:
    """What the settings say to ``make_private``."""
    return {
        "method": config.method,
        "epsilon": config.epsilon,
        "noise_multiplier": config.noise_multiplier,
        "delta": config.delta,
        "steps": steps,
        "batch": config.batch,
        "chunk": config.chunk,
        "noise": "secure" if config.noise_seed is None else config.noise_seed,
        "accountant": config.accountant,
        "spent": spent_before(config.spent),
        "self_test": config.self_test,
        "compile": config.compile,
        "post": config.post,
        "public": public,
    }


def warn_of(found: Sequence[RunNumbers]) -> None:
    """Say which of the finished runs came to nothing."""
    for text in alarms(found):
        warnings.warn(text, stacklevel=2)


def spent_before(folder: str | None) -> Ledger | None:
    """What an earlier use of the same data released."""
    if folder is None:
        return None
    place = Path(folder) / LEDGER if Path(folder).is_dir() else Path(folder)
    if not place.is_file():
        raise InputError(f"there is no {LEDGER} in {folder}: --spent takes the folder of an earlier run or advice")
    return Ledger(place)


def _monitor(config: TrainConfig, splits: Splits, apart: int, beside: Sequence[Method]) -> Monitor | None:
    """A look at some of the test data; none where the method gives each sample public companions that rows lack."""
    every = apart if config.diagnose_every is None else config.diagnose_every
    if whole("diagnose_every", every, least=0) == 0 or methods.parse(config.method).companions:
        return None
    most = min(LOOKED_AT, max(64, config.batch), config.chunk or LOOKED_AT, len(splits.test))
    rows = splits.test.rows(torch.arange(most))
    return Monitor(rows, "evaluation", tuple(m for m in beside if not m.companions and m.feedback is None), every)


def _calibrated(model: nn.Module, splits: Splits, folder: Path) -> None:
    """Keep how honest the final model's confidences are, for the report."""
    logits, labels = predicted(model, splits.test)
    if bool(logits.isfinite().all()):  # a run that diverged has no confidences
        write(folder / CALIBRATION, as_json(calibration(logits, labels).as_dict(), indent=1))


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
        model = models.build(config.model or "", splits.shape, splits.classes, vocabulary, splits.task)
    public, splits = _public(config, splits)
    if public is not None:
        model = models.Accompanied(model, public, methods.parse(config.method).companions)
        if config.data.partition(":")[0] in ("csv", "jsonl", "npz"):
            warnings.warn(
                f"--public {config.public} takes so many rows of your own file as public: the model's file holds them "
                "as they are",
                stacklevel=2,
            )
    return Network(model.to(_device(config.device)), public, splits)


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


def evaluated(config: TrainConfig, splits: Splits) -> int:
    """How many samples measure a run: none that it takes as public."""
    return len(_public(config, splits)[1].test)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"unknown device {name!r}: write cpu, cuda or cuda:1") from None
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


def _numbers(part: Arrays) -> Arrays:
    inputs, labels = part.data
    return Arrays((inputs.float(), labels))
