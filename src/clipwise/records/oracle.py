"""The slow way: torch.func's gradient, one sample at a time. The reference for everything in ``records``.

Receives: a model, a loss that gives one value per sample, and a batch.
Gives: the same SampleGradients, every per-sample gradient written out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from clipwise.records.capture import Loss, batch_size, check_losses, trainable
from clipwise.records.gradients import SampleGradients, written
from clipwise.records.tape import mapped
from clipwise.types import Batch


class _Losses(nn.Module):
    """The loss as a module around the model, so that functional_call can hand it parameters."""

    def __init__(self, model: nn.Module, loss: Loss) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Batch) -> Tensor:
        return self.loss(self.model, batch)


def _row(rows: Tensor, index: int) -> Tensor:
    return rows[index : index + 1] if rows.dim() else rows


def per_sample(model: nn.Module, loss: Loss, batch: Batch) -> SampleGradients:
    """The gradient of each sample's loss, by one call of ``torch.func.grad`` per sample.

    A batch of one is what the model sees, so it may be any model at all; nothing is vectorised.
    """
    parameters = {name: p.detach() for name, p in trainable(model).items()}
    losses = _Losses(model, loss)

    def one(own: dict[str, Tensor], row: Batch) -> Tensor:
        value = functional_call(losses, {f"model.{name}": p for name, p in own.items()}, (row,))
        check_losses(value, 1)
        return value[0]

    rows = batch_size(batch)
    # cuDNN's recurrent layers have a gradient only in training mode
    with torch.backends.cudnn.flags(enabled=False):
        return _stacked(one, parameters, batch, rows)


def _stacked(
    one: Callable[[dict[str, Tensor], Batch], Tensor], parameters: dict[str, Tensor], batch: Batch, rows: int
) -> SampleGradients:
    found = [grad(one)(parameters, mapped(batch, functools.partial(_row, index=i))) for i in range(rows)]
    if not found:
        return written({name: p.new_zeros(0, *p.shape) for name, p in parameters.items()}, parameters)
    # a sparse embedding's gradient is sparse
    each = {name: torch.stack([g[name].to_dense() for g in found]) for name in parameters}
    return written(each, parameters)
