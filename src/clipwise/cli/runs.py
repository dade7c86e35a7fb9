"""One run from its settings: data, model and optimizer by name, the folder, stopping and resuming.

Receives: TrainConfig.
Gives: the finished Run; on Ctrl-C, Stopped, which says how to go on.
"""

from __future__ import annotations

import datetime
import inspect
import shlex
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from clipwise import methods, models, training
from clipwise.cli.screen import Bar
from clipwise.config import TrainConfig, Training, from_toml, made, one_given, to_toml
from clipwise.data import Arrays, Splits, load
from clipwise.methods import Method
from clipwise.report.folder import CHECKPOINT, SETTINGS, STATEMENT
from clipwise.sampling import chunks
from clipwise.types import InputError, one_of, positive, whole

EPOCHS = 20.0
MEASUREMENTS = 10  # of a run, unless evaluate_every says otherwise
ROWS = 1024  # evaluated at a time
TOKENS = ("lstm_classifier", "small_transformer")

# (model, the method as it is at this step) → what else to measure; called at each measurement
Look = Callable[[nn.Module, Method], None]


class Stopped(KeyboardInterrupt):
    """Ctrl-C, with a message that says how to go on."""


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
    sgd = config.optimizer == "sgd"
    return replace(
        config,
        method=str(methods.parse(config.method)),
        model=config.model or ("digits_cnn" if config.data == "digits" else "mlp"),
        learning_rate=(0.5 if sgd else 1e-3) if config.learning_rate is None else config.learning_rate,
        momentum=0.9 if sgd and config.momentum is None else config.momentum,
    )


def use_threads(config: Training) -> None:
    """Give torch its threads; the digits are so small that a second one only waits for the first."""
    if config.threads is not None:
        torch.set_num_threads(whole("threads", config.threads))
    elif config.data == "digits":
        torch.set_num_threads(1)


def new_folder(name: str) -> Path:
    """A folder under runs that does not exist yet, with the time in its name."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    tries = (Path("runs", f"{name}-{now}{suffix}") for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    return next(place for place in tries if not place.exists())


def short(data: str) -> str:
    """The data's name as a part of a file name."""
    return Path(data.partition(":")[2]).stem if ":" in data else data


def settings_of(folder: str) -> TrainConfig:
    """The settings of the interrupted run in a folder."""
    place = Path(folder)
    if (place / STATEMENT).is_file():
        raise InputError(f"the run in {place} is finished: repeat it with clipwise train --config {place / SETTINGS}")
    if not (place / CHECKPOINT).is_file():
        raise InputError(f"there is no run to resume in {place}: expected a folder with {CHECKPOINT}")
    return made(TrainConfig, from_toml(TrainConfig, place / SETTINGS))


def splits_for(config: Training, model: str) -> Splits:
    """The data, as tokens or as numbers, whichever the model takes."""
    splits = load(config.data)
    tokens = not splits.train.data[0].is_floating_point()
    if model not in TOKENS:
        return splits if not tokens else replace(splits, train=_numbers(splits.train), test=_numbers(splits.test))
    if not tokens:
        raise InputError(f"{model} takes whole numbers (tokens), got {config.data} with fractions: write --model mlp")
    for part in (splits.train, splits.test):
        low, high = part.data[0].aminmax()
        if config.vocabulary is not None and not 0 <= low <= high < config.vocabulary:
            raise InputError(
                f"tokens must be 0 to vocabulary − 1 = {config.vocabulary - 1}, got {int(low)} to {int(high)}: "
                f"write --vocabulary {int(high) + 1}"
            )
    return splits


def accuracy(data: Arrays, model: nn.Module) -> dict[str, float]:
    """Accuracy and mean loss over the data."""
    right = total = 0.0
    for rows in chunks(torch.arange(len(data)), ROWS):
        inputs, labels = (t.to(next(model.parameters()).device) for t in data.rows(rows))
        outputs = model(inputs)
        right += float((outputs.argmax(1) == labels).sum())
        total += float(nn.functional.cross_entropy(outputs, labels, reduction="sum"))
    return {"accuracy": right / len(data), "loss": total / len(data)}


def run_one(config: TrainConfig, splits: Splits, folder: Path, bar: Bar, look: Look | None = None) -> training.Run:
    """Train as the resolved settings say, resuming where ``config.resume``.

    *Guarantees*: Ctrl-C waits for the end of the step, so that the checkpoint holds every release that the ledger has;
    a second one does not wait.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(whole("seed", config.seed, least=0))
        model = models.build(config.model or "", splits.shape, splits.classes, config.vocabulary)
    model.to(_device(config.device))
    steps = _steps(config, len(splits.train))
    every = (
        -(-steps // MEASUREMENTS) if config.evaluate_every is None else whole("evaluate_every", config.evaluate_every)
    )
    done, again = 0, f"clipwise train --resume {shlex.quote(str(folder))}"
    with _patient(bar) as heard:

        def progress(private: training.Private, row: Mapping[str, float]) -> None:
            nonlocal done
            done = private.steps_taken
            bar(done, private.steps, row)
            if look is not None and row.get("step") == done:  # measured just now
                look(model, private.method)
            if heard.is_set() and done < private.steps:
                raise KeyboardInterrupt

        try:
            return training.train(
                model,
                training.cross_entropy,
                splits.train,
                optimizer=partial(_optimizer, config),
                scheduler=partial(_cosine, steps) if config.schedule == "cosine" else None,
                evaluate=partial(accuracy, splits.test),
                evaluate_every=every,
                average=config.average,
                folder=folder,
                resume=config.resume is not None,
                progress=progress,
                settings=to_toml(config),
                method=config.method,
                epsilon=config.epsilon,
                noise_multiplier=config.noise_multiplier,
                delta=config.delta,
                steps=steps,
                batch=config.batch,
                chunk=config.chunk,
                noise="secure" if config.noise_seed is None else config.noise_seed,
                accountant=config.accountant,
                self_test=config.self_test,
                compile=config.compile,
            )
        except KeyboardInterrupt:
            if not (folder / CHECKPOINT).is_file():
                raise Stopped("stopped before the first step; nothing was trained") from None
            raise Stopped(f"stopped after step {done} of {steps}; nothing is lost: write {again}") from None
        except InputError as error:
            if done and (folder / SETTINGS).is_file():
                raise InputError(f"{error}; to resume, write {again}") from error
            raise


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"unknown device {name!r}: write cpu, cuda or cuda:1") from None
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(f"there is no device {name!r} on this machine ({torch.cuda.device_count()} GPUs): write cpu")
    return device


def _steps(config: TrainConfig, samples: int) -> int:
    if config.steps is not None:
        return whole("steps", config.steps)
    return max(1, round(positive("epochs", config.epochs or 0) * samples / whole("batch", config.batch)))


@contextmanager
def _patient(bar: Bar) -> Iterator[threading.Event]:
    """Within it the first Ctrl-C sets the event that is given, and the second one interrupts."""
    heard = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread hears signals
        yield heard
        return

    def hear(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        heard.set()
        bar.stopping()

    before = signal.signal(signal.SIGINT, hear)
    try:
        yield heard
    finally:
        signal.signal(signal.SIGINT, before)


def _optimizer(config: TrainConfig, parameters: Any) -> Optimizer:
    kind = optimizers()[config.optimizer]
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


def _cosine(steps: int, optimizer: Optimizer) -> LRScheduler:
    return CosineAnnealingLR(optimizer, steps)


def _numbers(part: Arrays) -> Arrays:
    inputs, labels = part.data
    return Arrays((inputs.float(), labels))
