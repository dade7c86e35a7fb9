"""How fast a private step is, beside what people use today; also ``python -m clipwise.bench``.

Receives: names of rows (models) and columns (libraries).
Gives: bench, as_text, Table, Row and Cell, and the registries CASES and COLUMNS.
"""

from __future__ import annotations

from clipwise.bench.cases import CASES, Case
from clipwise.bench.columns import COLUMNS, Step
from clipwise.bench.run import Cell, Row, Table, as_text, bench

__all__ = ["CASES", "COLUMNS", "Case", "Cell", "Row", "Step", "Table", "as_text", "bench"]
