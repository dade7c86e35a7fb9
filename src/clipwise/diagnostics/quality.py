"""How well a model predicts: its outputs for all rows of a data set, and accuracy and loss.

Receives: a model, on whatever device and in whatever mode, and data.
Gives: outputs, predicted, quality, baseline and roc_auc, on the CPU; the model's mode is as it was, also where the
model raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from clipwise.data import Arrays
from clipwise.records import device_of

ROWS = 1024  # that go through a model at a time


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it the model is in evaluation mode and nothing is recorded for gradients."""
    flags = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, flag in flags:  # one by one: a BatchNorm that was in evaluation mode stays there
            module.training = flag


def outputs(model: nn.Module, inputs: Tensor) -> Tensor:
    """The model's outputs for all inputs, in evaluation mode."""
    device = device_of(model)
    with evaluating(model):
        return torch.cat([model(piece.to(device)).cpu() for piece in inputs.split(ROWS)])


def predicted(model: nn.Module, data: Arrays) -> tuple[Tensor, Tensor]:
    """The model's outputs for all rows, in evaluation mode, and the labels or targets."""
    found, wanted = [], []
    for rows in torch.arange(len(data), device="cpu").split(ROWS):
        inputs, labels = data.rows(rows)
        found.append(outputs(model, inputs))
        wanted.append(labels.cpu())
    return torch.cat(found), torch.cat(wanted)


def quality(model: nn.Module, data: Arrays) -> dict[str, float]:
    """Accuracy and mean loss of a classifier; the mean squared error of a regression."""
    return scored(*predicted(model, data))


def scored(found: Tensor, wanted: Tensor) -> dict[str, float]:
    """The same, of outputs that are there."""
    if wanted.is_floating_point():
        return {"loss": float((found.squeeze(1) - wanted).square().mean())}
    loss = nn.functional.cross_entropy(found, wanted)
    return {"accuracy": float((found.argmax(1) == wanted).double().mean()), "loss": float(loss)}


def baseline(wanted: Tensor) -> float:
    """What always saying the same reaches: the accuracy of the most frequent class, the squared error of the mean."""
    if wanted.is_floating_point():
        return float(wanted.double().var(correction=0))
    return float(wanted.unique(return_counts=True)[1].max()) / len(wanted)


def roc_auc(found: Tensor, wanted: Tensor) -> float | None:
    """How often a sample of class 1 gets more of class 1 than one of class 0; ties count half, and 0.5 is guessing.

    Edge cases: None unless there are two classes, samples of both, and finite outputs.
    """
    from scipy.stats import rankdata

    first = wanted == 1
    ones = int(first.sum())
    if wanted.is_floating_point() or found.shape[1] != 2 or ones in (0, len(wanted)) or not found.isfinite().all():
        return None
    ranks = rankdata((found[:, 1].double() - found[:, 0].double()).numpy())
    return float((ranks[first.numpy()].mean() - (ones + 1) / 2) / (len(wanted) - ones))
