"""``clipwise models``: the networks that a name can choose.

Receives: Output.
Gives: a table of names, sizes, samples and papers, or JSON.
"""

from __future__ import annotations

from dataclasses import asdict

from rich.console import JustifyMethod
from rich.table import Table
from rich.text import Text

from clipwise import models
from clipwise.cli.screen import rendered
from clipwise.config import Output
from clipwise.plain import as_json


def run(config: Output) -> str:
    """A row for each network."""
    rows = models.list()
    if config.json:
        return as_json([asdict(row) for row in rows])
    table = Table(box=None, pad_edge=False)
    for title in ("name", "parameters", "one sample", "made for", "paper"):
        justify: JustifyMethod = "right" if title == "parameters" else "left"
        table.add_column(title, justify=justify, no_wrap=title in ("name", "parameters"), overflow="fold")
    for row in rows:
        table.add_row(row.name, f"{row.parameters:,}".replace(",", " "), Text(str(row.shape)), row.data, row.paper)
    return rendered(table)
