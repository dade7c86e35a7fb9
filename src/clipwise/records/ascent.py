"""Gradients at each sample's own displaced parameters, and its own curvature, without a weight for each sample.

Receives: a capture, rows, and a direction v_i for each unit of them as SampleGradients.
Gives: displaced: ∇ℓ_i(θ + r v_i/‖v_i‖); curvature: H_i v_i. Both are SampleGradients from one more recorded pass.

A layer is affine in its weight, so y(θ + c v_i) = y(θ) + c v_i x, and v_i = Σ_s b_is a_isᵀ is of low rank: the second
pass adds c (x aᵀ) b to a layer's output. Where writing v_i out is cheaper, each unit has its own weight instead
(``displacement.ready`` decides). Curvature is the same pass at c = 0, differentiated by c.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel

from clipwise.records.capture import Capture, batch_size, trainable
from clipwise.records.displacement import Own, moved, ready, tangents, vectors
from clipwise.records.gradients import SampleGradients
from clipwise.records.kinds import Record, joined
from clipwise.types import Batch, InputError


def displaced(capture: Capture, rows: Batch, along: SampleGradients, radius: float | Tensor) -> SampleGradients:
    """∇ℓ_i(θ + r v_i/‖v_i‖) for each row, at the model's present θ; ``radius`` is one number or one for each unit.

    Guarantees: the displacement of a unit depends on its own v_i alone; one forward and one backward pass.
    Edge cases: a v_i of zero, or one that is not finite, displaces nothing. With K times as many rows as ``along`` has
    units, K consecutive rows share a displacement. What the model keeps in buffers, or detaches from its parameters
    before it meets samples, stays θ's.
    """
    parameters = trainable(capture.model)
    views = _views(parameters, along, rows)
    if not along.samples or (not isinstance(radius, Tensor) and radius == 0):
        return capture(rows)

    def scale(norms: Tensor) -> tuple[Tensor, Tensor]:
        good = norms.isfinite() & (norms > 0)
        return good, torch.where(good, radius / norms, 0.0)  # c_i = r/‖v_i‖

    return capture(rows, _owns(parameters, along, scale, views))


def curvature(capture: Capture, rows: Batch, along: SampleGradients) -> SampleGradients:
    """H_i v_i for each row, H_i the Hessian of its loss at the model's present θ: forward over reverse, exact.

    Edge cases: as for ``displaced``; v_i is not normalised. Attention runs in its plain form, the only one whose
    gradient has a derivative.
    """
    parameters = trainable(capture.model)
    views = _views(parameters, along, rows)
    if not along.samples:
        return capture(rows)

    def scale(norms: Tensor) -> tuple[Tensor, Tensor]:
        good = norms.isfinite()
        return good, forward_ad.make_dual(torch.zeros_like(norms), good.to(norms.dtype))  # c = 0, ċ = 1

    records: dict[str, tuple[Record, ...]] = {}
    with forward_ad.dual_level(), sdpa_kernel(SDPBackend.MATH):
        found = capture(rows, _owns(parameters, along, scale, views), dual=True)
        for name, own in found.records.items():
            moving = [part for record in own for part in tangents(record)[1]]
            if moving:
                records[name] = joined(moving)
    return SampleGradients(records, found.like, found.samples, found.losses, found.sites)


def _views(parameters: Mapping[str, Tensor], along: SampleGradients, rows: Batch) -> int:
    """How many rows share a unit's displacement."""
    count = batch_size(rows)
    if count != along.samples and (not along.samples or count % along.samples):
        raise InputError(f"expected {along.samples} rows, or a multiple, for as many directions; got {count} rows")
    if tuple(parameters) != along.names:
        raise InputError("expected a direction for this model's trainable parameters, got one for other parameters")
    return count // along.samples if along.samples else 1


def _owns(
    parameters: Mapping[str, Tensor],
    along: SampleGradients,
    scale: Callable[[Tensor], tuple[Tensor, Tensor]],
    views: int,
) -> dict[str, Own]:
    """Each unit's own parameters θ + c v; ``scale`` says of norms [unit] which v are good, and gives c."""
    given = SampleGradients({name: own for name, own in along.records.items() if own}, along.like, along.samples)
    prepared = SampleGradients({name: ready(own) for name, own in given.records.items()}, along.like, along.samples)
    good, factors = scale(prepared.norms())  # what had to be written out has its norm for nothing
    # values may not be asked for while a graph is traced; what is already finite need not be copied
    if type(good) is not Tensor or not bool(good.all()):
        given, prepared = given.masked(good), prepared.masked(good)
    factors = factors[:, None]
    dual = forward_ad.unpack_dual(factors).tangent is not None
    values = {} if dual else vectors(parameters, prepared.records, factors)
    return {
        name: Own(views, values[name].requires_grad_)
        if name in values
        else moved(parameters[name], own, prepared.records[name], factors, views, reuse=not dual)
        for name, own in given.records.items()
    }
