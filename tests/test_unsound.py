"""Ways to a false ε through the public interface, each tried here: they are refused, or they change nothing.

Receives: small runs, and somebody who tampers with them.
Gives: that no sample moves more than was accounted, that no release goes uncounted and that nothing private is kept.
"""

import dataclasses
import random
import shutil
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clipwise as cw
from clipwise.methods import Count
from clipwise.noise import release
from clipwise.randomness import SeededStream
from clipwise.records import trainable
from clipwise.records.chance import generators, seeded
from clipwise.step import EACH, private_sum
from clipwise.types import Batch, Gaussian, InputError, PoissonGaussian, Refused
from made import Made

ROWS = 12
X = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(ROWS) % 2
OUTLIER = 5
BLOCKS = "dice(flat(1.0), 0.01, memory='blocks', blocks=3)"


def total(model: nn.Module, batch: Batch) -> Tensor:
    """A loss whose gradient is the sample itself, whatever the parameters."""
    outputs: Tensor = model(batch[0])
    return outputs.sum(1)


def private_for(model: nn.Module | None = None, data: Any = (X, Y), **changed: Any) -> cw.Private:
    model = nn.Linear(3, 2, bias=False) if model is None else model
    settings = {"noise_multiplier": 1.0, "steps": 4, "batch": 6, "delta": 1e-3, "noise": 1, **changed}
    optimizer = settings.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    return cw.make_private(model, optimizer, data, **settings)


def sum_of(x: Tensor, **how: Any) -> Tensor:
    """The sum of one step in which all take part, all but without noise."""
    private = private_for(data=(x, Y), loss=total, batch=ROWS, noise_multiplier=1e-9, **how)
    private.step(next(private.batches()))
    assert private.state.released is not None
    return ROWS * torch.cat([g.flatten() for g in private.state.released.values()])


def with_an_outlier() -> Tensor:
    other = X.clone()
    other[OUTLIER] = torch.tensor([0.0, 1e6, 0.0])
    return other


# --------------------------------------------------------------------- what one sample moves


def in_the_wrong_order(rows: Batch, count: int, generator: torch.Generator) -> Batch:
    return tuple(t.repeat(count, *(1 for _ in t.shape[1:])) for t in rows)


def mixed_up(rows: Batch, count: int, generator: torch.Generator) -> Batch:
    x, y = rows
    return (x + 10 * x.mean(0)).repeat_interleave(count, 0), y.repeat_interleave(count)


@pytest.mark.parametrize("views", [in_the_wrong_order, mixed_up])
def test_views_of_one_s_own_cannot_put_a_sample_into_another_s_gradient(views: Any) -> None:
    method = cw.self_augmentation(cw.normalised(1.0), 2, "own")
    moved = sum_of(X, method=method, views=views) - sum_of(with_an_outlier(), method=method, views=views)
    assert float(moved.norm()) <= 2.0  # one term was replaced by another


class Tied(nn.Module):
    """A table used twice, whose two gradients nearly cancel where x is nearly z."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(50, 64))

    def forward(self, ids: Tensor, x: Tensor, z: Tensor) -> Tensor:
        looked_up = nn.functional.embedding(ids, self.table)
        return (looked_up * x).sum(1) - nn.functional.linear(z, self.table)[:, 0]


@pytest.mark.parametrize(("count", "apart"), [(255, 0.01), (1023, 0.1), (4095, 0.03)])
def test_one_sample_more_in_a_chunk_that_cancels_moves_its_rounded_sum_by_no_more_than_the_bound(
    count: int, apart: float
) -> None:
    model = Tied()

    def summed(x: Tensor, z: Tensor) -> Tensor:
        rows = (torch.zeros(len(x), dtype=torch.long), x, z)
        gradients = cw.per_sample(model, lambda model, batch: model(*batch), rows)
        found, _ = private_sum(cw.flat(1.0), trainable(model), [gradients], most=count + 1)
        return found.parts[0].value["table"].double()

    for seed in range(6):
        draw = torch.Generator().manual_seed(seed)
        base, beside = torch.randn(2, 64, generator=draw)
        x, z = base.repeat(count, 1), (base + apart * beside).repeat(count, 1)
        for sign in (1, -1):  # one plain sample among them, or not
            place = count // 2
            x[place], z[place] = sign * base, 0
            others = torch.arange(count) != place
            assert (summed(x, z) - summed(x[others], z[others])).norm() <= 1


def test_the_margin_follows_the_chunk_s_size_and_not_who_was_drawn() -> None:
    lengths = [float(sum_of(100 * X[:1].repeat(ROWS, 1), chunk=chunk).norm()) / ROWS for chunk in (ROWS, 100_000)]
    assert lengths[0] == pytest.approx(1, abs=1e-4)
    assert lengths[1] == pytest.approx(1 / (1 + EACH * 100_000), abs=1e-4) and EACH * 100_000 > 0.04


def test_views_of_one_s_own_that_are_too_many_are_an_error() -> None:
    def twice_as_many(rows: Batch, count: int, generator: torch.Generator) -> Batch:
        return tuple(t.repeat_interleave(2 * count, 0) for t in rows)

    with pytest.raises(InputError, match="2 views of a row, got 4"):
        private_for(method="self_augmentation(flat(1.0), views=2, augment='own')", views=twice_as_many)


@pytest.mark.parametrize("chunk", [1, 2, 5, ROWS])
def test_views_of_one_s_own_are_a_sample_s_own_whoever_else_is_in_its_chunk(chunk: int) -> None:
    def flipped(rows: Batch, count: int, generator: torch.Generator) -> Batch:
        x, y = (t.repeat_interleave(count, 0) for t in rows)
        return x * (2.0 * (torch.rand(len(x), 1, generator=generator) < 0.5) - 1), y

    method = cw.self_augmentation(cw.flat(1e3), 3, "own")
    assert torch.allclose(
        sum_of(X, method=method, views=flipped, chunk=3 * chunk), sum_of(X, method=method, views=flipped), atol=5e-3
    )


def test_one_view_of_each_sample_is_another_one_in_every_step() -> None:
    private = private_for(nn.Conv2d(1, 1, 8), data=(torch.randn(ROWS, 1, 8, 8), Y), loss=lambda m, b: m(b[0]).flatten(),
                          method="self_augmentation(flat(1.0), views=1)", batch=ROWS)  # fmt: skip
    seen: list[int] = []
    engine = private._passes.engine
    private._passes.engine = lambda samples, seed, state: (seen.append(seed), engine(samples, seed, state))[1]  # type: ignore[method-assign]
    for batch in private.batches():
        private.step(batch)
    assert len(set(seen)) == private.steps


def centred(items: list[Any]) -> Batch:
    x = torch.stack([item for item, _ in items])
    return x - x.mean(0), torch.zeros(len(x), dtype=torch.long)


def test_a_collate_function_that_mixes_samples_is_refused() -> None:
    with pytest.raises(Refused, match="collate"):
        private_for(data=Made(ROWS, lambda i: (X[i], 0)), collate=centred)


@pytest.mark.parametrize("seed", [None, 7])
def test_what_dropout_and_data_draw_follows_the_run_s_generator_and_not_torch_s_seed(seed: int | None) -> None:
    drawn = Made(ROWS, lambda i: (X[i] + float(np.random.random()) + random.random() + torch.rand(()), Y[i]))

    def released(noise: int | str) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Dropout(0.5), nn.Linear(3, 2, bias=False))
        given = {"noise_multiplier": 1e-9, "batch": ROWS, "loss": total, "self_test": False, "noise": noise}
        private = private_for(model, drawn, **given)
        if seed is not None:
            seeded(seed)
        before = generators()
        private.step(next(private.batches()))
        assert generators() == before, "the user's own draws go on as if there were no step"
        assert private.state.released is not None
        return private.state.released["1.weight"]

    assert torch.allclose(released(1), released(1), atol=1e-6), "the same run"
    assert not torch.allclose(released(1), released(2), atol=1e-2), "another generator, other masks"
    assert not torch.allclose(released("secure"), released("secure"), atol=1e-2)


class Drops(nn.Module):
    """Dropout as a function: no module says that it is there."""

    p = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, self.p)


class Masks(nn.Module):
    """Dropout by numbers that are not torch's."""

    p = 0.0

    def __init__(self, draw: Callable[[int], Any]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x if not self.p else x * (torch.tensor(self.draw(x.numel())).view(x.shape) > self.p)


BY_NUMPY, BY_PYTHON = (Masks(draw) for draw in (np.random.rand, lambda n: [random.random() for _ in range(n)]))


@pytest.mark.parametrize("make", [nn.Dropout, lambda p: Drops(), lambda p: BY_NUMPY, lambda p: BY_PYTHON])
def test_a_dropout_that_begins_later_follows_the_run_s_generator_too(make: Any) -> None:
    def moved(seed: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(make(0.0), nn.Linear(3, 2, bias=False))
        model[0].p = 0.0
        private = private_for(model, loss=total, noise_multiplier=1e-9, batch=ROWS, self_test=False)
        batches = private.batches()
        private.step(next(batches))
        model[0].p = 0.5
        seeded(seed)
        private.step(next(batches))
        assert private.state.released is not None
        return private.state.released["1.weight"]

    assert torch.allclose(moved(1), moved(2), atol=1e-6)


class Waits(nn.Dropout):
    """Dropout that does something else before, and keeps its first mask from then on."""

    def __init__(self) -> None:
        super().__init__(0.5)
        self.mask: Tensor | None = None

    def before(self) -> None:
        """Nothing yet."""

    def forward(self, x: Tensor) -> Tensor:
        self.before()
        made = super().forward(x)
        self.mask = (made == 0) & (x != 0) if self.mask is None else self.mask
        return made


def test_runs_in_two_threads_do_not_put_back_what_the_other_has_seeded() -> None:
    # the second run's first mask was the one of torch's own seed, which the first run had put back meanwhile
    begun, ended = threading.Event(), threading.Event()
    drops = Waits(), Waits()
    data = torch.randn(ROWS, 64), Y  # so wide that no mask is another by chance
    runs = [private_for(nn.Sequential(drop, nn.Linear(64, 2)), data, batch=ROWS) for drop in drops]

    def waits() -> None:
        begun.set()
        ended.wait(0.1)

    drops[0].before, drops[1].before = lambda: begun.wait(0.1), waits  # type: ignore[method-assign]
    drops[0].mask = drops[1].mask = None
    batches = [next(run.batches()) for run in runs]
    threads = [threading.Thread(target=run.step, args=(batch,)) for run, batch in zip(runs, batches, strict=True)]
    seeded(7)
    threads[0].start()
    while not runs[0]._turn.locked():
        pass
    threads[1].start()
    threads[0].join()
    ended.set()
    threads[1].join()
    mask = drops[1].mask
    assert mask is not None
    seeded(7)
    assert not torch.equal(mask, nn.functional.dropout(torch.ones(mask.shape)) == 0)


def test_a_data_set_that_draws_at_random_is_not_taken_for_one_that_mixes() -> None:
    private_for(data=Made(ROWS, lambda i: (X[i] + torch.randn(3), 0)))


@pytest.mark.parametrize(
    ("method", "batch"), [("momentum_per_sample(rate=0.5)", ROWS), ("dice(memory='blocks', blocks=3)", 3)]
)
def test_a_data_set_that_is_shuffled_on_the_way_is_refused_where_a_sample_is_known_by_its_place(
    method: str, batch: int
) -> None:
    # in blocks of three steps, each of which pays for one draw, a sample that moved was drawn three times
    for chosen, refused in ((method, True), ("flat()", False)):
        data = Made(ROWS, lambda i: (X[i], 0))
        private = private_for(data=data, method=chosen, batch=batch)
        batches = private.batches()
        private.step(next(batches))
        private.step(next(batches))
        data.make = lambda i: (X[i - 1], 0)
        with pytest.raises(Refused, match="shuffle nothing") if refused else nullcontext():
            private.step(next(batches))


def test_a_probe_that_mixes_samples_is_refused() -> None:
    def mixing(engine: Any, rows: Batch) -> cw.SampleGradients:
        x, y = rows
        return engine.gradients((x + x.mean(0), y))

    with pytest.raises(Refused, match="probe"):
        private_for(method=dataclasses.replace(cw.flat(1.0), probe=mixing))


@pytest.mark.parametrize("self_test", [True, False])
def test_a_probe_that_puts_a_sample_into_several_terms_is_refused(self_test: bool) -> None:
    def twice(engine: Any, rows: Batch) -> cw.SampleGradients:
        return engine.gradients(tuple(torch.cat([t, t]) for t in rows))

    def step() -> None:
        private = private_for(method=dataclasses.replace(cw.flat(1.0), probe=twice), self_test=self_test)
        private.step(next(private.batches()))

    with pytest.raises(Refused, match="one gradient per sample"):
        step()


@pytest.mark.parametrize("value", [1e6, float("nan"), float("inf")])
def test_a_count_that_breaks_its_promise_is_held_to_a_half(value: float) -> None:
    method = dataclasses.replace(cw.flat(1.0), count=Count(lambda norms: torch.full_like(norms, value), 0.5))
    model = nn.Linear(3, 2)
    private, _ = private_sum(method, trainable(model), [cw.per_sample(model, cw.cross_entropy, (X, Y))])
    assert abs(float(private.parts[-1].value["count"])) <= 0.5 * ROWS


def test_a_parameter_with_the_name_of_a_count_gets_the_noise_of_its_own_bound() -> None:
    parameters = {"count": nn.Parameter(torch.zeros(4000))}
    private, _ = private_sum(cw.adaptive(100.0), parameters, [])
    released = release(private, PoissonGaussian(1.0, 0.1), SeededStream(0))
    assert released.deviation == {"count": pytest.approx(100 / 0.99**0.5)}
    assert float(released.gradient["count"].std()) == pytest.approx(100 / 0.99**0.5, rel=0.05)


@pytest.mark.parametrize(("bound", "length"), [(2.2e-45, 1.0), (1e-30, 1e15), (1e-26, 1e18)])
def test_a_weight_too_small_for_its_format_does_not_round_a_term_above_the_bound(bound: float, length: float) -> None:
    model = nn.Linear(1, 1, bias=False)
    gradients = cw.per_sample(model, lambda m, b: m(b).sum(1), torch.tensor([[length]]))
    method = dataclasses.replace(cw.flat(), weigh=lambda norms: bound / norms, bound=bound)
    (part,) = private_sum(method, trainable(model), [gradients])[0].parts
    assert float(part.value["weight"].norm()) <= bound


def test_what_somebody_writes_into_a_batch_s_indices_changes_nothing() -> None:
    moved = []
    for tampered in (False, True):
        private = private_for(loss=total)
        batch = next(private.batches())
        if tampered:
            batch.indices[:] = OUTLIER  # one sample as often as a batch has places
        private.step(batch)
        assert private.state.released is not None
        moved.append(private.state.released["weight"])
    assert torch.equal(*moved)


@pytest.mark.parametrize("changes", [{"unit": 2}, {"recall": 0.5}, {"count": Count(lambda n: n, 0.1)}])
def test_feedback_put_together_by_hand_has_no_proof_and_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(Refused, match="no privacy proof"):
        private_for(method=dataclasses.replace(cw.dice(cw.flat(1.0), 0.1), **changes), batch=ROWS)


# --------------------------------------------------------------------- what a run changes on its way


@pytest.mark.parametrize(
    "name",
    [
        "noise_multiplier",
        "sampling_rate",
        "expected_batch",
        "dice",
        "data",
        "model",
        "optimizer",
        "ledger",
        "delta",
        "accountant",
        "steps",
    ],
)
def test_what_noise_and_events_are_made_of_cannot_be_changed_on_the_way(name: str) -> None:
    private = private_for(method=BLOCKS, batch=3)
    for _ in range(2):  # neither before the first step nor later
        with pytest.raises(Refused, match=f"{name} is fixed"):
            setattr(private, name, None)
        private.step(next(private.batches()))


@pytest.mark.parametrize("name", ["steps_taken", "state", "hidden"])  # the release that begins a block pays for it
def test_what_steps_leave_for_later_ones_cannot_be_changed_on_the_way(name: str) -> None:
    private = private_for(method=BLOCKS, batch=3)
    private.step(next(private.batches()))
    with pytest.raises(AttributeError):
        setattr(private, name, None)


def test_a_run_is_recorded_elsewhere_only_where_nothing_is_lost() -> None:
    private = private_for(spent=dear())
    with pytest.raises(Refused, match="a ledger only grows"):
        private.record_in(cw.Ledger())
    other = dear()
    other.record(Gaussian(9.0, "more"))
    private.record_in(other)
    private.step(next(private.batches()))
    assert other.releases == 3 and private.ledger is other
    with pytest.raises(Refused, match="a ledger only grows"):
        private.record_in(dear())


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("dice(flat(1.0), 0.01)", "dice(flat(100.0), 1.0)"),  # under the first one's noise
        (BLOCKS, "flat(1.0)"),  # drawn three times as often as the event would say
        ("flat(1.0)", "dice(flat(1.0), 0.01)"),
        ("flat(1.0)", "momentum_per_sample(flat(1.0))"),  # which is for full batches
    ],
)
def test_a_method_is_not_exchanged_for_one_with_other_private_state(first: str, then: str) -> None:
    private = private_for(method=first, batch=3)
    with pytest.raises(Refused, match="one bound for a whole run"):
        private.method = cw.methods.parse(then)


def test_a_second_run_of_a_model_warns_that_the_first_one_is_not_counted(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Linear(3, 2)
    first = private_for(model)
    private_for(model)  # nothing was released yet
    assert not [w for w in recwarn if "trained by a private run before" in str(w.message)]
    first = private_for(model)
    first.step(next(first.batches()))
    with pytest.warns(UserWarning, match="trained by a private run before"):
        private_for(model)
    recwarn.clear()
    assert private_for(model, spent=first.ledger).epsilon() == first.epsilon() > 0
    assert not [w for w in recwarn if "trained by a private run before" in str(w.message)]


@pytest.mark.parametrize("spent", [cw.Ledger, lambda: _ledger_of(Gaussian(9.0, "advice"))])
def test_something_else_that_was_spent_does_not_silence_the_warning(spent: Any) -> None:
    model = nn.Linear(3, 2)
    first = private_for(model)
    first.step(next(first.batches()))
    with pytest.warns(UserWarning, match="trained by a private run before"):
        private_for(model, spent=spent())


def test_runs_of_one_model_that_take_turns_warn(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Linear(3, 2)
    first, second = private_for(model), private_for(model)
    first.step(next(first.batches()))
    assert not list(recwarn)
    for _ in range(2):
        second.step(next(second.batches()))
    assert ["another private run trained this model since" in str(w.message) for w in recwarn] == [True]
    assert recwarn[0].filename == __file__  # the user's own line


def _ledger_of(event: Any) -> cw.Ledger:
    ledger = cw.Ledger()
    ledger.record(event)
    return ledger


@pytest.mark.parametrize("later", [False, True])
def test_a_method_that_is_exchanged_for_one_that_looks_elsewhere_is_tested(later: bool) -> None:
    class Before:
        """Mixes each row with the one that came before it."""

        last: Tensor | None = None

        def __call__(self, rows: Any, count: int, generator: torch.Generator) -> Any:
            before, self.last = self.last, rows[0].clone()
            return torch.cat([rows[0], rows[0] if before is None else before]), rows[1].repeat_interleave(count, 0)

    private = private_for(views=Before())
    method = cw.self_augmentation(cw.flat(), views=2, augment="own")
    private.method = cw.schedule([(0, cw.flat()), (1, method)]) if later else method
    with pytest.raises(Refused):
        private.step(next(private.batches()))
    assert not private.ledger.releases


def test_a_loss_that_trains_another_model_beside_is_refused() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        other(batch[0]).sum().backward()
        return cw.cross_entropy(model, batch)

    private = private_for(model, loss=loss, optimizer=optimizer, self_test=False)
    before = other.weight.detach().clone()
    with pytest.raises(Refused, match="has no noise"):
        private.step(next(private.batches()))
    assert torch.equal(other.weight, before) and private.ledger.releases == 0


# --------------------------------------------------------------------- what a model keeps, or mixes while it trains


class Keeps(nn.Module):
    """A layer that does something with its batch besides, in training mode."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what, self.layer, self.aside = what, nn.Linear(3, 2), torch.zeros(3)
        self.register_buffer("kept", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not len(x):
            return self.layer(x)  # type: ignore[no-any-return]
        with torch.no_grad():
            if self.what == "the first sample":
                self.kept.copy_(x[0])
            elif self.what == "a running mean":
                self.kept.mul_(0.9).add_(x.mean(0), alpha=0.1)
            elif self.what == "differences from the first":
                x = x - x[:1]
            elif self.what == "sums of those before":
                x = x + x.cumsum(0)
            elif self.what == "the last batch, outside of buffers":
                x, self.aside = x - self.aside, x.mean(0)
        return self.layer(x)  # type: ignore[no-any-return]


KEPT = ["the first sample", "a running mean", "differences from the first", "sums of those before",
        "the last batch, outside of buffers"]  # fmt: skip


@pytest.mark.parametrize("what", KEPT)
def test_a_model_that_keeps_or_mixes_samples_in_training_mode_alone_is_refused(what: str) -> None:
    with pytest.raises(Refused):
        private_for(Keeps(what))


@pytest.mark.parametrize("what", KEPT)
def test_a_model_that_is_put_into_training_mode_later_is_tested_again(what: str) -> None:
    model = Keeps(what).eval()
    private = private_for(model)
    model.train()
    with pytest.raises(Refused):
        private.step(next(private.batches()))
    assert private.ledger.releases == 0 and not model.get_buffer("kept").any()


def test_a_module_that_is_exchanged_later_is_tested_too() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Identity(), nn.Linear(3, 2))
    private = private_for(model)
    private.step(next(private.batches()))

    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean(0).detach()

    model[1] = Mean()
    with pytest.raises(Refused, match="mixes"):
        private.step(next(private.batches()))


# --------------------------------------------------------------------- ledgers and resumed runs


def dear() -> cw.Ledger:
    ledger = cw.Ledger()
    ledger.record(Gaussian(0.5, "a table"))
    return ledger


def test_what_was_spent_is_counted_also_beside_a_ledger_that_is_not_empty() -> None:
    ledger = cw.Ledger()
    ledger.record(PoissonGaussian(50.0, 0.1))
    private = private_for(ledger=ledger, spent=dear())
    assert private.ledger.releases == 2 and private.epsilon() >= dear().epsilon(1e-3)


@pytest.mark.parametrize("beside", [False, True])
def test_a_target_is_kept_together_with_what_the_ledger_holds_already(beside: bool) -> None:
    ledger, spent = cw.Ledger(), cw.Ledger()
    for _ in range(4):
        ledger.record(PoissonGaussian(2.0, 0.5))
        spent.record(PoissonGaussian(2.0, 0.5))
    more = {"spent": spent} if beside else {}
    private = private_for(ledger=ledger, noise_multiplier=None, epsilon=8.0, **more)
    for batch in private.batches():
        private.step(batch)
    assert private.ledger is ledger and ledger.releases == (12 if beside else 8)
    assert 7.9 < private.epsilon() <= 8.0


def test_runs_that_share_a_ledger_and_were_calibrated_without_each_other_warn() -> None:
    """Each would keep its own target, and pass it together with the other's releases."""
    ledger = cw.Ledger()
    first, second = (private_for(ledger=ledger, noise_multiplier=None, epsilon=8.0) for _ in range(2))
    for private, said in ((first, 0), (second, 1)):
        with warnings.catch_warnings(record=True, action="always") as heard:
            for batch in private.batches():
                private.step(batch)
        mine = [str(w.message) for w in heard if "for which its noise was not calibrated" in str(w.message)]
        assert len(mine) == said, mine
    assert "holds 4 releases of others" in mine[0] and second.epsilon() > 8.0


@pytest.mark.filterwarnings("error:this run's ledger holds")
def test_where_that_warning_is_an_error_the_step_was_not_begun() -> None:
    ledger = cw.Ledger()
    first, second = (private_for(ledger=ledger, noise_multiplier=None, epsilon=8.0) for _ in range(2))
    first.step(next(first.batches()))
    batch = next(second.batches())
    with pytest.raises(UserWarning, match="holds 1 releases of others"):
        second.step(batch)
    assert ledger.releases == 1
    second.step(batch)  # the draw is still there: it is not another's turn
    assert ledger.releases == 2


@pytest.mark.filterwarnings("error")
def test_releases_of_others_are_no_news_where_no_target_was_given() -> None:
    ledger = cw.Ledger()
    runs = [private_for(ledger=ledger) for _ in range(2)]
    for private in runs:
        private.step(next(private.batches()))
    assert ledger.releases == 2


def test_a_run_that_was_refused_counts_nothing_in_its_ledger() -> None:
    """Made again, it would count what was spent before twice."""
    ledger = cw.Ledger()
    mixing = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with pytest.raises(Refused, match="BatchNorm"):
        private_for(mixing, ledger=ledger, spent=dear())
    centred = lambda model, batch: total(model, (batch[0] - batch[0].mean(0), batch[1]))
    with pytest.raises(Refused):
        private_for(loss=centred, ledger=ledger, spent=dear())
    assert ledger.releases == 0


def interrupted(folder: Path, **changed: Any) -> None:
    def stop(private: cw.Private, row: Any) -> None:
        if private.steps_taken == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(folder, progress=stop, **changed)


def run(folder: Path, **changed: Any) -> cw.Run:
    settings = {"noise_multiplier": 1.0, "steps": 4, "batch": 3, "delta": 1e-3, "method": "flat(1.0)", **changed}
    return cw.train(nn.Linear(3, 2), cw.cross_entropy, (X, Y), folder=folder, **settings)


def test_a_run_with_something_spent_resumes_and_counts_it_once(tmp_path: Path) -> None:
    interrupted(tmp_path / "run", spent=dear())
    assert run(tmp_path / "run", resume=True, spent=dear()).statement.releases == 1 + 4


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {"spent": dear()}),  # which the ledger of the run does not hold
        ({"method": "dice(flat(1.0), 0.01)"}, {"method": "dice(flat(0.001), 0.00001)"}),  # less noise, the same sum
        ({}, {"method": BLOCKS}),  # draws three times as often
        ({}, {"method": "flat(100.0)"}),
    ],
)
def test_a_run_is_not_resumed_with_another_method_or_other_releases_before_it(
    before: dict[str, Any], after: dict[str, Any], tmp_path: Path
) -> None:
    interrupted(tmp_path / "run", **before)
    with pytest.raises(InputError, match="must be what the run began with"):
        run(tmp_path / "run", resume=True, **after)


def test_momentum_of_each_sample_is_resumed_with_the_same_samples_in_their_order(tmp_path: Path) -> None:
    """One more or fewer, or shuffled again, one sample's momentum would be another's: it would move two terms."""

    def run(which: list[int], **how: Any) -> None:
        plan = {"noise_multiplier": 1.0, "steps": 4, "delta": 1e-3, "noise": 1, "self_test": False}
        method = "momentum_per_sample(flat(1.0), rate=0.5)"
        cw.train(nn.Linear(3, 2), cw.cross_entropy, (X[which], Y[which]), method=method, batch=len(which),
                 folder=tmp_path / "run", **plan, **how)  # fmt: skip

    def stop(private: cw.Private, *_: Any) -> None:
        if private.steps_taken == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run([*range(ROWS)], progress=stop)
    with pytest.raises(InputError, match="samples must be what the run began with, 12, got 11"):
        run([*range(ROWS - 1)], resume=True)
    with pytest.raises(Refused, match="one's momentum would become another's"):
        run([*range(ROWS)][::-1], resume=True)
    run([*range(ROWS)], resume=True, chunk=5)  # in which they are read, such as fit another GPU


def test_a_ledger_that_lost_what_was_spent_before_the_run_is_refused(tmp_path: Path) -> None:
    interrupted(tmp_path / "run", spent=dear())
    ledger = tmp_path / "run" / "ledger.jsonl"
    ledger.write_text("".join(ledger.read_text().splitlines(keepends=True)[1:]))  # as many as steps, and cheaper
    with pytest.raises(Refused, match="2 releases, and lacks 1 of the 3"):
        run(tmp_path / "run", resume=True, spent=dear())


@pytest.mark.parametrize("state", ["missing", "older", "far too large"])
def test_private_state_that_is_missing_older_or_tampered_with_moves_no_release_further(
    state: str, tmp_path: Path
) -> None:
    method, place = "dice(flat(1.0), 0.01)", tmp_path / "run" / "private-state.pt"
    older = tmp_path / "older.pt"

    def stop(private: cw.Private, row: Any) -> None:
        if private.steps_taken == 1:
            torch.save(private.hidden, older)
        if private.steps_taken == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", method=method, progress=stop)
    if state == "missing":
        place.unlink()
    elif state == "older":
        shutil.copy(older, place)
    else:
        torch.save({name: 1e30 * torch.ones_like(value) for name, value in torch.load(place).items()}, place)
    sums: list[float] = []

    def look(private: cw.Private, row: Any) -> None:
        assert private.state.released is not None
        sums.append(3 * float(torch.cat([g.flatten() for g in private.state.released.values()]).norm()))

    finished = run(tmp_path / "run", method=method, resume=True, progress=look)
    assert finished.statement.releases == 4
    # at most all twelve samples, the feedback, and noise of 8 entries
    assert max(sums) <= ROWS + 3 * 0.01 + 6 * 8**0.5
