"""Clipping bias: how far the mean of the weighted gradients is from the true mean.

Receives: per-sample gradients of one batch and a method.
Gives: ClippingBias, not private.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from clipwise.methods import Method
from clipwise.records import SampleGradients
from clipwise.step import weigh
from clipwise.types import Gradient

NOT_PRIVATE = "not private: for the data's owner only"


@dataclass(frozen=True)
class ClippingBias:
    """Bias of one batch's clipped mean g̃ as an estimate of the true mean ĝ. Not private."""

    magnitude: float  # ‖g̃ − ĝ‖ (paper 3, Fig. 2)
    cosine: float  # of g̃ and ĝ: the directional part, free of scale (paper 3, Fig. 6)
    clipped: float  # share of samples that were shortened
    median_norm: float
    note: str = NOT_PRIVATE

    @property
    def direction_error(self) -> float:
        """Share of g̃ that does not lie along ĝ: ‖c‖/‖g̃‖ in g̃ = a ĝ + c (paper 3, appendix C). 0 is unbiased."""
        return max(0.0, 1 - self.cosine**2) ** 0.5


def clipping_bias(gradients: SampleGradients, method: Method) -> ClippingBias:
    """The bias that ``method`` would have on these samples; several methods may look at the same gradients."""
    blocks = method.blocks(gradients.names)
    groups = [block.names for block in blocks]
    norms = gradients.norms(groups)
    weights = weigh(blocks, norms)
    everyone = torch.full((gradients.samples,), 1 / gradients.samples, dtype=norms.dtype, device=norms.device)
    true = _flat(gradients.weighted_sum(everyone))
    clipped = _flat(gradients.weighted_sum(weights / gradients.samples, groups))
    cosine = torch.nn.functional.cosine_similarity(true, clipped, dim=0)
    joint = norms.square().sum(1).sqrt()
    return ClippingBias(
        magnitude=float(torch.linalg.vector_norm(clipped - true)),
        cosine=float(cosine),
        clipped=float(((weights < 1 - 1e-4) & (norms > 0)).any(1).double().mean()),
        median_norm=float(joint.median()),
    )


def _flat(gradient: Gradient) -> Tensor:
    return torch.cat([gradient[name].double().flatten() for name in sorted(gradient)])
