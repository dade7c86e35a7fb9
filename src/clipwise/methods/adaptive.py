"""Adaptive clipping: the clip norm follows a quantile of the norms, itself released privately.

Receives: a first clip norm, the quantile to follow, the step of the update, and the count's share of the privacy.
Gives: a Method that is flat clipping at C_t, with a noisy count beside the sum and C_{t+1} computed from it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from clipwise.methods.citations import ANDREW_2021
from clipwise.methods.flat import flat
from clipwise.methods.method import Count, Method, length
from clipwise.types import Released, fraction, positive

if TYPE_CHECKING:
    from torch import Tensor


def adaptive(clip_norm: float = 1.0, quantile: float = 0.5, rate: float = 0.2, count_share: float = 0.01) -> Method:
    """Quantile-tracking clipping (Andrew et al. 2021) with the joint accounting done right.

    Gradient and count are one Gaussian release: 1/σ² = 1/s_g² + 1/(2 s_b)². The count's share of that is
    ``count_share`` = (σ/2s_b)², so s_b = σ/(2√share) and s_g = σ/√(1 − share). The update divides by the expected
    number of units, which are samples unless ``p_average`` merges them; never by the realised one.
    """
    now = length("clip_norm", clip_norm)
    quantile, rate = fraction("quantile", quantile, open_end=True), positive("rate", rate)
    share = fraction("count_share", count_share, open_end=True)

    def below(norms: Tensor) -> Tensor:
        return (norms <= now).to(norms.dtype) - 0.5  # 1[n ≤ C] − ½, of sensitivity ½

    def after(released: Released, units: float) -> Method:
        noisy = float(released.counts["count"])
        # C_{t+1} = C_t exp(−η_C (b_t/B + ½ − γ)); limited so that one wild draw cannot leave the range of floats
        power = -rate * (noisy / units + 0.5 - quantile)
        following = min(max(now * math.exp(min(max(power, -50.0), 50.0)), 1e-12), 1e12)
        return adaptive(following, quantile, rate, share)

    base = flat(now)
    settings = {"clip_norm": now, "quantile": quantile, "rate": rate, "count_share": share}
    return Method("adaptive", ANDREW_2021, settings, base.weigh, now, count=Count(below, share), after=after)
