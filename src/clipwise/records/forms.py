"""How each layer's norm is computed: Gram form, written out at once or a few samples at a time, or by a kernel.

Receives: the shape of one weight's records: positions, features in, features out.
Gives: a Form, with the counted costs that led to it; the same choice for the same shape, always. On a GPU it is where
measuring starts from (``tuning``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch

Name = Literal["gram", "written", "streamed", "fused"]

# Per-sample gradients written out a piece at a time should stay in a core's cache: this many floats.
STREAM_FLOATS = 1 << 20
CUDA_STREAM_FLOATS = 1 << 26  # enough to fill a GPU, a quarter of a gigabyte
# What it costs to write a float out and read it twice again (norm, weighted sum), in multiplications.
TRAFFIC = 16
# The same on a GPU, whose memory is slower beside its arithmetic: 12 bytes at 4 TB/s, 2 operations at 400 TFLOP/s. Of a
# format of 2 bytes it is half as much.
CUDA_TRAFFIC = 600
# A form of more than so many times the cheapest one's counted cost is not measured: every trial compiles kernels, and
# counting is not that wrong.
FAR = 2


@dataclass(frozen=True)
class Form:
    """The choice for one weight, and what it was chosen from (multiplications and floats per sample)."""

    name: Name
    gram_cost: int  # T²(p + q): two Gram matrices
    written_cost: int  # T·p·q: the per-sample gradient itself, as much as an ordinary weight gradient
    record_floats: int  # what (a, b) occupy
    written_floats: int  # what the written gradient occupies
    worth: tuple[Name, ...] = ()  # the forms worth measuring
    milliseconds: Mapping[Name, float] = field(default_factory=dict)  # of a step by each, where they were measured
    trial: int = 0  # for so many samples

    @property
    def kept(self) -> Name:
        """The form for records that stay pairs (a, b) even so, such as units that were merged after the pass."""
        others = sorted((time, name) for name, time in self.milliseconds.items() if name != "written")
        return others[0][1] if others and self.name == "written" else self.name


def stream_floats(*, cuda: bool) -> int:
    """How many floats of gradients are written out at a time."""
    return CUDA_STREAM_FLOATS if cuda else STREAM_FLOATS


def choose(
    positions: int,
    inputs: int,
    outputs: int,
    *,
    blocks: int = 1,
    raw_inputs: int | None = None,
    cuda: bool = False,
    kernel: bool = False,
    unfolds: bool = False,
    not_unfolded: int | None = None,
    formats: tuple[torch.dtype, torch.dtype] = (torch.float32, torch.float32),
) -> Form:
    """The cheapest form for ``blocks`` products of [positions, inputs]ᵀ [positions, outputs].

    ``raw_inputs`` is the layer input's floats per sample where that differs from positions × inputs (convolutions,
    whose unfolded input repeats every value); ``kernel``: a kernel can give the norm without writing anything;
    ``unfolds``: the Gram form would have to write the unfolded input, which no GPU should; ``not_unfolded``: what it
    costs by a kernel that does not; ``formats``: of the records, and of a gradient that is written out.
    """
    gram = blocks * positions**2 * (inputs + outputs)
    product = blocks * positions * inputs * outputs
    record = (raw_inputs if raw_inputs is not None else blocks * positions * inputs) + blocks * positions * outputs
    floats = blocks * inputs * outputs
    # Gram, streamed and fused forms need the product once more, for the weighted sum; a written one is only read again.
    costs: dict[Name, int] = {"gram": gram + product, "streamed": 2 * product}
    if kernel:  # Gram matrices are symmetric, and the kernel computes half of each
        costs = {"fused": 2 * product}
        if (least := not_unfolded if unfolds else gram // 2) is not None:
            costs["gram"] = least + product
    # Written out, it replaces (a, b), which are then free: never more memory than keeping them.
    kept, wrote = (dtype.itemsize for dtype in formats)
    if floats * wrote <= record * kept:
        costs["written"] = product + (CUDA_TRAFFIC if cuda else TRAFFIC) * floats * min(4, wrote) // 4
    name = min(costs, key=lambda form: costs[form])
    # Without a kernel Gram matrices are written: not where they take more memory than the records.
    heavy = not kernel and 2 * blocks * positions**2 > record
    worth = (form for form in costs if costs[form] <= FAR * costs[name] and not (heavy and form == "gram"))
    return Form(name, gram, product, record, floats, tuple(worth))
