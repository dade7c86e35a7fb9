"""One run from its settings, in a folder.

Receives: TrainConfig, resolved, and the data that it names.
Gives: run_one, the finished Run; without_privacy, a measurement of the same network trained without it; new_folder and
warn_of, for the commands that make runs.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from clipwise import methods, training
from clipwise.cli.parts import loss_of, measured_every, network, optimizer_of, scheduler_of, spent_before, steps_of
from clipwise.cli.screen import Bar
from clipwise.cli.stopping import patient, resumable, resume_command
from clipwise.config import TrainConfig, to_toml
from clipwise.data import Splits
from clipwise.diagnostics import Monitor, calibration, predicted
from clipwise.diagnostics.quality import baseline, roc_auc, scored
from clipwise.methods import Method
from clipwise.plain import as_json
from clipwise.private import Private
from clipwise.records import device_of, trainable
from clipwise.report.answer import RunNumbers, alarms
from clipwise.report.folder import CALIBRATION, write
from clipwise.sampling import CHUNK
from clipwise.start import Privacy
from clipwise.types import InputError, warn, whole

LOOKED_AT = 256  # test samples whose gradients are diagnosed, at most; no more than a batch, and at least 64
LOOKS_APART = 50  # steps at least, so that looks cost little
# (model, the method as it is now, steps made) → what else to measure; called at each measurement
AtMeasurement = Callable[[nn.Module, Method, int], None]


def new_folder(name: str) -> Path:
    """A folder under runs that does not exist yet, with the time in its name."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%d-%H%M%S")
    tries = (Path("runs", f"{name}-{now}{suffix}") for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    return next(place for place in tries if not place.exists())


def measured(splits: Splits, model: nn.Module) -> dict[str, float]:
    """What a run writes down about its test data: accuracy and mean loss, or the root of the mean squared error.

    ``baseline`` is the accuracy or error of always saying the most frequent class, or the mean, of the test data. Of
    two classes, one of which may be rare, there is also ``roc_auc``.
    """
    found, wanted = predicted(model, splits.test)
    seen, same = scored(found, wanted), baseline(wanted)
    if splits.task == "classes":
        area = roc_auc(found, wanted)
        return {**seen, "baseline": same} | ({} if area is None else {"roc_auc": area})
    return {"error": splits.unit * seen["loss"] ** 0.5, **seen, "baseline": splits.unit * same**0.5}


def keep_memory() -> None:
    """Let the C library keep what a step frees: it would give it back and ask for it anew at every step, page by page.

    That was a fifth of the time of training a ResNet on a CPU (docs/performance.md). Only glibc can be told so; what
    the user told it stays.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return
    for threshold in (-1, -3):  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD: one without the other would cost more
        mallopt(threshold, 1_000_000_000)


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
    keep_memory()
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
        with resumable(folder, lambda: progress.done, steps, command or resume_command(config, folder)):
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


def without_privacy(config: TrainConfig, splits: Splits, bar: Bar) -> dict[str, float]:
    """What the same network reaches by ordinary training: NOT PRIVATE, so its model is measured and not given.

    *Guarantees*: the same first weights, steps, batch size, optimizer, schedule and average as a private run of these
    settings; neither clipping nor noise, and nothing that filters what a private run releases.
    """
    model, _, splits = network(config, splits)
    splits = splits.to(device_of(model))
    steps, loss = steps_of(config, len(splits.train)), loss_of(splits, config.precision)
    optimizer = optimizer_of(config, trainable(model).values())
    scheduler = None if (schedule := scheduler_of(config, steps)) is None else schedule(optimizer)
    average = None if config.average is None else training.moving_average(model, config.average)
    draw = torch.Generator().manual_seed(config.seed)
    for step in range(steps):
        rows = torch.randperm(len(splits.train), generator=draw)[: config.batch]
        for piece in rows.split(config.chunk or CHUNK):
            (loss(model, splits.train.rows(piece)).sum() / len(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        if average is not None:
            average.update_parameters(model)
        bar(step + 1, steps, {})
    return measured(splits, model if average is None else average.module)


@dataclass
class _Progress:
    """What happens after each step: it is shown, what was measured is handed on, and Ctrl-C is heard."""

    bar: Bar
    heard: threading.Event
    at_measurement: Callable[[Method, int], None] | None
    done: int = 0

    def __call__(self, private: Private, row: Mapping[str, float]) -> None:
        self.done = private.steps_taken
        self.bar(self.done, private.steps, row)
        if self.at_measurement is not None and row.get("step") == self.done:  # measured just now
            self.at_measurement(private.method, self.done)
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
        "rows_per_person": config.rows_per_person,
        "spent": spent_before(config.spent),
        "self_test": config.self_test,
        "compile": config.compile,
        "post": config.post,
        "public": public,
    }


def warn_of(found: Sequence[RunNumbers]) -> None:
    """Say which of the finished runs came to nothing."""
    for text in alarms(found):
        warn(text)


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
