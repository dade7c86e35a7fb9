"""The transcriptions keep the promises that the papers and the table of methods state for them."""

import math
from collections.abc import Callable

import numpy as np
import pytest

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
