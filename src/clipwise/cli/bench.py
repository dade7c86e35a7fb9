"""``clipwise bench``: how fast a private step is.

Receives: BenchConfig.
Gives: the table of ``clipwise.bench``, as text or JSON.
"""

from __future__ import annotations

import sys

import torch

from clipwise.bench import as_text, bench, slowest_of
from clipwise.config import BenchConfig
from clipwise.plain import as_json, reason
from clipwise.types import whole


def run(config: BenchConfig) -> str:
    """Measure, telling on standard error what is being measured, and each finished row where no terminal shows it."""
    if config.threads is not None:
        torch.set_num_threads(whole("threads", config.threads))
    table = bench(
        config.rows or None,
        config.columns or None,
        rounds=config.rounds,
        memory=config.memory,
        batch=config.batch,
        progress=_tell,
        device=config.device,
        precisions=config.precisions,
        methods=config.methods,
        diagnostics=config.diagnostics,
        compile=config.compile,
    )
    rows = dict.fromkeys(row.row for row in table.rows) if config.profile else ()
    profiles = {row: _profile(row, config) for row in rows}
    if config.json:
        found = table.as_dict() | ({"profile": profiles} if config.profile else {})
        return as_json(found)
    heads = {row: f"{row}, the slowest layers, each measured on its own:" for row in profiles}
    return "\n".join([as_text(table), *(line for row in rows for line in ("", heads[row], *profiles[row]))]) + "\n"


def _tell(message: str) -> None:
    if not (message.startswith("|") and sys.stdout.isatty()):  # there the table shows the row again
        _say(message)


def _say(message: str) -> None:
    print(message, file=sys.stderr, flush=True)


def _profile(row: str, config: BenchConfig) -> list[str]:
    _say(f"{row}: looking for the slowest layers")
    try:
        return [str(layer) for layer in slowest_of(row, config.device, config.batch)]
    except Exception as error:  # the table is there by now, and must not be lost
        return [f"– {reason(error)}"]
