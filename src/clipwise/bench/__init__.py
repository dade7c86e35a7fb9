"""How fast a private step is, beside what people use today.

Receives: names of rows (models) and columns (libraries).
Gives: bench and as_text, Table, Row and Cell; slowest and slowest_of, Layer; the registries CASES, COLUMNS, GPU_CASES
and GPU_COLUMNS.
"""

from __future__ import annotations

from clipwise.bench.cases import CASES, GPU_CASES, Case
from clipwise.bench.columns import COLUMNS, GPU_COLUMNS, Step
from clipwise.bench.profile import Layer, slowest, slowest_of
from clipwise.bench.run import bench
from clipwise.bench.table import Cell, Row, Table, as_text

__all__ = [
    "CASES",
    "COLUMNS",
    "GPU_CASES",
    "GPU_COLUMNS",
    "Case",
    "Cell",
    "Layer",
    "Row",
    "Step",
    "Table",
    "as_text",
    "bench",
    "slowest",
    "slowest_of",
]
