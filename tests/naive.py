"""The clipping methods, transcribed slowly and literally: the reference that the library is compared with.

Written from the texts of the papers and the table of methods, and not from the library's code: agreement between the
two is evidence only because neither was copied from the other. Everything is numpy, float64, one sample at a time.

    paper 2  "On the convergence and calibration of deep learning with differential privacy"
    paper 4  "Differentially private learning with per-sample adaptive clipping" (DP-PSAC)
    Andrew et al. (2021), Bu et al. (2022) are known here only as those papers and the table of methods quote them.

Letters: g_i a sample's gradient, n_i its norm, C (paper 2: R) the clipping norm, B the expected batch size, z standard
normal. A method returns the sum over samples *before* noise. A norm of 0 always contributes 0.
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

Array = np.ndarray
Phase = TypeVar("Phase")
Weigh = Callable[[Array, float], Array]  # (g [sample, dimension], clip_norm) -> un-noised sum [dimension]


def norm(v: Array) -> float:
    """‖v‖₂."""
    return math.sqrt(sum(float(x) ** 2 for x in v))


def weighted_sum(g: Array, weight: Callable[[float], float]) -> Array:
    """Σ_i w(‖g_i‖) g_i; the empty batch gives 0 (Poisson sampling does draw it)."""
    total = np.zeros(g.shape[1], dtype=np.float64)
    for g_i in np.asarray(g, dtype=np.float64):
        n = norm(g_i)
        if n > 0:  # g_i = 0 contributes 0 under every weight, also where the weight itself is 0/0
            total = total + weight(n) * g_i
    return total


# Weights w(n), n > 0


def flat_weight(n: float, clip_norm: float) -> float:
    """min(1, C/n). Paper 2, Algorithm 1, option 1 ("local"); paper 4, the DP-SGD iteration in the Introduction."""
    return min(1.0, clip_norm / n)


def normalised_weight(n: float, clip_norm: float) -> float:
    """C/n. Paper 4, "Review: Normalized/Automatic DP Training", first display (times C as in the second)."""
    return clip_norm / n


def automatic_weight(n: float, clip_norm: float, gamma: float) -> float:
    """C/(n + γ). Paper 4, "Review: Normalized/Automatic DP Training", last display; its r is called γ here."""
    return clip_norm / (n + gamma)


def psac_weight(n: float, clip_norm: float, r: float) -> float:
    """C/(n + r/(n + r)). Paper 4, Algorithm 1, line 5. (The paper's own w leaves C out.)"""
    return clip_norm / (n + r / (n + r))


def global_weight(n: float, clip_norm: float) -> float:
    """1[n ≤ R]. Paper 2, Algorithm 1, option 2: the boundary is kept."""
    return 1.0 if n <= clip_norm else 0.0


# Sums over samples


def flat(g: Array, clip_norm: float) -> Array:
    """Σ min(1, C/n_i) g_i. Paper 2, Algorithm 1, option 1; flat in the sense of §4.2, equation (4.3)."""
    return weighted_sum(g, lambda n: flat_weight(n, clip_norm))


def normalised(g: Array, clip_norm: float) -> Array:
    """Σ C g_i/n_i, with 0 at g_i = 0. Paper 4, "Review: Normalized/Automatic DP Training"."""
    # The paper leaves g = 0 undefined (0/0); the table of methods defines 0.
    return weighted_sum(g, lambda n: normalised_weight(n, clip_norm))


def automatic(g: Array, clip_norm: float, gamma: float) -> Array:
    """Σ C g_i/(n_i + γ). Paper 4, "Review: Normalized/Automatic DP Training" (Auto-S/NSGD, regularised)."""
    return weighted_sum(g, lambda n: automatic_weight(n, clip_norm, gamma))


def psac(g: Array, clip_norm: float, r: float) -> Array:
    """Σ C g_i/(n_i + r/(n_i + r)). Paper 4, Algorithm 1, lines 5-6."""
    # Line 3 samples with replacement; the table of methods asks for Poisson, so the number of rows of g is random.
    return weighted_sum(g, lambda n: psac_weight(n, clip_norm, r))


def global_(g: Array, clip_norm: float) -> Array:
    """Σ g_i 1[n_i ≤ R]. Paper 2, Algorithm 1, option 2 ("global clipping"); R is clip_norm."""
    return weighted_sum(g, lambda n: global_weight(n, clip_norm))


def layerwise(blocks: Sequence[Array], clip_norms: Sequence[float], weight: Weigh = flat) -> list[Array]:
    """Block r clipped by its own norm to its own R_r. Paper 2, §4.2, "Layerwise Clipping", before equation (4.4).

    The paper's Algorithm 2 (appendix) is not in the text this was written from. Blocks are [sample, block dimension].
    """
    if len(blocks) != len(clip_norms):
        raise ValueError(f"expected one clipping norm per block, got {len(clip_norms)} for {len(blocks)} blocks")
    return [weight(block, clip_norm) for block, clip_norm in zip(blocks, clip_norms, strict=True)]


# Noise of layerwise clipping


def layerwise_noise_scale(clip_norms: Sequence[float], sigma: float) -> float:
    """σ√ΣC_r²: the standard deviation in *every* block. Table of methods, `layerwise`."""
    # Differs from paper 2, §4.2, which adds σR_r in block r: that is σ/√L jointly, see layerwise_joint_multiplier.
    return sigma * math.sqrt(sum(clip_norm**2 for clip_norm in clip_norms))


def layerwise_joint_multiplier(clip_norms: Sequence[float], standard_deviations: Sequence[float]) -> float:
    """1/√Σ(C_r/s_r)²: the noise multiplier of releasing block r with noise s_r. Table of methods, `layerwise`."""
    pairs = zip(clip_norms, standard_deviations, strict=True)
    return 1 / math.sqrt(sum((clip_norm / s) ** 2 for clip_norm, s in pairs))


# Adaptive clipping norm (Andrew et al. 2021, as the table of methods states it; no paper here gives its equations)


def adaptive_count(g: Array, clip_norm: float) -> float:
    """Σ(1[n_i ≤ C] − ½), before noise; one sample moves it by exactly ½. Table of methods, `adaptive`."""
    count = 0.0
    for g_i in np.asarray(g, dtype=np.float64):
        count += (1.0 if norm(g_i) <= clip_norm else 0.0) - 0.5
    return count


def adaptive_update(clip_norm: float, noisy_count: float, expected_batch: float, quantile: float, rate: float) -> float:
    """C exp(−η_C (b/B + ½ − γ)): b the noisy count, B the *expected* batch. Table of methods, `adaptive`."""
    return clip_norm * math.exp(-rate * (noisy_count / expected_batch + 0.5 - quantile))


def adaptive_gradient_noise(sigma: float, count_noise: float) -> float:
    """s_g from 1/σ² = 1/s_g² + 1/(2 s_b)². Table of methods, `adaptive`.

    s_g multiplies C_t, as σ does; s_b = count_noise is the standard deviation of the count's noise itself.
    """
    if 2 * count_noise <= sigma:
        raise ValueError(f"expected count_noise > sigma/2 = {sigma / 2}, got {count_noise}: no budget for gradients")
    return 1 / math.sqrt(1 / sigma**2 - 1 / (2 * count_noise) ** 2)


# Schedule and step


def schedule(t: int, phases: Sequence[tuple[int, Phase]]) -> Phase:
    """What is active at step t (from 0): the last phase that has begun. Paper 2, §6.3, "mix-up training".

    phases: (first step, anything), first steps increasing from 0, fixed before training. Noise follows what is active.
    """
    if not phases or phases[0][0] != 0 or t < 0:
        raise ValueError(f"expected phases that begin at step 0 and t ≥ 0, got {phases} at {t}")
    active = phases[0][1]
    for first_step, phase in phases:
        if first_step <= t:
            active = phase
    return active


def dp_sgd_step(
    theta: Array,
    g: Array,
    weigh: Weigh,
    clip_norm: float,
    sigma: float,
    z: Array,
    expected_batch: float,
    learning_rate: float,
) -> Array:
    """θ − η (Σ w(n_i) g_i + σ C z)/B. Paper 4, Algorithm 1, lines 5-7; paper 2, Algorithm 1, last line.

    clip_norm is both what weigh is called with and the bound that scales the noise; for layerwise clipping pass
    √ΣC_r² and a weigh that ignores it.
    """
    # Paper 2 and paper 4's Introduction divide by the realised |I_t|, |B_t|; the table of methods divides by B.
    # Paper 4's Algorithm 1 already divides by B.
    released = weigh(g, clip_norm) + sigma * clip_norm * np.asarray(z, dtype=np.float64)
    return np.asarray(theta, dtype=np.float64) - learning_rate * released / expected_batch


# Closed-form claims, for tests


def bound(method: str, clip_norm: float | Sequence[float]) -> float:
    """The largest norm of one sample's term. Table of methods, column "bound"; paper 4, "Privacy Guarantee"."""
    if method == "layerwise":
        assert not isinstance(clip_norm, float | int)
        return math.sqrt(sum(c**2 for c in clip_norm))
    assert method in {"flat", "normalised", "automatic", "psac", "global_", "adaptive"}, method
    assert isinstance(clip_norm, float | int)
    return float(clip_norm)


def psac_largest_weight(clip_norm: float, r: float) -> float:
    """C/(2√r − r), attained at n = √r − r. Paper 4, denominators of Theorem 2 and Lemma 2, for 0 < r ≤ 1."""
    # For r > 1 that n is negative: the weight then only decreases, from its limit C at n = 0. Neither the paper
    # (which takes r in (0, 1]) nor the table of methods says so.
    return clip_norm / (2 * math.sqrt(r) - r) if r <= 1 else clip_norm


def psac_norm_of_largest_weight(r: float) -> float:
    """n = √r − r, where psac_largest_weight is attained; 0 for r > 1."""
    return max(0.0, math.sqrt(r) - r)


def psac_weight_at_zero(clip_norm: float) -> float:
    """The limit of the weight as n → 0: C·1, whatever r > 0. Paper 4, "Non-Monotonous Adaptive Weight Function"."""
    return clip_norm


def automatic_largest_weight(clip_norm: float, gamma: float) -> float:
    """C/γ, approached as n → 0. Paper 4, Introduction: "up to 1/r times"."""
    return clip_norm / gamma
