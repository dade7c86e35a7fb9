"""Before the first step, and whenever the model's mode changes: what training computes is made of single samples.

Receives: what goes through the model, and by which method.
Gives: run, which says to what passes write, or raises an error that names what is wrong and what to write.

Four samples are looked at closely (``records.checks``). Then as many as a step may have, at places drawn afresh, are
read and computed together, and once more in pieces, each read by itself: losses, gradients and buffers must agree.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from clipwise.methods import Method
from clipwise.passes import Passes, PublicState, probed
from clipwise.reading import READ, Reader, shapes
from clipwise.records import Capture, Loss, SampleGradients, batch_size, trainable
from clipwise.records.agreement import in_half, limits, moved_weights
from clipwise.records.chance import RowDraws, generators, seeded, still, watched
from clipwise.records.checks import (
    alone_as_together,
    changed_at,
    check_samples,
    culprit,
    exchanged,
    losses_of,
    refuse_remembered,
    same_losses,
)
from clipwise.records.displacement import Own
from clipwise.records.extremes import refuse_extreme_gradients, refuse_extremes
from clipwise.records.states import Buffers, beside, held, restored, unmoved
from clipwise.records.tf32 import forbidden, without_cudnn_if_recurrent
from clipwise.records.trees import mapped
from clipwise.step import Rule
from clipwise.types import Batch, Refused

FEW = 4  # samples that are looked at closely
LOOKS = 2  # at a whole step's samples, each time others
SEEDS = 8  # for what draws at random, at the size of a step
TINY = 1e-3  # losses of this size and below are compared as if they were of it: rounding is of the outputs' size


def run(passes: Passes, method: Method, state: PublicState) -> set[str]:
    """Test the model with the rows that the method gives it: with views or public companions, say.

    Gives the buffers and parameters that a pass writes to, none of which is made of the batch.
    """
    samples, before = len(passes.data), beside(passes.model)
    # far apart: neighbours may be alike, and then changing one into another would change nothing
    few = torch.linspace(0, samples - 1, min(FEW, samples), dtype=torch.float64, device="cpu").round().long()
    loss = passes.capture.loss
    capture = Capture(passes.model, loss)
    draw = torch.Generator("cpu")
    draw.seed()  # other places each time

    def drawn(count: int) -> Tensor:
        return torch.randperm(samples, generator=draw, device="cpu")[:count].sort().values

    size = min(samples, passes.most(method))
    reader = Reader.of(passes, drawn(max(size, READ)))
    rows, each = reader.read(few, torch.arange(len(few), device="cpu").split(1))
    shown = _shown(passes, method, few, rows)
    check_samples(passes.model, loss, shown)
    refuse_extremes(passes.model, loss, shown)
    refuse_extreme_gradients(passes.model, loss, shown)

    def gradients(places: Tensor) -> SampleGradients:
        own = each[int(places)] if len(places) == 1 else rows
        return probed(method, replace(passes.engine(few[places], 0, state), fast=None, capture=capture), own)

    alone_as_together(passes.model, gradients, len(few), partial(_terms, method))
    buffers = Buffers(passes.model)
    with unmoved(passes.model):  # of a largest number that these few have, no look at others would tell
        half = in_half(passes.model, capture(shown))
        written = buffers.written() | buffers.parameters_written()
    look = 0
    while look < LOOKS and size > 1:
        order = torch.randperm(size, generator=draw, device="cpu")
        try:
            _look(reader, method, drawn(size), order, half=half)
            look += 1
        except torch.cuda.OutOfMemoryError:  # a chunk may fill the memory, and a plain pass may need more
            size //= 2
    # what could not be put back, such as a largest number that no later look would move
    refuse_remembered(passes.model, before, beside(passes.model))
    return written


def _terms(method: Method, gradients: SampleGradients) -> dict[str, Tensor]:
    """What a step would add for these samples, over its bound: each block's, by the name of its first parameter."""
    blocks = method.blocks(gradients.names)
    groups = [block.names for block in blocks]
    weights = gradients.weighed(Rule(blocks, gradients.samples), groups).weights
    finite = gradients.masked(gradients.norms(groups).isfinite().all(1))
    sums = finite.weighted_sum(weights, groups)
    return {b.names[0]: torch.cat([sums[n].flatten().double() for n in b.names]) / b.bound for b in blocks}


@dataclass(frozen=True)
class _Pass:
    """What one pass over some rows gives."""

    losses: Tensor
    gradient: Sequence[Tensor]  # of the weighted sum of the losses
    held: dict[str, Tensor]  # buffers and parameters afterwards
    drew: bool  # at random, dropout aside


def _look(reader: Reader, method: Method, places: Tensor, order: Tensor, *, half: bool) -> None:
    """Refuse what gives a sample another loss, or another gradient, in other company, or keeps something of it."""
    passes, samples = reader.passes, len(places)
    model, loss = passes.model, passes.capture.loss
    order = reader.shorter_first(places, order)
    # unequal, and one sample alone: what depends on how many there are differs too
    pieces = [piece.sort().values for piece in order.tensor_split([1, 1 + (samples - 1) // 3]) if len(piece)]
    rows, parts = reader.read(places, pieces)
    whole = _shown(passes, method, places, rows)
    each = [_shown(passes, method, places[p], part) for p, part in zip(pieces, parts, strict=True)]
    count = batch_size(whole) // samples  # rows of each sample, which follow each other
    everything = torch.arange(count * samples, device="cpu")
    weights = torch.linspace(0.5, 1.5, count * samples, device="cpu")[torch.randperm(count * samples, device="cpu")]

    chance = RowDraws(len(everything), False)

    def computed(some: Batch, index: Tensor) -> _Pass:
        with chance.of(index.tolist()):
            return _computed(model, loss, some, weights[index])

    def furthest(found: Tensor, index: Tensor) -> float:
        size = together.losses[together.losses.isfinite()].square().mean().sqrt() + TINY
        return _furthest(found, together.losses[index.to(found.device)], size, half)

    with restored(model), forbidden():
        together = computed(whole, everything)
        if together.drew:
            _refuse_mixing(model, loss, whole, _rows_of(order[: samples // 2], count))
            model.eval()
            chance.needed = True
            together = computed(whole, everything)
        with moved_weights(model, half):
            near = computed(whole, everything)
        tolerance = limits(furthest(near.losses, everything), half)
        left, size = list(together.gradient), 1e-12
        for part, piece in zip(each, pieces, strict=True):
            index = _rows_of(piece, count)
            found = computed(part, index)
            if (apart := furthest(found.losses, index)) > tolerance:
                _refuse_company(model, loss, whole, part, index, apart, tolerance)
            if shapes(part) == shapes(whole):
                refuse_remembered(model, together.held, found.held)
            left, size = _less(left, found.gradient), size + _length(found.gradient)
        apart, moved = _length(left) / size, _length(_less(near.gradient, together.gradient)) / size
        tolerance = limits(moved, half)
        if apart > tolerance:  # not where it is no number: a sample is not finite
            raise Refused(
                f"the backward pass treats samples differently among {len(everything)} rows than in pieces of them: "
                f"the gradient moves by {apart:.1e} of its size, expected at most {tolerance:.0e}; let no hook and no "
                "autograd function of your own use more than one sample's gradient"
            )
        del left
        with chance.of(everything.tolist()):
            recorded = _recorded(model, loss, whole, weights)
        apart = _length(_less(recorded, together.gradient)) / size
        if apart > tolerance:
            raise Refused(
                f"the samples' own gradients, weighed and added as in a step, are not the gradient of their losses: "
                f"they differ by {apart:.1e} of its size among {len(everything)} rows, expected at most "
                f"{tolerance:.0e}; let row i of every layer be sample i: sort, shuffle or regroup no rows in the model"
            )


def _rows_of(samples: Tensor, count: int) -> Tensor:
    """The rows of these samples, where each has ``count`` of them."""
    return (count * samples[:, None] + torch.arange(count, device="cpu")).flatten()


def _refuse_company(
    model: nn.Module, loss: Loss, whole: Batch, part: Batch, index: Tensor, apart: float, tolerance: float
) -> NoReturn:
    """Say what gave the rows ``index`` of ``whole`` other losses there than in ``part``, where they are alone."""
    with still(model):
        name = culprit(model, loss, (whole, index), (part, slice(None)), tolerance=tolerance)
    raise Refused(
        f"{name} treats a sample differently among {batch_size(whole)} rows than among {len(index)} of them: its loss "
        f"moves by {apart:.1e} of the losses' size, expected at most {tolerance:.0e}; compute each sample's loss from "
        "that sample alone: no statistics, shares, ranks or counts of the batch, and where collate pads, a mask"
    )


def _recorded(model: nn.Module, loss: Loss, rows: Batch, weights: Tensor) -> list[Tensor]:
    """Σ_i w_i g_i from per-sample gradients; other samples' rows would come with the wrong weights."""
    parameters = trainable(model)
    with restored(model), still(model):
        seeded(0)
        gradients = Capture(model, loss)(mapped(rows, torch.clone))
        summed = gradients.weighted_sum(weights.to(next(iter(parameters.values())).device))
        return [summed[name] for name in parameters]


def _computed(model: nn.Module, loss: Loss, rows: Batch, weights: Tensor) -> _Pass:
    parameters = list(trainable(model).values())
    # cuDNN's recurrent layers have a gradient only in training mode
    with restored(model), still(model), without_cudnn_if_recurrent(model), torch.enable_grad():
        seeded(0)
        losses, drew = watched(lambda: losses_of(model, loss, mapped(rows, torch.clone)))
        summed = (losses * weights.to(losses)).sum()
        gradient = torch.autograd.grad(summed, parameters, allow_unused=True, materialize_grads=True)
        return _Pass(losses.detach().double(), [g.to_dense() for g in gradient], held(model), drew)


def _furthest(found: Tensor, expected: Tensor, scale: Tensor, half: bool) -> float:
    """The largest difference between losses, of their size."""
    both = found.isfinite() & expected.isfinite()
    if not half and not torch.equal(found.isfinite(), expected.isfinite()):
        return math.inf  # in half precision a loss may just overflow
    return float(((found - expected).abs() / (expected.abs() + scale))[both].amax()) if bool(both.any()) else 0.0


def _less(one: Sequence[Tensor], other: Sequence[Tensor]) -> list[Tensor]:
    return [a - b for a, b in zip(one, other, strict=True)]


def _length(gradient: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(torch.linalg.vector_norm(g, dtype=torch.float64)) ** 2 for g in gradient))


def _refuse_mixing(model: nn.Module, loss: Loss, rows: Batch, index: Tensor) -> None:
    """Refuse a model that draws at random if, with the same draws, changing some rows changes another's loss."""
    changed = mapped(rows, lambda t: changed_at(t, index.to(t.device), exchanged))
    others = torch.ones(batch_size(rows), dtype=torch.bool, device="cpu")
    others[index] = False
    for seed in range(SEEDS):
        (before, drawn), (after, drawn_then) = (_drawn(model, loss, b, seed) for b in (rows, changed))
        same = others.to(before.device)
        # where the draws follow the values they cannot be compared
        if drawn == drawn_then and not same_losses(before[same], after[same]):
            name = culprit(model, loss, (rows, others), (changed, others), seed)
            raise Refused(
                f"{name} mixes the samples of a batch: changing some samples changed others' losses; leave out what "
                "mixes them at random (mixup, cutmix, a shuffled batch), or mix each with public samples"
            )


def _drawn(model: nn.Module, loss: Loss, rows: Batch, seed: int) -> tuple[Tensor, Any]:
    count = batch_size(rows)
    with unmoved(model), torch.enable_grad(), RowDraws(count, True).of(range(count)):
        seeded(seed)
        return losses_of(model, loss, mapped(rows, torch.clone)).detach(), generators()


class _Seen(Exception):
    """Carries the rows that a method gave the model first."""


class _Look(Capture):
    """A capture that only shows what it was given."""

    def __call__(self, batch: Batch, owns: Mapping[str, Own] | None = None, dual: bool = False) -> SampleGradients:
        raise _Seen(batch)


def _shown(passes: Passes, method: Method, samples: Tensor, rows: Batch) -> Batch:
    """The rows that the method gives the model for these samples; as they are where it never looks at any."""
    # as before the first step: then methods that look elsewhere later on look at θ, where the model itself is tested
    here = replace(passes.engine(samples, 0), capture=_Look(passes.model, passes.capture.loss), fast=None)
    try:
        probed(method, here, rows)
    except _Seen as seen:
        return seen.args[0]
    return rows
