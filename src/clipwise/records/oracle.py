"""The slow way: torch.func's gradient, one sample at a time. The reference for everything in ``records``.

Receives: a model, a loss that gives one value per sample, and a batch.
Gives: the same SampleGradients, every per-sample gradient written out; also at displaced parameters, and curvature.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp
from torch.nn.attention import SDPBackend, sdpa_kernel

from clipwise.records.capture import Loss, batch_size, check_losses, trainable
from clipwise.records.gradients import SampleGradients, from_dense
from clipwise.records.tf32 import without_cudnn
from clipwise.records.trees import row
from clipwise.types import Batch, Gradient


class _Losses(nn.Module):
    """The loss as a module around the model, so that functional_call can hand it parameters."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Batch) -> Tensor:
        return self.loss(self.model, batch)


def per_sample(model: nn.Module, loss: Loss, batch: Batch) -> SampleGradients:
    """The gradient of each sample's loss, by one call of ``torch.func.grad`` per sample.

    A batch of one is what the model sees, so it may be any model at all; nothing is vectorised.
    """
    one = _one(model, loss)
    return _stacked(lambda _, row: grad(one)(_values(model), row), model, batch)


def displaced(
    model: nn.Module, loss: Loss, batch: Batch, along: SampleGradients, radius: float | Tensor
) -> SampleGradients:
    """∇ℓ_i(θ + r v_i/‖v_i‖): each sample with its own parameters, written out (see ``ascent``)."""
    one, v = _one(model, loss), along.materialise()
    norms = sum(t.reshape(len(t), -1).square().sum(1) for t in v.values()).sqrt()  # type: ignore[union-attr]
    c = torch.where(norms.isfinite() & (norms > 0), radius / norms, 0.0)
    views = batch_size(batch) // max(along.samples, 1)

    def at(index: int, row: Batch) -> Gradient:
        unit = index // views
        own = {n: p + (c[unit] * v[n][unit]).to(p.dtype) if c[unit] else p for n, p in _values(model).items()}
        return grad(one)(own, row)

    return _stacked(at, model, batch)


def curvature(model: nn.Module, loss: Loss, batch: Batch, along: SampleGradients) -> SampleGradients:
    """H_i v_i by ``torch.func.jvp`` of ``torch.func.grad``, one sample at a time (see ``ascent``).

    Edge cases: what torch has no forward derivative for is torch's error.
    """
    one, v = _one(model, loss), along.materialise()
    views = batch_size(batch) // max(along.samples, 1)

    def at(index: int, row: Batch) -> Gradient:
        values = _values(model)
        direction = {name: v[name][index // views].to(p.dtype) for name, p in values.items()}
        finite = all(bool(t.isfinite().all()) for t in direction.values())
        direction = direction if finite else {name: torch.zeros_like(p) for name, p in values.items()}
        moved: Gradient = jvp(lambda own: grad(one)(own, row), (values,), (direction,))[1]
        return moved

    with sdpa_kernel(SDPBackend.MATH):  # of attention's forms the one whose gradient has a derivative
        return _stacked(at, model, batch)


def _values(model: nn.Module) -> Gradient:
    return {name: p.detach() for name, p in trainable(model).items()}


def _one(model: nn.Module, loss: Loss) -> Callable[[Gradient, Batch], Tensor]:
    """One sample's loss as a function of all parameters."""
    losses = _Losses(model, loss)

    def one(own: Gradient, row: Batch) -> Tensor:
        value = functional_call(losses, {f"model.{name}": p for name, p in own.items()}, (row,))
        check_losses(value, 1)
        return value[0]

    return one


def _stacked(of: Callable[[int, Batch], Gradient], model: nn.Module, batch: Batch) -> SampleGradients:
    """``of(index, row)`` for every row."""
    parameters = _values(model)
    # cuDNN's recurrent layers have a gradient only in training mode
    with without_cudnn():
        found = [of(i, row(batch, i)) for i in range(batch_size(batch))]
    if not found:
        return from_dense({name: p.new_zeros(0, *p.shape) for name, p in parameters.items()}, parameters)
    # a sparse embedding's gradient is sparse
    each = {name: torch.stack([g[name].to_dense() for g in found]) for name in parameters}
    return from_dense(each, parameters)
