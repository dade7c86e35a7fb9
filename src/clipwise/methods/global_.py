"""Global clipping: keep a gradient whole or not at all, so that what is kept has no bias.

Receives: the threshold R.
Gives: a Method with w(n) = 1 where n ≤ R and 0 beyond.
"""

from clipwise.methods.citations import BU_2023_CONVERGENCE
from clipwise.methods.method import Method, length


def global_(clip_norm: float = 1.0) -> Method:
    """Global clipping (Bu et al. 2023, "On the convergence and calibration…"): a large R with a small step size."""
    bound = length("clip_norm", clip_norm)
    return Method(
        "global_",
        BU_2023_CONVERGENCE,
        {"clip_norm": bound},
        weigh=lambda n: (n <= bound).to(n.dtype),  # 1[n ≤ R]
        bound=bound,
    )
