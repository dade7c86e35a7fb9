"""The usual losses, each with one value per sample.

Receives: a model and a batch (inputs, targets).
Gives: cross_entropy for classes, squared_error for numbers.
"""

from __future__ import annotations

from torch import Tensor, nn

from clipwise.types import Batch, InputError


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """The usual loss of a classifier for batches (inputs, labels): one value per sample."""
    inputs, labels = _pair(batch, "cross_entropy", "labels")
    if labels.is_floating_point() and labels.dim() == 1:
        raise InputError(
            f"cross_entropy takes labels that are whole numbers, got {labels.dtype}: write y.long(), or for numbers to "
            "predict loss=clipwise.squared_error"
        )
    outputs = model(inputs)
    if not labels.is_floating_point():
        if labels.dim() == outputs.dim() == 2:
            write = "y.squeeze(1)" if labels.shape[1] == 1 else "y.argmax(1) where each row marks its class with a 1"
            raise InputError(f"cross_entropy takes one label per sample, got shape {list(labels.shape)}: write {write}")
        labels = labels.long()  # torch refuses other whole numbers
    try:
        return nn.functional.cross_entropy(outputs, labels, reduction="none")
    except IndexError as error:
        if "out of bounds" not in str(error):
            raise
        raise InputError(
            f"labels must be 0 to the number of outputs less one ({error}): write y - 1 where they begin with 1, or "
            "give the model more outputs"
        ) from error


def squared_error(model: nn.Module, batch: Batch) -> Tensor:
    """The usual loss of a model with one output for batches (inputs, numbers): one value per sample."""
    inputs, targets = _pair(batch, "squared_error", "numbers")
    outputs = model(inputs).squeeze(-1)
    if outputs.shape != targets.shape:  # [n] and [n, 1] would make [n, n]
        write = "y.squeeze(1)" if targets.shape == (*outputs.shape, 1) else "a loss(model, batch) of your own"
        raise InputError(
            f"squared_error takes one output and one number per sample, got outputs of shape {list(outputs.shape)} for "
            f"numbers of shape {list(targets.shape)}: write {write}"
        )
    return (outputs - targets).square()


def _pair(batch: Batch, loss: str, second: str) -> tuple[Tensor, Tensor]:
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        got = f"{len(batch)} parts" if isinstance(batch, (tuple, list)) else type(batch).__name__
        raise InputError(
            f"clipwise.{loss} takes batches (inputs, {second}), got {got}: write a loss(model, batch) of your own, "
            "with one value per sample"
        )
    inputs, targets = batch
    return inputs, targets
