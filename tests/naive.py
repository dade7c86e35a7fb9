"""The clipping methods, transcribed slowly and literally: the reference that the library is compared with.

Written from the texts of the papers and the table of methods, and not from the library's code: agreement between the
two is evidence only because neither was copied from the other. Everything is numpy, float64, one sample at a time.

    paper 0  "A theory to instruct differentially-private learning via clipping bias reduction"
    paper 1  "Differentially private SGD without clipping bias: an error-feedback approach" (DiceSGD)
    paper 2  "On the convergence and calibration of deep learning with differential privacy"
    paper 3  "Bias-aware minimisation: understanding and mitigating estimator bias in private SGD" (BAM)
    paper 4  "Differentially private learning with per-sample adaptive clipping" (DP-PSAC)
    Andrew et al. (2021), Bu et al. (2022) are known here only as those papers and the table of methods quote them.
    De et al. (2022), Tang et al. (2023, DP-AdamBC), Zhang et al. (2024, DOPPLER) and Zhang et al. (2024, DiSK) were not
    at hand either: each function below states the equations that it takes to be theirs and what it chose.

Letters: g_i a sample's gradient, n_i its norm, C (paper 2: R) the clipping norm, B the expected batch size, z standard
normal, θ (paper 0: w, paper 1: x) the parameters, G̃_t what step t released. A method returns the sum over samples
*before* noise. A norm of 0 always contributes 0.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

Array = np.ndarray
Phase = TypeVar("Phase")
Weigh = Callable[[Array, float], Array]  # (g [sample, dimension], clip_norm) -> un-noised sum [dimension]
Sample = Any  # whatever the gradient takes: a number, (features, label), several views of one
Grad = Callable[[Array, Sample], Array]  # (θ, x) -> ∇f(θ; x)
Hvp = Callable[[Array, Sample, Array], Array]  # (θ, x, v) -> ∇²f(θ; x) v
Network = Callable[[Array, Array], Array]  # (θ, rows [row, feature]) -> outputs [row, class]
Loss = Callable[[Array, Any], float]  # (one row's output, label) -> loss


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


# Where the gradient is taken: v_i of one sample, to which the weights above apply in place of g_i


def private_sum(
    probe: Callable[[Sample], Array], batch: Sequence[Sample], dimension: int, weigh: Weigh, clip_norm: float
) -> Array:
    """Σ_i w(‖v_i‖) v_i with v_i = probe(x_i): what every method of this part sums; the empty batch gives 0."""
    v = np.zeros((len(batch), dimension), dtype=np.float64)
    for i, x_i in enumerate(batch):
        v[i] = probe(x_i)
    return weigh(v, clip_norm)


def inner_momentum(iterates: Sequence[Array], x: Sample, grad: Grad, gamma0: float, horizon: int) -> Array:
    """Σ_l γ0^l ∇f(θ_{t−l}; x) / Σ_l γ0^l over l = 0 … min(K0, t). Paper 0, Algorithm 2, equation (13).

    iterates: θ_0 … θ_t, the current one last; horizon is K0, so that K0 + 1 gradients enter (the text says K0).
    """
    # Equation (13) has no divisor: it cancels under normalisation. For clipping the table of methods divides, so that
    # the norm keeps its scale. In the first steps both sums stop at θ_0. 0^0 is 1 here: γ0 = 0 is the plain gradient.
    t = len(iterates) - 1
    total, weights = np.zeros_like(np.asarray(iterates[t], dtype=np.float64)), 0.0
    for back in range(min(horizon, t) + 1):
        total = total + gamma0**back * grad(iterates[t - back], x)
        weights += gamma0**back
    return total / weights


def over_views(f: Callable[..., Array]) -> Callable[..., Array]:
    """f averaged over the K views that stand in the sample's place: of a `Grad` or of an `Hvp`.

    Inner momentum and BAM with views are those methods of over_views(grad): the same views in every pass.
    """

    def mean(theta: Array, views: Sequence[Sample], *more: Array) -> Array:
        total = np.zeros_like(np.asarray(theta, dtype=np.float64))
        for view in views:
            total = total + f(theta, view, *more)
        return total / len(views)

    return mean


def self_augmentation(theta: Array, views: Sequence[Sample], grad: Grad) -> Array:
    """(1/K) Σ_k ∇f(θ; T_k x). Paper 0, §6 (De et al.): the average over one sample's views is what is clipped."""
    return over_views(grad)(theta, views)


def bam(theta: Array, x: Sample, grad: Grad, radius: float, alpha: float = 1.0) -> Array:
    """(1−α) g + α h, h = ∇f(θ + λ g/‖g‖; x); g = 0: h = g. Paper 3, equation (14) and Algorithm 2, lines 4-5."""
    # Line 4 overwrites θ and line 5 differentiates L_BAO; the table of methods: θ stays, L is differentiated.
    g = grad(theta, x)
    n = norm(g)
    h = grad(theta + radius * g / n, x) if n > 0 else g
    return (1 - alpha) * g + alpha * h


def bam_exact(theta: Array, x: Sample, grad: Grad, hvp: Hvp, radius: float, alpha: float = 1.0) -> Array:
    """(1−α) g + α h, h = g + λ H g/‖g‖ = ∇(f + λ‖∇f‖); g = 0: h = g. Paper 3, equations (10) and (13)."""
    g = grad(theta, x)
    n = norm(g)
    h = g + radius * hvp(theta, x, g / n) if n > 0 else g
    return (1 - alpha) * g + alpha * h


def dp_sat_point(theta: Array, released: Array | None, radius: float) -> Array:
    """θ + ρ G̃_{t−1}/‖G̃_{t−1}‖, where *every* sample's gradient is taken; θ itself at the first step. Paper 3, §8."""
    # The next θ is computed from θ, not from this point. Whether G̃ is divided by B does not matter.
    n = 0.0 if released is None else norm(released)
    return np.array(theta, dtype=np.float64) if released is None or n == 0 else theta + radius * released / n


def p_average(g: Array, tags: Sequence[int], p: int, weigh: Weigh, clip_norm: float) -> Array:
    """Σ_groups w(‖u‖) u with u = (1/p) Σ_{i in the group} g_i. Paper 0, §3.3. Divide by B/p, the number of groups.

    tags: each sample's group, drawn for that sample alone; the noise is σ times p_average_sensitivity.
    """
    # The divisor is p also for a group of another size: the group of a tag has p samples only on average.
    units = []
    for tag in sorted(set(tags)):
        unit = np.zeros(g.shape[1], dtype=np.float64)
        for g_i, tag_i in zip(g, tags, strict=True):
            if tag_i == tag:
                unit = unit + g_i
        units.append(unit / p)
    return weigh(np.array(units, dtype=np.float64).reshape(len(units), g.shape[1]), clip_norm)


def p_average_sensitivity(clip_norm: float, p: int) -> float:
    """2C for p > 1: a new sample may turn its whole unit around. Table of methods, `p-averaged clipping`."""
    return 2 * clip_norm if p > 1 else clip_norm


def momentum_per_sample(
    theta: Array,
    data: Sequence[Sample],
    grad: Grad,
    gamma: float,
    weigh: Weigh,
    clip_norm: float,
    sigma: float,
    zs: Sequence[Array],
    expected_batch: float,
    learning_rate: float,
) -> list[Array]:
    """θ_0 … θ_T of full-batch descent on clipped per-sample momenta. Paper 0, Algorithm 1; one z per step.

    The paper is weigh = normalised, clip_norm = 1 and expected_batch = 1 (its η is not divided).
    """
    iterates = [np.array(theta, dtype=np.float64)]
    m = [grad(iterates[0], x_i) for x_i in data]  # line 2: m_0 = ∇f(w_0)
    for z in zs:
        momenta = np.array(m, dtype=np.float64)
        iterates.append(  # lines 4-5
            dp_sgd_step(iterates[-1], momenta, weigh, clip_norm, sigma, z, expected_batch, learning_rate)
        )
        m = [gamma * grad(iterates[-1], x_i) + (1 - gamma) * m_i for x_i, m_i in zip(data, m, strict=True)]  # line 7
    return iterates


# BatchClipping


def batch_norm(u: Array, scale: Array, shift: Array, eps: float = 1e-5) -> Array:
    """χ ∘ (u_i − μ)/√(σ² + ε) + θ over the rows of u only, σ² with 1/rows. Paper 0, Algorithm 4 (its ε is 0)."""
    rows = len(u)
    mean = sum(u[i] for i in range(rows)) / rows
    variance = sum((u[i] - mean) ** 2 for i in range(rows)) / rows
    return np.array([scale * (u[i] - mean) / np.sqrt(variance + eps) + shift for i in range(rows)])


def batch_norm_network(hidden: int, classes: int, eps: float = 1e-5) -> Network:
    """Linear → batch_norm → tanh → Linear, for tests: θ is W1 [hidden, d], b1, χ, θ_BN, W2 [classes, hidden], b2."""

    def network(theta: Array, rows: Array) -> Array:
        sizes = [hidden * rows.shape[1], hidden, hidden, hidden, classes * hidden, classes]
        w1, b1, scale, shift, w2, b2 = np.split(np.asarray(theta, dtype=np.float64), np.cumsum(sizes)[:-1])
        u = np.array([w1.reshape(hidden, -1) @ row + b1 for row in rows])
        return np.array([w2.reshape(classes, hidden) @ np.tanh(a) + b2 for a in batch_norm(u, scale, shift, eps)])

    return network


def cross_entropy(output: Array, label: int) -> float:
    """−log softmax(output)[label]."""
    top = float(np.max(output))
    return top + math.log(sum(math.exp(float(o) - top) for o in output)) - float(output[label])


def numerical_gradient(f: Callable[[Array], float], theta: Array, h: float = 1e-3) -> Array:
    """∇f by the five-point rule; its error is h⁴ f⁽⁵⁾/30 and rounding of about 1e-13 |f|."""
    theta = np.asarray(theta, dtype=np.float64)
    g = np.zeros_like(theta)
    for j in range(len(theta)):
        e = np.zeros_like(theta)
        e[j] = h
        g[j] = (f(theta - 2 * e) - 8 * f(theta - e) + 8 * f(theta + e) - f(theta + 2 * e)) / (12 * h)
    return g


def batch_clipping_output(theta: Array, x: Array, companions: Array, network: Network) -> Array:
    """NW(θ, {x} ∪ public features)[1]: the output of x, whose unit's other rows are public. Paper 0, equation (15)."""
    return network(theta, np.concatenate([x[None], companions]))[0]


def batch_clipping(theta: Array, x: Array, label: Any, companions: Array, network: Network, loss: Loss) -> Array:
    """∇_θ l(NW(θ, x, x_pub)[1], y). Paper 0, Algorithm 3, line 4: no public label, no other private row.

    companions [p, feature]: the public features drawn for this sample; the base method's bound is the bound.
    """
    return numerical_gradient(lambda at: loss(batch_clipping_output(at, x, companions, network), label), theta)


def batch_clipping_vote(theta: Array, x: Array, draws: Sequence[Array], network: Network) -> int:
    """The class that most draws of public companions predict for x. Paper 0, appendix E, Fig. 9 (10 draws)."""
    # The paper does not say what a tie gives; the smallest class here.
    votes: dict[int, int] = {}
    for companions in draws:
        predicted = int(np.argmax(batch_clipping_output(theta, x, companions, network)))
        votes[predicted] = votes.get(predicted, 0) + 1
    return min(votes, key=lambda c: (-votes[c], c))


# DiceSGD (paper 1), on the scale of sums: clip_norm is C1, error_clip is C2s = B C2, error is E = B e. E starts at 0


def clip(v: Array, clip_norm: float) -> Array:
    """min(1, C/‖v‖) v. Paper 1, equation (2)."""
    return flat(np.asarray(v, dtype=np.float64)[None], clip_norm)


def normalise(v: Array, clip_norm: float) -> Array:
    """C v/‖v‖, 0 at 0: what "clip" means in paper 1, §C.2 and Algorithm 4, which sets C1 = C2 = 1."""
    return normalised(np.asarray(v, dtype=np.float64)[None], clip_norm)


def dice_sum(
    error: Array, g: Array, clip_norm: float, error_clip: float, shorten: Callable[[Array, float], Array] = clip
) -> Array:
    """V_t = Σ clip(g_i, C1) + clip(E_t, C2s), before noise. Paper 1, Algorithm 2, line 5, times B.

    Algorithm 4 ("automatic") is shorten = normalise, clip_norm = 1, error_clip = B.
    """
    total = shorten(error, error_clip)
    for g_i in g:
        total = total + shorten(g_i, clip_norm)
    return total


def dice_error(
    error: Array,
    g: Array,
    clip_norm: float,
    error_clip: float,
    memory: str = "full",
    shorten: Callable[[Array, float], Array] = clip,
) -> Array:
    """E_{t+1} = [what stays of E_t] + Σ (g_i − clip(g_i, C1)). Paper 1, Algorithm 2, line 7; the sound bounds S1-S4.

    full     E_t − clip(E_t, C2s): the paper (S1), and inside a block (S3)
    none     0: only the last residual is kept (S2)
    bounded  clip(E_t − clip(E_t, C2s), C2s) (S4)
    """
    residual = np.zeros_like(np.asarray(error, dtype=np.float64))
    for g_i in g:
        residual = residual + (g_i - shorten(g_i, clip_norm))
    left = error - shorten(error, error_clip)
    if memory == "full":
        return left + residual
    if memory == "none":
        return residual
    assert memory == "bounded", memory
    return shorten(left, error_clip) + residual


def dice_block_error(error: Array, step: int, blocks: int) -> Array:
    """The E that step t (from 0) of memory in blocks begins with: 0 at every multiple of b. Sound bound S3."""
    return np.zeros_like(error) if step % blocks == 0 else np.array(error)


def dice_block_draws(step: int, group: int, blocks: int, sampling_rate: float) -> float:
    """The rate at which step t (from 0) draws a record of this group: b q if t mod b is its group, else 0. S3."""
    rate = blocks * sampling_rate
    if rate > 1:
        raise ValueError(f"expected blocks × sampling_rate ≤ 1, got {rate}")
    return rate if step % blocks == group else 0.0


def dice_step(
    theta: Array,
    error: Array,
    g: Array,
    clip_norm: float,
    error_clip: float,
    noise: Array,
    expected_batch: float,
    learning_rate: float,
    memory: str = "full",
    shorten: Callable[[Array, float], Array] = clip,
) -> tuple[Array, Array]:
    """(θ − η (V_t + noise)/B, E_{t+1}). Paper 1, Algorithms 2 and 4; noise is that of the sum, already scaled."""
    released = dice_sum(error, g, clip_norm, error_clip, shorten) + noise
    following = dice_error(error, g, clip_norm, error_clip, memory, shorten)  # the noise does not enter E
    return np.asarray(theta, dtype=np.float64) - learning_rate * released / expected_batch, following


def dice_adam_step(
    theta: Array,
    error: Array,
    moments: tuple[Array, Array],
    t: int,
    g: Array,
    clip_norm: float,
    error_clip: float,
    noise: Array,
    expected_batch: float,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    memory: str = "full",
) -> tuple[Array, Array, tuple[Array, Array]]:
    """(θ, E, moments) after an Adam step on (V_t + noise)/B; t from 1. Paper 1, Algorithm 3."""
    # Line 8 corrects by 1 − β^t with t from 0, which divides by 0 at the first step; t counts from 1 here.
    # The text at hand does not show whether ε is added to the root or under it; added to the root here, as in Adam.
    mean = (dice_sum(error, g, clip_norm, error_clip) + noise) / expected_batch
    theta, moments = adam_step(theta, moments, t, mean, learning_rate, betas, eps)
    return theta, dice_error(error, g, clip_norm, error_clip, memory), moments


# Post-processing: everything below sees released values only. `released` is G̃_1, G̃_2, … [step][dimension]


def outer_momentum(released: Sequence[Array], beta: float) -> list[Array]:
    """M_t = β M_{t−1} + G̃_t, M_0 = 0: heavy ball (no 1 − β, no Nesterov)."""
    momenta: list[Array] = []
    for g in released:
        momenta.append(np.array(g, dtype=np.float64) if not momenta else beta * momenta[-1] + g)
    return momenta


def outer_momentum_as_printed(released: Sequence[Array], gamma1: float) -> list[Array]:
    """M_t = (1 − γ1) M_{t−1} + G̃_t. Paper 0, Algorithm 2, equation (14)."""
    # §7's "γ1 = 0.9" is heavy ball with β = 0.9 and not 1 − 0.9: see the table of methods.
    return outer_momentum(released, 1 - gamma1)


def recursive_filter(inputs: Sequence[Array], a: Sequence[float], b: Sequence[float]) -> list[Array]:
    """y_t = −Σ_{k=1..n_a} a_k y_{t−k} + Σ_{k=0..n_b} b_k g_{t−k}; everything before the first step is 0.

    a is a_1, a_2, …; b is b_0, b_1, …
    """
    outputs: list[Array] = []
    for t in range(len(inputs)):
        y = np.zeros_like(np.asarray(inputs[t], dtype=np.float64))
        for k, a_k in enumerate(a, start=1):
            if t - k >= 0:
                y = y - a_k * outputs[t - k]
        for k, b_k in enumerate(b):
            if t - k >= 0:
                y = y + b_k * inputs[t - k]
        outputs.append(y)
    return outputs


def doppler(released: Sequence[Array], a: Sequence[float], b: Sequence[float]) -> list[Array]:
    """y_t/c_t: the low-pass filter with its correction for beginning at 0. Zhang et al. (2024), DOPPLER.

    As known here: a linear recursive filter of the released gradients with −Σ a_k + Σ b_k = 1 (gain 1 at frequency 0),
    divided by the scalar c_t that the same recursion gives for an input of ones: E[y_t]/c_t is the mean of a constant
    gradient from the first step on. DP-SGD then steps along y_t/c_t.
    """
    # Chosen: the ones begin with the first step, as the gradients do, so b_k enters c_t only from the step k later.
    # Summing all b_k into c_t at once would mis-scale the first steps; for a stable filter the two agree in the limit.
    if b[0] == 0:
        raise ValueError("expected b_0 ≠ 0, got 0: the first step has nothing to divide by")
    corrections = recursive_filter([np.ones(1)] * len(released), a, b)
    return [y / float(c[0]) for y, c in zip(recursive_filter(released, a, b), corrections, strict=True)]


def disk_gradient(theta: Array, moved: Array, x: Sample, grad: Grad, kappa: float, gamma: float) -> Array:
    """r ∇f(θ + γ d; x) + (1 − r) ∇f(θ; x), r = (1 − κ)/(κ γ), d = θ_t − θ_{t−1}: what DiSK clips per sample.

    As known here (Zhang et al. 2024, DiSK): predict g_t ≈ g_{t−1} + H d with H d ≈ (∇f(θ + γ d) − ∇f(θ))/γ and correct
    with gain κ: (1 − κ)(g_{t−1} + H d) + κ ∇f(θ) = (1 − κ) g_{t−1} + κ [the expression above]. At the first step d = 0
    and the gradient is plain. θ and d are released, so the bound is the base's and the noise σC, whatever r is.
    """
    r = (1 - kappa) / (kappa * gamma)
    return r * grad(theta + gamma * moved, x) + (1 - r) * grad(theta, x)


def disk_filter(released: Sequence[Array], kappa: float) -> list[Array]:
    """m_t = (1 − κ) m_{t−1} + κ G̃_t, the first m being G̃_1 itself; the optimizer takes m_t for its gradient. DiSK."""
    # Chosen: the recursion begins at the first release, as public programs of the method do. Beginning at 0 would
    # shorten the first steps by κ, 1 − (1 − κ)², … Chosen: κ weighs the release, as the equation says; one public
    # program weighs it by 1 − κ, and then the filter no longer follows the gradient of a quadratic.
    filtered = [np.array(released[0], dtype=np.float64)]
    for g in released[1:]:
        filtered.append((1 - kappa) * filtered[-1] + kappa * g)
    return filtered


def adam_moments(
    moments: tuple[Array, Array], t: int, g: Array, betas: tuple[float, float]
) -> tuple[tuple[Array, Array], Array, Array]:
    """((m, v), m/(1 − β1^t), v/(1 − β2^t)) with m, v the averages of g and g²; t counts from 1, m and v begin at 0."""
    m = betas[0] * moments[0] + (1 - betas[0]) * g
    v = betas[1] * moments[1] + (1 - betas[1]) * g**2
    return (m, v), m / (1 - betas[0] ** t), v / (1 - betas[1] ** t)


def adam_step(
    theta: Array,
    moments: tuple[Array, Array],
    t: int,
    g: Array,
    learning_rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> tuple[Array, tuple[Array, Array]]:
    """θ − η m̂/(√v̂ + ε). g is G̃/B; t counts from 1."""
    moments, m_hat, v_hat = adam_moments(moments, t, g, betas)
    return np.asarray(theta, dtype=np.float64) - learning_rate * m_hat / (np.sqrt(v_hat) + eps), moments


def adam_bc_step(
    theta: Array,
    moments: tuple[Array, Array],
    t: int,
    g: Array,
    learning_rate: float,
    noise_deviation: float,
    floor: float,
    betas: tuple[float, float] = (0.9, 0.999),
) -> tuple[Array, tuple[Array, Array]]:
    """θ − η m̂/√max(v̂ − (σC/B)², floor), coordinate by coordinate. Tang et al. (2023), DP-AdamBC; no ε beside it.

    noise_deviation is σC/B, the noise's standard deviation in each coordinate of g = G̃/B; floor (the paper's γ') is
    under the root. v keeps the noise: only what divides is corrected.
    """
    moments, m_hat, v_hat = adam_moments(moments, t, g, betas)
    denominator = np.sqrt(np.maximum(v_hat - noise_deviation**2, floor))
    return np.asarray(theta, dtype=np.float64) - learning_rate * m_hat / denominator, moments


# Examples whose answers are known in closed form; all are one-dimensional and without noise

TWO_SAMPLES = np.array([[1.0], [-3.0]])  # F(w) = (w − 1)² + (w + 3)². Paper 0, end of §3.1
TWO_SAMPLES_OPTIMUM = -1.0


def two_samples_gradient(w: Array, sample: Array) -> Array:
    """2 (w − s); at w = 0 these are −2 and 6, and normalised they cancel."""
    return 2 * (w - sample)


def two_samples_stuck(clip_norm: float) -> tuple[float, float]:
    """The interval [−3 + C/2, 1 − C/2] in which Σ min(1, C/n) g is 0, for C < 4; [−1, −1] for larger C.

    Normalised gradients cancel in the open interval (−3, 1), whatever C is.
    """
    return (-3 + clip_norm / 2, 1 - clip_norm / 2) if clip_norm < 4 else (TWO_SAMPLES_OPTIMUM, TWO_SAMPLES_OPTIMUM)


def clipping_bias_slope(clip_norm: float) -> int:
    """C' = ⌈C⌉ + 1, the largest slope and one less than the number of samples. Paper 1, appendix B.1."""
    # The bracket is illegible in the text at hand: with ⌊C⌋ + 1 and C < 1 the two samples are symmetric, without bias.
    return math.ceil(clip_norm) + 1


def clipping_bias_samples(clip_norm: float) -> Array:
    """C' samples at −1 and one at C'. Paper 1, appendix B.1."""
    slope = clipping_bias_slope(clip_norm)
    return np.array([[-1.0]] * slope + [[float(slope)]])


def clipping_bias_gradient(slope: float) -> Grad:
    """clip(x − ξ, C'), the derivative of paper 1's Huber-like loss: ½ (x − ξ)² inside, slope ±C' outside."""
    return lambda x, sample: clip(np.asarray(x, dtype=np.float64) - sample, slope)


CLIPPING_BIAS_OPTIMUM = 0.0  # Σ ξ = 0, and no sample is farther than C' from 0


def clipping_bias_fixed_point(clip_norm: float) -> float:
    """−(C' − C)/C': where clipped descent ends, at a distance ≥ ½ for C ≤ 1. Paper 1, appendix B.1."""
    # C' clip(x + 1, C) = C, the last sample being clipped: x + 1 = C/C' < C. It is the only zero.
    slope = clipping_bias_slope(clip_norm)
    return -(slope - clip_norm) / slope


def clipping_bias_error(clip_norm: float) -> float:
    """E = C − C' min(1, C): the error at which feedback rests, with x = 0 and C2s ≥ |E|, on the scale of sums."""
    # Paper 1, §3.1: E = −Σ clip(∇f_i(x*), C1), where C' samples have gradient 1 and one has −C' (clipped to −C).
    return clip_norm - clipping_bias_slope(clip_norm) * min(1.0, clip_norm)
