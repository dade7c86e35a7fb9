"""BatchClipping: one private sample and several public ones go through BatchNorm together (paper 0, Algorithm 3).

Receives: a base method and how many public companions p.
Gives: a Method with the base's weights and bound: a unit holds one private sample, and the loss is its own alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from clipwise.methods.citations import XIAO_2023
from clipwise.methods.flat import flat
from clipwise.methods.method import Engine, Method, base_of, wrapped
from clipwise.types import Batch, whole

if TYPE_CHECKING:
    from clipwise.records import SampleGradients


def batch_clipping(base: Method | None = None, companions: int = 3) -> Method:
    """v_i = ∇ℓ(network(x_i with p public inputs)_first, y_i).

    The model must be ``clipwise.models.Accompanied``, whose BatchNorm sees one unit at a time and keeps no statistics;
    the public inputs are ``make_private(public=…)``, and no public label is used.
    """
    inner = base_of(batch_clipping, base, flat)
    companions = whole("companions", companions, least=0)

    def probe(engine: Engine, rows: Batch) -> SampleGradients:
        return inner.gradients(engine, engine.companions(rows, companions) if companions else rows)

    rows = (1 + companions) * inner.rows
    settings = {"companions": companions}
    return wrapped(inner, batch_clipping, settings, citation=XIAO_2023, probe=probe, rows=rows, companions=companions)
