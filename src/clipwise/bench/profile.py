"""Which layers a private step spends its extra time on.

Receives: per-sample gradients, as a capture gave them.
Gives: for each parameter, how its norm is computed and the measured milliseconds of its norm and its weighted sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from clipwise.bench.cases import CASES, GPU_CASES, on_gpu
from clipwise.records import Capture, SampleGradients
from clipwise.records.timing import timed


@dataclass(frozen=True)
class Layer:
    """One parameter's share of a step, measured on its own and not compiled."""

    name: str
    form: str  # of its norm, as ``explain()`` names it
    norm: float  # milliseconds
    total: float  # milliseconds of the weighted sum

    def __str__(self) -> str:
        """One line."""
        return f"{self.name:44} {self.form:10} norm {self.norm:8.3f} ms, sum {self.total:8.3f} ms"


def slowest(gradients: SampleGradients, most: int = 10) -> list[Layer]:
    """The parameters whose norm and sum take longest, the slowest first."""
    forms = {name: site.how for site in gradients.sites for name in site.parameters}
    layers = [Layer(name, forms.get(name, "backward"), *times) for name, times in timed(gradients).items()]
    return sorted(layers, key=lambda layer: -(layer.norm + layer.total))[:most]


def slowest_of(row: str, device: str = "cpu", batch: int | None = None) -> list[Layer]:
    """The same for a row of the bench; on CUDA in bfloat16."""
    gpu = on_gpu(device)
    case = replace((GPU_CASES if gpu else CASES)[row], device=device, narrow=gpu)
    case = case if batch is None else replace(case, batch=batch)
    return slowest(Capture(case.model(), case.losses)(case.data()))
