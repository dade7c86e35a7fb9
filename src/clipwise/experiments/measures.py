"""What an experiment measures of a model beside its accuracy. Everything here reads raw data: not private.

Receives: a model with its engine, training and test data, and what is wanted.
Gives: columns of numbers for one row of a run; final numbers with the curves behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from clipwise.audit import logistic_attack
from clipwise.data import Arrays
from clipwise.diagnostics import calibration, independence, measure, predicted
from clipwise.methods import Engine, Method
from clipwise.types import Gradient

Curve = list[dict[str, float]]


def gradients(engine: Engine, rows: Any, method: Method, compare: Mapping[str, Method]) -> dict[str, float]:
    """How per-sample gradients spread at this point, and what the run's method and others would make of them.

    Where the method averages p samples, everything is said of averages of p consecutive rows. Of a method that
    remembers earlier steps (DiceSGD's feedback) only this step is seen.
    """
    found, own = engine.gradients(rows), method
    if method.unit > 1:
        base = method.settings["base"]
        assert isinstance(base, Method)
        found, own = (1 / method.unit) * found.merged(method.unit), base
    chosen = {str(each): each for each in (own, *compare.values())}
    taken = {text: each.gradients(engine, rows) for text, each in chosen.items() if each.probe is not None}
    seen = measure(found, list(chosen.values()), taken=taken)
    row = {
        "norm_25": seen.spread.quantiles["25%"],
        "norm_75": seen.spread.quantiles["75%"],
        "mean_norm": seen.spread.mean_length,  # ‖ĝ‖
        "sampling_noise": seen.spread.sampling_noise,  # E ‖ĝ − g_i‖²
        **{f"bucket_{i}": bucket.cosine for i, bucket in enumerate(seen.buckets, start=1)},
    }
    for label, each in (("", own), *((f"_{label}", each) for label, each in compare.items())):
        bias = seen.methods[str(each)].whole
        row[f"cosine{label}"] = bias.cosine
        row[f"bias{label}"] = bias.magnitude
        row[f"off_direction{label}"] = bias.direction_error
        row[f"clipped{label}"] = bias.clipped
    return row


def calibrated(model: nn.Module, test: Arrays) -> tuple[dict[str, float], Curve]:
    """ECE, MCE, NLL and mean confidence, and the reliability diagram."""
    found = calibration(*predicted(model, test))
    bins = [
        {"confidence": each.confidence, "accuracy": each.accuracy, "samples": float(each.samples)}
        for each in found.bins
        if each.samples
    ]
    return {"ece": found.ece, "mce": found.mce, "nll": found.nll, "confidence": found.confidence}, bins


def attacked(model: nn.Module, train: Arrays, test: Arrays, samples: int) -> tuple[dict[str, float], Curve]:
    """The area under the ROC curve of membership inference from logits and labels, and the curve."""
    parts = [part.rows(torch.arange(min(samples, len(part)))) for part in (train, test)]
    found = logistic_attack(model, *parts)
    curve = [{"fpr": float(x), "tpr": float(y)} for x, y in zip(found.fpr, found.tpr, strict=True)]
    return {"auc": found.area, "auc_low": found.low, "auc_high": found.high}, curve


def window(engine: Engine, rows: Any, iterates: Sequence[Gradient]) -> tuple[dict[str, float], Curve]:
    """How much of single samples' noise cancels over windows of the last iterates."""
    found = independence([engine.at(iterate).gradients(rows) for iterate in iterates])
    first, last = found.windows[0], found.windows[-1]
    curve = [
        {"length": float(each.length), "noise": each.noise, "independent": each.independent} for each in found.windows
    ]
    return {"noise_of_one": first.noise, "noise_of_window": last.noise, "noise_if_independent": last.independent}, curve


def weights(method: Method) -> tuple[dict[str, float], Curve]:
    """The weight that a method gives to a gradient of each norm: no data, no model."""
    norms = torch.logspace(-4, 2, 601, dtype=torch.float64)
    found = method.weigh(norms)
    peak = int(found.argmax())
    values = {
        "largest_weight": float(found[peak]),
        "norm_of_largest": float(norms[peak]),
        "weight_of_tiny": float(found[0]),
        "weight_of_large": float(found[-1] * norms[-1]),  # ω(n) n: what is left of a large gradient
    }
    return values, [{"norm": n, "weight": w} for n, w in zip(norms.tolist(), found.tolist(), strict=True)]
