"""DiSK: a simplified Kalman filter of gradients, whose prediction step is taken per sample (Zhang et al. 2025).

Receives: a base method, the filter's gain κ and the look-ahead γ.
Gives: a Method with the base's weights and bound: points and directions are released ones. Its other half is the
filter itself, m ← (1 − κ) m + κ G̃: ``post="average(gain=κ)"``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clipwise.methods.citations import ZHANG_2025_DISK
from clipwise.methods.flat import flat
from clipwise.methods.method import Engine, Method, base_of, length, wrapped
from clipwise.types import Batch, InputError, fraction

if TYPE_CHECKING:
    from clipwise.records import SampleGradients

# c at most: a gradient's rounding may depend on who else is in the chunk, and the difference of two is c times as rough
STEEPEST = 100.0


def disk(base: Method | None = None, gain: float = 0.7, ahead: float = 0.5) -> Method:
    """v_i = c ∇f(θ + γ d; x_i) + (1 − c) ∇f(θ; x_i) with d = θ_t − θ_{t−1} and c = (1 − κ)/(κ γ), then weigh.

    The combination is made before clipping, so that one bound holds for it. At κ = 1, and in the first step, it is the
    base's gradient.
    """
    inner = base_of(disk, base, flat)
    gain, ahead = length("gain", fraction("gain", gain)), length("ahead", ahead)
    c = (1 - gain) / (gain * ahead)
    if c > STEEPEST:
        raise InputError(
            f"(1 − gain)/(gain · ahead) must be at most {STEEPEST:g}, got {c:.4g}: it magnifies a gradient's rounding, "
            "which other samples may change; write a larger ahead, (1 − gain)/gain for instance"
        )

    def probe(engine: Engine, rows: Batch) -> SampleGradients:
        here = inner.gradients(engine, rows)
        if c == 0 or not engine.past:
            return here
        further = {name: p + ahead * (p - engine.past[0][name]) for name, p in engine.parameters.items()}
        return c * inner.gradients(engine.at(further), rows) + (1 - c) * here

    past = max(1, inner.past)
    settings = {"gain": gain, "ahead": ahead}
    return wrapped(inner, disk, settings, steady=True, citation=ZHANG_2025_DISK, probe=probe, past=past)
