"""Automatic clipping (Auto-S, NSGD): nearly every gradient gets length C, small ones less.

Receives: the length C and the stability constant γ.
Gives: a Method with w(n) = C/(n + γ).
"""

from clipwise.methods.citations import BU_2023_AUTOMATIC
from clipwise.methods.method import Method, length


def automatic(clip_norm: float = 1.0, gamma: float = 0.01) -> Method:
    """Auto-S of Bu et al. 2023 (γ = 0.01 there; Xia et al. 2023 compare with 0.1)."""
    bound, gamma = length("clip_norm", clip_norm), length("gamma", gamma)
    return Method(
        "automatic",
        BU_2023_AUTOMATIC,
        {"clip_norm": bound, "gamma": gamma},
        weigh=lambda n: bound / (n + gamma),  # C/(n + γ)
        bound=bound,
    )
