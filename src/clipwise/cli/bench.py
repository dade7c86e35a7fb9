"""``clipwise bench``: how fast a private step is.

Receives: BenchConfig.
Gives: the table of ``clipwise.bench``, as text or JSON.
"""

from __future__ import annotations

import json
import sys

import torch

from clipwise.bench import as_text, bench, profiled
from clipwise.config import BenchConfig
from clipwise.types import whole


def run(config: BenchConfig) -> str:
    """Measure, telling on standard error what is being measured."""
    if config.threads is not None:
        torch.set_num_threads(whole("threads", config.threads))
    table = bench(
        config.rows or None,
        config.columns or None,
        rounds=config.rounds,
        memory=config.memory,
        batch=config.batch,
        progress=lambda message: print(message, file=sys.stderr),
        device=config.device,
        precisions=config.precisions,
        methods=config.methods,
    )
    if config.profile:
        for row in dict.fromkeys(row.row for row in table.rows):
            print(profiled(row, config.device, config.batch), file=sys.stderr)
    return (json.dumps(table.as_dict(), indent=2, ensure_ascii=False) if config.json else as_text(table)) + "\n"
