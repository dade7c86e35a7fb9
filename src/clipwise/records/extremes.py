"""Samples with extreme values: one that is very large, or not a number, may not touch the others.

Receives: a model, a loss and a few samples.
Gives: refuse_extremes, which says nothing, or names what mixes them.

A maximum or a scale of the whole batch that cancels again leaves its rounding behind: at usual values nobody sees it.
"""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from clipwise.records.capture import Loss
from clipwise.records.checks import culprit, same_losses, seeded_losses
from clipwise.records.trees import mapped, tensors
from clipwise.types import Batch, Refused

# (a factor, what it makes of a sample, what to write instead)
EXTREMES = (
    (
        2.0**20,  # float32 keeps three bits after the point beside it
        "of very large values",
        "take maxima and scales of each sample alone, such as logits.max(1, keepdim=True) for logits.max()",
    ),
    (
        math.nan,
        "that is not a number",
        "skip no batch for such a sample, which by itself adds nothing to a step",
    ),
)


def refuse_extremes(model: nn.Module, loss: Loss, batch: Batch) -> None:
    """Refuse what lets the last sample, of extreme values, change another's loss.

    Edge cases: tokens stay as they are, and so do whole numbers among fractions, which may be categories. A model that
    raises an error at such values is left alone. On CUDA a kernel that asserts its numbers would end the process: there
    a copy of the model is looked at on the processor, and a model or a loss that cannot be there is left alone.
    """
    if not any(t.dim() and t.is_floating_point() for t in tensors(batch)):
        return
    if any(t.is_cuda for t in (*model.parameters(), *tensors(batch))):
        try:
            model, batch = copy.deepcopy(model).cpu(), mapped(batch, Tensor.cpu)
            before = seeded_losses(model, loss, batch)
        except Exception:  # it needs the device, or cannot be copied
            return
    else:
        before = seeded_losses(model, loss, batch)
    others = slice(-1)
    for factor, what, write in EXTREMES:
        changed = mapped(batch, lambda t, factor=factor: _last_times(t, factor))  # type: ignore[misc]
        try:
            after = seeded_losses(model, loss, changed)
        except Refused:
            raise
        except Exception:  # whatever a model says to values that it does not take
            continue
        if not same_losses(before[others], after[others]):
            name = culprit(model, loss, (batch, others), (changed, others))
            raise Refused(f"{name} mixes the samples of a batch: one sample {what} changed another's loss; {write}")


def _last_times(rows: Tensor, factor: float) -> Tensor:
    if not rows.dim() or not rows.is_floating_point():
        return rows
    last = rows[-1:]
    whole = last % 1 == 0
    kept = whole & ~whole.all()  # whole numbers among fractions
    return torch.cat([rows[:-1], torch.where(kept, last, factor * (last + 1))])
