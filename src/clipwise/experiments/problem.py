"""Small problems that are written out in an experiment.

Receives: the problem's x and y, where its one weight starts, and its loss.
Gives: the data, a line without intercept, and a loss with one value per sample.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from clipwise.data import Arrays
from clipwise.losses import squared_error
from clipwise.records import Loss
from clipwise.types import Batch


def huber(threshold: float, model: nn.Module, batch: Batch) -> Tensor:
    """½ r² where |r| ≤ C', and C' (|r| − C'/2) beyond, for r = f(x) − y (paper 1, appendix B.1)."""
    inputs, targets = batch
    return nn.functional.huber_loss(model(inputs).squeeze(1), targets, reduction="none", delta=threshold)


def posed(problem: Mapping[str, Any]) -> tuple[nn.Module, Loss, Arrays]:
    """The model at its start, in float64, its loss and the data."""
    x = torch.tensor(problem["x"], dtype=torch.float64)
    y = torch.tensor(problem["y"], dtype=torch.float64)
    line = nn.Linear(x.shape[1], 1, bias=False, dtype=torch.float64)
    nn.init.constant_(line.weight, problem["start"])
    loss: Loss = partial(huber, float(problem["huber"])) if "huber" in problem else squared_error
    return line, loss, Arrays((x, y))


def place(model: nn.Module, problem: Mapping[str, Any]) -> dict[str, float]:
    """Where the weight is, and how far from the optimum."""
    weight = float(next(model.parameters()).detach().mean())
    return {"weight": weight, "error": abs(weight - problem["optimum"])}
