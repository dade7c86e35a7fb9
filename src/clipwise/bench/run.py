"""The bench itself: every column of every row, timed side by side in one run.

Receives: names of rows and columns, the number of rounds; on a GPU also precisions and methods.
Gives: a Table of times and peak memory with ratios to the plain step, on a GPU to the fastest ordinary one, and of
methods and looks to flat clipping; as_text.

Time: a row's columns take turns within one process, one step each per round, so that a slow moment of the machine hits
all of them; the median over rounds is reported, after warm-up steps, with garbage collection off.
Memory: each cell in a fresh process, see ``clipwise.bench.memory``; on a GPU what the column took of the device: what
it keeps, its CUDA graphs included, and the most that a step takes besides.
"""

from __future__ import annotations

import gc
import platform
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from clipwise.bench.cases import CASES, GPU_CASES, Case
from clipwise.bench.columns import COLUMNS, GPU_COLUMNS, LOOK, LOOKS, METHOD, ON_REQUEST, ORDINARY, Step, builder
from clipwise.bench.memory import peak_megabytes
from clipwise.bench.targets import EVERY, LOOK_SHARE, targets
from clipwise.methods import parse
from clipwise.types import InputError, one_of, whole

PRECISIONS = ("bf16", "tf32", "float32")
FLAT = METHOD + "flat"  # what methods are compared with
KINDS = ("", METHOD, LOOK)  # of columns, each with a table of its own
IN_A_ROW = 5  # steps of a round on a GPU
UNSTEADY = 1.25  # a median this many times the fastest round was measured on a busy machine


@dataclass(frozen=True)
class Cell:
    """One step of one column on one row; what could not be measured is None, and ``missing`` says why."""

    column: str
    milliseconds: float | None = None  # median over rounds
    ratio: float | None = None  # to the ordinary step; a method's and a look's to flat's
    megabytes: float | None = None  # peak, see clipwise.bench.memory
    memory_ratio: float | None = None
    rounds: tuple[float, ...] = ()  # milliseconds of each round
    missing: str | None = None
    target: float | None = None  # the most that a method's or a look's ratio should be, and its memory's
    memory_target: float | None = None

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
    precision: str = "float32"

    @property
    def reference(self) -> Cell:
        """What ratios are to: the fastest of the ordinary columns."""
        timed = [cell for cell in self.cells if cell.column in ORDINARY and cell.milliseconds is not None]
        return min(timed, key=lambda cell: cell.milliseconds or 0.0) if timed else self.cells[0]

    def compared(self) -> Row:
        """The row with its ratios: of columns to the reference, of methods and looks to flat."""
        flat = next((cell for cell in self.cells if cell.column == FLAT), self.reference)
        cells = [_compared(c, flat if c.column.startswith((METHOD, LOOK)) else self.reference) for c in self.cells]
        return replace(self, cells=tuple(cells))


@dataclass(frozen=True)
class Table:
    """The whole bench, with what one needs to know to compare it with another one."""

    rows: tuple[Row, ...]
    rounds: int
    threads: int
    torch: str
    machine: str
    device: str = "cpu"

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
    device: str = "cpu",
    precisions: Sequence[str] = ("bf16", "tf32"),
    methods: Sequence[str] = (),
    diagnostics: bool = False,
    compile: bool = False,
) -> Table:
    """Measure rows × columns (all of them unless named); the plain column is always there, ratios need it.

    ``batch`` replaces every row's batch size; ``progress`` is told what is being measured, and each row as soon as it
    is; ``precisions`` are for CUDA, where each makes a row of its own. ``methods`` are columns of their own, and so are
    looks at the gradients (``diagnostics``), with flat beside them; where no ``columns`` are named, they are all that
    is measured. ``compile``: methods' steps are compiled, on CUDA.

    *Edge cases*: a peer that is not installed or fails on a model leaves a cell with the reason, and the rest goes on.
    """
    whole("rounds", rounds)
    on_cuda = device.split(":")[0] == "cuda"
    if on_cuda and not torch.cuda.is_available():
        raise InputError(f"expected a device that torch sees, got {device}: write --device cpu")
    if compile and not on_cuda:
        raise InputError(f"compile is for methods' steps on a GPU, got device {device}: write --device cuda")
    known, table = (GPU_CASES, GPU_COLUMNS) if on_cuda else (CASES, COLUMNS)
    named = [one_of("row", row, known) for row in (known if rows is None else rows)]
    if columns is None:
        columns = [] if methods or diagnostics else [column for column in table if column not in ON_REQUEST]
    wanted = {"plain", *(one_of("column", column, table) for column in columns)}
    beside = ["flat", *methods] if methods or diagnostics else []
    allowed = {METHOD + method: targets(parse(method)) for method in beside}
    allowed |= dict.fromkeys(LOOKS, (EVERY * LOOK_SHARE, None)) if diagnostics else {}
    used = {column: builder(column, table) for column in [*(c for c in table if c in wanted), *allowed]}
    cases = {row: replace(known[row], device=device, compile=compile) for row in named}
    if batch is not None:
        cases = {row: replace(case, batch=whole("batch", batch)) for row, case in cases.items()}
    made = []
    for row, case in cases.items():
        for precision in [one_of("precision", p, PRECISIONS) for p in precisions] if on_cuda else ["float32"]:
            with _products(precision):
                exact = replace(case, narrow=precision == "bf16")
                measured = _row(row, exact, used, rounds, memory, progress, precision)
                cells = [
                    replace(cell, target=time, memory_target=space)
                    for cell in measured.cells
                    for time, space in [allowed.get(cell.column, (None, None))]
                ]
                made.append(replace(measured, cells=tuple(cells)))
                progress("\n".join(_lines(made[-1], device)))
    return Table(
        rows=tuple(made),
        rounds=rounds,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        machine=torch.cuda.get_device_name(device) if on_cuda else f"{platform.system()} {platform.machine()}",
        device=device,
    )


@contextmanager
def _products(precision: str) -> Iterator[None]:
    """Float32 products rounded to TF32, or not; and the fastest convolutions, as whoever measures would choose."""
    cudnn, cublas = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, cublas.allow_tf32, cudnn.benchmark
    if precision != "float32":
        cudnn.allow_tf32 = cublas.allow_tf32 = cudnn.benchmark = True
    try:
        yield
    finally:
        cudnn.allow_tf32, cublas.allow_tf32, cudnn.benchmark = before


def _row(
    row: str,
    case: Case,
    columns: Mapping[str, Callable[[Case], Step]],
    rounds: int,
    memory: bool,
    progress: Callable[[str], None],
    precision: str,
) -> Row:
    on_cuda = case.device != "cpu"
    torch.compiler.reset()  # after eight recompilations of a line of code torch goes on without a compiler
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peers warn about their own insides
        steps, taken, missing = _warmed_up(case, columns, progress, precision)
        progress(f"{case.title}, {precision}: timing {rounds} rounds")
        wait, in_a_row = (torch.cuda.synchronize, IN_A_ROW) if on_cuda else (lambda: None, 1)
        times, failed = _times(steps, rounds, wait, in_a_row)
        missing |= failed
    steps.clear()  # their memory is not needed while other processes are measured
    cells: list[Cell] = []
    for column in columns:
        megabytes = None
        if memory and on_cuda:
            megabytes = taken.get(column)
        elif memory and column not in missing:
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
    return Row(row, case.title, case.batch, tuple(cells), precision).compared()


def _warmed_up(
    case: Case, columns: Mapping[str, Callable[[Case], Step]], progress: Callable[[str], None], precision: str
) -> tuple[dict[str, Step], dict[str, float], dict[str, str]]:
    """Each column's step, the megabytes that it took of a GPU, and why a column has none."""
    steps: dict[str, Step] = {}
    taken: dict[str, float] = {}
    missing: dict[str, str] = {}
    on_cuda = case.device != "cpu"
    for column, build in columns.items():
        progress(f"{case.title}, {precision}: warming up {column}")
        try:
            before = _device_megabytes() if on_cuda else 0.0
            step = build(case)
            for _ in range(step.warm_up):
                step()
            if on_cuda:
                taken[column] = _device_megabytes() - before + _device_transient(step)
            steps[column] = step
        except Exception as error:  # whatever a peer raises belongs in its cell
            missing[column] = _reason(error)
    return steps, taken, missing


def _reason(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _device_megabytes() -> float:
    """What is taken of the device, CUDA graphs' memory included."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() / 2**20


def _device_transient(step: Step) -> float:
    """The most that a step allocates beyond what is there before it; replayed CUDA graphs allocate nothing."""
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def _times(
    steps: dict[str, Step], rounds: int, wait: Callable[[], None], in_a_row: int
) -> tuple[dict[str, tuple[float, ...]], dict[str, str]]:
    """Milliseconds of each column's step in each round, and why a column has none.

    ``wait`` for what a device still does, after so many steps ``in_a_row``: one alone would be timed with all that the
    host does while the device has nothing to do yet, which in a training loop it does beside the step before.
    """
    times: dict[str, list[float]] = {column: [] for column in steps}
    failed: dict[str, str] = {}
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for column, step in steps.items():
                if column in failed:
                    continue
                try:
                    wait()
                    start = time.perf_counter()
                    for _ in range(in_a_row):
                        step()
                    wait()
                except Exception as error:  # one column's failure is its own
                    failed[column] = _reason(error)
                    continue
                times[column].append(1000 * (time.perf_counter() - start) / in_a_row)
    finally:
        if collecting:
            gc.enable()
    return {column: tuple(values) for column, values in times.items() if column not in failed}, failed


def _compared(cell: Cell, reference: Cell) -> Cell:
    def ratio(value: float | None, of: float | None) -> float | None:
        return value / of if value is not None and of else None

    return replace(
        cell,
        ratio=ratio(cell.milliseconds, reference.milliseconds),
        memory_ratio=ratio(cell.megabytes, reference.megabytes),
    )


def as_text(table: Table) -> str:
    """The table for a terminal or a Markdown page, with what the numbers mean above and the missing cells below."""
    where = (
        f"on the CPU: median of {table.rounds} rounds, {table.threads} threads"
        if table.device == "cpu"
        else f"on {table.machine}: median of {table.rounds} rounds of {IN_A_ROW} steps"
    )
    lines = [f"One training step {where}, torch {table.torch}."]
    for kind in KINDS:
        columns = [c.column for c in _part(table.rows[0], kind)] if table.rows else []
        if not columns:
            continue
        head = "| model [batch] | " + " | ".join(column.removeprefix(METHOD) for column in columns) + " |"
        lines += [_meaning(kind, table), "", head, "|---" * (1 + len(columns)) + "|"]
        lines += [_line(row, kind, table.device) for row in table.rows]
    notes = [
        f"– {cell.column} on {row.title}: {cell.missing}{_install(cell)}"
        for row in table.rows
        for cell in row.cells
        if cell.missing
    ]
    if table.unsteady():
        notes.append(f"Do not trust {', '.join(table.unsteady())}: the machine was busy, run it again when it is idle.")
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _install(cell: Cell) -> str:
    return ": write pip install 'clipwise[bench]'" if "No module named 'opacus'" in (cell.missing or "") else ""


def _part(row: Row, kind: str) -> list[Cell]:
    """The cells of one of the tables: columns, methods or looks. A step that others are compared with is no table."""
    own = [cell for cell in row.cells if next((k for k in KINDS if k and cell.column.startswith(k)), "") == kind]
    if kind == LOOK and own:
        return [*(cell for cell in row.cells if cell.column == FLAT), *own]
    return own if len(own) > 1 or len(own) == len(row.cells) else []


def _meaning(kind: str, table: Table) -> str:
    measured = any(cell.megabytes is not None for row in table.rows for cell in row.cells)
    memory = " and megabytes" if measured else ""
    if kind == LOOK:
        return (
            f"\nA look at the gradients of the whole batch, not private. flat: milliseconds{memory} of a step; "
            f"looks: share of {EVERY} such steps, beside the most that it should be."
        )
    if kind == METHOD:
        return (
            f"\nMethods as make_private runs them, not compiled. flat: milliseconds{memory}; the others: times as "
            "much, beside the most that it should be."
        )
    if table.device == "cpu":
        return f"plain: milliseconds{memory} of the step without privacy; other columns: times as much as plain."
    peak = "; peak gigabytes" if measured else ""
    return f"Milliseconds; times as much as the fastest ordinary step (plain … channels_last){peak}."


def _lines(row: Row, device: str) -> list[str]:
    """A row as it will stand in the tables."""
    return [_line(row, kind, device) for kind in KINDS if _part(row, kind)]


def _line(row: Row, kind: str, device: str) -> str:
    title = row.title if device == "cpu" else f"{row.title}, {row.precision}"
    words = _method_words if kind else _words if device == "cpu" else _gpu_words
    return f"| {title} [{row.batch}] | " + " | ".join(words(cell) for cell in _part(row, kind)) + " |"


def _gpu_words(cell: Cell) -> str:
    if cell.milliseconds is None or cell.ratio is None:
        return "–"
    memory = f", {cell.megabytes / 1024:.2f}" if cell.megabytes is not None else ""
    return f"{cell.milliseconds:.2f} ({cell.ratio:.2f}×{memory})"


def _words(cell: Cell) -> str:
    if cell.milliseconds is None or cell.ratio is None:
        return "–"
    if cell.column == "plain":
        return f"{cell.milliseconds:.1f} ms" + (f", {cell.megabytes:.0f} MB" if cell.megabytes is not None else "")
    return f"{cell.ratio:.2f}×" + (f" (memory {cell.memory_ratio:.1f}×)" if cell.memory_ratio is not None else "")


def _method_words(cell: Cell) -> str:
    if cell.milliseconds is None or cell.ratio is None:
        return "–"
    if cell.column == FLAT:
        return f"{cell.milliseconds:.1f} ms" + (f", {cell.megabytes:.0f} MB" if cell.megabytes is not None else "")
    words = (_share if cell.column in LOOKS else _beside)(cell.ratio, cell.target)
    return words if cell.memory_ratio is None else f"{words}; memory {_beside(cell.memory_ratio, cell.memory_target)}"


def _beside(ratio: float, target: float | None) -> str:
    """A ratio with its target, where it has one: 2.31× ≤ 2.5, or 2.71× > 2.5."""
    return f"{ratio:.2f}×" + (f" {'≤' if ratio <= target else '>'} {target:.4g}" if target is not None else "")


def _share(ratio: float, target: float | None) -> str:
    """A look as a share of the steps between two looks: 2.3 % ≤ 3."""
    most = "" if target is None else f" {'≤' if ratio <= target else '>'} {100 * target / EVERY:.4g}"
    return f"{100 * ratio / EVERY:.1f} %{most}"
