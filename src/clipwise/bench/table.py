"""What a bench found, and how it is printed.

Receives: times and peak memory of each cell.
Gives: Cell, Row and Table, with ratios to the plain step, on a GPU to the fastest ordinary one, and of methods and
looks to flat clipping; as_text, and lines, one row of it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from clipwise.bench.cases import on_gpu
from clipwise.bench.columns import LOOK, LOOKS, METHOD, ORDINARY
from clipwise.bench.targets import EVERY

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
    compile: bool = False  # the methods' steps

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self) | {"unsteady": self.unsteady()}

    def unsteady(self) -> list[str]:
        """The cells whose time is not to be trusted, as ``row/column``."""
        return [f"{row.row}/{cell.column}" for row in self.rows for cell in row.cells if cell.unsteady]


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
        f"on {table.machine}: median of {table.rounds} rounds of {IN_A_ROW} steps"
        if on_gpu(table.device)
        else f"on the CPU: median of {table.rounds} rounds, {table.threads} threads"
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
        f"– {cell.column} on {row.title}: {cell.missing}{_install(cell.missing)}"
        for row in table.rows
        for cell in row.cells
        if cell.missing
    ]
    if table.unsteady():
        notes.append(f"Do not trust {', '.join(table.unsteady())}: the machine was busy, run it again when it is idle.")
    return "\n".join([*lines, *([""] if notes else []), *notes])


def _install(missing: str) -> str:
    return ": write pip install 'clipwise[bench]'" if "No module named 'opacus'" in missing else ""


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
            f"\nMethods as make_private runs them, {'' if table.compile else 'not '}compiled. "
            f"flat: milliseconds{memory}; the others: times as much, beside the most that it should be."
        )
    if not on_gpu(table.device):
        return f"plain: milliseconds{memory} of the step without privacy; other columns: times as much as plain."
    peak = "; peak gigabytes" if measured else ""
    return f"Milliseconds; times as much as the fastest ordinary step (plain … channels_last){peak}."


def lines(row: Row, device: str) -> list[str]:
    """A row as it will stand in the tables."""
    return [_line(row, kind, device) for kind in KINDS if _part(row, kind)]


def _line(row: Row, kind: str, device: str) -> str:
    title = f"{row.title}, {row.precision}" if on_gpu(device) else row.title
    return f"| {title} [{row.batch}] | " + " | ".join(_words(cell, kind, device) for cell in _part(row, kind)) + " |"


def _words(cell: Cell, kind: str, device: str) -> str:
    if cell.milliseconds is None or cell.ratio is None:
        return "–"
    if not kind and on_gpu(device):
        memory = f", {cell.megabytes / 1024:.2f}" if cell.megabytes is not None else ""
        return f"{cell.milliseconds:.2f} ({cell.ratio:.2f}×{memory})"
    if cell.column in ("plain", FLAT):  # what the others are compared with
        return f"{cell.milliseconds:.1f} ms" + (f", {cell.megabytes:.0f} MB" if cell.megabytes is not None else "")
    if not kind:
        return f"{cell.ratio:.2f}×" + (f" (memory {cell.memory_ratio:.1f}×)" if cell.memory_ratio is not None else "")
    words = (_share if cell.column in LOOKS else _beside)(cell.ratio, cell.target)
    return words if cell.memory_ratio is None else f"{words}; memory {_beside(cell.memory_ratio, cell.memory_target)}"


def _beside(ratio: float, target: float | None) -> str:
    """A ratio with its target, where it has one: 2.31× ≤ 2.5, or 2.71× > 2.5."""
    return f"{ratio:.2f}×" + (f" {'≤' if ratio <= target else '>'} {target:.4g}" if target is not None else "")


def _share(ratio: float, target: float | None) -> str:
    """A look as a share of the steps between two looks: 2.3 % ≤ 3."""
    most = "" if target is None else f" {'≤' if ratio <= target else '>'} {100 * target / EVERY:.4g}"
    return f"{100 * ratio / EVERY:.1f} %{most}"
