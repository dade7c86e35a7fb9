"""Stopping a run, and going on with it.

Receives: a run's, a comparison's or an experiment's folder, and what the command says now.
Gives: patient, which hears Ctrl-C and waits for the step's end; resumable, which says how to go on after whatever
stopped the run; begun, the same for several runs; resume_command; resumed, the settings that it goes on with.
"""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TypeVar

from clipwise import methods
from clipwise.cli.screen import Bar
from clipwise.config import CompareConfig, ReproduceConfig, TrainConfig, Training, flag, from_toml, made
from clipwise.report.folder import CHECKPOINT, LEDGER, SETTINGS, STATEMENT
from clipwise.report.runs import command_of, resuming
from clipwise.types import InputError

C = TypeVar("C", TrainConfig, CompareConfig, ReproduceConfig)
COMMANDS: dict[type, str] = {TrainConfig: "train", CompareConfig: "compare", ReproduceConfig: "reproduce"}
SEVERAL = {"compare": "a comparison", "reproduce": "an experiment"}  # what their folders hold: runs in folders within


class Stopped(KeyboardInterrupt):
    """Ctrl-C, with a message that says how to go on."""


@contextmanager
def patient(bar: Bar) -> Iterator[threading.Event]:
    """Within it the first Ctrl-C or SIGTERM sets the event that is given, and the second one interrupts.

    SIGTERM too: a batch system or a container that ends sends it, and a killed run pays for its last steps twice.
    """
    heard = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread hears signals
        yield heard
        return

    def hear(*_: object) -> None:
        restore()
        heard.set()
        bar.stopping()

    def restore() -> None:
        for kind, handler in before.items():
            signal.signal(kind, handler)

    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
    try:
        for kind in before:  # known by now: a signal may come in between
            signal.signal(kind, hear)
        yield heard
    finally:
        restore()


@contextmanager
def resumable(folder: Path, done: Callable[[], int], steps: int, command: str) -> Iterator[None]:
    """Within it whatever stops the run in this folder says by which command it goes on; ``done`` counts its steps."""
    try:
        yield
    except KeyboardInterrupt:
        if not (folder / CHECKPOINT).is_file():
            raise Stopped("stopped before the first step; nothing was trained") from None
        raise Stopped(f"stopped after step {done()} of {steps}; nothing is lost: write {command}") from None
    except InputError as error:
        if done() and (folder / SETTINGS).is_file():
            raise InputError(f"{error}; to resume, write {command}") from error
        raise


@contextmanager
def begun(config: CompareConfig | ReproduceConfig, folder: Path) -> Iterator[None]:
    """Within it the runs in this folder are made: Ctrl-C says by which command they go on; bad input leaves none."""
    try:
        yield
    except BaseException as error:
        if config.resume is None and [place.name for place in folder.iterdir()] == [SETTINGS]:
            (folder / SETTINGS).unlink()
            folder.rmdir()
        elif isinstance(error, KeyboardInterrupt):
            raise Stopped(f"stopped; finished runs are kept: write {resume_command(config, folder)}") from None
        raise


def resume_command(config: Training | ReproduceConfig, folder: Path) -> str:
    """The command that goes on with what is in this folder, where it is now: its settings do not say where."""
    words = ["clipwise", COMMANDS[type(config)], "--resume", str(folder)]
    words += ["--device", config.device] if config.device != "cpu" else []
    return shlex.join([*words, "--tensorboard"] if isinstance(config, Training) and config.tensorboard else words)


def resumed(config: C, folder: str) -> C:
    """The folder's own settings, and this call's for how and where it runs; other changes are refused."""
    place = Path(folder)
    _refuse_other(place, COMMANDS[type(config)])
    before = made(type(config), from_toml(type(config), place / SETTINGS))
    free = {each.name for each in fields(config) if not each.metadata["kept"] and each.name != "folder"}
    if not getattr(config, "self_test", True):
        free.add("self_test")  # a run that it refuses late can be ended without it, and its statement says so
    for name in sorted(config.spoken - free):
        value, was = getattr(config, name), folder if name == "folder" else getattr(before, name)
        if value != was and not (name == "method" and str(methods.parse(value)) == was):
            raise InputError(f"a resumed run keeps its settings, got {flag(name)} {value} for {was}: leave it out")
    return replace(before, **{name: getattr(config, name) for name in free})


def _refuse_other(place: Path, command: str) -> None:
    """Refuse a folder that does not hold what this command goes on with."""
    held = command_of(place)
    if command == "train" and (place / STATEMENT).is_file():
        raise InputError(f"the run in {place} is finished: repeat it with clipwise train --config {place / SETTINGS}")
    if held in SEVERAL and held != command:
        raise InputError(f"{place} holds {SEVERAL[held]}: write clipwise {held} --resume {shlex.quote(str(place))}")
    if command == "train":
        if not (place / CHECKPOINT).is_file():
            raise InputError(f"there is no run to resume in {place}: expected a folder with {CHECKPOINT}")
        if not (place / SETTINGS).is_file():
            raise InputError(f"the run in {place} was made in Python: go on with it there, by {resuming(place)}")
    elif held == "train" or (place / LEDGER).is_file():  # one made in Python may have no settings
        raise InputError(f"{place} holds one run: write clipwise train --resume {shlex.quote(str(place))}")
    elif held is None:
        raise InputError(
            f"there is nothing to resume in {place}: expected {SEVERAL[command]}, a folder with {SETTINGS}"
        )
