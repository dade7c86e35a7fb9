"""Bias-aware minimisation: gradients taken where each sample's own loss has risen (paper 3).

Receives: a base method, the radius λ, the form and the interpolation α.
Gives: a Method with the base's weights and bound: a sample's displacement depends on that sample alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

from clipwise.methods.citations import KNOLLE_2023
from clipwise.methods.flat import flat
from clipwise.methods.method import Engine, Method, base_of, length, wrapped
from clipwise.types import Batch, fraction, one_of

if TYPE_CHECKING:
    from clipwise.records import SampleGradients

Form = Literal["ascent", "exact"]


def bam(base: Method | None = None, radius: float = 0.02, form: Form = "ascent", alpha: float = 1.0) -> Method:
    """h_i = ∇L_i(θ + λ g_i/‖g_i‖), or g_i + λ H_i g_i/‖g_i‖ where ``form`` is "exact"; then (1−α) g_i + α h_i.

    A gradient of zero gives no direction, and so no ascent. Both passes use the same views.
    """
    inner = base_of(bam, base, flat)
    radius = length("radius", radius, least=0.0)
    one_of("form", form, get_args(Form))
    alpha = fraction("alpha", alpha)

    def probe(engine: Engine, rows: Batch) -> SampleGradients:
        here = inner.gradients(engine, rows)
        if radius == 0:
            return here
        if form == "exact":
            norms = here.norms()
            scale = (alpha * radius / norms).where((norms > 0) & norms.isfinite(), 0.0)
            return here + scale * inner.gradients(engine.curved(here), rows)  # (1−α) g + α (g + λ H g/‖g‖)
        there = inner.gradients(engine.displaced(here, radius), rows)
        return there if alpha == 1 else (1 - alpha) * here + alpha * there

    settings = {"radius": radius, "form": form, "alpha": alpha}
    steady = form == "ascent"  # no compiler sees forward-mode derivatives
    return wrapped(inner, bam, settings, steady=steady, citation=KNOLLE_2023, probe=probe)
