"""The bench itself: every column of every row, timed side by side in one run.

Receives: names of rows and columns, the number of rounds; on a GPU also precisions and methods.
Gives: a Table of times and peak memory.

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
from dataclasses import replace

import torch

from clipwise.bench.cases import CASES, GPU_CASES, Case, on_gpu
from clipwise.bench.columns import COLUMNS, GPU_COLUMNS, LOOKS, METHOD, ON_REQUEST, Step, builder
from clipwise.bench.memory import peak_megabytes
from clipwise.bench.table import IN_A_ROW, Cell, Row, Table, lines
from clipwise.bench.targets import EVERY, LOOK_SHARE, targets
from clipwise.methods import parse
from clipwise.plain import reason
from clipwise.types import InputError, one_of, whole

PRECISIONS = ("bf16", "tf32", "float32")


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
    gpu = on_gpu(device)
    if gpu and not torch.cuda.is_available():
        raise InputError(f"expected a device that torch sees, got {device}: write --device cpu")
    if compile and not gpu:
        raise InputError(f"compile is for methods' steps on a GPU, got device {device}: write --device cuda")
    known, table = (GPU_CASES, GPU_COLUMNS) if gpu else (CASES, COLUMNS)
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
        for precision in [one_of("precision", p, PRECISIONS) for p in precisions] if gpu else ["float32"]:
            with _products(precision):
                exact = replace(case, narrow=precision == "bf16")
                measured = _row(row, exact, used, rounds, memory, progress, precision)
                cells = [
                    replace(cell, target=time, memory_target=space)
                    for cell in measured.cells
                    for time, space in [allowed.get(cell.column, (None, None))]
                ]
                made.append(replace(measured, cells=tuple(cells)))
                progress("\n".join(lines(made[-1], device)))
    return Table(
        rows=tuple(made),
        rounds=rounds,
        threads=torch.get_num_threads(),
        torch=torch.__version__,
        machine=torch.cuda.get_device_name(device) if gpu else f"{platform.system()} {platform.machine()}",
        device=device,
        compile=compile,
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
    gpu = on_gpu(case.device)
    torch.compiler.reset()  # after eight recompilations of a line of code torch goes on without a compiler
    with warnings.catch_warnings(action="ignore"):  # peers warn about their own insides
        steps, taken, missing = _warmed_up(case, columns, progress, precision)
        progress(f"{case.title}, {precision}: timing {rounds} rounds")
        wait, in_a_row = (torch.cuda.synchronize, IN_A_ROW) if gpu else (lambda: None, 1)
        times, failed = _times(steps, rounds, wait, in_a_row)
        missing |= failed
    steps.clear()  # their memory is not needed while other processes are measured
    cells: list[Cell] = []
    for column in columns:
        megabytes = None
        if memory and gpu:
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
    gpu = on_gpu(case.device)
    for column, build in columns.items():
        progress(f"{case.title}, {precision}: warming up {column}")
        try:
            before = _device_megabytes() if gpu else 0.0
            step = build(case)
            for _ in range(step.warm_up):
                step()
            if gpu:
                taken[column] = _device_megabytes() - before + _device_transient(step)
            steps[column] = step
        except Exception as error:  # whatever a peer raises belongs in its cell
            missing[column] = reason(error)[:300]
    return steps, taken, missing


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
                    failed[column] = reason(error)[:300]
                    continue
                times[column].append(1000 * (time.perf_counter() - start) / in_a_row)
    finally:
        if collecting:
            gc.enable()
    return {column: tuple(values) for column, values in times.items() if column not in failed}, failed
