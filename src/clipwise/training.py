"""A whole private run: steps, schedule, measurements, checkpoints, and what is left of it in a folder.

Receives: what ``make_private`` takes, and how to evaluate, average, stop and resume.
Gives: ``train``, whose Run holds the model, the privacy statement and the measurements.
"""

from __future__ import annotations

import datetime
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from clipwise import methods, ranks
from clipwise.accounting import Ledger, spent
from clipwise.accounting.ledger import counts, listed, totals
from clipwise.data.copies import warn_of_measured
from clipwise.data.datasets import held
from clipwise.diagnostics import Monitor
from clipwise.diagnostics.quality import evaluating
from clipwise.elsewhere import RUN, lacking
from clipwise.methods import Method
from clipwise.passes import PublicState
from clipwise.plain import four_digits, no_less, rounded_up
from clipwise.private import Private
from clipwise.records import Loss, batch_size, trainable
from clipwise.report import RunFolder, Statement, own
from clipwise.report.board import Board, writer
from clipwise.report.folder import CHECKPOINT, HIDDEN, MODEL, SETTINGS, STATEMENT, STATEMENT_TEXT, digest, refuse_unfit
from clipwise.start import Privacy, make_private, refuse_unknown
from clipwise.trained import forget_trained, note_trained
from clipwise.types import Event, InputError, Refused, fraction, warn, whole

CHECKPOINTS = 10  # of a run at least, beside those at measurements
WHOSE = "samples, in their order"  # among the private state, where it is one momentum for each


@dataclass(frozen=True, repr=False)
class Run:
    """A finished run; a notebook shows it in one line, and ``print(run.report)`` says all of it."""

    model: nn.Module  # the averaged one where an average was asked for
    statement: Statement
    ledger: Ledger  # every release, for ``spent=`` of a later run on the same data; the folder's, where there is one
    metrics: tuple[Mapping[str, float], ...]
    folder: Path | None
    citation: str
    diagnostics: tuple[Mapping[str, Any], ...] = ()  # what the monitor saw, as plain values; not private

    def __repr__(self) -> str:
        """What was trained how, its privacy and its last measurement."""
        return (
            f"<private run of {type(self.model).__name__} by {self.statement.method}, "
            f"δ = {no_less(self.statement.delta)}: {self._last()}>"
        )

    if not TYPE_CHECKING:  # which would take every name for one that is there

        def __getattr__(self, name: str) -> NoReturn:
            """A name that is not here is answered by what to write, where other libraries have it."""
            raise lacking("a finished run", name, RUN)

    @property
    def epsilon(self) -> float:
        """ε spent."""
        return self.statement.epsilon

    @property
    def report(self) -> str:
        """Privacy, last measurements and what to cite, as text."""
        where = f"\nwritten to {self.folder}" if self.folder else ""
        return f"{self.statement.text()}measured: {self._last()}{where}\n\n{self.citation}"

    def _last(self) -> str:
        last = (
            f"{key} {rounded_up(value) if key == 'epsilon' else four_digits(value)}"
            for key, value in (self.metrics[-1] if self.metrics else {}).items()
        )
        return ", ".join(last) or "nothing"


Evaluate = Callable[[nn.Module], Mapping[str, float]]
Progress = Callable[[Private, Mapping[str, float]], None]  # after each step, with what was seen last


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
    monitor: Monitor | None = None,
    tensorboard: bool = False,
    **privacy: Unpack[Privacy],
) -> Run:
    """A whole private run; ``privacy`` is what ``make_private`` takes (method, epsilon, delta, epochs, batch, …).

    ``evaluate(model)`` gives numbers to write down, every ``evaluate_every`` steps and at the end, and without a folder
    is tried before the first step too, so that a mistake in it does not lose the run; ``average`` is the decay of an
    exponential moving average of the weights, which is then what is evaluated and returned. With a ``folder`` the run
    can be stopped at any moment and resumed, and every release counts: where the process was killed, steps since the
    last checkpoint (at every measurement, and at each tenth of the steps) are made again, and a warning says to which
    ε that leads; ``settings`` is a text to keep beside it,
    from which the run could be made again. A ``monitor`` looks at what clipping does to its own rows, before the first
    step, whenever it is due and at the end, and the folder keeps what it saw: not private. ``tensorboard`` also writes
    the curves into the folder for TensorBoard.
    """
    if average is not None:
        fraction("average", average, open_end=True)
    refuse_unknown("train", privacy, {*inspect.signature(train).parameters, *Privacy.__annotations__} - {"privacy"})
    if evaluate is not None and not callable(evaluate):
        raise InputError(f"evaluate must be a function of the model, got {evaluate!r}: write evaluate=lambda model: …")
    if not isinstance(monitor, Monitor | None):
        raise InputError(f'monitor must be a Monitor, got {monitor!r}: write monitor=clipwise.Monitor(rows, "private")')
    chosen = _optimizer(model, optimizer)
    schedule = _scheduler(chosen, scheduler)
    for wanted, name in ((resume, "resume"), (tensorboard, "tensorboard")):
        if wanted and folder is None:
            raise InputError(f"{name} needs the folder of the run; write folder=…")
    keeps = folder if ranks.first() else None  # of several processes one writes
    place = RunFolder(keeps, resume=True) if keeps is not None and resume else None
    if keeps is not None and not resume:
        refuse_unfit(Path(keeps))  # now: calibration and the self-test take seconds
    if tensorboard:
        writer()  # it must be installed
    if resume:
        forget_trained(model)  # by the run that goes on, whose ledger counts
    private = make_private(model, chosen, data, loss=loss, **privacy)
    if evaluate is not None:
        warn_of_measured(evaluate, held(private.data))
    every = whole("evaluate_every", evaluate_every) if evaluate_every is not None else private.steps
    if monitor is not None and any(phase.companions for phase in private.method.phases):
        raise InputError(
            f"a monitor has no public companions for its rows, and {private.method.name} needs them: leave monitor out"
        )
    if folder is not None:
        _refuse_unwritten(private.method)
    if keeps is not None:
        place = place or _new_folder(keeps, private, settings)  # after every check: bad input leaves no folder
    ema = moving_average(model, average) if average else None
    board = Board(place.path) if tensorboard and place is not None else None
    loop = _Loop(private, schedule, average, ema, place, evaluate, monitor, board)
    if resume:
        loop.restore()
    # a run that is stopped lets go of its files too
    with private.ledger, nullcontext() if board is None else closing(board):
        if not resume:
            loop.checkpoint()  # whatever stops the run from now on, it can be resumed
        try:
            loop.run(every, progress)
        except BaseException:
            loop.checkpoint()
            raise
        return loop.finish()


def moving_average(model: nn.Module, decay: float) -> AveragedModel:
    """The exponential moving average of a model's weights and buffers."""
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay), use_buffers=True)


@dataclass
class _Loop:
    """Everything of a run beside the private step: schedule, average, measurements, files."""

    private: Private
    scheduler: LRScheduler | None
    average: float | None  # the decay of ema
    ema: AveragedModel | None
    folder: RunFolder | None
    evaluate: Evaluate | None
    monitor: Monitor | None
    board: Board | None
    metrics: list[Mapping[str, float]] = field(default_factory=list)
    looks: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def model(self) -> nn.Module:
        """What is evaluated and returned."""
        return self.private.model if self.ema is None else self.ema.module

    @property
    def latest(self) -> Mapping[str, float]:
        """The last measurement, and the share that was clipped at the last look."""
        clipped = {"clipped": own(self.looks[-1])["clipped"]} if self.looks else {}
        return {**(self.metrics[-1] if self.metrics else {}), **clipped}

    def run(self, every: int, progress: Progress | None) -> None:
        """All steps that are left, and after each what is due."""
        private = self.private
        if not private.steps_taken and not self.looks:
            self.look()
        if ranks.told(lambda: self.folder is None):
            self.evaluated()  # a mistake in it would lose the run, which no folder keeps, after its last step
        if private.steps_taken == private.steps:  # stopped after its last step, before all was seen
            self.note(every)
            return
        for batch in private.batches():
            private.step(batch)
            if self.scheduler is not None:
                self.scheduler.step()
            if self.ema is not None:
                self.ema.update_parameters(private.model)
            self.note(every)
            if progress is not None:
                progress(private, self.latest)

    def note(self, every: int) -> None:
        """Look and measure where that is due after this step and was not done before, and save."""
        done, last = self.private.steps_taken, self.private.steps_taken == self.private.steps
        due = last or (self.monitor is not None and self.monitor.due(done))
        if due and not _holds(self.looks, done):
            self.look()
        if last or done % every == 0:
            if not _holds(self.metrics, done):
                self.measure()
            self.checkpoint()
        elif done % -(-self.private.steps // CHECKPOINTS) == 0:  # what is repeated after a kill costs ε a second time
            self.checkpoint()

    def evaluated(self) -> dict[str, float]:
        """What the user's function says of the model now; nothing where there is none."""
        if self.evaluate is None:
            return {}
        with evaluating(self.model):
            return _numbers(self.evaluate(self.model))

    def measure(self) -> None:
        """One measurement, kept wherever the run's numbers are."""
        row: dict[str, float] = {"step": self.private.steps_taken, "epsilon": self.private.epsilon()}
        row |= {key: value for key, value in self.evaluated().items() if key not in row}  # ε is the run's own
        self.metrics.append(row)
        if self.board is not None:
            self.board.measured(row)
        if self.folder is not None:
            self.folder.measured(row)

    def look(self) -> None:
        """What clipping does to the monitor's rows now: at released parameters, so that it costs no others' privacy."""
        if self.monitor is None:
            return
        private = self.private
        # not the compiled graph, whose gradients its next call overwrites
        engine = replace(private.engine(torch.arange(batch_size(self.monitor.rows), device="cpu"), 0), fast=None)
        found = self.monitor.look(
            engine,
            private.method,
            step=private.steps_taken,
            noise_multiplier=private.noise_multiplier,
            expected_batch=private.expected_batch,
        )
        row = found.as_dict()
        self.looks.append(row)
        if self.board is not None:
            self.board.looked(row)
        if self.folder is not None:
            self.folder.diagnosed(row)

    @property
    def plan(self) -> dict[str, Any]:
        """What may not change when the run is resumed."""
        kind = "none" if self.scheduler is None else type(self.scheduler).__name__
        own = {"optimizer": type(self.private.optimizer).__name__, "scheduler": kind, "average": self.average or "none"}
        return self.private.plan | own

    def checkpoint(self) -> None:
        if self.folder is None:
            return
        self.private.ledger.sync()  # the ledger is never behind the model
        state = {
            "step": self.private.steps_taken,
            "steps": self.private.steps,
            "plan": self.plan,
            "releases": self.private.ledger.releases,  # more than the steps, where something was spent before
            "recorded": listed(totals(self.private.ledger.entries).items()),
            "method": str(self.private.method),
            "used": self.private.methods_used,
            "model": self.private.model.state_dict(),
            "optimizer": self.private.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
            "average": None if self.ema is None else self.ema.state_dict(),
            "public": vars(self.private.state),
        }
        if self.private.hidden is not None:  # first: a later private state with an earlier model is as sound
            whose = {} if self.private.method.recall is None else {WHOSE: self.private.fingerprint}
            self.folder.save(HIDDEN, self.private.hidden | whose)
        self.folder.save(CHECKPOINT, state)

    def _refuse_another(self, state: Mapping[str, Any]) -> None:
        """Refuse to go on from the checkpoint of a run that this one is not: one statement speaks for all of it."""
        private = self.private
        if (rate := state["plan"]["sampling_rate"]) != private.sampling_rate:  # it changes the noise too, so first
            was, now, batch = state["plan"]["samples"], len(private.data), private.expected_batch
            raise InputError(
                f"the run began with {was} samples and a batch of {rate * was:g}, got {now} and {batch:g}: that is "
                "another sampling rate, and so another noise; resume with the same data and batch"
            )
        # another number of steps is another noise, where that was calibrated
        same_noise = state["plan"]["noise_multiplier"] == private.noise_multiplier
        began = state["plan"] if same_noise else {"steps": state["steps"], **state["plan"]}
        goes_on = {"steps": private.steps, **self.plan}
        for name, was in began.items():
            if name == "self_test" and not goes_on[name]:
                continue  # the statement will say that it was turned off, which is less than was done
            if goes_on[name] != was:
                why = "; it follows from epsilon, where that is given" if name == "noise_multiplier" else ""
                said = "noise" if name == "generator" else name  # the option
                raise InputError(f"{said} must be what the run began with, {was}, got {goes_on[name]}{why}")

    def kept(self) -> tuple[dict[str, Any], dict[str, Any] | None, list[tuple[Event, int]]]:
        """What the folder holds of the run: its checkpoint, its private state and its ledger."""
        assert self.folder is not None
        state, ledger = self.folder.load(CHECKPOINT), self.folder.ledger()  # what was spent before is in it
        if lost := counts(state["recorded"]) - counts(listed(ledger.entries)):
            raise Refused(
                f"the ledger in {self.folder.path} holds {ledger.releases} releases, and lacks {lost.total()} of the "
                f"{state['releases']} that the checkpoint knows of, such as {next(iter(lost))}: ε would be too small; "
                "restore the ledger's file"
            )
        hidden = self.folder.load(HIDDEN) if (self.folder.path / HIDDEN).exists() else None
        return state, hidden, ledger.entries

    def restore(self) -> None:
        state, hidden, entries = ranks.told(self.kept)
        self._refuse_another(state)
        ledger = Ledger() if self.folder is None else self.folder.ledger()
        if self.folder is None:
            ledger.extend(entries)
        self.private.record_in(ledger)
        if hidden and WHOSE in hidden and not torch.equal(hidden.pop(WHOSE), self.private.fingerprint):
            raise Refused(
                "the samples are not those of the run, in their order, so that one's momentum would become another's "
                "and move two terms of the sum: resume with the same data in the same order"
            )
        same = state["method"] == str(self.private.method)  # it need not be one that has an expression
        method = self.private.method if same else methods.parse(state["method"])
        self.private.resumed(state["step"], method, PublicState(**state["public"]), hidden, state["used"])
        if repeated := ledger.releases - state["releases"]:
            self._warn_of_repeated(repeated)
        self.private.model.load_state_dict(state["model"])
        self.private.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])
        if self.ema is not None:
            self.ema.load_state_dict(state["average"])
        # in every process: what was measured is not measured again, as an evaluation of all of them must know
        self.metrics, self.looks = ranks.told(lambda: self._seen(state["step"]))

    def _seen(self, step: int) -> tuple[list[Mapping[str, float]], list[Mapping[str, Any]]]:
        """What the folder holds of measurements and looks until this step; it goes on from there."""
        assert self.folder is not None
        self.folder.forget_after(step)
        return [*self.folder.metrics()], [*self.folder.diagnostics()]

    def _warn_of_repeated(self, repeated: int) -> None:
        private = self.private
        entries = [*private.ledger.entries, *private.planned(private.steps - private.steps_taken)]
        rows = private.rows_per_person
        ends = rounded_up(spent(entries, private.delta, private.accountant, rows_per_person=rows))
        warn(
            f"{repeated} steps since the last checkpoint are made again, and both times count: this run will end at "
            f"ε = {ends}; a checkpoint is made at every measurement and at least {CHECKPOINTS} times a run: more often "
            "with a smaller evaluate_every"
        )

    def finish(self) -> Run:
        note_trained(self.model, self.private.ledger)  # the average is a copy
        statement = self.private.statement()
        citation = "\n\n".join(paper.bibtex() for paper in methods.papers([self.private.method, self.private.post]))
        if self.folder is not None:
            file = self.folder.save(MODEL, self.model.state_dict())
            today = datetime.datetime.now(datetime.UTC).date().isoformat()
            statement = replace(statement, model=digest(file), made=today)
            self.folder.write(STATEMENT, json.dumps(statement.as_dict(), indent=2) + "\n")
            self.folder.write(STATEMENT_TEXT, statement.text())
            for name in (CHECKPOINT, HIDDEN):
                (self.folder.path / name).unlink(missing_ok=True)
        place = None if self.folder is None else self.folder.path
        return Run(self.model, statement, self.private.ledger, tuple(self.metrics), place, citation, tuple(self.looks))


def _numbers(found: Any) -> dict[str, float]:
    try:
        return {key: float(value) for key, value in found.items()}
    except (AttributeError, TypeError, ValueError, RuntimeError):  # torch raises the last for several numbers
        said = f"evaluate must give numbers by name, such as {{'accuracy': 0.9}}, got {found!r}"
        raise InputError(said) from None


def _holds(rows: Sequence[Mapping[str, Any]], step: int) -> bool:
    return bool(rows) and rows[-1]["step"] == step


def _new_folder(folder: str | Path, private: Private, settings: str | None) -> RunFolder:
    """A new run's folder, in whose ledger it is recorded from now on."""
    place = RunFolder(folder)
    ledger = place.ledger()
    ledger.extend(private.ledger.entries)
    private.record_in(ledger)
    if settings is not None:
        place.write(SETTINGS, settings)
    return place


def _refuse_unwritten(method: Method) -> None:
    """Refuse a method that changes from step to step and that a checkpoint could not hold, before anything is spent."""
    if method.after is None:
        return
    try:
        methods.parse(str(method))
    except InputError as error:
        raise InputError(
            f"a run with a folder can be resumed, but {method.name} changes from step to step and its expression "
            f"cannot be read again ({error}); write clipwise.METHODS[name] = its factory, or leave folder out"
        ) from error


def _optimizer(model: nn.Module, given: Optimizer | Callable[[Any], Optimizer] | None) -> Optimizer:
    if not isinstance(model, nn.Module):
        raise InputError(
            f"expected a model first, an nn.Module, got {type(model).__name__}: write train(model, loss, data, …)"
        )
    if isinstance(given, Optimizer):
        return given
    if given is not None and not callable(given):
        raise InputError(
            f"optimizer must be one of torch's, or what makes one of parameters such as torch.optim.Adam, got {given!r}"
        )
    parameters = list(trainable(model).values())
    return given(parameters) if given is not None else torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def _scheduler(
    optimizer: Optimizer, given: LRScheduler | Callable[[Optimizer], LRScheduler] | None
) -> LRScheduler | None:
    try:
        made = given if given is None or isinstance(given, LRScheduler) else given(optimizer)
    except TypeError as error:  # no function, or one that wants more, as StepLR itself does
        raise InputError(
            "scheduler must be one of torch's, or what makes one of an optimizer alone, got "
            f"{getattr(given, '__name__', repr(given))} ({error}): write scheduler=lambda optimizer: "
            "torch.optim.lr_scheduler.StepLR(optimizer, 100)"
        ) from error
    if isinstance(made, ReduceLROnPlateau):
        raise InputError(
            "train steps a schedule after every release and has no measurement to give to ReduceLROnPlateau; write a "
            "loop of your own with make_private, or a schedule of steps such as CosineAnnealingLR"
        )
    return made
