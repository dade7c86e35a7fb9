"""DP-SAT: gradients taken uphill along the last release (Park et al. 2023; the baseline of paper 3).

Receives: a base method and the radius ρ.
Gives: a Method with the base's weights and bound: the direction is released, so looking there is free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clipwise.methods.citations import PARK_2023
from clipwise.methods.flat import flat
from clipwise.methods.method import Engine, Method, base_of, length, wrapped
from clipwise.types import Batch

if TYPE_CHECKING:
    from clipwise.records import SampleGradients


def dp_sat(base: Method | None = None, radius: float = 0.086) -> Method:
    """v_i = ∇L_i(θ + ρ G̃_{t−1}/‖G̃_{t−1}‖); the first step is the base's."""
    inner = base_of(dp_sat, base, flat)
    radius = length("radius", radius, least=0.0)

    def probe(engine: Engine, rows: Batch) -> SampleGradients:
        if engine.released is None or radius == 0:
            return inner.gradients(engine, rows)
        length = max(float(sum(g.double().square().sum() for g in engine.released.values())) ** 0.5, 1e-300)
        uphill = {
            name: p + ((radius / length) * engine.released[name]).to(p.dtype) if name in engine.released else p
            for name, p in engine.parameters.items()
        }
        return inner.gradients(engine.at(uphill), rows)

    return wrapped(inner, dp_sat, {"radius": radius}, citation=PARK_2023, probe=probe)
