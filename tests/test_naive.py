"""The transcriptions keep the promises that the papers and the table of methods state for them."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

import naive

METHODS: dict[str, naive.Weigh] = {
    "flat": naive.flat,
    "normalised": naive.normalised,
    "automatic": lambda g, c: naive.automatic(g, c, 0.01),
    "psac": lambda g, c: naive.psac(g, c, 0.1),
    "global_": naive.global_,
}
every_method = pytest.mark.parametrize("name", METHODS)


def gradients(seed: int, samples: int = 40, dimension: int = 7) -> np.ndarray:
    """Random directions whose norms span twelve orders of magnitude, and one zero."""
    rng = np.random.default_rng(seed)
    g = rng.standard_normal((samples, dimension)) * 10 ** rng.uniform(-8, 4, (samples, 1))
    g[0] = 0
    return g


@every_method
@pytest.mark.parametrize("clip_norm", [0.1, 1.0, 75.0])
def test_one_sample_contributes_at_most_the_bound(name: str, clip_norm: float) -> None:
    for g_i in gradients(0, 300):
        assert np.linalg.norm(METHODS[name](g_i[None], clip_norm)) <= naive.bound(name, clip_norm) * (1 + 1e-12)


@every_method
def test_removing_one_sample_moves_the_sum_by_at_most_the_bound(name: str) -> None:
    g = gradients(1) / 1e3
    whole = METHODS[name](g, 1.0)
    for i in range(len(g)):
        moved = whole - METHODS[name](np.delete(g, i, axis=0), 1.0)
        assert np.linalg.norm(moved) <= naive.bound(name, 1.0) * (1 + 1e-9)


@every_method
def test_zero_gradients_and_empty_batches_give_zero(name: str) -> None:
    for g in (np.zeros((3, 5)), np.zeros((0, 5))):
        np.testing.assert_array_equal(METHODS[name](g, 1.0), np.zeros(5))


@every_method
def test_terms_are_positive_multiples_that_keep_the_direction(name: str) -> None:
    g_i = np.array([0.3, -0.2, 0.05])
    term = METHODS[name](g_i[None], 1.0)
    assert np.dot(term, g_i) == pytest.approx(np.linalg.norm(term) * np.linalg.norm(g_i))


def test_known_values_by_hand() -> None:
    g = np.array([[3.0, 4.0], [0.0, 0.5]])  # norms 5 and 1/2
    np.testing.assert_allclose(naive.flat(g, 1.0), [0.6, 0.8 + 0.5])
    np.testing.assert_allclose(naive.normalised(g, 2.0), [1.2, 1.6 + 2.0])
    np.testing.assert_allclose(naive.automatic(g, 1.0, 0.5), [3 / 5.5, 4 / 5.5 + 0.5])
    np.testing.assert_allclose(naive.psac(g, 1.0, 0.5), [3 / (5 + 1 / 11), 4 / (5 + 1 / 11) + 0.5 / (0.5 + 0.5)])
    np.testing.assert_allclose(naive.global_(g, 1.0), [0.0, 0.5])


def test_global_keeps_the_boundary() -> None:
    g = np.array([[3.0, 4.0]])  # norm exactly 5
    np.testing.assert_array_equal(naive.global_(g, 5.0), [3.0, 4.0])
    np.testing.assert_array_equal(naive.global_(g, np.nextafter(5.0, 0.0)), [0.0, 0.0])


def test_flat_and_global_agree_when_nothing_is_clipped() -> None:
    g = gradients(2)
    largest = max(naive.norm(g_i) for g_i in g)
    np.testing.assert_allclose(naive.flat(g, largest), g.sum(axis=0))
    np.testing.assert_allclose(naive.global_(g, largest), g.sum(axis=0))


def test_no_regulariser_means_normalised() -> None:
    g = gradients(3)
    np.testing.assert_allclose(naive.automatic(g, 1.5, 0.0), naive.normalised(g, 1.5))
    np.testing.assert_allclose(naive.psac(g, 1.5, 0.0), naive.normalised(g, 1.5))


# PSAC


@pytest.mark.parametrize("r", [1e-4, 0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("clip_norm", [0.1, 1.0])
def test_psac_weight_is_largest_where_the_paper_says(r: float, clip_norm: float) -> None:
    norms = np.concatenate([np.linspace(1e-9, 2, 200_001), np.geomspace(1e-12, 1e3, 10_001)])
    weights = clip_norm / (norms + r / (norms + r))
    largest = naive.psac_largest_weight(clip_norm, r)
    assert weights.max() <= largest * (1 + 1e-12)
    assert weights.max() == pytest.approx(largest, rel=1e-4)
    assert norms[weights.argmax()] == pytest.approx(naive.psac_norm_of_largest_weight(r), abs=1e-4)
    if r < 1:
        at = naive.psac_norm_of_largest_weight(r)
        assert naive.psac_weight(at, clip_norm, r) == pytest.approx(largest, rel=1e-12)


def test_psac_weight_decreases_from_its_limit_when_r_exceeds_one() -> None:
    norms = np.geomspace(1e-9, 1e3, 10_001)
    weights = [naive.psac_weight(n, 1.0, 4.0) for n in norms]
    assert np.all(np.diff(weights) < 0)
    assert weights[0] == pytest.approx(naive.psac_largest_weight(1.0, 4.0))


@pytest.mark.parametrize("r", [0.01, 0.1, 1.0, 4.0])
def test_psac_weight_tends_to_the_clip_norm_at_zero(r: float) -> None:
    for n in (1e-6, 1e-9, 1e-12):
        assert naive.psac_weight(n, 0.3, r) == pytest.approx(naive.psac_weight_at_zero(0.3), rel=(1 + 1 / r) * n)


def test_no_rescaled_r_undoes_rescaled_gradients() -> None:
    norms = np.geomspace(1e-3, 1e1, 50)

    def lengths(weight: Callable[[float, float, float], float], scale: float, r: float) -> np.ndarray:
        return np.array([scale * n * weight(scale * n, 1.0, r) for n in norms])

    np.testing.assert_allclose(lengths(naive.automatic_weight, 10, 1.0), lengths(naive.automatic_weight, 1, 0.1))
    for r in np.geomspace(1e-4, 1e3, 200):  # n·w = x/(x + 1), x = n²/r + n: the second n carries a unit, whatever r is
        assert np.abs(lengths(naive.psac_weight, 10, r) - lengths(naive.psac_weight, 1, 0.1)).max() > 0.01


@pytest.mark.parametrize("weight", [naive.automatic_weight, naive.psac_weight])
def test_large_gradients_are_normalised(weight: Callable[[float, float, float], float]) -> None:
    assert weight(1e6, 1.0, 0.1) == pytest.approx(1e-6, rel=1e-6)


def test_psac_weighs_small_gradients_less_than_automatic() -> None:
    for n in np.geomspace(1e-6, 0.05, 20):
        assert naive.psac_weight(n, 1.0, 0.1) < naive.automatic_weight(n, 1.0, 0.1)
        assert naive.automatic_weight(n, 1.0, 0.1) <= naive.automatic_largest_weight(1.0, 0.1)


# Layerwise


@every_method
def test_layerwise_contribution_is_within_the_joint_bound(name: str) -> None:
    clip_norms = [0.5, 1.0, 2.0]
    blocks = [gradients(seed, 100, dimension) for seed, dimension in enumerate((3, 5, 2))]
    for block, clip_norm in zip(blocks, clip_norms, strict=True):
        block[1] = 0
        block[1, 0] = clip_norm  # one sample on the boundary in every block
    worst = 0.0
    for i in range(100):
        terms = naive.layerwise([block[i : i + 1] for block in blocks], clip_norms, METHODS[name])
        worst = max(worst, float(np.linalg.norm(np.concatenate(terms))))
    assert worst <= naive.bound("layerwise", clip_norms) * (1 + 1e-12)
    assert worst > max(clip_norms)  # a single block's norm is not the sensitivity


def test_one_block_is_the_base_method() -> None:
    g = gradients(4)
    np.testing.assert_array_equal(naive.layerwise([g], [1.0])[0], naive.flat(g, 1.0))
    assert naive.layerwise_noise_scale([1.5], 2.0) == pytest.approx(3.0)


def test_equal_noise_in_every_block_has_the_stated_multiplier() -> None:
    clip_norms, sigma = [0.5, 1.0, 2.0, 0.1], 1.3
    scale = naive.layerwise_noise_scale(clip_norms, sigma)
    assert scale == pytest.approx(sigma * naive.bound("layerwise", clip_norms))
    assert naive.layerwise_joint_multiplier(clip_norms, [scale] * 4) == pytest.approx(sigma)


def test_the_papers_noise_per_block_is_short_by_the_root_of_the_number_of_blocks() -> None:
    clip_norms, sigma = [0.5, 1.0, 2.0, 0.1], 1.3
    per_block = [sigma * clip_norm for clip_norm in clip_norms]
    assert naive.layerwise_joint_multiplier(clip_norms, per_block) == pytest.approx(sigma / math.sqrt(4))
    repaired = [math.sqrt(4) * s for s in per_block]
    assert naive.layerwise_joint_multiplier(clip_norms, repaired) == pytest.approx(sigma)


# Adaptive


def test_one_sample_moves_the_count_by_one_half() -> None:
    g = gradients(5)
    whole = naive.adaptive_count(g, 1.0)
    for i in range(len(g)):
        assert abs(whole - naive.adaptive_count(np.delete(g, i, axis=0), 1.0)) == 0.5


def test_count_by_hand() -> None:
    g = np.array([[3.0, 4.0], [0.0, 1.0], [0.0, 0.0]])
    assert naive.adaptive_count(g, 1.0) == 0.5
    assert naive.adaptive_count(g, 5.0) == 1.5
    assert naive.adaptive_count(g[:0], 5.0) == 0


@pytest.mark.parametrize(("sigma", "count_noise"), [(1.0, 10.0), (0.4, 0.3), (9.34, 200.0)])
def test_gradient_and_count_together_cost_one_release_at_sigma(sigma: float, count_noise: float) -> None:
    gradient_noise = naive.adaptive_gradient_noise(sigma, count_noise)
    assert gradient_noise > sigma
    # sensitivities C and ½ under noise s_g C and s_b: the identity of two blocks released jointly
    joint = naive.layerwise_joint_multiplier([2.5, 0.5], [2.5 * gradient_noise, count_noise])
    assert joint == pytest.approx(sigma, rel=1e-12)


def test_a_count_that_takes_the_whole_budget_is_refused() -> None:
    with pytest.raises(ValueError, match="count_noise"):
        naive.adaptive_gradient_noise(1.0, 0.5)


def test_the_clip_norm_rests_at_the_quantile_and_moves_towards_it() -> None:
    norms = np.arange(1, 101, dtype=np.float64)  # one-dimensional gradients; 70 of 100 are ≤ 70
    g = norms[:, None]

    def updated(clip_norm: float) -> float:
        return naive.adaptive_update(clip_norm, naive.adaptive_count(g, clip_norm), 100, 0.7, 0.2)

    assert updated(70.5) == pytest.approx(70.5)
    assert updated(20.0) > 20.0
    assert updated(90.0) < 90.0
    clip_norm = 0.1
    for _ in range(400):
        clip_norm = updated(clip_norm)
    assert 69 <= clip_norm <= 72


# Schedule and step


def test_schedule_switches_at_its_steps() -> None:
    phases = [(0, "flat"), (95, "global_")]
    active = [naive.schedule(t, phases) for t in range(100)]
    assert active == ["flat"] * 95 + ["global_"] * 5
    with pytest.raises(ValueError, match="step 0"):
        naive.schedule(0, [(1, "flat")])


def test_step_divides_by_the_expected_batch_and_scales_noise_by_the_bound() -> None:
    theta, z = np.array([1.0, 2.0]), np.array([0.5, -1.0])
    g = np.array([[3.0, 4.0]])
    moved = naive.dp_sgd_step(theta, g, naive.flat, 1.0, 2.0, z, 10, 0.5)
    np.testing.assert_allclose(moved, theta - 0.5 * (np.array([0.6, 0.8]) + 2.0 * z) / 10)
    # twice the realised batch, the same divisor
    doubled = naive.dp_sgd_step(theta, np.repeat(g, 2, axis=0), naive.flat, 1.0, 2.0, z, 10, 0.5)
    np.testing.assert_allclose(doubled - moved, -0.5 * np.array([0.6, 0.8]) / 10)
    # an empty batch still takes its noise
    empty = naive.dp_sgd_step(theta, g[:0], naive.flat, 1.0, 2.0, z, 10, 0.5)
    np.testing.assert_allclose(empty, theta - 0.5 * 2.0 * z / 10)


def test_clip_norm_and_learning_rate_are_coupled_under_normalisation() -> None:
    g, theta, z = gradients(6), np.zeros(7), np.random.default_rng(6).standard_normal(7)
    for weigh in (METHODS["normalised"], METHODS["automatic"], METHODS["psac"]):
        one = naive.dp_sgd_step(theta, g, weigh, 4.0, 1.1, z, 40, 0.5)
        other = naive.dp_sgd_step(theta, g, weigh, 1.0, 1.1, z, 40, 2.0)
        np.testing.assert_allclose(one, other)


def test_layerwise_step_uses_the_joint_bound() -> None:
    g, theta, z = gradients(7), np.zeros(7), np.random.default_rng(7).standard_normal(7)
    clip_norms = [0.5, 2.0]

    def weigh(whole: np.ndarray, _: float) -> np.ndarray:
        return np.concatenate(naive.layerwise([whole[:, :3], whole[:, 3:]], clip_norms))

    moved = naive.dp_sgd_step(theta, g, weigh, naive.bound("layerwise", clip_norms), 1.1, z, 40, 1.0)
    noise = naive.layerwise_noise_scale(clip_norms, 1.1) * z
    np.testing.assert_allclose(moved, -(weigh(g, 0.0) + noise) / 40)


# Where the gradient is taken

CURVATURE = np.array([[3.0, 1.0, 0.0], [1.0, 2.0, 0.5], [0.0, 0.5, 1.0]])
POINTS = np.random.default_rng(20).standard_normal((6, 3))
START = np.array([0.7, -0.4, 1.1])


def bowl(theta: np.ndarray, x: np.ndarray) -> np.ndarray:
    """∇ of ½ (θ − x)ᵀ A (θ − x)."""
    return CURVATURE @ (theta - x)


def bowl_hvp(theta: np.ndarray, x: np.ndarray, v: np.ndarray) -> np.ndarray:
    return CURVATURE @ v


def ripple_loss(theta: np.ndarray, x: np.ndarray) -> float:
    return float(np.log(np.cosh(theta @ x)) + 0.1 * np.sum(theta**3))


def ripple(theta: np.ndarray, x: np.ndarray) -> np.ndarray:
    return np.tanh(theta @ x) * x + 0.3 * theta**2


def ripple_hvp(theta: np.ndarray, x: np.ndarray, v: np.ndarray) -> np.ndarray:
    return (x @ v) * x / np.cosh(theta @ x) ** 2 + 0.6 * theta * v


def test_the_five_point_rule_gives_a_known_gradient() -> None:
    for x in POINTS:
        measured = naive.numerical_gradient(lambda at, x=x: ripple_loss(at, x), START)
        np.testing.assert_allclose(measured, ripple(START, x), atol=1e-11)


def test_a_probe_replaces_the_gradient_in_the_sum() -> None:
    v = np.array([bowl(START, x) for x in POINTS])
    summed = naive.private_sum(lambda x: bowl(START, x), list(POINTS), 3, naive.flat, 0.8)
    np.testing.assert_array_equal(summed, naive.flat(v, 0.8))
    np.testing.assert_array_equal(naive.private_sum(lambda x: x, [], 3, naive.flat, 0.8), np.zeros(3))


def test_inner_momentum_by_hand_and_truncated_in_the_first_steps() -> None:
    iterates = [np.array([v]) for v in (1.0, 10.0, 100.0, 1000.0)]
    grad = lambda theta, x: theta * x

    def after(steps: int) -> float:
        return float(naive.inner_momentum(iterates[:steps], 2.0, grad, 0.3, 2)[0])

    assert after(1) == pytest.approx(2 * 1)
    assert after(2) == pytest.approx(2 * (10 + 0.3 * 1) / 1.3)
    assert after(3) == pytest.approx(2 * (100 + 0.3 * 10 + 0.09 * 1) / 1.39)
    assert after(4) == pytest.approx(2 * (1000 + 0.3 * 100 + 0.09 * 10) / 1.39)  # three terms, the first forgotten


def test_inner_momentum_without_decay_or_horizon_is_the_plain_gradient() -> None:
    iterates = list(POINTS)
    for gamma0, horizon in ((0.0, 2), (0.5, 0)):
        np.testing.assert_allclose(
            naive.inner_momentum(iterates, START, bowl, gamma0, horizon), bowl(iterates[-1], START)
        )


def test_inner_momentum_keeps_the_scale_of_a_constant_gradient() -> None:
    for steps in (1, 2, 5):
        v = naive.inner_momentum([START] * steps, POINTS[0], bowl, 0.4, 3)
        np.testing.assert_allclose(v, bowl(START, POINTS[0]))


def test_self_augmentation_is_the_mean_over_views() -> None:
    np.testing.assert_allclose(
        naive.self_augmentation(START, POINTS, bowl), bowl(START, POINTS.mean(axis=0)), rtol=1e-12
    )
    one = naive.self_augmentation(START, POINTS[:1], ripple)
    np.testing.assert_array_equal(one, ripple(START, POINTS[0]))


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_bam_ascends_exactly_on_a_quadratic(alpha: float) -> None:
    for x in POINTS:
        ascent = naive.bam(START, x, bowl, 0.3, alpha)
        np.testing.assert_allclose(ascent, naive.bam_exact(START, x, bowl, bowl_hvp, 0.3, alpha), rtol=1e-12)
        g = bowl(START, x)
        np.testing.assert_allclose(ascent, g + alpha * 0.3 * CURVATURE @ g / np.linalg.norm(g), rtol=1e-12)


def test_bam_approaches_its_exact_form_with_the_square_of_the_radius() -> None:
    for x in POINTS:
        gaps = [
            np.linalg.norm(naive.bam(START, x, ripple, r) - naive.bam_exact(START, x, ripple, ripple_hvp, r))
            for r in (0.02, 0.01)
        ]
        assert gaps[0] / gaps[1] == pytest.approx(4, rel=0.1)


def test_exact_bam_is_the_gradient_of_the_loss_plus_the_gradients_norm() -> None:
    for x in POINTS:
        penalised = lambda at, x=x: ripple_loss(at, x) + 0.3 * float(np.linalg.norm(ripple(at, x)))
        expected = naive.numerical_gradient(penalised, START)
        np.testing.assert_allclose(naive.bam_exact(START, x, ripple, ripple_hvp, 0.3), expected, atol=1e-9)


def test_bam_does_not_ascend_from_a_zero_gradient() -> None:
    np.testing.assert_array_equal(naive.bam(START, START, bowl, 0.3), np.zeros(3))
    np.testing.assert_array_equal(naive.bam_exact(START, START, bowl, bowl_hvp, 0.3), np.zeros(3))


def test_bam_with_views_ascends_along_the_mean_and_differentiates_the_mean() -> None:
    views = POINTS[:4]
    g = np.mean([ripple(START, x) for x in views], axis=0)
    u = g / np.linalg.norm(g)
    h = np.mean([ripple(START + 0.2 * u, x) for x in views], axis=0)
    np.testing.assert_allclose(naive.bam(START, views, naive.over_views(ripple), 0.2), h, rtol=1e-12)
    exact = g + 0.2 * np.mean([ripple_hvp(START, x, u) for x in views], axis=0)
    measured = naive.bam_exact(START, views, naive.over_views(ripple), naive.over_views(ripple_hvp), 0.2)
    np.testing.assert_allclose(measured, exact, rtol=1e-12)


def test_dp_sat_moves_by_its_radius_along_the_last_release_and_not_at_first() -> None:
    released, step = np.array([3.0, 0.0, 4.0]), np.array([0.3, 0.0, 0.4])
    np.testing.assert_allclose(naive.dp_sat_point(START, released, 0.5), START + step)
    np.testing.assert_allclose(naive.dp_sat_point(START, released / 7, 0.5), START + step)
    np.testing.assert_array_equal(naive.dp_sat_point(START, None, 0.5), START)
    np.testing.assert_array_equal(naive.dp_sat_point(START, np.zeros(3), 0.5), START)


# p-averaged clipping


def test_p_average_by_hand() -> None:
    g = np.array([[3.0, 0.0], [1.0, 4.0], [0.0, 0.2]])
    # group 5: (4, 4)/2, norm √8, clipped to 1; group 9 has one sample and is still divided by 2
    expected = np.array([2.0, 2.0]) / math.sqrt(8) + np.array([0.0, 0.1])
    np.testing.assert_allclose(naive.p_average(g, [5, 5, 9], 2, naive.flat, 1.0), expected)
    np.testing.assert_allclose(naive.p_average(g[[2, 0, 1]], [9, 5, 5], 2, naive.flat, 1.0), expected)
    np.testing.assert_array_equal(naive.p_average(g[:0], [], 2, naive.flat, 1.0), np.zeros(2))


def test_groups_of_one_are_the_base_method() -> None:
    g = gradients(21)
    np.testing.assert_allclose(naive.p_average(g, list(range(len(g))), 1, naive.flat, 1.0), naive.flat(g, 1.0))
    assert naive.p_average_sensitivity(1.5, 1) == naive.bound("flat", 1.5)


def test_p_average_is_unbiased_when_nothing_is_clipped() -> None:
    g = np.random.default_rng(22).standard_normal((12, 3))
    tags = list(np.random.default_rng(23).integers(0, 4, 12))
    summed = naive.p_average(g, tags, 3, naive.flat, 1e9)
    np.testing.assert_allclose(summed / (12 / 3), g.mean(axis=0))  # divisor B/p


def test_a_sign_flipping_mate_moves_the_p_averaged_sum_by_twice_the_bound() -> None:
    mate, flips = np.array([[5.0, 0.0]]), np.array([[5.0, 0.0], [-50.0, 0.0]])
    moved = naive.p_average(flips, [3, 3], 2, naive.flat, 1.0) - naive.p_average(mate, [3], 2, naive.flat, 1.0)
    assert np.linalg.norm(moved) == pytest.approx(naive.p_average_sensitivity(1.0, 2)) == pytest.approx(2.0)


def test_adding_a_sample_moves_the_p_averaged_sum_by_at_most_its_sensitivity() -> None:
    g = gradients(24, 30, 2) / 10
    tags = list(np.random.default_rng(25).integers(0, 8, 30))
    whole = naive.p_average(g, tags, 4, naive.flat, 1.0)
    for i in range(30):
        without = naive.p_average(np.delete(g, i, axis=0), tags[:i] + tags[i + 1 :], 4, naive.flat, 1.0)
        assert np.linalg.norm(whole - without) <= naive.p_average_sensitivity(1.0, 4) * (1 + 1e-9)


# Momentum per sample


def test_momentum_per_sample_by_hand() -> None:
    data = [np.array([1.0]), np.array([-3.0])]
    zs = [np.array([0.5]), np.array([-1.0])]
    w0, w1, w2 = naive.momentum_per_sample(
        np.array([2.0]), data, naive.two_samples_gradient, 0.25, naive.flat, 5.0, 0.1, zs, 2, 0.5
    )
    assert w0 == [2.0]  # gradients 2 and 10, the second clipped to 5
    assert w1 == pytest.approx(2 - 0.5 * (2 + 5 + 0.1 * 5 * 0.5) / 2)
    m = [0.25 * 2 * (float(w1[0]) - x) + 0.75 * g for x, g in ((1, 2.0), (-3, 10.0))]
    assert w2 == pytest.approx(float(w1[0]) - 0.5 * (m[0] + 5 - 0.1 * 5) / 2)


def test_momentum_per_sample_without_memory_is_plain_descent() -> None:
    zs = np.random.default_rng(26).standard_normal((4, 3))
    found = naive.momentum_per_sample(START, list(POINTS), bowl, 1.0, naive.normalised, 1.0, 0.7, list(zs), 6, 0.2)
    theta = START
    for z, at in zip(zs, found[1:], strict=True):
        g = np.array([bowl(theta, x) for x in POINTS])
        theta = naive.dp_sgd_step(theta, g, naive.normalised, 1.0, 0.7, z, 6, 0.2)
        np.testing.assert_allclose(at, theta)


# BatchClipping


def test_batch_norm_standardises_the_rows_it_is_given() -> None:
    u = np.random.default_rng(27).standard_normal((5, 3)) * [1, 10, 100] + 7
    out = naive.batch_norm(u, np.array([1.0, 2.0, 3.0]), np.array([0.0, -1.0, 4.0]), eps=0.0)
    np.testing.assert_allclose(out.mean(axis=0), [0, -1, 4], atol=1e-12)
    np.testing.assert_allclose(out.std(axis=0), [1, 2, 3], rtol=1e-12)


def batch_clipping_case() -> tuple[np.ndarray, np.ndarray, np.ndarray, naive.Network]:
    rng = np.random.default_rng(28)
    theta = rng.standard_normal(5 * 4 + 5 + 5 + 5 + 3 * 5 + 3) * 0.7
    return theta, rng.standard_normal((4, 4)), rng.standard_normal((20, 4)), naive.batch_norm_network(5, 3)


def test_batch_clipping_is_the_gradient_that_autograd_finds() -> None:
    theta, private, public, network = batch_clipping_case()
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 5), torch.nn.BatchNorm1d(5), torch.nn.Tanh(), torch.nn.Linear(5, 3)
    ).double()
    torch.nn.utils.vector_to_parameters(torch.tensor(theta), model.parameters())
    for label, x in zip((0, 2, 1, 1), private, strict=True):
        companions = public[label : label + 3]
        output = model(torch.tensor(np.concatenate([x[None], companions])))[0]
        loss = torch.nn.functional.cross_entropy(output[None], torch.tensor([label]))
        assert naive.cross_entropy(output.detach().numpy(), label) == pytest.approx(loss.item())
        expected = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(model.parameters()))])
        found = naive.batch_clipping(theta, x, label, companions, network, naive.cross_entropy)
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-9)


def test_batch_clipping_sees_its_own_companions_in_any_order() -> None:
    theta, private, public, network = batch_clipping_case()
    one = naive.batch_clipping(theta, private[0], 1, public[:3], network, naive.cross_entropy)
    same = naive.batch_clipping(theta, private[0], 1, public[[2, 0, 1]], network, naive.cross_entropy)
    np.testing.assert_allclose(one, same, atol=1e-10)
    other = naive.batch_clipping(theta, private[0], 1, public[3:6], network, naive.cross_entropy)
    assert np.abs(one - other).max() > 1e-3


def test_a_unit_of_one_row_has_no_gradient_before_its_batch_norm() -> None:
    theta, private, public, network = batch_clipping_case()
    g = naive.batch_clipping(theta, private[0], 1, public[:0], network, naive.cross_entropy)
    np.testing.assert_allclose(g[:30], 0, atol=1e-10)  # W1, b1 and the scale: the row is its own mean
    assert np.abs(g[30:]).max() > 1e-2


def test_the_vote_is_the_commonest_prediction_and_the_smallest_class_of_a_tie() -> None:
    network: naive.Network = lambda theta, rows: np.eye(3)[[int(rows[1, 0])] * len(rows)]  # the companion decides
    x = np.zeros(1)

    def vote(*classes: int) -> int:
        return naive.batch_clipping_vote(x, x, [np.array([[float(c)]]) for c in classes], network)

    assert vote(2, 1, 2, 0, 2) == 2
    assert vote(2, 1, 1, 2) == 1
    assert vote(0) == 0


def test_the_vote_reads_the_output_of_the_sample_and_not_of_a_companion() -> None:
    network: naive.Network = lambda theta, rows: np.array([np.eye(3)[int(row[0])] for row in rows])
    draws = [np.array([[2.0], [2.0]])] * 3
    assert naive.batch_clipping_vote(np.zeros(1), np.array([1.0]), draws, network) == 1


# DiceSGD


def dice_run(
    gs: list[np.ndarray], memory: str, c1: float = 1.0, c2: float = 2.0, blocks: int = 0
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The sums V_t and the errors E_t (the last one left over) for given gradients."""
    sums, errors = [], [np.zeros(gs[0].shape[1])]
    for t, g in enumerate(gs):
        if blocks:
            errors[-1] = naive.dice_block_error(errors[-1], t, blocks)
        sums.append(naive.dice_sum(errors[-1], g, c1, c2))
        errors.append(naive.dice_error(errors[-1], g, c1, c2, memory))
    return sums, errors


def test_dice_by_hand() -> None:
    g = np.array([[3.0, 4.0], [0.3, 0.0]])
    error = np.array([0.0, -10.0])
    np.testing.assert_allclose(naive.dice_sum(error, g, 1.0, 2.0), [0.6 + 0.3, 0.8 - 2.0])
    residual = np.array([2.4, 3.2])
    np.testing.assert_allclose(naive.dice_error(error, g, 1.0, 2.0), [2.4, 3.2 - 8])
    np.testing.assert_allclose(naive.dice_error(error, g, 1.0, 2.0, "none"), residual)
    np.testing.assert_allclose(naive.dice_error(error, g, 1.0, 2.0, "bounded"), residual - [0, 2])
    np.testing.assert_allclose(naive.dice_sum(error, g, 1.0, 2.0, naive.normalise), [0.6 + 1.0, 0.8 - 2.0])
    found = naive.dice_error(error, g, 1.0, 2.0, "full", naive.normalise)
    np.testing.assert_allclose(found, [2.4 - 0.7, 3.2 - 8])


def test_with_full_memory_nothing_is_lost() -> None:
    rng = np.random.default_rng(30)
    gs = [rng.standard_normal((size, 3)) * 3 for size in (4, 0, 7, 1, 5)]
    sums, errors = dice_run(gs, "full")
    np.testing.assert_allclose(sum(sums) + errors[-1], sum(g.sum(axis=0) for g in gs))
    for memory in ("none", "bounded"):
        sums, errors = dice_run([10 * g for g in gs], memory)
        assert np.linalg.norm(sum(sums) + errors[-1] - sum(10 * g.sum(axis=0) for g in gs)) > 1


def test_the_scale_of_sums_is_the_papers_scale_of_means() -> None:
    rng = np.random.default_rng(31)
    batch, c1, c2, rate = 4, 1.0, 0.7, 0.3
    theta, error = np.zeros(3), np.zeros(3)
    x, e = np.zeros(3), np.zeros(3)
    for _ in range(6):
        g, w = rng.standard_normal((batch, 3)) * 4, rng.standard_normal(3)
        theta, error = naive.dice_step(theta, error, g, c1, batch * c2, batch * w, batch, rate)
        v = sum(naive.clip(g_i, c1) for g_i in g) / batch + naive.clip(e, c2)  # Algorithm 2, lines 5-7
        x = x - rate * (v + w)
        e = e + g.mean(axis=0) - v
        np.testing.assert_allclose(theta, x)
        np.testing.assert_allclose(error, batch * e)


def test_automatic_dice_is_the_papers_algorithm_with_unit_vectors() -> None:
    rng = np.random.default_rng(32)
    batch, rate = 3, 0.3
    theta, error, x, e = np.zeros(3), np.zeros(3), np.zeros(3), np.zeros(3)
    for _ in range(6):
        g, w = rng.standard_normal((batch, 3)) * 4, rng.standard_normal(3)
        theta, error = naive.dice_step(theta, error, g, 1.0, batch, batch * w, batch, rate, shorten=naive.normalise)
        v = sum(g_i / np.linalg.norm(g_i) for g_i in g) / batch + (e / np.linalg.norm(e) if e.any() else 0 * e)
        x, e = x - rate * (v + w), e + g.mean(axis=0) - v
        np.testing.assert_allclose(theta, x)
        np.testing.assert_allclose(error, batch * e)


def test_dice_with_adam_agrees_with_torch_and_keeps_noise_out_of_the_error() -> None:
    rng = np.random.default_rng(33)
    theta, error, moments = START, np.zeros(3), (np.zeros(3), np.zeros(3))
    weight = torch.nn.Parameter(torch.tensor(START))
    optimizer = torch.optim.Adam([weight], lr=0.05, betas=(0.8, 0.95), eps=1e-3)
    plain = np.zeros(3)
    for t in range(1, 6):
        g, noise = rng.standard_normal((4, 3)) * 3, rng.standard_normal(3)
        weight.grad = torch.tensor((naive.dice_sum(error, g, 1.0, 2.0) + noise) / 4)
        optimizer.step()
        theta, error, moments = naive.dice_adam_step(
            theta, error, moments, t, g, 1.0, 2.0, noise, 4, 0.05, (0.8, 0.95), 1e-3
        )
        np.testing.assert_allclose(theta, weight.detach().numpy())
        plain = naive.dice_error(plain, g, 1.0, 2.0)
        np.testing.assert_array_equal(error, plain)


def outlier_shifts(memory: str, steps: int = 12, blocks: int = 0, drawn: int = 1) -> list[float]:
    """How one outlier, drawn once, moves the sums: C1 = 1, C2s = 2, its gradient as large as the attack needs."""
    without = [np.zeros((1, 1))] * steps
    with_it = [np.zeros((1, 1)) if t != drawn else np.array([[2.0 * (steps + 1) + 1]]) for t in range(steps)]
    pair = [dice_run(gs, memory, 1.0, 2.0, blocks)[0] for gs in (with_it, without)]
    return [float((a - b)[0]) for a, b in zip(*pair, strict=True)]


def test_an_outlier_drawn_once_moves_every_later_sum_of_full_memory() -> None:
    assert outlier_shifts("full") == [0.0, 1.0] + [2.0] * 10


def test_an_outlier_moves_one_later_sum_without_memory_and_two_with_bounded_memory() -> None:
    assert outlier_shifts("none") == [0.0, 1.0, 2.0] + [0.0] * 9
    assert outlier_shifts("bounded") == [0.0, 1.0, 2.0, 2.0] + [0.0] * 8


def test_an_outlier_moves_sums_until_its_block_ends() -> None:
    assert outlier_shifts("full", blocks=4) == [0.0, 1.0, 2.0, 2.0] + [0.0] * 8
    assert outlier_shifts("full", blocks=4, drawn=4) == [0.0] * 4 + [1.0, 2.0, 2.0, 2.0] + [0.0] * 4
    assert outlier_shifts("full", blocks=4, drawn=7) == [0.0] * 7 + [1.0] + [0.0] * 4


@pytest.mark.parametrize(("memory", "blocks", "reach"), [("none", 0, 1), ("bounded", 0, 2), ("full", 4, 3)])
def test_one_draw_moves_the_sums_by_at_most_what_the_sound_bounds_assume(memory: str, blocks: int, reach: int) -> None:
    rng = np.random.default_rng(34)
    c1, c2, worst = 1.0, 2.0, 0.0
    for _ in range(60):
        gs = [rng.standard_normal((3, 2)) * 10 ** rng.uniform(-1, 2) for _ in range(8)]
        more = [*gs[:4], np.concatenate([gs[4], rng.standard_normal((1, 2)) * 100]), *gs[5:]]
        pair = [dice_run(one, memory, c1, c2, blocks)[0] for one in (gs, more)]
        moved = [float(np.linalg.norm(a - b)) for a, b in zip(*pair, strict=True)]
        assert moved[:4] == [0.0] * 4
        assert moved[4] <= c1 * (1 + 1e-9)
        if memory == "bounded":  # S4: 2√2 C2s over everything later
            assert math.hypot(*moved[5:]) <= 2 * math.sqrt(2) * c2 * (1 + 1e-9)
        assert all(m <= 2 * c2 * (1 + 1e-9) for m in moved[5 : 5 + reach])
        if memory != "bounded":
            np.testing.assert_allclose(moved[5 + reach :], 0, atol=1e-9)
        worst = max(worst, moved[5])
    assert worst > 1.9 * c2  # C2s alone would not do


def test_blocks_draw_one_group_a_step_and_the_same_batch_on_average() -> None:
    rates = np.array([[naive.dice_block_draws(t, group, 4, 0.05) for group in range(4)] for t in range(8)])
    np.testing.assert_allclose(rates.sum(axis=1), 4 * 0.05)  # N/b records in each group: N q expected
    np.testing.assert_array_equal(rates.argmax(axis=1), [0, 1, 2, 3, 0, 1, 2, 3])
    assert (rates > 0).sum() == 8
    with pytest.raises(ValueError, match="sampling_rate"):
        naive.dice_block_draws(0, 0, 4, 0.3)


# Post-processing


def explicit_heavy_ball(released: np.ndarray, beta: float) -> np.ndarray:
    return np.array([sum(beta ** (t - s) * released[s] for s in range(t + 1)) for t in range(len(released))])


def test_outer_momentum_is_its_sum() -> None:
    released = np.random.default_rng(35).standard_normal((7, 3))
    np.testing.assert_allclose(naive.outer_momentum(list(released), 0.9), explicit_heavy_ball(released, 0.9))
    np.testing.assert_allclose(naive.outer_momentum_as_printed(list(released), 0.6), explicit_heavy_ball(released, 0.4))
    np.testing.assert_array_equal(naive.outer_momentum(list(released), 0.0), released)


FILTERS = [
    ((-0.9,), (0.1,)),  # exponential average
    ((-0.9,), (0.05, 0.05)),
    ((-1.2, 0.4), (0.1, 0.06, 0.04)),
    ((), (0.25, 0.25, 0.25, 0.25)),  # moving average
]


@pytest.mark.parametrize(("a", "b"), FILTERS)
def test_the_filter_is_the_one_that_signal_processing_knows(a: tuple[float, ...], b: tuple[float, ...]) -> None:
    signal = pytest.importorskip("scipy.signal")
    released = np.random.default_rng(37).standard_normal((30, 2))
    expected = signal.lfilter(b, (1.0, *a), released, axis=0)
    np.testing.assert_allclose(naive.recursive_filter(list(released), a, b), expected, atol=1e-12)


@pytest.mark.parametrize(("a", "b"), FILTERS)
def test_doppler_passes_a_constant_unchanged_from_the_first_step(a: tuple[float, ...], b: tuple[float, ...]) -> None:
    assert sum(b) - sum(a) == pytest.approx(1)
    np.testing.assert_allclose(naive.doppler([START] * 40, a, b), np.tile(START, (40, 1)))
    with pytest.raises(ValueError, match="b_0"):
        naive.doppler([START], a, (0.0, *b))


def test_doppler_with_one_pole_is_the_corrected_average_and_suppresses_noise() -> None:
    released = np.random.default_rng(38).standard_normal((400, 3))
    found = naive.doppler(list(released), (-0.9,), (0.1,))
    for t in range(10):  # as Adam corrects its moments
        average = sum(0.1 * 0.9 ** (t - s) * released[s] for s in range(t + 1))
        np.testing.assert_allclose(found[t], average / (1 - 0.9 ** (t + 1)))
    assert np.var(found[100:]) < 0.1  # (1 − 0.9)/(1 + 0.9) in theory


@pytest.mark.parametrize(("kappa", "gamma"), [(0.7, 0.5), (0.3, 1.0), (0.9, 1 / 9)])
def test_disk_tracks_the_gradient_of_a_quadratic_exactly(kappa: float, gamma: float) -> None:
    theta, moved, m = START, np.zeros(3), None
    for _ in range(8):
        mean = np.mean([naive.disk_gradient(theta, moved, x, bowl, kappa, gamma) for x in POINTS], axis=0)
        m = mean if m is None else naive.disk_filter([m, mean], kappa)[1]
        np.testing.assert_allclose(m, np.mean([bowl(theta, x) for x in POINTS], axis=0), atol=1e-12)
        following = theta - 0.2 * m
        theta, moved = following, following - theta


def test_disk_takes_one_gradient_when_gamma_undoes_the_gain() -> None:
    moved = np.array([0.1, -0.2, 0.3])
    kappa = 0.4
    gamma = (1 - kappa) / kappa
    found = naive.disk_gradient(START, moved, POINTS[0], ripple, kappa, gamma)
    np.testing.assert_allclose(found, ripple(START + gamma * moved, POINTS[0]), atol=1e-15)
    plain = naive.disk_gradient(START, 0 * moved, POINTS[0], ripple, 0.7, 0.5)
    np.testing.assert_allclose(plain, ripple(START, POINTS[0]))


def test_disk_filter_is_its_sum_and_begins_at_the_first_release() -> None:
    released = np.random.default_rng(39).standard_normal((6, 3))
    found = naive.disk_filter(list(released), 0.3)
    np.testing.assert_array_equal(found[0], released[0])
    for t in range(1, 6):
        explicit = 0.7**t * released[0] + sum(0.3 * 0.7 ** (t - s) * released[s] for s in range(1, t + 1))
        np.testing.assert_allclose(found[t], explicit)


def test_adam_agrees_with_torch() -> None:
    rng = np.random.default_rng(40)
    theta, moments = START, (np.zeros(3), np.zeros(3))
    weight = torch.nn.Parameter(torch.tensor(START))
    optimizer = torch.optim.Adam([weight], lr=0.1, betas=(0.7, 0.9), eps=1e-2)
    for t in range(1, 8):
        g = rng.standard_normal(3)
        weight.grad = torch.tensor(g)
        optimizer.step()
        theta, moments = naive.adam_step(theta, moments, t, g, 0.1, (0.7, 0.9), 1e-2)
        np.testing.assert_allclose(theta, weight.detach().numpy())


def test_adam_bc_divides_by_the_signal_alone() -> None:
    # Noise of exactly its variance at every step: g = (2 ± s, ± s), so the averages of g² are known in closed form.
    s, theta, moments = 0.5, np.zeros(2), (np.zeros(2), np.zeros(2))
    for t in range(1, 201):
        sign = 1.0 if t % 2 else -1.0
        before = theta
        theta, moments = naive.adam_bc_step(
            theta, moments, t, np.array([2 + sign * s, sign * s]), 0.1, s, 1e-4, (0.5, 0.999)
        )
    m_hat, v_hat = moments[0] / (1 - 0.5**200), moments[1] / (1 - 0.999**200)
    assert v_hat[1] == pytest.approx(s**2)  # nothing but noise, still in the average ...
    np.testing.assert_allclose(before[1] - theta[1], 0.1 * m_hat[1] / math.sqrt(1e-4))  # ... and gone under the root
    np.testing.assert_allclose(before[0] - theta[0], 0.1 * m_hat[0] / math.sqrt(v_hat[0] - s**2))
    assert v_hat[0] - s**2 == pytest.approx(4, rel=0.01)


def test_adam_bc_without_noise_is_adam() -> None:
    g, zero = np.array([1.0, -3.0]), (np.zeros(2), np.zeros(2))
    corrected, _ = naive.adam_bc_step(np.zeros(2), zero, 1, g, 0.1, 0.0, 1e-12)
    np.testing.assert_allclose(corrected, naive.adam_step(np.zeros(2), zero, 1, g, 0.1, eps=0.0)[0])


# The papers' examples


def descend(weigh: naive.Weigh, grad: naive.Grad, data: np.ndarray, at: float, clip_norm: float, steps: int) -> float:
    w = np.array([at])
    for _ in range(steps):
        summed = naive.private_sum(lambda s, w=w: grad(w, s), list(data), 1, weigh, clip_norm)
        w = w - 0.3 * summed / len(data)
    return float(w[0])


def test_two_samples_cancel_when_normalised_although_the_optimum_is_elsewhere() -> None:
    g = np.array([naive.two_samples_gradient(np.zeros(1), s) for s in naive.TWO_SAMPLES])
    np.testing.assert_array_equal(g, [[-2.0], [6.0]])
    np.testing.assert_array_equal(naive.normalised(g, 1.0), [0.0])
    plain = descend(naive.flat, naive.two_samples_gradient, naive.TWO_SAMPLES, 0.0, 1e9, 200)
    assert plain == pytest.approx(naive.TWO_SAMPLES_OPTIMUM)
    for start in (-2.9, 0.0, 0.9):
        assert descend(naive.normalised, naive.two_samples_gradient, naive.TWO_SAMPLES, start, 1.0, 100) == start


@pytest.mark.parametrize("clip_norm", [0.5, 1.0, 3.9, 4.0, 9.0])
def test_two_samples_are_stuck_exactly_where_stated(clip_norm: float) -> None:
    low, high = naive.two_samples_stuck(clip_norm)

    def force(w: float) -> float:
        g = np.array([naive.two_samples_gradient(np.array([w]), s) for s in naive.TWO_SAMPLES])
        return float(naive.flat(g, clip_norm)[0])

    for w in np.linspace(low, high, 7):
        assert force(w) == pytest.approx(0, abs=1e-12)
    assert force(low - 1e-3) < -1e-4
    assert force(high + 1e-3) > 1e-4


def test_averaging_the_two_samples_first_reaches_the_optimum() -> None:
    w = np.zeros(1)
    for _ in range(400):
        g = np.array([naive.two_samples_gradient(w, s) for s in naive.TWO_SAMPLES])
        w = w - 0.05 * naive.p_average(g, [0, 0], 2, naive.flat, 1.0)
    assert float(w[0]) == pytest.approx(naive.TWO_SAMPLES_OPTIMUM)


CLIPS = [0.1, 0.5, 1.0, 1.5, 2.0, 3.7]


@pytest.mark.parametrize("clip_norm", CLIPS)
def test_clipped_descent_ends_at_a_constant_distance_from_the_optimum(clip_norm: float) -> None:
    grad = naive.clipping_bias_gradient(naive.clipping_bias_slope(clip_norm))
    samples = naive.clipping_bias_samples(clip_norm)
    assert samples.sum() == 0
    expected = naive.clipping_bias_fixed_point(clip_norm)
    for start in (-5.0, 0.0, 5.0):
        assert descend(naive.flat, grad, samples, start, clip_norm, 1500) == pytest.approx(expected, abs=1e-6)
        plain = descend(naive.flat, grad, samples, start, 1e9, 300)
        assert plain == pytest.approx(naive.CLIPPING_BIAS_OPTIMUM, abs=1e-6)
    assert abs(expected) >= (0.5 if clip_norm <= 1 else 1 / naive.clipping_bias_slope(clip_norm))


@pytest.mark.parametrize("clip_norm", CLIPS)
def test_error_feedback_ends_at_the_optimum_and_at_the_stated_error(clip_norm: float) -> None:
    grad = naive.clipping_bias_gradient(naive.clipping_bias_slope(clip_norm))
    samples = naive.clipping_bias_samples(clip_norm)
    n = len(samples)
    for start in (-2.0, 3.0):
        x, error = np.array([start]), np.zeros(1)
        for _ in range(1500):
            g = np.array([grad(x, s) for s in samples])
            x, error = naive.dice_step(x, error, g, clip_norm, n * clip_norm, np.zeros(1), n, 0.1)
        assert float(x[0]) == pytest.approx(naive.CLIPPING_BIAS_OPTIMUM, abs=1e-6)
        assert float(error[0]) == pytest.approx(naive.clipping_bias_error(clip_norm), abs=1e-5)
    assert abs(naive.clipping_bias_error(clip_norm)) <= n * clip_norm
