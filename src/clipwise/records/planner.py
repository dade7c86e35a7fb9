"""How each layer's norm is computed: Gram form, written out at once or a few samples at a time, or by a kernel.

Receives: the shape of one weight's records: positions, features in, features out.
Gives: a Form, with the counted costs that led to it; the same choice for the same shape, always.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Name = Literal["gram", "written", "streamed", "fused"]

# Per-sample gradients written out a piece at a time should stay in a core's cache: this many floats.
STREAM_FLOATS = 1 << 20
CUDA_STREAM_FLOATS = 1 << 26  # enough to fill a GPU, a quarter of a gigabyte
# What it costs to write a float out and read it twice again (norm, weighted sum), in multiplications.
TRAFFIC = 16
# The same on a GPU, whose memory is slower beside its arithmetic: 12 bytes at 4 TB/s, 2 operations at 400 TFLOP/s.
CUDA_TRAFFIC = 600


@dataclass(frozen=True)
class Form:
    """The choice for one weight, and what it was chosen from (multiplications and floats per sample)."""

    name: Name
    gram_cost: int  # T²(p + q): two Gram matrices
    written_cost: int  # T·p·q: the per-sample gradient itself, as much as an ordinary weight gradient
    record_floats: int  # what (a, b) occupy
    written_floats: int  # what the written gradient occupies


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
    half: bool = False,
) -> Form:
    """The cheapest form for ``blocks`` products of [positions, inputs]ᵀ [positions, outputs].

    ``raw_inputs`` is the layer input's floats per sample where that differs from positions × inputs (convolutions,
    whose unfolded input repeats every value); ``kernel``: a kernel can give the norm without writing anything;
    ``unfolds``: the Gram form would have to write the unfolded input, which no GPU should; ``half``: records are in
    half precision, and a written gradient is not.
    """
    gram = blocks * positions**2 * (inputs + outputs)
    product = blocks * positions * inputs * outputs
    record = (raw_inputs if raw_inputs is not None else blocks * positions * inputs) + blocks * positions * outputs
    floats = blocks * inputs * outputs
    # Gram, streamed and fused forms need the product once more, for the weighted sum; a written one is only read again.
    costs: dict[Name, int] = {"gram": gram + product, "streamed": 2 * product}
    if kernel:  # Gram matrices are symmetric, and the kernel computes half of each
        costs = {"fused": 2 * product} if unfolds else {"fused": 2 * product, "gram": gram // 2 + product}
    # Written out, it replaces (a, b), which are then free: never more memory than keeping them.
    if floats * (2 if half else 1) <= record:
        costs["written"] = product + (CUDA_TRAFFIC if cuda else TRAFFIC) * floats
    name = min(costs, key=lambda form: costs[form])
    return Form(name, gram, product, record, floats)
