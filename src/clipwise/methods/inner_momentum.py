"""Inner momentum: a sample's gradients at the last iterates, averaged before they are weighed (paper 0, Algorithm 2).

Receives: a base method, how many earlier iterates K0, and the decay γ0.
Gives: a Method with the base's weights and bound, since earlier iterates are released.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clipwise.methods.citations import XIAO_2023
from clipwise.methods.flat import flat
from clipwise.methods.method import Engine, Method, base_of, wrapped
from clipwise.types import Batch, fraction, whole

if TYPE_CHECKING:
    from clipwise.records import SampleGradients


def inner_momentum(base: Method | None = None, horizon: int = 2, decay: float = 0.3) -> Method:
    """v_i = Σ_{l=0..K0} γ0^l ∇f(θ_{t−l}; x_i) / Σ γ0^l (eq. 13, divided so that norms keep their scale).

    The sum is shorter in the first steps. Views of a sample are the same at every iterate.
    """
    inner = base_of(inner_momentum, base, flat)
    horizon, decay = whole("horizon", horizon, least=0), fraction("decay", decay)

    def probe(engine: Engine, rows: Batch) -> SampleGradients:
        here, known = inner.gradients(engine, rows), min(horizon, len(engine.past))
        total = sum(decay**power for power in range(1 + known))
        if total == 1.0:
            return here
        earlier = ((decay**power / total) * inner.gradients(engine.back(power), rows) for power in range(1, 1 + known))
        return ((1 / total) * here).plus(*earlier)

    settings = {"horizon": horizon, "decay": decay}
    past = horizon + inner.past  # the base may look back from each iterate
    return wrapped(inner, inner_momentum, settings, citation=XIAO_2023, steady=True, probe=probe, past=past)
