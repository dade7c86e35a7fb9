"""One private step: equal to the slow transcription, divided by the expected batch, counted before it is used.

Receives: Private, with a seeded stream whose noise the test draws again.
Gives: θ after a step against naive.dp_sgd_step, and every way of using a step wrongly refused.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clipwise as cw
import naive
from clipwise.methods import parse
from clipwise.noise import release
from clipwise.randomness import SeededStream
from clipwise.records import from_dense
from clipwise.sampling import poisson
from clipwise.step import EACH, MARGIN, fed_back, private_sum
from clipwise.types import InputError, PoissonGaussian, Refused
from made import Made

ROWS, SEED = 50, 5


def data(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, 4, generator=generator, dtype=dtype) * 3, torch.randint(0, 3, (ROWS,), generator=generator)


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


PLAN = {"noise_multiplier": 1.5, "steps": 3, "batch": 20, "noise": SEED, "delta": 1e-3, "self_test": False}


def private_for(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, samples: Any = None, **changed: Any
) -> cw.Private:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.7)
    return cw.make_private(model, optimizer, data() if samples is None else samples, **{**PLAN, **changed})


def theta(model: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().double().flatten() for p in model.parameters()]).numpy()


def sample_gradients(model: nn.Module, indices: Tensor) -> np.ndarray:
    """[sample, parameter], one sample at a time by plain autograd."""
    x, y = data()
    rows = []
    for i in indices.tolist():
        loss = nn.functional.cross_entropy(model(x[i : i + 1]), y[i : i + 1])
        rows.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).numpy())
    return np.array(rows).reshape(len(rows), len(theta(model)))


@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize(
    ("text", "weigh", "clip_norm"),
    [
        ("flat(0.9)", naive.flat, 0.9),
        ("normalised(0.3)", naive.normalised, 0.3),
        ("automatic(1.0, gamma=0.1)", lambda g, c: naive.automatic(g, c, 0.1), 1.0),
        ("psac(2.0, r=0.2)", lambda g, c: naive.psac(g, c, 0.2), 2.0),
        ("global_(3.0)", naive.global_, 3.0),
        (
            "layerwise({'0': flat(0.3), '2': flat(0.4)})",
            lambda g, c: np.concatenate(naive.layerwise([g[:, :25], g[:, 25:]], [0.3, 0.4])),
            0.5,
        ),
    ],
)
def test_steps_are_dp_sgd_on_explicit_gradients_with_the_same_noise(
    text: str, weigh: naive.Weigh, clip_norm: float, chunk: int
) -> None:
    model = mlp()
    private = private_for(model, method=text, chunk=chunk)
    for step, batch in enumerate(private.batches()):
        stream = SeededStream(SEED).at(step)
        indices = poisson(ROWS, 20 / ROWS, stream)
        assert torch.equal(indices, batch.indices)
        before = theta(model)
        expected = naive.dp_sgd_step(
            before,
            sample_gradients(model, indices),
            lambda g, c: weigh(g, c) / (1 + MARGIN + EACH * chunk),
            clip_norm,
            1.5,
            stream.normal([len(before)]).numpy(),
            expected_batch=20,  # whatever was drawn
            learning_rate=0.7,
        )
        private.step(batch)
        np.testing.assert_allclose(theta(model), expected, rtol=1e-9, atol=1e-12)
    assert private.steps_taken == 3 and private.ledger.releases == 3


def test_the_sum_is_divided_by_the_expected_batch_and_not_by_the_realised_one() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, 4, generator=generator, dtype=torch.float64).expand(ROWS, 4)  # every sample is the same
    y = torch.zeros(ROWS, dtype=torch.long)
    moves, sizes = [], []
    for seed in range(6):
        model = mlp()
        before = theta(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        how = {"noise_multiplier": 1e-9, "steps": 1, "noise": seed, "method": cw.normalised(1.0)}
        private = private_for(model, optimizer, (x, y), **how)
        for batch in private.batches():
            private.step(batch)
            sizes.append(len(batch))
        moves.append(float(np.linalg.norm(theta(model) - before)))
    assert len(set(sizes)) > 1
    np.testing.assert_allclose(moves, np.array(sizes) / 20, rtol=2e-4)


def test_an_empty_batch_counts_and_moves_the_model_by_noise_alone() -> None:
    model = mlp()
    private = private_for(model, batch=1, steps=30, method=cw.flat(0.5))
    empty = 0
    for step, batch in enumerate(private.batches()):
        before = theta(model)
        private.step(batch)
        assert private.ledger.releases == step + 1
        if not len(batch):
            empty += 1
            noise = 1.5 * 0.5 * SeededStream(SEED).at(step).normal([len(before)]).numpy()
            np.testing.assert_allclose(theta(model), before - 0.7 * noise, rtol=1e-9, atol=1e-12)
    assert empty > 3, "this seed draws empty batches"


class Watched(torch.optim.SGD):
    """Writes down how much the ledger held when the optimizer was called."""

    ledger: Any = None
    seen: tuple[int, ...] = ()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen = (*self.seen, self.ledger.releases)
        super().step(closure)


@pytest.mark.parametrize(
    ("method", "post"),
    [
        *((text, None) for text in ("flat", "dp_sat", "disk", "inner_momentum", "dice", "momentum_per_sample")),
        *(("flat", text) for text in ("heavy_ball(0.9)", "low_pass", "average", "adam_bc")),
    ],
)
@pytest.mark.parametrize("frozen", [True, False])
def test_a_layer_that_is_frozen_or_unfrozen_later_is_trained_so_or_refused_before_anything_is_released(
    method: str, post: str | None, frozen: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
    model[0].requires_grad_(frozen)
    data = torch.randn(60, 4), torch.randint(0, 2, (60,))
    size = 60 if method == "momentum_per_sample" else 20
    private = private_for(model, samples=data, method=method, post=post, steps=6, batch=size, self_test=True)
    for batch in private.batches():
        if private.steps_taken == 3:
            model[0].requires_grad_(not frozen)
            before = model[0].weight.detach().clone()
            if method in ("flat", "dp_sat") and (post is None or frozen):
                private.step(batch)
                assert torch.equal(model[0].weight, before) is frozen
            else:
                with pytest.raises(InputError, match=r"0\.bias is (no longer|only now) trained"):
                    private.step(batch)
                assert private.ledger.releases == 3
            return
        private.step(batch)


def test_a_release_is_recorded_before_the_optimizer_sees_it() -> None:
    model = mlp()
    optimizer = Watched(model.parameters(), lr=0.1)
    private = private_for(model, optimizer)
    optimizer.ledger = private.ledger
    for batch in private.batches():
        private.step(batch)
    assert optimizer.seen == (1, 2, 3)
    assert private.ledger.entries == [(PoissonGaussian(1.5, 20 / ROWS), 3)]


def test_a_release_that_cannot_be_recorded_is_not_used() -> None:
    model = mlp()
    private = private_for(model)
    before = theta(model)

    def full(event: Any, **_: Any) -> None:
        raise InputError("cannot write the ledger")

    private.ledger.record = full  # type: ignore[method-assign]
    with pytest.raises(InputError, match="cannot write the ledger"):
        private.step(next(private.batches()))
    assert (theta(model) == before).all() and private.steps_taken == 0
    assert all(p.grad is None for p in model.parameters())


def test_nothing_is_left_on_the_model_after_a_step() -> None:
    model = mlp()
    attributes = {name: sorted(vars(module)) for name, module in model.named_modules()}
    private = private_for(model)
    for batch in private.batches():
        private.step(batch)
        assert all(p.grad is None and not p._backward_hooks for p in model.parameters())
    assert {name: sorted(vars(module)) for name, module in model.named_modules()} == attributes
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())


# Uses that would not be Poisson samples, or not noisy


def test_a_batch_of_another_origin_is_refused() -> None:
    private, other = private_for(mlp()), private_for(mlp())
    for foreign in (data(), torch.arange(5), None, next(other.batches())):
        with pytest.raises(Refused, match="Poisson"):
            private.step(foreign)  # type: ignore[arg-type]
    assert private.ledger.releases == 0


def test_a_batch_made_by_hand_is_refused() -> None:
    private = private_for(mlp())
    batch = next(private.batches())
    for tampered in (replace(batch), replace(batch, indices=torch.tensor([1]))):
        with pytest.raises(Refused, match="Poisson"):
            private.step(tampered)


def test_a_batch_used_twice_is_refused() -> None:
    private = private_for(mlp())
    batch = next(private.batches())
    private.step(batch)
    with pytest.raises(Refused, match="once"):
        private.step(batch)
    assert private.ledger.releases == 1


def test_a_batch_that_was_skipped_is_an_error() -> None:
    private = private_for(mlp())
    with pytest.raises(InputError, match="was not used"):
        for _ in private.batches():
            pass


def test_asking_again_gives_the_batch_that_was_drawn_so_nobody_can_choose_among_draws() -> None:
    private = private_for(mlp(), noise="secure")
    drawn = [next(private.batches()) for _ in range(5)]
    assert all(torch.equal(batch.indices, drawn[0].indices) for batch in drawn)


def test_a_failed_step_does_not_draw_another_batch() -> None:
    model, broken = mlp(), [True]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if broken[0]:
            raise RuntimeError("out of memory")
        return cw.cross_entropy(model, batch)

    private = private_for(model, loss=loss, noise="secure")
    first = next(private.batches())
    with pytest.raises(RuntimeError):
        private.step(first)
    broken[0] = False
    again = next(private.batches())
    assert torch.equal(first.indices, again.indices)
    private.step(again)
    assert private.ledger.releases == 1


def test_a_gradient_without_noise_on_the_model_is_refused_and_named() -> None:
    model = mlp()
    private = private_for(model)
    model(data()[0]).sum().backward()
    with pytest.raises(Refused, match=r"0\.weight"):
        private.step(next(private.batches()))
    model.zero_grad()
    private.step(next(private.batches()))


def test_a_gradient_without_noise_on_a_frozen_parameter_of_the_optimizer_is_refused() -> None:
    model = mlp()
    optimizer = torch.optim.SGD([{"params": model[0].parameters()}, {"params": model[2].parameters()}], lr=1.0)
    model(data()[0]).square().mean().backward()  # looking at the data before training
    model[0].requires_grad_(False)
    for p in model[2].parameters():
        p.grad = None
    before = model[0].weight.detach().clone()
    try:
        private = private_for(model, optimizer)
        private.step(next(private.batches()))
    except Refused:
        pass
    assert torch.equal(model[0].weight, before), "a raw gradient reached the optimizer"


def test_a_frozen_layer_stays_and_the_rest_is_noisy() -> None:
    model = mlp()
    model[0].requires_grad_(False)
    before = [p.detach().clone() for p in model.parameters()]
    private = private_for(model)
    private.step(next(private.batches()))
    assert [torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True)] == [True, True, False, False]


def test_a_batchnorm_that_wakes_up_during_training_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
    model.eval()
    model[1].requires_grad_(False)
    private = private_for(model)
    private.step(next(private.batches()))
    statistics = model[1].running_mean.clone()
    model.train()  # what everyone writes after an evaluation
    with pytest.raises(Refused, match="BatchNorm1d"):
        private.step(next(private.batches()))
    assert torch.equal(model[1].running_mean, statistics)


@pytest.mark.parametrize("text", ["dp_sat(bam(flat(1.0)))", "inner_momentum(flat(1.0))", "disk(flat(1.0))"])
def test_a_change_of_mode_on_the_way_is_self_tested_also_where_the_method_looks_elsewhere(text: str) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.1), nn.Linear(5, 3)).double()
    private = private_for(model, method=text, self_test=True)
    private.step(next(private.batches()))
    model.eval()
    private.step(next(private.batches()))
    assert private.steps_taken == 2


def test_a_method_that_never_looks_at_the_parameters_themselves_is_self_tested_on_plain_rows() -> None:
    def probe(engine: Any, rows: Any) -> Any:
        return engine.at({name: 0.5 * p for name, p in engine.parameters.items()}).gradients(rows)

    private = private_for(mlp(), method=replace(cw.flat(1.0), probe=probe), self_test=True)
    private.step(next(private.batches()))
    assert private.steps_taken == 1


@pytest.mark.parametrize("size", [1, 4])
def test_a_clip_norm_follows_the_share_of_units_and_not_of_samples(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from clipwise import private as loop

    found: list[Any] = []
    monkeypatch.setattr(loop, "release", lambda *given: found.append(release(*given)) or found[-1])
    private = private_for(mlp(), method=cw.p_average(cw.adaptive(1.0, quantile=0.7, rate=0.3), size=size))
    for batch in private.batches():
        now = private.method.bound
        private.step(batch)
        expected = naive.adaptive_update(now, float(found[-1].counts["count"]), 20 / size, 0.7, 0.3)
        assert private.method.bound == pytest.approx(expected, rel=1e-6)


def test_an_optimizer_that_fails_leaves_no_gradient_and_the_method_of_the_next_step() -> None:
    model = mlp()
    private = private_for(model, method="schedule([(0, flat(1.0)), (1, flat(2.0))])")

    def full(*_: Any) -> None:
        raise OSError("disk full")

    hook = private.optimizer.register_step_pre_hook(full)
    with pytest.raises(OSError, match="disk full"):
        private.step(next(private.batches()))
    hook.remove()
    assert all(p.grad is None for p in model.parameters())
    assert private.ledger.releases == private.steps_taken == private.method.settings["step"] == 1
    private.step(next(private.batches()))
    assert private.ledger.releases == 2


def test_a_sample_that_comes_in_several_rows_is_refused() -> None:
    crops = Made(ROWS, lambda i: (data()[0][i].expand(3, 4), data()[1][i].expand(3)))

    def together(samples: list[Any]) -> Any:  # each of a sample's three rows would be clipped by itself
        return tuple(torch.cat(column) for column in zip(*samples, strict=True))

    def one_step() -> None:
        private = private_for(mlp(), samples=crops, collate=together, self_test=True)
        private.step(next(private.batches()))

    with pytest.raises(InputError, match="row"):
        one_step()


def test_what_was_observed_counts_samples_and_non_finite_ones() -> None:
    like = {"w": torch.zeros(2)}
    rows = torch.tensor([[1.0, 2.0], [float("nan"), 0.0], [3.0, 4.0]])
    chunk = from_dense({"w": rows}, like)
    private, observed = private_sum(cw.flat(1.0), like, [chunk, chunk])
    assert (observed.samples, observed.non_finite) == (6, 2)
    expected = 2 * torch.tensor(naive.flat(rows[[0, 2]].numpy(), 1.0)).float() / (1 + MARGIN)
    torch.testing.assert_close(private.parts[0].value["w"].float(), expected)


def test_sums_are_float32_or_better_whatever_the_model_runs_in() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        like = {"w": torch.zeros(2, dtype=dtype)}
        private, _ = private_sum(cw.adaptive(), like, [from_dense({"w": torch.ones(3, 2, dtype=dtype)}, like)])
        for part in private.parts:
            assert all(torch.finfo(v.dtype).eps <= torch.finfo(torch.float32).eps for v in part.value.values())


@pytest.mark.parametrize("text", ["adaptive(0.5)", "schedule([(0, flat(0.5)), (1, global_(5.0))])"])
def test_the_method_of_the_next_step_comes_from_what_was_released(text: str) -> None:
    private = private_for(mlp(), method=text)
    bounds = []
    for batch in private.batches():
        bounds.append(private.method.bound)
        private.step(batch)
    assert len(set(bounds)) > 1
    assert parse(str(private.method)).bound == private.method.bound


@pytest.mark.parametrize("post", [None, "heavy_ball(0.9)", "average(0.1)"])
def test_an_optimizer_that_writes_into_its_gradients_changes_nothing_that_is_kept(post: str | None) -> None:
    ends, kept = [], []
    for foreach in (False, True):  # SGD with Nesterov's momentum and foreach writes into gradients
        model = mlp(torch.float32)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=foreach)
        private = private_for(model, optimizer, data(torch.float32), steps=4, post=post)
        for batch in private.batches():
            private.step(batch)
        assert private.state.released is not None
        ends.append(theta(model))
        kept.append(torch.cat([value.flatten() for value in private.state.released.values()]))
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(kept[0], kept[1])


def test_a_filter_is_told_the_deviation_that_the_released_gradient_has() -> None:
    told: list[float] = []

    def listening(state: Any, gradient: Any, noise: Any) -> tuple[Any, Any]:
        told.extend(noise.values())
        return state, gradient

    model = mlp()
    private = private_for(model, steps=60, batch=20)
    vars(private)["post"] = replace(private.post, apply=listening)
    away = []
    for batch in private.batches():
        before = sample_gradients(model, batch.indices)
        private.step(batch)
        weights = np.minimum(1, 1 / np.linalg.norm(before, axis=1)) if len(before) else np.zeros(0)
        assert private.state.released is not None
        mean = torch.cat([value.double().flatten() for value in private.state.released.values()]).numpy()
        away.append(mean - (weights @ before if len(before) else 0) / 20)
    assert set(told) == {1.5 / 20}  # σ C over the expected batch
    assert float(np.std(away)) == pytest.approx(1.5 / 20, rel=0.05)


@pytest.mark.parametrize("method", [cw.flat(), cw.dice(cw.flat())], ids=str)
def test_a_second_chunk_is_refused_where_one_was_promised(method: cw.Method) -> None:
    values = {"w": torch.ones(2, 3)}
    chunk = from_dense(values, {"w": torch.zeros(3)})
    with pytest.raises(InputError, match="expected one chunk"):
        private_sum(method, {"w": torch.zeros(3)}, [chunk, chunk], alone=True)


def test_what_clipping_cut_off_is_the_same_for_the_only_chunk() -> None:
    """Also beside a sample that is not finite: of it nothing is cut off."""
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [torch.inf, 1.0], [torch.nan, 0.0]])
    like = {"w": torch.zeros(2)}
    found = [
        private_sum(cw.dice(cw.flat(1.0)), like, [from_dense({"w": rows}, like)], alone=alone)[0].residual
        for alone in (False, True)
    ]
    for residual in found:
        assert residual is not None
        torch.testing.assert_close(residual["w"].double(), torch.tensor([2.4, 3.2]).double(), rtol=1e-4, atol=1e-4)
    assert torch.equal(found[0]["w"], found[1]["w"].double())  # type: ignore[index]


@pytest.mark.parametrize("memory", ["full", "none", "bounded"])
def test_a_memory_is_in_float64_and_no_part_of_the_step_that_it_came_from(memory: str) -> None:
    """A compiled step writes its next sums where these lie."""
    feedback = parse(f"dice(flat(1.0), memory={memory!r})").feedback
    residual = {"w": torch.tensor([2.4, 3.2])}
    assert feedback is not None
    total, error = {"w": torch.zeros(2).double()}, {"w": torch.ones(2).double()}
    _, following = fed_back(feedback, total, error, residual, 8.0, last=False)
    assert following is not None and following["w"].dtype == torch.float64
    before = following["w"].clone()
    residual["w"].zero_()
    assert torch.equal(following["w"], before)


def test_a_batch_is_not_read_by_hand() -> None:
    batch = next(private_for(mlp()).batches())
    for reading in (lambda: batch[0], lambda: list(batch)):
        with pytest.raises(InputError, match=r"holds no rows: write private\.step\(batch\)"):
            reading()
    assert repr(batch) == "PoissonBatch(step=0)"  # not who was drawn


def test_a_loop_over_epochs_around_the_batches_of_all_epochs_is_told_so() -> None:
    private = private_for(mlp())
    for batch in private.batches():
        private.step(batch)
    with pytest.warns(UserWarning, match="all 3 steps of this run are taken.*without a loop over epochs"):
        assert list(private.batches()) == []


def test_the_statement_names_every_method_that_was_exchanged_for_another() -> None:
    torch.manual_seed(0)
    model, data = nn.Linear(3, 2), (torch.randn(40, 3), torch.randint(2, (40,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = cw.make_private(model, optimizer, data, batch=8, steps=4, noise_multiplier=1.0, delta=1e-5, noise=1)
    private.method = cw.flat(2.0)  # before anything was released
    for batch in private.batches():
        private.step(batch)
        if private.steps_taken == 2:
            private.method = cw.flat(3.0)
    assert private.statement().method == f"{cw.flat(2.0)}; from step 2: {cw.flat(3.0)}"
