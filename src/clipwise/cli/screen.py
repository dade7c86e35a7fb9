"""What a person sees: a progress bar on standard error, tables on standard output.

Receives: steps done and measurements; rows of a table.
Gives: Bar, a context, and rendered, which lays a table out for the terminal or for a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Bar:
    """One line per run with its steps, ε and accuracy at the last measurement, and the time left.

    *Edge cases*: nothing is shown where standard error is not a terminal, or where ``quiet``.
    """

    def __init__(self, *, quiet: bool) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[measured]}"),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=quiet or not console.is_terminal,
        )
        self._task: TaskID | None = None
        self._started = False

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
        self._task, self._started = self._progress.add_task(name, total=None, measured="preparing"), False

    def __call__(self, done: int, total: int, row: Mapping[str, float]) -> None:
        """Show how far the run is; ``row`` is its last measurement."""
        assert self._task is not None
        if not self._started:  # a resumed run does not begin at 0, which would spoil the time left
            self._progress.reset(self._task, total=total, completed=done)
            self._started = True
        measured = f"ε {row['epsilon']:.2f}, accuracy {row['accuracy']:.1%}" if row else ""
        self._progress.update(self._task, completed=done, measured=measured)

    def stopping(self) -> None:
        """Say that Ctrl-C was heard."""
        if self._task is not None:
            self._progress.update(self._task, measured="stopping after this step; Ctrl-C again stops at once")


def rendered(*parts: RenderableType) -> str:
    """The parts as text for standard output, in colour where that is a terminal."""
    console = Console(highlight=False)
    with console.capture() as capture:
        for part in parts:
            console.print(part)
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())
