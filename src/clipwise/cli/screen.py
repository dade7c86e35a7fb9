"""What a person sees: a progress bar on standard error, tables on standard output.

Receives: steps done and measurements; rows of a table.
Gives: Bar, a context, and rendered, which lays a table out for the terminal or for a file.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from clipwise.cli import show
from clipwise.plain import as_json, four_digits, rounded_up


class Bar:
    """One line per run with its steps, what was seen last (ε, share clipped, loss, accuracy), and the time left.

    With ``lines`` each measurement is also a line of JSON on standard output, for programs that watch.
    *Edge cases*: no bar is shown where standard error is not a terminal, or where ``quiet``.
    """

    def __init__(self, *, quiet: bool, lines: bool = False) -> None:
        console = Console(stderr=True)
        self._width, self._bar = console.width, min(24, console.width // 8)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=self._bar),
            MofNCompleteColumn(),
            TextColumn("{task.fields[measured]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._started, self._lines, self._name = False, lines, ""
        self._began, self._first, self._taken = 0.0, 0, 0

    def __enter__(self) -> Self:
        """Show it."""
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Take it away: what stays is the summary."""
        self._progress.stop()

    def begin(self, name: str) -> None:
        """A new line; it pulses until the first step is done."""
        longest = self._width // 4
        shown = name[:longest] if len(name.strip()) <= longest else f"{name[: longest - 1]}…"
        self._task, self._started = self._progress.add_task(shown, total=None, measured="preparing"), False
        self._taken = len(shown) + self._bar + len("00:00") + 5  # columns of everything but the steps and what was seen
        self._name = name.strip()

    def __call__(self, done: int, total: int, row: Mapping[str, float]) -> None:
        """Show how far the run is; ``row`` is what was seen of it last."""
        assert self._task is not None
        if not self._started:  # a resumed run does not begin at 0, which would spoil the time left
            self._progress.reset(self._task, total=total, completed=done)
            self._started, self._began, self._first = True, time.monotonic(), done
        room = self._width - self._taken - len(f"{total}/{total}")
        self._progress.update(self._task, completed=done, measured=_measured(row, room))
        if self._lines and row.get("step") == done:
            show(self._line(done, total, row))

    def _line(self, done: int, total: int, row: Mapping[str, float]) -> str:
        each = (time.monotonic() - self._began) / max(1, done - self._first)  # the first step set the clock
        left = round(each * (total - done), 1)
        # clipped is null where nobody looked
        known = {"run": self._name, "clipped": None, **row, "seconds_left": left, "step": done, "steps": total}
        return as_json(known, indent=None)

    def stopping(self) -> None:
        """Say that Ctrl-C was heard."""
        if self._task is not None:
            self._progress.update(self._task, measured="stopping after this step; Ctrl-C again stops at once")


def _measured(row: Mapping[str, float], room: int) -> str:
    """What was seen last, as much of it as there is room for; only the clipped share is known from the beginning."""
    parts = [f"ε {rounded_up(row['epsilon'])}"] if "epsilon" in row else []
    parts += [f"clipped {row['clipped']:.0%}"] if "clipped" in row else []
    parts += [f"loss {row['loss']:.3g}", " ".join(quality(row))] if "epsilon" in row else []
    while parts and len(", ".join(parts)) > room:
        parts.pop()
    return ", ".join(parts)


def quality(row: Mapping[str, float]) -> tuple[str, str]:
    """What a measurement says about the model: its name and its value."""
    return ("accuracy", f"{row['accuracy']:.1%}") if "accuracy" in row else ("error", four_digits(row["error"]))


def rendered(*parts: RenderableType) -> str:
    """The parts as text for standard output, in colour where that is a terminal."""
    page = io.StringIO()  # a capture of standard output itself would write to it, and break where nothing can
    console = Console(file=page, force_terminal=Console().is_terminal, highlight=False)
    for part in parts:
        console.print(part)
    return "".join(f"{line.rstrip()}\n" for line in page.getvalue().splitlines())
