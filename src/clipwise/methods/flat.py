"""Flat clipping: shorten what is longer than C.

Receives: the clip norm C.
Gives: a Method with w(n) = min(1, C/n), so w(n)·n ≤ C.
"""

from clipwise.methods.citations import ABADI_2016
from clipwise.methods.method import Method, length


def flat(clip_norm: float = 1.0) -> Method:
    """DP-SGD's clipping (Abadi et al. 2016, Algorithm 1; "local" clipping in Bu et al. 2023)."""
    bound = length("clip_norm", clip_norm)
    return Method(
        "flat",
        ABADI_2016,
        {"clip_norm": bound},
        weigh=lambda n: (bound / n).clamp(max=1.0),  # min(1, C/n); a zero gradient keeps weight 1
        bound=bound,
    )
