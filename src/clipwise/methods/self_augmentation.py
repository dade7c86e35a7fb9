"""Self-augmentation: a sample's gradient is the mean over several views of it (paper 0 §6; De et al. 2022).

Receives: a base method, the number of views K, and how a view is made.
Gives: a Method with the base's weights and bound: a sample is one sample, however many views it has.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clipwise.methods.citations import DE_2022
from clipwise.methods.flat import flat
from clipwise.methods.method import Engine, Method, base_of, wrapped
from clipwise.types import Batch, whole

if TYPE_CHECKING:
    from clipwise.records import SampleGradients


def self_augmentation(base: Method | None = None, views: int = 8, augment: str = "crop-flip") -> Method:
    """v_i = (1/K) Σ_k ∇f(θ; T_k x_i).

    ``augment`` names the views of ``clipwise.data.views``; "own" uses the function given as ``make_private(views=…)``.
    """
    inner = base_of(self_augmentation, base, flat)
    views = whole("views", views)

    def probe(engine: Engine, rows: Batch) -> SampleGradients:
        found = inner.gradients(engine, engine.views(rows, views, augment))
        return found if views == 1 else (1 / views) * found.merged(views)

    rows = views * inner.rows
    settings, steady = {"views": views, "augment": augment}, augment != "own"  # the user's own function may do anything
    return wrapped(inner, self_augmentation, settings, steady=steady, citation=DE_2022, probe=probe, rows=rows)
