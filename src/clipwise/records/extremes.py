"""Samples with extreme values, or gradients: one that is very large, or not a number, may not touch the others.

Receives: a model, a loss and a few samples.
Gives: refuse_extremes, which says nothing, or names what mixes them; refuse_extreme_gradients.

A maximum or a scale of the whole batch that cancels again leaves its rounding behind: at usual values nobody sees it.
Nor does anybody see a limit for the whole batch's gradient before it is reached.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.records.capture import Capture, Loss, batch_size, check_losses
from clipwise.records.chance import RowDraws, seeded
from clipwise.records.checks import culprit, draws, same_losses, seeded_losses
from clipwise.records.states import unmoved
from clipwise.records.trees import mapped, tensors
from clipwise.types import Batch, Refused

# (a factor, what it makes of a sample, what to write instead)
EXTREMES = (
    (
        2.0**20,  # float32 keeps three bits after the point beside it
        "of very large values",
        "take maxima and scales of each sample alone, such as logits.max(1, keepdim=True) for logits.max()",
    ),
    (math.nan, "that is not a number", "skip no batch for such a sample, which by itself adds nothing to a step"),
)


LARGE = 2**25  # parameters: of more, a few samples' passes take a processor seconds, and texts are long


def refuse_extremes(model: nn.Module, loss: Loss, batch: Batch) -> None:
    """Refuse what lets the last sample, of extreme values, change another's loss.

    Edge cases: tokens and pictures in bytes stay as they are, and what the model's first layer makes of them becomes
    extreme; whole numbers among fractions stay too, which may be categories. A model that raises an error at such
    values is left alone. On CUDA a kernel that asserts its numbers would end the process: there a copy of the model is
    looked at on the processor, of a large one not behind its first layer, and a model or a loss that cannot be there is
    left alone.
    """
    rows = [t for t in tensors(batch) if t.dim()]
    inputs = any(t.is_floating_point() for t in rows)
    behind = batch_size(batch) > 1 and (not inputs or any(t.dim() > 1 for t in rows if not t.is_floating_point()))
    if any(t.is_cuda for t in (*model.parameters(), *rows)):
        behind = behind and sum(p.numel() for p in model.parameters()) <= LARGE
        if not (inputs or behind):
            return
        try:
            model, batch = copy.deepcopy(model).cpu(), mapped(batch, Tensor.cpu)
            seeded_losses(model, loss, batch)
        except Exception:  # it needs the device, or cannot be copied
            return
    if inputs:
        _refuse_extreme(model, loss, batch, lambda factor: (loss, mapped(batch, partial(_last_times, factor=factor))))
    if behind:
        place = _first_layer(model, loss, batch)
        _refuse_extreme(model, loss, batch, partial(_in_layer, place, model, loss, batch))


def _refuse_extreme(model: nn.Module, loss: Loss, batch: Batch, made: Callable[[float], tuple[Loss, Batch]]) -> None:
    """``made`` gives a batch whose last sample is extreme by a factor, and a loss that may tell it from the other."""
    others = slice(-1)
    chance = RowDraws(batch_size(batch), draws(model, loss, batch))
    with chance.of(range(chance.rows)):
        before = seeded_losses(model, loss, batch)
    for factor, what, write in EXTREMES:
        told, changed = made(factor)
        try:
            with chance.of(range(chance.rows)):
                after = seeded_losses(model, told, changed)
        except Refused:
            raise
        except Exception:  # whatever a model says to values that it does not take
            continue
        if not same_losses(before[others], after[others]):
            name = culprit(model, told, (batch, others), (changed, others))
            raise Refused(f"{name} mixes the samples of a batch: one sample {what} changed another's loss; {write}")
        with chance.of(range(chance.rows)):
            again = seeded_losses(model, loss, batch)
        if not same_losses(before, again):
            raise Refused(
                f"the loss or the model gives the same batch other losses the second time, once it has seen a sample "
                f"{what}: it keeps something of the batches that it saw, which one sample moves for all that follow; "
                "keep nothing of them"
            )


def _first_layer(model: nn.Module, loss: Loss, batch: Batch) -> int:
    """The number of the first layer's call whose output has a row of fractions for each sample; -1 for none."""

    def lengths(rows: Batch) -> list[int]:
        found: list[int] = []
        with _given(model, lambda output: found.append(len(output))):
            seeded_losses(model, loss, rows)
        return found

    size = batch_size(batch)
    # of one sample less too: something else may be as many, such as the positions of a text
    pairs = list(zip(lengths(batch), lengths(mapped(batch, lambda t: t[:-1] if t.dim() else t)), strict=False))
    return pairs.index((size, size - 1)) if (size, size - 1) in pairs else -1


def _in_layer(place: int, model: nn.Module, loss: Loss, batch: Batch, factor: float) -> tuple[Loss, Batch]:
    """A copy of the batch, and a loss in which that layer makes the copy's last row extreme."""
    copied = mapped(batch, torch.clone)

    def told(model: nn.Module, batch: Batch) -> Tensor:
        if batch is not copied:
            return loss(model, batch)
        calls = itertools.count()
        with _given(model, lambda output: _last_times(output, factor) if next(calls) == place else None):
            return loss(model, batch)

    return told, copied


@contextmanager
def _given(model: nn.Module, change: Callable[[Tensor], Tensor | None]) -> Iterator[None]:
    """Within it, the fractions that each layer gives are what ``change`` makes of them."""
    own = set(model.modules())

    def hook(module: nn.Module, _: Any, output: Any) -> Any:
        fractions = isinstance(output, Tensor) and output.dim() and output.is_floating_point()
        return change(output) if fractions and module in own else None

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def refuse_extreme_gradients(model: nn.Module, loss: Loss, batch: Batch) -> None:
    """Refuse a backward pass in which the last sample's gradient, very large or no number, changes another's.

    A hook, or an autograd function, that clips the gradient of a batch does so; one that clips each entry does not.
    """
    size = batch_size(batch)
    if size == 1:
        return
    factors = torch.ones(size, device="cpu")

    def scaled(model: nn.Module, batch: Batch) -> Tensor:
        losses = loss(model, batch)
        check_losses(losses, batch_size(batch))
        return losses * factors.to(losses) if len(losses) == size else losses  # a plan is made with other numbers

    capture = Capture(model, scaled)

    def norms(factor: float) -> Tensor:
        factors[-1] = factor
        with unmoved(model), torch.autograd.set_detect_anomaly(False):  # it would raise an error here
            seeded(0)
            return capture(batch).norms()[:-1]

    before = norms(1.0)
    least = 1e-6 * float(before.nan_to_num(0.0, 0.0, 0.0).amax())
    for factor, what, _ in EXTREMES:
        if not torch.allclose(before, norms(factor), rtol=1e-2, atol=least, equal_nan=True):
            raise Refused(
                f"the backward pass mixes the samples of a batch: one gradient {what} changed another's; clip and skip "
                "no gradient of the whole batch in a hook or an autograd function: a step clips each sample's own"
            )


def _last_times(rows: Tensor, factor: float) -> Tensor:
    if not rows.dim() or not rows.is_floating_point():
        return rows
    last = rows[-1:]
    whole = last % 1 == 0
    kept = whole & ~whole.all()  # whole numbers among fractions
    return torch.cat([rows[:-1], torch.where(kept, last, factor * (last + 1))])
