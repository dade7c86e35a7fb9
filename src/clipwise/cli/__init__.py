"""The ``clipwise`` command: one file per subcommand, each imported when it is asked for.

Receives: the arguments of the command line.
Gives: an exit code: 0, 1 for an audit that finds a false claim, 2 with one line on standard error for bad input,
130 after Ctrl-C.

What the subcommands share: options (arguments to settings), parts (what a run is made of), runs (one run), stopping
(and going on), screen (tables and progress); retrained is the audit's.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from clipwise import __version__, config
from clipwise.cli.options import filled, read
from clipwise.types import InputError, nearest


@dataclass(frozen=True)
class Command:
    """A subcommand; its module's ``run(settings)`` gives what to print."""

    settings: type[config.Output]
    does: str
    example: str


COMMANDS = {
    "train": Command(
        config.TrainConfig,
        "Train a model privately and write the run to a folder.",
        "clipwise train --data digits --method psac --epsilon 3",
    ),
    "compare": Command(
        config.CompareConfig,
        "Train the same model by several methods and compare accuracy and clipping bias.",
        "clipwise compare --data digits --epsilon 3 --epochs 20",
    ),
    "predict": Command(
        config.PredictConfig,
        "Predict for new rows with a finished run's model, as a csv table on standard output.",
        "clipwise predict runs/RUN --data new.csv > predictions.csv",
    ),
    "report": Command(
        config.ReportConfig,
        "Write one page about finished runs: which method is less biased, and why.",
        "clipwise report runs/compare-digits-20260101-120000",
    ),
    "advise": Command(
        config.AdviseConfig,
        "Recommend a method and a clip norm, from public or random data, or from private data at a stated cost.",
        "clipwise advise --data digits --epsilon 3",
    ),
    "calibrate": Command(
        config.CalibrateConfig,
        "Find the noise multiplier that keeps an ε, or the ε that a noise multiplier costs.",
        "clipwise calibrate --epsilon 4 --samples 60000 --batch 600 --epochs 20",
    ),
    "audit": Command(
        config.AuditConfig,
        "Attack methods, or the configuration of a run, and hold what that shows against the ε that is claimed.",
        "clipwise audit --method flat psac",
    ),
    "bench": Command(
        config.BenchConfig,
        "Time private training steps beside those of other libraries.",
        "clipwise bench --rows mnist_cnn --columns clipwise vmap",
    ),
    "reproduce": Command(
        config.ReproduceConfig,
        "Repeat a figure or table of the papers, and hold what comes out against what they say.",
        "clipwise reproduce paper4/figure2",
    ),
    "models": Command(config.Output, "List the networks, their sizes and their papers.", "clipwise models"),
    "cite": Command(config.CiteConfig, "Print what to cite for methods, as BibTeX.", "clipwise cite psac automatic"),
}


class Finding(Exception):
    """A command's answer that is bad news: printed like any other, with exit code 1."""


def _help() -> str:
    return (
        f"{filled('Differentially private training that measures and reduces the bias of per-sample clipping.')}\n\n"
        + "".join(f"{filled(command.does, f'  {name:<10} ')}\n" for name, command in COMMANDS.items())
        + "\nFor example:\n"
        + "".join(f"  {command.example}\n" for command in COMMANDS.values())
        + f"\n{filled('clipwise COMMAND --help lists its options; --config FILE reads them from a TOML file.')}\n"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and give its exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # what goes to a file on Windows is in an encoding without ε
        sys.stdout.reconfigure(encoding="utf-8", errors=sys.stdout.errors)
    try:
        with _one_line_warnings():
            show(_answer(arguments))
    except Finding as found:
        show(str(found))
        return 1
    except InputError as error:
        return _say(f"error: {error}", 2)
    except KeyboardInterrupt as stop:
        return _say(str(stop) or "stopped", 130)
    return 0


def _answer(arguments: list[str]) -> str:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        return _help()
    name, *rest = arguments
    if name in ("-V", "--version"):
        return f"clipwise {__version__}\n"
    if name not in COMMANDS:
        what = "option" if name.startswith("-") else "command"
        raise InputError(f"unknown {what} {name!r}: {nearest(name, [*COMMANDS, '--help', '--version'])}")
    command = COMMANDS[name]
    settings = read(name, command.settings, rest, f"{filled(command.does)}\n\nFor example: {command.example}")
    if isinstance(settings, str):
        return settings
    run: Callable[[config.Output], str] = importlib.import_module(f"clipwise.cli.{name}").run
    return run(settings)


def show(text: str) -> None:
    """Print it on standard output; what cannot be written is an error in one line, unless its reader went away."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        # the interpreter flushes once more when it ends, and would complain a second time
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # whose reader has seen enough
            raise InputError(f"cannot write the output ({error.strerror}): free space or write it elsewhere") from error


def _say(message: str, code: int) -> int:
    print(" ".join(message.split()), file=sys.stderr)
    return code


@contextmanager
def _one_line_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: print("warning:", *str(message).split(), file=sys.stderr)
        yield
