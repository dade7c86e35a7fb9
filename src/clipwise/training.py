"""Private training: sampling → step → release → ledger → optimizer.

Receives: a model, a loss that gives one value per sample, data, a method and a privacy budget.
Gives: ``make_private`` for a loop of your own, and ``train`` for the whole run.
"""

from __future__ import annotations

import inspect
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.hooks import RemovableHandle

from clipwise import methods
from clipwise.accounting import Ledger, calibrate
from clipwise.accounting.events import ACCOUNTANTS
from clipwise.data import RowDataset, as_dataset
from clipwise.methods import Method
from clipwise.noise import release
from clipwise.randomness import SecureStream, SeededStream, Stream
from clipwise.records import Capture, Loss, batch_size, trainable
from clipwise.records.checks import refuse_modules, self_test
from clipwise.records.compiled import CompiledCapture
from clipwise.records.tape import mapped
from clipwise.report import RunFolder, Statement
from clipwise.report.folder import CHECKPOINT, MODEL, SETTINGS, STATEMENT, STATEMENT_TEXT
from clipwise.sampling import chunks, poisson
from clipwise.step import Observed, private_sum
from clipwise.types import Batch, InputError, PoissonGaussian, Refused, fraction, nearest, one_of, positive, whole

CHUNK = 256  # rows that go through the model at a time, unless the user says otherwise


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The usual loss of a classifier for batches (inputs, labels): one value per sample."""
    inputs, labels = batch
    return nn.functional.cross_entropy(model(inputs), labels, reduction="none")


@dataclass(frozen=True)
class PoissonBatch:
    """The samples of one step, to be read in chunks; ``Private.step`` takes each one once, in order."""

    step: int
    indices: Tensor
    stream: Stream = field(repr=False)

    def __len__(self) -> int:
        """How many samples were drawn. Not private."""
        return len(self.indices)


class Private:
    """A model under private training: draws batches, makes steps, keeps the ledger.

    Guarantees: every step is recorded in the ledger before the optimizer sees its gradient; the sampling rate, the
    noise multiplier and the number of steps are fixed at the start.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        data: RowDataset,
        *,
        loss: Loss,
        method: Method,
        noise_multiplier: float,
        delta: float,
        steps: int,
        expected_batch: float,
        chunk: int,
        stream: Stream,
        ledger: Ledger,
        accountant: str,
        self_tested: bool,
        compile: bool,
    ) -> None:
        """Use ``make_private``, which checks and fills in what is missing."""
        self.model, self.optimizer, self.data = model, optimizer, data
        self.method, self.ledger = method, ledger
        self.steps, self.steps_taken = steps, 0
        self.delta, self.accountant = delta, accountant
        self.expected_batch = expected_batch
        self.event = PoissonGaussian(noise_multiplier, expected_batch / len(data))
        self.observed: Observed | None = None  # of the last step; not private
        self.fallbacks: tuple[str, ...] = ()
        self._capture: Capture | CompiledCapture = Capture(model, loss)
        if compile:
            groups = [block.names for block in method.blocks(tuple(trainable(model)))]
            self._capture = CompiledCapture(model, loss, chunk, groups)
        self._chunk, self._stream, self._self_tested = chunk, stream, self_tested
        self._drawn: PoissonBatch | None = None
        self._first, self._stepping = str(method), False
        _guard(optimizer, self)

    @property
    def noise_multiplier(self) -> float:
        """The noise's standard deviation over the sensitivity."""
        return self.event.noise_multiplier

    def batches(self) -> Iterator[PoissonBatch]:
        """The batches of all steps that are left; give each to ``step`` before asking for the next."""
        while self.steps_taken < self.steps:
            if self._drawn is None:  # an unused draw stays: choosing among draws is not Poisson sampling
                stream = self._stream.at(self.steps_taken)
                indices = poisson(len(self.data), self.event.sampling_rate, stream)
                self._drawn = PoissonBatch(self.steps_taken, indices, stream)
            yield self._drawn
            if self._drawn is not None:
                raise InputError("the last batch was not used; write private.step(batch) for every batch")

    def step(self, batch: PoissonBatch) -> None:
        """One private update of the model from one Poisson batch."""
        if not isinstance(batch, PoissonBatch) or batch is not self._drawn:
            raise Refused(
                "step takes each batch of private.batches() once, in order: other batches are not Poisson samples, "
                "and their ε would be wrong; write `for batch in private.batches(): private.step(batch)`"
            )
        parameters = trainable(self.model)
        refuse_modules(self.model)  # a model.train() since the last step may have woken a BatchNorm
        self._refuse_gradients(parameters)
        private, self.observed = private_sum(self.method, parameters, self._gradients(batch))
        self._drawn = None
        released = release(private, self.event, batch.stream)
        self.ledger.record(released.event)  # before anything uses what was released
        for name, parameter in parameters.items():
            # the expected batch is a public constant; the realised one is not
            parameter.grad = (released.gradient[name] / self.expected_batch).to(parameter.dtype)
        self._stepping = True
        try:
            self.optimizer.step()
        finally:
            self._stepping = False
        self.optimizer.zero_grad(set_to_none=True)
        self.method = self.method.next(released, self.expected_batch)
        self.steps_taken += 1

    @property
    def plan(self) -> dict[str, Any]:
        """What may not change when a run is resumed, since one statement speaks for all of it."""
        return {**vars(self.event), "generator": self._stream.name}

    def refuse_other_steps(self) -> None:
        """Refuse a step of the optimizer that is not this run's own: no statement would cover it."""
        if not self._stepping:
            raise Refused(
                "this optimizer belongs to a private run, and a step of its own would use gradients without noise; "
                "write private.step(batch) instead of loss.backward() and optimizer.step()"
            )

    def epsilon(self) -> float:
        """ε spent so far, at the run's δ."""
        return self.ledger.epsilon(self.delta, self.accountant)

    def statement(self) -> Statement:
        """What has been guaranteed so far, and how."""
        return Statement.of(
            self.ledger,
            delta=self.delta,
            accountant=self.accountant,
            sampling_rate=self.event.sampling_rate,
            expected_batch=self.expected_batch,
            noise_multiplier=self.event.noise_multiplier,
            generator=self._stream.name,
            method=self._first,
            self_tested=self._self_tested,
            fallbacks=self.fallbacks,
        )

    def _gradients(self, batch: PoissonBatch) -> Iterator[Any]:
        device = next(iter(trainable(self.model).values())).device
        for piece in chunks(batch.indices, self._chunk):
            rows = mapped(self.data.rows(piece), lambda t: t.to(device))
            if batch_size(rows) != len(piece):
                raise Refused(
                    f"expected one row per sample, got {batch_size(rows)} rows for {len(piece)} samples: a sample "
                    "in several rows has that many times the sensitivity; give each sample one row"
                )
            gradients = self._capture(rows)
            self.fallbacks = gradients.fallbacks or self.fallbacks
            yield gradients

    def _refuse_gradients(self, parameters: Mapping[str, Tensor]) -> None:
        groups = (group["params"] for group in self.optimizer.param_groups)  # frozen ones too
        held = {f"number {i} of the optimizer": p for i, p in enumerate(p for group in groups for p in group)}
        left = [name for name, p in {**parameters, **held}.items() if p.grad is not None]
        if left:
            raise Refused(
                f"the parameter {left[0]} holds a gradient that has no noise; private.step computes its own: "
                "remove loss.backward(), or write optimizer.zero_grad() before the step"
            )


# optimizer → the hook that keeps it to its private run; a later run of the same optimizer takes its place
_GUARDS: WeakKeyDictionary[Optimizer, RemovableHandle] = WeakKeyDictionary()


def _guard(optimizer: Optimizer, private: Private) -> None:
    if optimizer in _GUARDS:
        _GUARDS[optimizer].remove()
    _GUARDS[optimizer] = optimizer.register_step_pre_hook(lambda *_: private.refuse_other_steps())


def make_private(
    model: nn.Module,
    optimizer: Optimizer,
    data: Any,
    *,
    loss: Loss = cross_entropy,
    method: Method | str | None = None,
    epsilon: float | None = None,
    delta: float = 1e-5,
    noise_multiplier: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    batch: int = 256,
    chunk: int | None = None,
    noise: str | int = "secure",
    accountant: str = "pld",
    self_test: bool = True,
    compile: bool = False,
    collate: Callable[[list[Any]], Batch] | None = None,
    ledger: Ledger | None = None,
) -> Private:
    """Private training for a loop of your own.

    Say how private by ``epsilon`` and ``delta`` (the noise is calibrated) or by ``noise_multiplier``; how long by
    ``epochs`` or ``steps``. ``batch`` is the expected batch, ``chunk`` how many rows go through the model at a time;
    ``noise="secure"`` draws from the operating system's entropy; a seed is for tests, and the statement names it.
    ``compile`` makes graphs of one fixed chunk, to which batches are padded: minutes at the start, then faster steps.
    """
    if isinstance(loss, nn.Module) or not callable(loss):
        raise InputError(
            f"loss must be a function loss(model, batch) with one value per sample, got {type(loss).__name__}; write "
            "for instance clipwise.cross_entropy"
        )
    dataset = as_dataset(data, collate)
    rows = len(dataset)
    if whole("batch", batch) > rows:
        raise InputError(
            f"batch must be at most the {rows} samples of the data, got {batch}: the rate is batch/samples"
        )
    rate = batch / rows
    if fraction("delta", delta, open_end=True) >= 1 / rows:
        warnings.warn(
            f"delta={delta:g} is not below 1/samples = {1 / rows:.2g}: it would allow a sample's publication",
            stacklevel=2,
        )
    if (epochs is None) == (steps is None):
        raise InputError(f"say how long to train by {_either(epochs)} epochs or steps; write for instance epochs=20")
    count = whole("steps", steps) if steps is not None else max(1, round(positive("epochs", epochs or 0) / rate))
    if (epsilon is None) == (noise_multiplier is None):
        raise InputError(
            f"say how private by {_either(epsilon)} epsilon or noise_multiplier; write for instance epsilon=3"
        )
    chosen = methods.parse(method) if isinstance(method, str) else methods.flat() if method is None else method
    if not isinstance(chosen, Method):
        raise InputError(f"expected a method such as clipwise.psac(), got {method!r}")
    one_of("accountant", accountant, ACCOUNTANTS)
    parameters = trainable(model)
    chosen.blocks(tuple(parameters))  # a block that no parameter falls in is an error now, not after the first batch
    _check_optimizer(optimizer, parameters)
    stream: Stream = SecureStream() if noise == "secure" else SeededStream(_seed(noise))
    sigma = (
        positive("noise_multiplier", noise_multiplier)
        if noise_multiplier is not None
        else calibrate(epsilon=epsilon or 0, delta=delta, sampling_rate=rate, steps=count, accountant=accountant)
    )
    _check_model(model, loss, dataset, self_test)
    return Private(
        model,
        optimizer,
        dataset,
        loss=loss,
        method=chosen,
        noise_multiplier=sigma,
        delta=delta,
        steps=count,
        expected_batch=float(batch),
        chunk=whole("chunk", _chunk(batch, rows, compile) if chunk is None else chunk),
        stream=stream,
        ledger=Ledger() if ledger is None else ledger,
        accountant=accountant,
        self_tested=self_test,
        compile=compile,
    )


PRIVACY = frozenset(inspect.signature(make_private).parameters)  # what ``train`` hands on


def _either(one: float | None) -> str:
    return "one of" if one is None else "only one of"


def _chunk(batch: int, rows: int, compile: bool) -> int:
    """How many rows go through the model at a time; a compiled chunk holds nearly every Poisson batch whole."""
    return min(rows, math.ceil(batch + 4 * math.sqrt(batch))) if compile else CHUNK


def _seed(noise: str | int) -> int:
    if isinstance(noise, bool) or not isinstance(noise, int):
        raise InputError(f"noise must be 'secure' or a seed (a whole number), got {noise!r}")
    return noise


def _check_model(model: nn.Module, loss: Loss, dataset: RowDataset, test: bool) -> None:
    refuse_modules(model)
    if test:
        device = next(iter(trainable(model).values())).device
        few = dataset.rows(torch.arange(min(4, len(dataset))))
        self_test(model, loss, mapped(few, lambda t: t.to(device)))


def _check_optimizer(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
    if not parameters:
        raise InputError("the model has no trainable parameter; write requires_grad_(True) on what is to be trained")
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = [name for name, p in parameters.items() if id(p) not in held]
    if missing:
        raise InputError(
            f"the optimizer does not hold the trainable parameter {missing[0]}, so it would never move; "
            "write optimizer = Optimizer(model.parameters(), …), or freeze it with requires_grad_(False)"
        )


@dataclass(frozen=True)
class Run:
    """A finished run."""

    model: nn.Module  # the averaged one where an average was asked for
    statement: Statement
    metrics: tuple[Mapping[str, float], ...]
    folder: Path | None
    citation: str

    @property
    def epsilon(self) -> float:
        """ε spent."""
        return self.statement.epsilon

    @property
    def report(self) -> str:
        """Privacy, last measurements and what to cite, as text."""
        last = ", ".join(f"{key} {value:.4g}" for key, value in (self.metrics[-1] if self.metrics else {}).items())
        where = f"\nwritten to {self.folder}" if self.folder else ""
        return f"{self.statement.text()}measured: {last or 'nothing'}{where}\n\n{self.citation}"


Evaluate = Callable[[nn.Module], Mapping[str, float]]
Progress = Callable[[Private, Mapping[str, float]], None]  # after each step, with the last measurement


def train(
    model: nn.Module,
    loss: Loss,
    data: Any,
    *,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None,
    evaluate: Evaluate | None = None,
    evaluate_every: int | None = None,
    average: float | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    settings: str | None = None,
    **privacy: Any,
) -> Run:
    """A whole private run; ``privacy`` is what ``make_private`` takes (method, epsilon, delta, epochs, batch, …).

    ``evaluate(model)`` gives numbers to write down, every ``evaluate_every`` steps and at the end; ``average`` is the
    decay of an exponential moving average of the weights, which is then what is evaluated and returned. With a
    ``folder`` the run can be stopped at any moment and resumed: nothing is lost and nothing is counted twice;
    ``settings`` is a text to keep beside it, from which the run could be made again.
    """
    fraction("average", average, open_end=True) if average is not None else None
    for name in privacy:
        if name not in PRIVACY:
            raise TypeError(f"train has no option {name!r}: {nearest(name, PRIVACY)}")
    own = _optimizer(model, optimizer)
    plan = _scheduler(own, scheduler)
    place = None
    ledger = Ledger()
    if resume and folder is None:
        raise InputError("resume needs the folder of the run; write folder=…")
    if folder is not None and resume:
        place = RunFolder(folder, resume=True)
        ledger = place.ledger()
    private = make_private(model, own, data, loss=loss, ledger=ledger, **privacy)
    every = whole("evaluate_every", evaluate_every) if evaluate_every is not None else private.steps
    if folder is not None and place is None:  # after every check, so that bad input leaves no folder
        place = RunFolder(folder)
        private.ledger = place.ledger()
        if settings is not None:
            place.write(SETTINGS, settings)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(average), use_buffers=True) if average else None
    loop = _Loop(private, own, plan, ema, place, evaluate)
    if resume:
        loop.restore()
    else:
        loop.checkpoint()  # whatever stops the run from now on, it can be resumed
    try:
        for batch in private.batches():
            private.step(batch)
            loop.after_step()
            done = private.steps_taken
            if done % every == 0 or done == private.steps:
                loop.measure()
                loop.checkpoint()
            if progress is not None:
                progress(private, loop.metrics[-1] if loop.metrics else {})
    except BaseException:
        loop.checkpoint()
        raise
    return loop.finish()


@dataclass
class _Loop:
    """Everything of a run beside the private step: schedule, average, measurements, files."""

    private: Private
    optimizer: Optimizer
    scheduler: LRScheduler | None
    ema: AveragedModel | None
    folder: RunFolder | None
    evaluate: Evaluate | None
    metrics: list[Mapping[str, float]] = field(default_factory=list)

    @property
    def model(self) -> nn.Module:
        """What is evaluated and returned."""
        return self.private.model if self.ema is None else self.ema.module

    def after_step(self) -> None:
        if self.scheduler is not None:
            self.scheduler.step()
        if self.ema is not None:
            self.ema.update_parameters(self.private.model)

    def measure(self) -> None:
        row: dict[str, float] = {"step": self.private.steps_taken, "epsilon": self.private.epsilon()}
        if self.evaluate is not None:
            flags = [(module, module.training) for module in self.model.modules()]
            self.model.eval()
            with torch.no_grad():
                row.update({key: float(value) for key, value in self.evaluate(self.model).items()})
            for module, flag in flags:  # one by one: a BatchNorm that was in eval mode stays there
                module.training = flag
        self.metrics.append(row)
        if self.folder is not None:
            self.folder.measured(self.metrics)

    def checkpoint(self) -> None:
        if self.folder is None:
            return
        self.private.ledger.sync()  # the ledger is never behind the model
        state = {
            "step": self.private.steps_taken,
            "plan": self.private.plan,
            "method": str(self.private.method),
            "model": self.private.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "average": None if self.ema is None else self.ema.state_dict(),
        }
        self.folder.save(CHECKPOINT, state)

    def restore(self) -> None:
        assert self.folder is not None
        state = self.folder.checkpoint()
        for name, was in state["plan"].items():
            if self.private.plan[name] != was:
                raise InputError(f"{name} must be the {was} that the run began with, got {self.private.plan[name]}")
        if self.private.ledger.releases < state["step"]:
            raise Refused(
                f"the ledger in {self.folder.path} holds {self.private.ledger.releases} releases, expected at least "
                f"the {state['step']} steps of the checkpoint: ε would be too small; restore the ledger's file"
            )
        self.private.steps_taken = state["step"]
        self.private.method = methods.parse(state["method"])
        self.private.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.ema is not None:
            self.ema.load_state_dict(state["average"])
        self.metrics = [row for row in self.folder.metrics() if row["step"] <= state["step"]]

    def finish(self) -> Run:
        statement = self.private.statement()
        citation = self.private.method.citation.bibtex()
        if self.folder is not None:
            self.folder.save(MODEL, self.model.state_dict())
            self.folder.write(STATEMENT, json.dumps(statement.as_dict(), indent=2) + "\n")
            self.folder.write(STATEMENT_TEXT, statement.text())
            (self.folder.path / CHECKPOINT).unlink(missing_ok=True)
            self.private.ledger.close()
        place = None if self.folder is None else self.folder.path
        return Run(self.model, statement, tuple(self.metrics), place, citation)


def _optimizer(model: nn.Module, given: Optimizer | Callable[[Any], Optimizer] | None) -> Optimizer:
    if isinstance(given, Optimizer):
        return given
    parameters = [p for p in model.parameters() if p.requires_grad]
    return given(parameters) if given is not None else torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def _scheduler(
    optimizer: Optimizer, given: LRScheduler | Callable[[Optimizer], LRScheduler] | None
) -> LRScheduler | None:
    return given if given is None or isinstance(given, LRScheduler) else given(optimizer)
