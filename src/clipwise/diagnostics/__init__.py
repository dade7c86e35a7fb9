"""Measurements of what clipping does. Everything here reads raw gradients or labels: not private.

Receives: per-sample gradients and methods; logits and labels.
Gives: numbers marked ``not private``; on a public proxy they cost the training data nothing, and say that too.

To read in this order: finite (a batch's norms and mean), together (products of several weightings, in one pass), bias
(what methods do), measure (all of it, and the monitor of a run), window (over iterates), ntk (the tangent kernel under
clipping), quality (of predictions) and their calibration.
"""

from clipwise.diagnostics.bias import ClippingBias, Effect, clipping_bias
from clipwise.diagnostics.calibration import Calibration, calibration, temperature
from clipwise.diagnostics.measure import Diagnosis, Monitor, measure
from clipwise.diagnostics.ntk import Flow, Kernel, Tangent, flow, gram, kernel, logit, logit_rows, ntk
from clipwise.diagnostics.quality import outputs, predicted, quality
from clipwise.diagnostics.window import Independence, independence

__all__ = [
    "Calibration",
    "ClippingBias",
    "Diagnosis",
    "Effect",
    "Flow",
    "Independence",
    "Kernel",
    "Monitor",
    "Tangent",
    "calibration",
    "clipping_bias",
    "flow",
    "gram",
    "independence",
    "kernel",
    "logit",
    "logit_rows",
    "measure",
    "ntk",
    "outputs",
    "predicted",
    "quality",
    "temperature",
]
