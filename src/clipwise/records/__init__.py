"""Per-sample gradients that are never written out unless that is cheaper.

Receives: a model, a loss that gives one value per sample, and a batch.
Gives: SampleGradients, from one forward and one backward pass; and the slow oracle with the same interface.

To read in this order: capture (the two passes), follow (how a model is watched), tape (taps and what they become),
layers and composites (each operation), kinds (the records), gradients (their algebra), forms (of a norm, the cheapest);
trees (tensors in lists and mappings) is what they all use.
"""

from clipwise.records.capture import Capture, Loss, batch_size, device_of, per_sample, swapped, traced, trainable
from clipwise.records.gradients import Groups, SampleGradients, from_dense, widest

__all__ = [
    "Capture",
    "Groups",
    "Loss",
    "SampleGradients",
    "batch_size",
    "device_of",
    "from_dense",
    "per_sample",
    "swapped",
    "traced",
    "trainable",
    "widest",
]
