"""The bench itself: every column of every row, timed side by side in one run.

Receives: names of rows and columns, the number of rounds.
Gives: a Table of times and peak memory with ratios to the plain step; as_text lays it out.

Time: a row's columns take turns within one process, one step each per round, so that a slow moment of the machine hits
all of them; the median over rounds is reported, after warm-up steps, with garbage collection off.
Memory: each cell in a fresh process, see ``clipwise.bench.memory``.
"""

from __future__ import annotations

import gc
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from clipwise.bench.cases import CASES, Case
from clipwise.bench.columns import COLUMNS, Step
from clipwise.bench.memory import peak_megabytes
from clipwise.types import one_of, whole

WARM_UP = 2
UNSTEADY = 1.25  # a median this many times the fastest round was measured on a busy machine


@dataclass(frozen=True)
class Cell:
    """One step of one column on one row; what could not be measured is None, and ``missing`` says why."""

    column: str
    milliseconds: float | None = None  # median over rounds
    ratio: float | None = None  # to the plain step
    megabytes: float | None = None  # peak, see clipwise.bench.memory
    memory_ratio: float | None = None
    rounds: tuple[float, ...] = ()  # milliseconds of each round
    missing: str | None = None

    @property
    def unsteady(self) -> bool:
        """Whether something else used the machine so much that the median does not tell the step's own time."""
        return self.milliseconds is not None and self.milliseconds > UNSTEADY * min(self.rounds)


@dataclass(frozen=True)
class Row:
    """One model."""

    row: str
    title: str
    batch: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Table:
    """The whole bench, with what one needs to know to compare it with another one."""

    rows: tuple[Row, ...]
    rounds: int
    threads: int
    torch: str
    machine: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"unsteady": self.unsteady()}

    def unsteady(self) -> list[str]:
        """The cells whose time is not to be trusted, as ``row/column``."""
        return [f"{row.row}/{cell.column}" for row in self.rows for cell in row.cells if cell.unsteady]


def bench(
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    rounds: int = 11,
    memory: bool = True,
    batch: int | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Table:
    """Measure rows × columns (all of them unless named); the plain column is always there, ratios need it.

    ``batch`` replaces every row's batch size; ``progress`` is told what is being measured.

    *Edge cases*: a peer that is not installed or fails on a model leaves a cell with the reason, and the rest goes on.
    """
    whole("rounds", rounds)
    named = [one_of("row", row, CASES) for row in (CASES if rows is None else rows)]
    wanted = {"plain", *(one_of("column", column, COLUMNS) for column in (COLUMNS if columns is None else columns))}
    cases = {row: CASES[row] if batch is None else replace(CASES[row], batch=whole("batch", batch)) for row in named}
    return Table(
        rows=tuple(
            _row(row, case, [column for column in COLUMNS if column in wanted], rounds, memory, progress)
            for row, case in cases.items()
        ),
        rounds=rounds,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        machine=f"{platform.system()} {platform.machine()}",
    )


def _row(row: str, case: Case, columns: list[str], rounds: int, memory: bool, progress: Callable[[str], None]) -> Row:
    steps: dict[str, Step] = {}
    missing: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers warn about their own insides
        for column in columns:
            progress(f"{case.title}: warming up {column}")
            try:
                step = COLUMNS[column](case)
                for _ in range(WARM_UP):
                    step()
                steps[column] = step
            except Exception as error:  # whatever a peer raises belongs in its cell
                missing[column] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        progress(f"{case.title}: timing {rounds} rounds")
        times = _times(steps, rounds)
    steps.clear()  # their memory is not needed while other processes are measured
    cells: list[Cell] = []
    for column in columns:
        megabytes = None
        if memory and column not in missing:
            progress(f"{case.title}: memory of {column}")
            peak = peak_megabytes(row, column, case.batch, torch.get_num_threads())
            if isinstance(peak, str):
                missing[column] = f"memory: {peak}"
            else:
                megabytes = peak
        median = statistics.median(times[column]) if column in times else None
        cells.append(
            Cell(column, median, megabytes=megabytes, rounds=times.get(column, ()), missing=missing.get(column))
        )
    reference = next(cell for cell in cells if cell.column == "plain")
    return Row(row, case.title, case.batch, tuple(_compared(cell, reference) for cell in cells))


def _times(steps: dict[str, Step], rounds: int) -> dict[str, tuple[float, ...]]:
    """Milliseconds of each column in each round."""
    times: dict[str, list[float]] = {column: [] for column in steps}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for column, step in steps.items():
                start = time.perf_counter()
                step()
                times[column].append(1000 * (time.perf_counter() - start))
    finally:
        if collecting:
            gc.enable()
    return {column: tuple(values) for column, values in times.items()}


def _compared(cell: Cell, plain: Cell) -> Cell:
    def ratio(value: float | None, reference: float | None) -> float | None:
        return value / reference if value is not None and reference else None

    return replace(
        cell,
        ratio=ratio(cell.milliseconds, plain.milliseconds),
        memory_ratio=ratio(cell.megabytes, plain.megabytes),
    )


def as_text(table: Table) -> str:
    """The table for a terminal or a Markdown page, with what the numbers mean above and the missing cells below."""
    columns = [cell.column for cell in table.rows[0].cells] if table.rows else []
    lines = [
        f"One training step on the CPU: median of {table.rounds} rounds, {table.threads} threads, torch {table.torch}.",
        "plain: milliseconds and megabytes of the step without privacy; other columns: times as much as plain.",
        "",
        "| model [batch] | " + " | ".join(columns) + " |",
        "|---" * (1 + len(columns)) + "|",
    ]
    for row in table.rows:
        lines.append(f"| {row.title} [{row.batch}] | " + " | ".join(_words(cell) for cell in row.cells) + " |")
    notes = [
        f"– {cell.column} on {row.title}: {cell.missing}" for row in table.rows for cell in row.cells if cell.missing
    ]
    if table.unsteady():
        notes.append(f"Do not trust {', '.join(table.unsteady())}: the machine was busy, run it again when it is idle.")
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _words(cell: Cell) -> str:
    if cell.milliseconds is None or cell.ratio is None:
        return "–"
    if cell.column == "plain":
        return f"{cell.milliseconds:.1f} ms" + (f", {cell.megabytes:.0f} MB" if cell.megabytes is not None else "")
    return f"{cell.ratio:.2f}×" + (f" (memory {cell.memory_ratio:.1f}×)" if cell.memory_ratio is not None else "")
