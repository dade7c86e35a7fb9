"""How long each parameter's norm and weighted sum take.

Receives: per-sample gradients, as a capture gave them.
Gives: milliseconds of both, by parameter, each measured on its own and not compiled.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from clipwise.records.gradients import SampleGradients

ROUNDS = 5


def timed(gradients: SampleGradients) -> dict[str, tuple[float, float]]:
    """(norm, weighted sum) of every parameter that has records, in milliseconds: medians of a few rounds."""
    weights = torch.ones(gradients.samples, device=next(iter(gradients.like.values())).device)
    return {
        name: (
            _milliseconds(lambda records=records: [record.sq_norm() for record in records]),  # type: ignore[misc]
            _milliseconds(lambda records=records: [record.total(weights) for record in records]),  # type: ignore[misc]
        )
        for name, records in gradients.records.items()
    }


def _milliseconds(call: Callable[[], object]) -> float:
    wait: Callable[[], None] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    call()
    times = []
    for _ in range(ROUNDS):
        wait()
        start = time.perf_counter()
        call()
        wait()
        times.append(1000 * (time.perf_counter() - start))
    return statistics.median(times)
