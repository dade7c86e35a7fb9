"""DP-PSAC: per-sample adaptive clipping with a weight that does not favour tiny gradients.

Receives: the length C and the regulariser r, which lives in the gradient's units.
Gives: a Method with w(n) = C/(n + r/(n + r)).
"""

from clipwise.methods.citations import XIA_2023
from clipwise.methods.method import Method, length


def psac(clip_norm: float = 1.0, r: float = 0.1) -> Method:
    """DP-PSAC (Xia et al. 2023, Algorithm 1): w → C as n → 0; the largest weight is C/(2√r − r) at n = √r − r."""
    bound, r = length("clip_norm", clip_norm), length("r", r)
    return Method(
        "psac",
        XIA_2023,
        {"clip_norm": bound, "r": r},
        weigh=lambda n: bound / (n + r / (n + r)),  # C/(n + r/(n + r))
        bound=bound,
    )
