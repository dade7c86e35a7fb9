"""How each layer's norm is computed: Gram form, written out, or written out a few samples at a time.

Receives: the shape of one weight's records: positions, features in, features out.
Gives: a Form, with the counted costs that led to it; the same choice for the same shape, always.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Name = Literal["gram", "written", "streamed"]

# A matrix product of this many elements of output stays in a core's cache, so writing it out costs no memory traffic.
STREAM_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class Form:
    """The choice for one weight, and what it was chosen from (multiplications and floats per sample)."""

    name: Name
    gram_cost: int  # T²(p + q): two Gram matrices
    written_cost: int  # T·p·q: the per-sample gradient itself
    record_floats: int  # what (a, b) occupy
    written_floats: int  # what the written gradient occupies


def choose(positions: int, inputs: int, outputs: int, *, blocks: int = 1, raw_inputs: int | None = None) -> Form:
    """The cheapest form for ``blocks`` products of [positions, inputs]ᵀ [positions, outputs].

    ``raw_inputs`` is the layer input's floats per sample where that differs from positions × inputs (convolutions,
    whose unfolded input repeats every value).
    """
    gram = blocks * positions**2 * (inputs + outputs)
    written = blocks * positions * inputs * outputs
    record = (raw_inputs if raw_inputs is not None else blocks * positions * inputs) + blocks * positions * outputs
    floats = blocks * inputs * outputs
    if gram < written:
        name: Name = "gram"
    else:
        # Written out during the backward pass, the gradient replaces (a, b), which are then free: keep it where
        # it is the smaller of the two, and otherwise make it a few samples at a time and keep only its norm.
        name = "written" if floats <= record else "streamed"
    return Form(name, gram, written, record, floats)
