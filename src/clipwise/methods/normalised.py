"""Normalisation: every gradient gets length C.

Receives: the length C.
Gives: a Method with w(n) = C/n, and 0 for a zero gradient.
"""

import torch

from clipwise.methods.citations import YANG_2022
from clipwise.methods.method import Method, length


def normalised(clip_norm: float = 1.0) -> Method:
    """Normalised gradients (NSGD with regulariser 0)."""
    bound = length("clip_norm", clip_norm)
    return Method(
        "normalised",
        YANG_2022,
        {"clip_norm": bound},
        weigh=lambda n: torch.where(n > 0, bound / n, 0.0),  # C/n
        bound=bound,
    )
