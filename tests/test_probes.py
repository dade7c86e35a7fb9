"""Where gradients are taken, and what is fed back: the engine's numbers against slow transcriptions of the papers.

Receives: a small smooth network in float64, its data, and ``naive``, which was written from the papers alone.
Gives: per-sample terms, whole trajectories (with noise too small to see), neutral settings, combinations, refusals.
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clipwise as cw
import naive
from clipwise import methods, models, postprocess
from clipwise.data import views as views_of
from clipwise.engine import ChunkEngine
from clipwise.methods import Method
from clipwise.randomness import SeededStream
from clipwise.records import Capture, SampleGradients, trainable
from clipwise.sampling import units
from clipwise.step import private_sum
from clipwise.types import InputError

Array = np.ndarray
SAMPLES = 12
LOOSE = {"rtol": 1e-4, "atol": 1e-5}  # weights are shrunk by a margin for rounding


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def data(seed: int = 1, rows: int = SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = 2 * torch.randn(rows, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 2, (rows,), generator=generator)


def begun(model: nn.Module, samples: Any, learning_rate: float = 0.5, **options: Any) -> cw.Private:
    """A run with hardly any noise, unless the options say otherwise."""
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=learning_rate)
    return cw.make_private(model, optimizer, samples, **{"noise_multiplier": 1e-11, **options})


class Plain:
    """The same network for ``naive``: vectors in and out, one sample at a time, by autograd on a copy."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.names = [name for name, _ in model.named_parameters()]
        self.shapes = [p.shape for p in model.parameters()]

    def vector(self, tensors: Any) -> Array:
        values = tensors.values() if isinstance(tensors, dict) else tensors
        return torch.cat([t.detach().double().flatten() for t in values]).numpy()

    def named(self, theta: Array) -> dict[str, Tensor]:
        pieces = torch.from_numpy(np.array(theta)).split([s.numel() for s in self.shapes])
        return {n: p.reshape(s).clone() for n, p, s in zip(self.names, pieces, self.shapes, strict=True)}

    @property
    def theta(self) -> Array:
        return self.vector(list(self.model.parameters()))

    def loss(self, parameters: dict[str, Tensor], sample: Any) -> Tensor:
        x, y = sample
        out = torch.func.functional_call(self.model, parameters, (x[None],))
        return nn.functional.cross_entropy(out, y[None])

    def grad(self, theta: Array, sample: Any) -> Array:
        parameters = {n: p.requires_grad_() for n, p in self.named(theta).items()}
        found = torch.autograd.grad(self.loss(parameters, sample), list(parameters.values()))
        return self.vector(found)

    def hvp(self, theta: Array, sample: Any, v: Array) -> Array:
        parameters = {n: p.requires_grad_() for n, p in self.named(theta).items()}
        first = torch.autograd.grad(self.loss(parameters, sample), list(parameters.values()), create_graph=True)
        along = self.named(v)
        product = sum((g * a).sum() for g, a in zip(first, along.values(), strict=True))
        assert isinstance(product, Tensor)
        return self.vector(torch.autograd.grad(product, list(parameters.values())))


def samples_of(batch: tuple[Tensor, Tensor]) -> list[Any]:
    return list(zip(*batch, strict=True))


def engine(model: nn.Module, rows: int = SAMPLES, **public: Any) -> ChunkEngine:
    return ChunkEngine(Capture(model, cw.cross_entropy), torch.arange(rows), **public)


def vectors(gradients: SampleGradients, plain: Plain) -> Array:
    dense = gradients.materialise()
    return torch.cat([dense[name].flatten(1) for name in plain.names], 1).numpy()


def close(got: Any, expected: Any, **how: float) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(expected), **{**{"rtol": 1e-9, "atol": 1e-12}, **how})


@pytest.fixture
def plain() -> Plain:
    return Plain(network())


# ── one step: v_i ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("horizon", [0, 1, 2, 4])
@pytest.mark.parametrize("known", [0, 1, 3])
def test_inner_momentum_is_equation_13_over_its_weights(plain: Plain, horizon: int, known: int) -> None:
    batch, here = data(), plain.theta
    earlier = [here + 0.3 * np.random.default_rng(k).normal(size=here.size) for k in range(known)]
    method = cw.inner_momentum(cw.flat(1.0), horizon=horizon, decay=0.3)
    found = method.gradients(engine(plain.model, past=tuple(plain.named(t) for t in earlier)), batch)
    iterates = [*reversed(earlier), here]
    for v, sample in zip(vectors(found, plain), samples_of(batch), strict=True):
        close(v, naive.inner_momentum(iterates, sample, plain.grad, 0.3, horizon))


def test_views_are_of_a_batch_s_first_tensor_and_the_others_are_repeated_to_match(plain: Plain) -> None:
    Pair = namedtuple("Pair", ["x", "y"])
    x, y = torch.rand(4, 3, 16, 16), torch.tensor([3, 1, 2, 0])
    here, expected = replace(engine(plain.model, 4), seed=6), views_of(x, 2, 6)
    batch: Any
    for batch in ((x, y), [x, y], Pair(x, y)):
        found = here.views(batch, 2, "crop-flip")
        assert type(found) is type(batch)
        assert torch.equal(found[0], expected) and found[1].tolist() == [3, 3, 1, 1, 2, 2, 0, 0]
    found = here.views({"x": x, "y": y}, 2, "crop-flip")
    assert torch.equal(found["x"], expected) and found["y"].tolist() == [3, 3, 1, 1, 2, 2, 0, 0]
    assert torch.equal(here.views(x, 2, "crop-flip"), expected)
    none = replace(engine(plain.model, 0), seed=6).views((x[:0], y[:0]), 2, "crop-flip")
    assert [t.shape for t in none] == [(0, 3, 16, 16), (0,)]


def test_self_augmentation_is_the_mean_over_views() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(72, 3)).double()
    plain = Plain(model)
    x = torch.randn(5, 1, 8, 8, dtype=torch.float64)
    batch = (x, torch.arange(5) % 3)
    keys = torch.tensor([7, 3, 11, 2, 5])
    method = cw.self_augmentation(cw.flat(1.0), views=4)
    found = method.gradients(replace(engine(model, 5), keys=keys, seed=9), batch)
    seen = views_of(x, 4, 9, "crop-flip", keys), batch[1].repeat_interleave(4)
    assert found.samples == 5
    for i, v in enumerate(vectors(found, plain)):
        views = [(seen[0][4 * i + k], seen[1][4 * i + k]) for k in range(4)]
        assert len({tuple(view[0].flatten().tolist()) for view in views}) > 1, "the views differ"
        close(v, naive.self_augmentation(plain.theta, views, plain.grad))


@pytest.mark.parametrize("alpha", [1.0, 0.3])
@pytest.mark.parametrize("form", ["ascent", "exact"])
def test_bam_looks_where_each_sample_s_own_loss_has_risen(plain: Plain, form: Any, alpha: float) -> None:
    batch = data()
    found = cw.bam(cw.flat(1.0), radius=0.4, form=form, alpha=alpha).gradients(engine(plain.model), batch)
    for v, sample in zip(vectors(found, plain), samples_of(batch), strict=True):
        if form == "ascent":
            expected = naive.bam(plain.theta, sample, plain.grad, 0.4, alpha)
        else:
            expected = naive.bam_exact(plain.theta, sample, plain.grad, plain.hvp, 0.4, alpha)
        close(v, expected, rtol=1e-8)


@pytest.mark.parametrize("form", ["ascent", "exact"])
def test_bam_with_views_uses_the_mean_over_the_same_views_in_both_passes(form: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(72, 3)).double()
    plain, batch = Plain(model), (torch.randn(4, 1, 8, 8, dtype=torch.float64), torch.arange(4) % 3)
    method = cw.bam(cw.self_augmentation(cw.flat(1.0), views=3), radius=0.2, form=form)
    found = method.gradients(replace(engine(model, 4), seed=5), batch)
    seen = views_of(batch[0], 3, 5, "crop-flip"), batch[1].repeat_interleave(3)
    grad, hvp = naive.over_views(plain.grad), naive.over_views(plain.hvp)
    for i, v in enumerate(vectors(found, plain)):
        views = [(seen[0][3 * i + k], seen[1][3 * i + k]) for k in range(3)]
        if form == "ascent":
            expected = naive.bam(plain.theta, views, grad, 0.2)
        else:
            expected = naive.bam_exact(plain.theta, views, grad, hvp, 0.2)
        close(v, expected, rtol=1e-8)


def test_dp_sat_looks_uphill_along_the_last_release(plain: Plain) -> None:
    batch, released = data(), np.random.default_rng(0).normal(size=plain.theta.size)
    method = cw.dp_sat(cw.flat(1.0), radius=0.5)
    point = naive.dp_sat_point(plain.theta, released, 0.5)
    found = method.gradients(engine(plain.model, released=plain.named(released)), batch)
    first = method.gradients(engine(plain.model), batch)
    for v, start, sample in zip(vectors(found, plain), vectors(first, plain), samples_of(batch), strict=True):
        close(v, plain.grad(point, sample))
        close(start, plain.grad(plain.theta, sample))


def test_disk_combines_before_clipping(plain: Plain) -> None:
    batch, before = data(), plain.theta + 0.2 * np.random.default_rng(0).normal(size=plain.theta.size)
    method = cw.disk(cw.flat(1.0), gain=0.7, ahead=0.5)
    found = method.gradients(engine(plain.model, past=(plain.named(before),)), batch)
    for v, sample in zip(vectors(found, plain), samples_of(batch), strict=True):
        close(v, naive.disk_gradient(plain.theta, plain.theta - before, sample, plain.grad, 0.7, 0.5))


def test_batch_clipping_normalises_a_sample_with_its_companions_only() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        net[1].weight.copy_(torch.rand(4) + 0.5)
        net[1].bias.copy_(torch.randn(4))
    public = torch.randn(20, 3, dtype=torch.float64)
    model = models.Accompanied(net.double(), public, companions=3)
    plain, batch = Plain(model), data()
    here = engine(model, public=public)
    beside = here.companions(batch, 3)[0]
    assert beside.shape == (SAMPLES, 4, 3) and torch.equal(beside[:, 0], batch[0])
    found = cw.batch_clipping(cw.flat(1.0), companions=3).gradients(here, batch)
    network = naive.batch_norm_network(4, 2)
    for i, v in enumerate(vectors(found, plain)):
        expected = naive.batch_clipping(
            plain.theta, batch[0][i].numpy(), int(batch[1][i]), beside[i, 1:].numpy(), network, naive.cross_entropy
        )
        close(v, expected, rtol=1e-5, atol=1e-8)


def test_batch_clipping_predicts_by_the_majority_over_draws_of_companions() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
    public, (x, _) = torch.randn(20, 3, dtype=torch.float64), data(rows=30)
    model = models.Accompanied(net, public, companions=3, draws=9)  # odd, so that two classes do not tie
    theta, literal = Plain(model).theta, naive.batch_norm_network(4, 2)
    model.eval()
    torch.manual_seed(1)
    shares = model(x).exp()
    torch.manual_seed(1)
    drawn = [public[torch.randint(20, (30, 3))].numpy() for _ in range(9)]
    for i, row in enumerate(x.numpy()):
        votes = [naive.batch_clipping_output(theta, row, one[i], literal).argmax() for one in drawn]
        assert int(shares[i].argmax()) == naive.batch_clipping_vote(theta, row, [one[i] for one in drawn], literal)
        close(shares[i], (np.bincount(votes, minlength=2) + 0.5) / 10, rtol=1e-6)
    assert ((shares > 0.1) & (shares < 0.9)).any(), "some draws disagree"
    assert models.Accompanied(net, public, 3).draws == 10  # the paper's


# ── a whole run: θ_0 … θ_T ───────────────────────────────────────────────────────────────────────────────────────────


def trajectory(
    method: Method | str, steps: int, model: nn.Module, batch: Any, *, learning_rate: float = 0.7, **options: Any
) -> list[Array]:
    """Full batches in chunks no larger than they must be, whose margin and noise are far below what is compared."""
    size = len(batch[0])
    private = begun(
        model, batch, learning_rate, method=method, steps=steps, batch=size, **{"chunk": 2 * size, **options}
    )
    plain = Plain(model)
    iterates = [plain.theta]
    for drawn in private.batches():
        private.step(drawn)
        iterates.append(plain.theta)
    return iterates


def descended(
    plain: Plain, batch: Any, steps: int, term: Callable[[list[Array], Array | None, Any], Array], clip_norm: float
) -> list[Array]:
    """θ ← θ − η Σ clip(v_i)/B with v_i = term(iterates so far, last released mean, sample)."""
    iterates, released = [plain.theta], None
    for _ in range(steps):
        rows = np.stack([term(iterates, released, sample) for sample in samples_of(batch)])
        released = naive.flat(rows, clip_norm) / len(rows)
        iterates.append(iterates[-1] - 0.7 * released)
    return iterates


def test_inner_momentum_through_training(plain: Plain) -> None:
    expected = descended(plain, data(), 5, lambda it, _, s: naive.inner_momentum(it, s, plain.grad, 0.5, 2), 0.6)
    close(trajectory(cw.inner_momentum(cw.flat(0.6), 2, 0.5), 5, plain.model, data()), expected, **LOOSE)


def test_an_earlier_iterate_has_its_own_past(plain: Plain) -> None:
    def inner_disk(iterates: list[Array], sample: Any) -> Array:
        moved = iterates[-1] - iterates[-2] if len(iterates) > 1 else np.zeros_like(iterates[-1])
        return naive.disk_gradient(iterates[-1], moved, sample, plain.grad, 0.6, 0.5)

    def inner_momentum(iterates: list[Array], sample: Any) -> Array:
        return naive.inner_momentum(iterates, sample, plain.grad, 0.4, 1)

    for text, base in (
        ("disk(flat(0.5), gain=0.6)", inner_disk),
        ("inner_momentum(flat(0.5), 1, 0.4)", inner_momentum),
    ):

        def term(iterates: list[Array], _: Array | None, sample: Any, base: Any = base) -> Array:
            weights = [0.5**back for back in range(min(2, len(iterates) - 1) + 1)]
            terms = [w * base(iterates[: len(iterates) - back], sample) for back, w in enumerate(weights)]
            return sum(terms) / sum(weights)

        again = Plain(network())
        expected = descended(again, data(), 5, term, 0.5)
        found = trajectory(f"inner_momentum({text}, horizon=2, decay=0.5)", 5, again.model, data())
        close(found, expected, **LOOSE)


def test_dp_sat_through_training(plain: Plain) -> None:
    def term(iterates: list[Array], released: Array | None, sample: Any) -> Array:
        return plain.grad(naive.dp_sat_point(iterates[-1], released, 0.3), sample)

    expected = descended(plain, data(), 4, term, 0.6)
    close(trajectory(cw.dp_sat(cw.flat(0.6), 0.3), 4, plain.model, data(), chunk=5), expected, **LOOSE)


def test_disk_through_training_with_its_filter(plain: Plain) -> None:
    iterates, filtered, batch = [plain.theta], None, data()
    for _ in range(4):
        moved = iterates[-1] - iterates[-2] if len(iterates) > 1 else None
        rows = np.stack(
            [
                plain.grad(iterates[-1], s)
                if moved is None
                else naive.disk_gradient(iterates[-1], moved, s, plain.grad, 0.6, 0.5)
                for s in samples_of(batch)
            ]
        )
        released = naive.flat(rows, 0.6) / SAMPLES
        filtered = released if filtered is None else 0.4 * filtered + 0.6 * released
        iterates.append(iterates[-1] - 0.7 * filtered)
    got = trajectory(cw.disk(cw.flat(0.6), 0.6, 0.5), 4, plain.model, batch, post="average(gain=0.6)")
    close(got, iterates, **LOOSE)


def test_momentum_per_sample_is_algorithm_1(plain: Plain) -> None:
    batch = data()
    expected = naive.momentum_per_sample(
        plain.theta,
        samples_of(batch),
        plain.grad,
        0.3,
        naive.normalised,
        1.0,
        0.0,
        [np.zeros_like(plain.theta)] * 5,
        SAMPLES,
        0.7,
    )
    got = trajectory(cw.momentum_per_sample(cw.normalised(1.0), 0.3), 5, plain.model, batch, chunk=5)
    close(got, expected, **LOOSE)


@pytest.mark.parametrize("memory", ["full", "none", "bounded", "automatic"])
def test_dice_feeds_back_what_was_cut_off(plain: Plain, memory: Any) -> None:
    batch = data()
    automatic = memory == "automatic"
    c1, c2 = (1.0, 1.0) if automatic else (0.4, 0.15)
    shorten = naive.normalise if automatic else naive.clip
    theta, error, expected = plain.theta, np.zeros_like(plain.theta), [plain.theta]
    for _ in range(6):
        rows = np.stack([plain.grad(theta, s) for s in samples_of(batch)])
        theta, error = naive.dice_step(
            theta, error, rows, c1, c2 * SAMPLES, 0.0, SAMPLES, 0.7, "full" if automatic else memory, shorten
        )
        expected.append(theta)
    base = cw.normalised(c1) if automatic else cw.flat(c1)
    method = cw.dice(base, c2, memory="full" if automatic else memory, blocks=1, automatic=automatic)
    got = trajectory(method, 6, plain.model, batch, chunk=5)
    close(got, expected, **LOOSE)
    if not automatic:
        assert not np.allclose(got[-1], trajectory(cw.flat(c1), 6, network(), batch)[-1], rtol=1e-3)


@pytest.mark.parametrize("memory", ["blocks", "bounded"])
def test_dice_in_blocks_draws_from_one_group_after_another(plain: Plain, memory: Any) -> None:
    # half of the samples in expectation, and two groups: each step draws one group whole
    (x, y), expected = data(), 6
    theta, error, iterates = plain.theta, np.zeros_like(plain.theta), [plain.theta]
    for step in range(5):
        if memory == "blocks":
            error = naive.dice_block_error(error, step, 2)
        own = [s for i, s in enumerate(samples_of((x, y))) if naive.dice_block_draws(step, i % 2, 2, 0.5) == 1]
        rows = np.stack([plain.grad(theta, s) for s in own])
        how = "full" if memory == "blocks" else memory
        theta, error = naive.dice_step(theta, error, rows, 0.4, 0.15 * expected, 0.0, expected, 0.7, how)
        iterates.append(theta)
    model, got = plain.model, [plain.theta]
    method = cw.dice(cw.flat(0.4), 0.15, memory=memory, blocks=2)
    private = begun(model, (x, y), 0.7, method=method, steps=5, batch=expected, chunk=6)
    for batch in private.batches():
        private.step(batch)
        got.append(plain.theta)
    close(got, iterates, **LOOSE)


@pytest.mark.parametrize("memory", ["full", "none", "blocks", "bounded"])
def test_the_noise_and_the_ledger_of_dice_follow_its_proved_bounds(memory: Any) -> None:
    model = nn.Linear(3, 2)
    method = cw.dice(cw.flat(0.5), 0.02, memory=memory, blocks=4)
    x, y = data(rows=400)
    budget = {"noise_multiplier": None, "epsilon": 3.0, "delta": 1e-3}
    private = begun(model, (x.float(), y), 0.1, method=method, steps=8, batch=20, **budget)
    for batch in private.batches():
        private.step(batch)
    assert private.dice is not None
    assert private.epsilon() <= 3.0
    expected = private.dice.epsilon(noise_multiplier=private.noise_multiplier, delta=1e-3, steps=8)
    assert private.epsilon() == pytest.approx(expected, rel=1e-6)
    plain = cw.calibrate(epsilon=3.0, delta=1e-3, sampling_rate=0.05, steps=8)
    assert private.noise_multiplier * private.dice.sensitivity > plain * 0.5, "feedback is paid for"


def test_dice_with_adam_is_algorithm_3(plain: Plain) -> None:
    batch = data()
    theta, error, moments = plain.theta, np.zeros_like(plain.theta), (np.zeros_like(plain.theta),) * 2
    expected = [theta]
    for t in range(1, 5):
        rows = np.stack([plain.grad(theta, s) for s in samples_of(batch)])
        theta, error, moments = naive.dice_adam_step(
            theta, error, moments, t, rows, 0.4, 0.15 * SAMPLES, 0.0, SAMPLES, 0.1, (0.9, 0.99), 1e-8, "full"
        )
        expected.append(theta)
    adam = torch.optim.Adam(plain.model.parameters(), lr=0.1, betas=(0.9, 0.99), eps=1e-8)
    got = trajectory(cw.dice(cw.flat(0.4), 0.15), 4, plain.model, batch, optimizer=adam)
    close(got, expected, rtol=1e-3, atol=1e-4)


# ── groups of private samples ────────────────────────────────────────────────────────────────────────────────────────


def test_a_sample_joins_a_group_by_itself_and_moves_nobody_else() -> None:
    def groups(indices: Tensor) -> set[frozenset[int]]:
        pieces = units(indices, 4, 1000, SeededStream(3))
        return {frozenset(row[keep].tolist()) for rows, keeps in pieces for row, keep in zip(rows, keeps, strict=True)}

    everyone = groups(torch.arange(20))
    assert sorted(i for group in everyone for i in group) == list(range(20))
    without_last = groups(torch.arange(19))
    assert {group - {19} for group in everyone} - {frozenset()} == without_last


def test_groups_stay_whole_and_pieces_small() -> None:
    for rows, keep in units(torch.arange(200), 50, 16, SeededStream(1)):
        assert rows.numel() <= 16 or len(rows) == 1
        assert keep.any(1).all()
    (rows, keep) = next(iter(units(torch.arange(0), 50, 16, SeededStream(1))))
    assert rows.numel() == 0 and keep.numel() == 0


def test_p_average_weighs_the_groups_averages(plain: Plain) -> None:
    batch = data(rows=10)
    stream = SeededStream(4)
    tags = (stream.uniform(10) * 3).long().tolist()  # the same draws as the library's
    rows = np.stack([plain.grad(plain.theta, s) for s in samples_of(batch)])
    expected = naive.p_average(rows, tags, 4, naive.flat, 0.2)
    method, total = cw.p_average(cw.flat(0.2), size=4), None
    chunks = []
    for padded, keep in units(torch.arange(10), 3, 8, SeededStream(4)):
        flat = padded.flatten()
        found = method.gradients(engine(plain.model), (batch[0][flat], batch[1][flat]))
        chunks.append(0.25 * found.masked(keep.flatten()).merged(padded.shape[1]))
    total, _ = private_sum(method, trainable(plain.model), chunks)
    close(plain.vector(total.parts[0].value), expected, **LOOSE)
    assert total.parts[0].bound == naive.p_average_sensitivity(0.2, 4) == 0.4


def test_p_average_through_training_divides_by_the_expected_number_of_groups(plain: Plain) -> None:
    batch = data(rows=10)
    private = begun(plain.model, batch, 0.7, method="p_average(flat(0.2), 2)", steps=1, batch=10, chunk=10, noise=8)
    drawn = next(private.batches())
    start = plain.theta
    stream = SeededStream(8).at(0)
    stream.uniform(10)  # the Poisson draw
    tags = (stream.uniform(10) * 5).long().tolist()
    rows = np.stack([plain.grad(start, s) for s in samples_of(batch)])
    private.step(drawn)
    close(plain.theta, start - 0.7 * naive.p_average(rows, tags, 2, naive.flat, 0.2) / 5, **LOOSE)


# ── neutral settings, combinations, refusals ─────────────────────────────────────────────────────────────────────────

NEUTRAL = [
    "inner_momentum(flat(0.5), horizon=0)",
    "momentum_per_sample(flat(0.5), rate=1.0)",
    "self_augmentation(flat(0.5), views=1, augment='none')",
    "bam(flat(0.5), radius=0.0)",
    "dp_sat(flat(0.5), radius=0.0)",
    "p_average(flat(0.5), size=1)",
    "batch_clipping(flat(0.5), companions=0)",
    "dice(flat(0.5), feedback_norm=0.0)",
    "disk(flat(0.5), gain=1.0)",
]


@pytest.mark.parametrize("text", NEUTRAL)
def test_a_neutral_setting_is_flat_exactly(text: str) -> None:
    def last(method: str) -> Array:
        model = network()
        private = begun(model, data(), method=method, noise_multiplier=1.0, steps=4, batch=12, noise=5)
        for batch in private.batches():
            private.step(batch)
        return Plain(model).theta

    assert np.array_equal(last(text), last("flat(0.5)"))


def test_every_wrapper_has_a_neutral_setting() -> None:
    assert {text.partition("(")[0] for text in NEUTRAL} == {factory.__name__ for factory in methods.WRAPPERS}


COMBINATIONS = [
    "inner_momentum(self_augmentation(psac(0.5), views=2, augment='none'))",
    "inner_momentum(bam(automatic(0.5), radius=0.1), horizon=1)",
    "bam(inner_momentum(flat(0.5), horizon=1), radius=0.1)",
    "dp_sat(bam(flat(0.5)))",
    "dice(inner_momentum(bam(flat(0.5))), 0.02)",
    "inner_momentum(dice(psac(0.5), 0.02, memory='none'))",
    "p_average(inner_momentum(layerwise(flat(0.5))), size=3)",
    "momentum_per_sample(bam(psac(0.5)), rate=0.5)",
    "inner_momentum(adaptive(0.5))",
    "schedule([(0, bam(flat(0.5))), (2, inner_momentum(global_(3.0)))])",
    "self_augmentation(dp_sat(layerwise(psac(0.5))), views=2, augment='none')",
    "disk(self_augmentation(flat(0.5), views=2, augment='none'))",
]


@pytest.mark.parametrize("text", COMBINATIONS)
def test_combinations_train_and_say_what_they_are(text: str, tmp_path: Any) -> None:
    method = methods.parse(text)
    assert str(methods.parse(str(method))) == str(method)
    sigma = {"noise_multiplier": 2.0}
    model = network()
    run = cw.train(
        model,
        cw.cross_entropy,
        data(),
        method=method,
        steps=4,
        batch=12,
        noise=1,
        chunk=24,
        folder=tmp_path / "a",
        **sigma,
    )
    again = network()
    cw.train(again, cw.cross_entropy, data(), method=text, steps=4, batch=12, noise=1, chunk=5, **sigma)
    close(Plain(again).theta, Plain(model).theta, rtol=1e-4, atol=1e-5)  # chunks leave everything, but for rounding
    assert np.isfinite(Plain(model).theta).all() and run.epsilon > 0


@pytest.mark.parametrize(
    "text",
    [
        "inner_momentum(flat(0.5))",
        "dice(flat(0.5), 0.1)",
        "momentum_per_sample(flat(0.5))",
        "disk(flat(0.5))",
        "dp_sat",
    ],
)
def test_a_resumed_run_is_the_whole_run(text: str, tmp_path: Any) -> None:
    options: Any = {
        "method": text,
        "noise_multiplier": 1.0,
        "steps": 6,
        "batch": 12,
        "noise": 1,
        "post": "heavy_ball(0.5) | low_pass",
    }
    whole = network()
    cw.train(whole, cw.cross_entropy, data(), **options)

    class Stop(Exception):
        pass

    def stop(private: cw.Private, _: Any) -> None:
        if private.steps_taken == 3:
            raise Stop

    with pytest.raises(Stop):
        cw.train(network(), cw.cross_entropy, data(), folder=tmp_path, progress=stop, **options)
    resumed = network(seed=9)
    cw.train(resumed, cw.cross_entropy, data(), folder=tmp_path, resume=True, **options)
    close(Plain(resumed).theta, Plain(whole).theta)
    assert not (tmp_path / "private-state.pt").exists(), "private state goes when the run ends"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("momentum_per_sample(flat(1.0))", "batch=12"),
        ("batch_clipping(flat(1.0))", "public"),
        ("self_augmentation(flat(1.0), augment='own')", "views="),
        ("self_augmentation(flat(1.0), augment='crop')", "pictures"),
        ("bam(bam(flat(1.0)))", "once"),
    ],
)
def test_what_a_method_lacks_is_said_before_training(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        begun(network(), data(), method=text, steps=2, batch=6)


# ── post-processing ──────────────────────────────────────────────────────────────────────────────────────────────────


def filtered(text: str, released: Sequence[Array], noise: float = 0.0) -> list[Array]:
    post, state, out = postprocess.parse(text), None, []
    assert str(postprocess.parse(str(post))) == str(post)
    for g in released:
        state, update = post.apply(
            state, {"a": torch.from_numpy(g[:2]), "b": torch.from_numpy(g[2:])}, {"a": noise, "b": noise}
        )
        out.append(torch.cat([update["a"], update["b"]]).numpy())
    return out


RELEASED = [np.random.default_rng(k).normal(size=5) for k in range(8)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("identity", RELEASED),
        ("heavy_ball(0.9)", naive.outer_momentum(RELEASED, 0.9)),
        ("outer_momentum(0.6)", naive.outer_momentum_as_printed(RELEASED, 0.6)),
        ("average(0.3)", naive.disk_filter(RELEASED, 0.3)),
        ("low_pass", naive.doppler(RELEASED, [-0.8], [0.1, 0.1])),
        ("low_pass((0.5, 0.2, 0.3), (-0.4, 0.1))", naive.doppler(RELEASED, [-0.4, 0.1], [0.5, 0.2, 0.3])),
        ("low_pass((1.0,), ())", RELEASED),
        ("heavy_ball(0.0)", RELEASED),
        ("average(1.0) | outer_momentum(1.0)", RELEASED),
        ("heavy_ball(0.9) | average(0.3)", naive.disk_filter(naive.outer_momentum(RELEASED, 0.9), 0.3)),
    ],
)
def test_filters_are_their_recursions(text: str, expected: Sequence[Array]) -> None:
    close(filtered(text, RELEASED), expected)


@pytest.mark.parametrize(
    ("inputs", "outputs", "step"),
    [
        ((0.0, 1.0), (), 1),  # a delay: nothing comes out of the first step
        ((0.5, -0.5, 1.0), (), 2),
        ((0.3, -0.1, -0.2, 1.0), (), 3),  # cancels but for rounding
        ((1.0, -0.5, 0.5), (0.5,), 2),
        ((1e-50,), (), 1),  # float32 has no such number
        ((1e30, 1.0), (), 1),
    ],
)
def test_a_filter_that_would_divide_by_nothing_is_refused_with_its_step(
    inputs: tuple[float, ...], outputs: tuple[float, ...], step: int
) -> None:
    with pytest.raises(InputError, match=f"gain must not vanish .* at step {step} of .* write a positive input first"):
        postprocess.low_pass(inputs, outputs)


@pytest.mark.parametrize(
    ("inputs", "outputs"), [((1e-6, 1.0), ()), ((0.5, -0.4, 0.9), ()), ((1.0, -1.5, 0.7), (-0.9,)), ((0.1,), (-0.999,))]
)
def test_a_filter_whose_gain_never_vanishes_gives_a_constant_back(
    inputs: tuple[float, ...], outputs: tuple[float, ...]
) -> None:
    post, state = postprocess.low_pass(inputs, outputs), None
    constant = {"a": torch.tensor([1.0, -2.0])}
    for _ in range(50):
        state, update = post.apply(state, constant, {"a": 0.0})
        torch.testing.assert_close(update, constant, rtol=1e-4, atol=0)


def test_adam_bc_takes_the_noise_out_of_the_second_moment() -> None:
    theta, moments = np.zeros(5), (np.zeros(5), np.zeros(5))
    for t, (g, update) in enumerate(zip(RELEASED, filtered("adam_bc(0.9, 0.99, 1e-3)", RELEASED, 0.5), strict=True), 1):
        following, moments = naive.adam_bc_step(theta, moments, t, g, 0.1, 0.5, 1e-3, (0.9, 0.99))
        close(-0.1 * update, following - theta, rtol=1e-7)
        theta = following


@pytest.mark.parametrize(
    "text",
    [
        "heavy_ball(1.0)",
        "average(0)",
        "low_pass((0.1,), (-1.1,))",
        "low_pass((), ())",
        "low_pass((0.5, -0.5), ())",
        "adam_bc(1.0)",
        "adam_bc(floor=1e-50)",
        "adam_bc(floor=1e50)",
        "flat(1.0)",
        "heavy",
        "",
    ],
)
def test_wrong_filters_are_input_errors_of_one_line(text: str) -> None:
    with pytest.raises(InputError) as caught:
        postprocess.parse(text)
    assert "\n" not in str(caught.value)
