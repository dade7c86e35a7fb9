"""Ways to a false ε by what changes on the way: seeds, what is trained, code, collate, copies, and steps at once.

Receives: small runs, and somebody who changes them.
Gives: that they are refused, with the words that say why, and that their honest kin pass.
"""

import copy
import os
import pickle
import random
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import default_collate

import clipwise as cw
from clipwise import self_test
from clipwise.records.extremes import refuse_extremes
from clipwise.records.states import modes
from clipwise.types import InputError, Refused
from made import Made

ROWS = 120
X = 3 * torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(ROWS) % 3


def private_for(model: nn.Module | None = None, data: Any = (X, Y), **changed: Any) -> cw.Private:
    model = nn.Linear(6, 3) if model is None else model
    settings = {"noise_multiplier": 1.0, "steps": 4, "batch": 30, "delta": 1e-3, "noise": 1, **changed}
    return cw.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data, **settings)


def dropping() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.5), nn.Linear(16, 3))


# --------------------------------------------------------------------- seeds


def samples(before: Callable[[int], Any] = lambda _: None) -> Made:
    """The samples, after ``before`` was called with their number."""

    def make(index: int) -> tuple[Tensor, Tensor]:
        before(index)
        return X[index], Y[index]

    return Made(ROWS, make)


@pytest.mark.parametrize("seed", [torch.manual_seed, np.random.seed, random.seed])
def test_a_data_set_that_seeds_a_generator_is_refused(seed: Any) -> None:
    with pytest.raises(Refused, match=r"data set or collate seeds a generator .*Generator\(\)\.manual_seed"):
        private_for(dropping(), samples(seed))


def test_a_collate_function_that_seeds_a_generator_is_refused() -> None:
    """What it draws would follow a sample's place, whatever a step's own seed."""

    def masked(items: list[Any]) -> Any:
        torch.manual_seed(0)
        x, y = default_collate(items)
        return x * (torch.rand(x.shape) > 0.5), y

    with pytest.raises(Refused, match="data set or collate seeds a generator"):
        private_for(data=samples(), collate=masked)


@pytest.mark.parametrize("seed", [torch.manual_seed, np.random.seed, random.seed])
def test_a_loss_or_a_model_that_seeds_a_generator_is_refused(seed: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        seed(0)
        return cw.cross_entropy(model, batch)

    with pytest.raises(Refused, match="the loss or the model seeds a generator"):
        private_for(dropping(), loss=loss)


def of_its_own(index: int) -> None:
    torch.rand(3, generator=torch.Generator().manual_seed(index))


def as_images_and_masks_are_augmented_alike(_: int) -> None:
    """The seed is drawn itself, so that it is as secret as the step's."""
    seed = int(np.random.randint(2**31))
    for _ in range(2):
        torch.manual_seed(seed)
        random.seed(seed)
        torch.rand(3)


def and_puts_it_back(index: int) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(index)
        torch.rand(3)


@pytest.mark.parametrize("before", [of_its_own, as_images_and_masks_are_augmented_alike, and_puts_it_back])
def test_a_data_set_whose_seeds_are_its_own_or_drawn_passes(before: Any) -> None:
    private_for(dropping(), samples(before))


# --------------------------------------------------------------------- what is tested again


class Sorts(nn.Module):
    """Rows are sorted on their way through the first layer, and put back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = x[:, 0].argsort()
        return self.last(self.first(x[order]).tanh()[order.argsort()])


def test_a_layer_that_is_unfrozen_later_is_tested() -> None:
    first = X[:40][X[:40, 0].argsort()]  # in order: a look at a step's first three samples shows nothing
    model = Sorts()
    model.first.requires_grad_(False)
    private = private_for(model, (torch.cat([first, X[40:]]), Y))  # rows of a frozen layer need not be the samples'
    private.step(next(private.batches()))
    model.first.requires_grad_(True)
    with pytest.raises(Refused, match="sort, shuffle or regroup no rows"):
        private.step(next(private.batches()))


def test_a_layer_that_is_unfrozen_after_compiling_is_named() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].requires_grad_(False)
    private = private_for(model, compile=True)
    model[0].requires_grad_(True)
    with pytest.raises(InputError, match=r"^0\.bias is trained only since .* spent=private\.ledger"):
        private.step(next(private.batches()))
    assert private.ledger.releases == 0


def patched(model: nn.Sequential) -> Any:
    model[1].forward = lambda x: (x - x.mean(0)).tanh()


def hooked(model: nn.Sequential) -> Any:
    return nn.modules.module.register_module_forward_hook(
        lambda module, _, output: output - output.mean(0) if module is model[1] else None
    )


@pytest.mark.parametrize("change", [patched, hooked])
def test_a_forward_pass_that_is_patched_or_hooked_everywhere_later_is_tested(change: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    private = private_for(model)
    private.step(next(private.batches()))
    handle = change(model)
    try:
        with pytest.raises(Refused, match="mixes the samples"):
            private.step(next(private.batches()))
    finally:
        if handle is not None:
            handle.remove()


class Centred(nn.Module):
    """Subtracts the mean of the batch, or nothing."""

    def __init__(self, on: bool | str) -> None:
        super().__init__()
        self.on = on

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0) if self.on else x


def exchanged(model: nn.Sequential) -> None:
    model[1] = Centred(True)


def switched(model: nn.Sequential) -> None:
    model[1].on = True


def switched_by_a_name(model: nn.Sequential) -> None:
    model[1].on = "always"


class Centring(Centred):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


def reclassed(model: nn.Sequential) -> None:
    model[1].__class__ = Centring


@pytest.mark.parametrize(
    ("off", "change"), [(False, exchanged), (False, switched), ("", switched_by_a_name), (False, reclassed)]
)
def test_a_module_that_is_exchanged_for_another_of_its_kind_or_switched_is_tested(off: bool | str, change: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 8), Centred(off), nn.Linear(8, 3))
    private = private_for(model)
    private.step(next(private.batches()))
    change(model)
    with pytest.raises(Refused, match="mixes the samples"):
        private.step(next(private.batches()))


SETTINGS = SimpleNamespace(step=SimpleNamespace(mixup=False))


def mixed(x: Tensor) -> Tensor:
    return (x + x.flip(0)) / 2 if SETTINGS.step.mixup else x


def by_global(model: nn.Module, batch: Any) -> Tensor:
    return cw.cross_entropy(model, (mixed(batch[0]), batch[1]))


@torch.autocast("cpu", enabled=False)
def decorated(model: nn.Module, batch: Any) -> Tensor:
    return by_global(model, batch)


class Loss:
    """May mix samples by a flag of its own, and puts them through a norm."""

    def __init__(self) -> None:
        self.options, self.norm = {"mixup": False}, nn.BatchNorm1d(6).eval()

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        x = self.norm(batch[0])
        return cw.cross_entropy(model, ((x + x.flip(0)) / 2 if self.options["mixup"] else x, batch[1]))

    def normed(self) -> None:
        self.norm.train()

    def mixing(self) -> None:
        self.options["mixup"] = True


class Set(nn.Module):
    """May mix samples by its settings, of which its forward pass says nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.settings, self.last = SimpleNamespace(mixup=False), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.mixed(x))

    def mixed(self, x: Tensor) -> Tensor:
        return (x + x.flip(0)) / 2 if self.settings.mixup else x


def a_global_flag() -> tuple[dict[str, Any], Callable[[], None]]:
    return {"loss": by_global}, lambda: setattr(SETTINGS.step, "mixup", True)


def a_flag_behind_decorators() -> tuple[dict[str, Any], Callable[[], None]]:
    return {"loss": lambda model, batch: decorated(model, batch)}, lambda: setattr(SETTINGS.step, "mixup", True)


def a_flag_of_the_closure() -> tuple[dict[str, Any], Callable[[], None]]:
    mixup = False

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cw.cross_entropy(model, ((batch[0] + batch[0].flip(0)) / 2 if mixup else batch[0], batch[1]))

    def switch() -> None:
        nonlocal mixup
        mixup = True

    return {"loss": loss}, switch


def an_option_of_the_loss() -> tuple[dict[str, Any], Callable[[], None]]:
    loss = Loss()
    return {"loss": partial(loss)}, loss.mixing


def a_norm_in_the_loss() -> tuple[dict[str, Any], Callable[[], None]]:
    loss = Loss()
    return {"loss": loss}, loss.normed


def a_setting_of_the_model() -> tuple[dict[str, Any], Callable[[], None]]:
    model = Set()
    return {"model": model}, lambda: setattr(model.settings, "mixup", True)


@pytest.mark.parametrize(
    "which",
    [
        a_global_flag,
        a_flag_behind_decorators,
        a_flag_of_the_closure,
        an_option_of_the_loss,
        a_norm_in_the_loss,
        a_setting_of_the_model,
    ],
)
def test_a_loss_or_a_model_that_is_switched_by_a_flag_elsewhere_is_tested(
    which: Callable[[], tuple[dict[str, Any], Callable[[], None]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each moved the sum by six bounds when one sample left: more than its ε is for."""
    monkeypatch.setattr(SETTINGS.step, "mixup", False)
    given, switch = which()
    private = private_for(**given)
    private.step(next(private.batches()))
    switch()
    with pytest.raises(Refused, match="mixes the samples"):
        private.step(next(private.batches()))


def test_a_loss_that_is_the_same_is_tested_once_and_one_that_is_switched_once_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tested = list[str]()
    run = self_test.run
    monkeypatch.setattr(self_test, "run", lambda *given: tested.append("again") or run(*given))
    sharper = False

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return cw.cross_entropy(model, batch) * (2 if sharper else 1)

    private = private_for(loss=loss)
    for place, batch in enumerate(private.batches()):
        sharper = place > 1
        private.step(batch)
    assert len(tested) == 2


class Turned(nn.Module):
    """Means over time, [sample, time, feature], that may be computed time first."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last, self.time_first = nn.Linear(6, 4), nn.Linear(4, 3), False

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1) if self.time_first else x
        return self.last(self.layer(x).tanh().mean(0 if self.time_first else 1))


def test_a_model_that_is_turned_is_followed_anew() -> None:
    """In a chunk of as many samples as there are times nothing else would tell: each time would pass for a sample."""
    model, times, places = Turned(), 8, torch.arange(8)
    x = torch.randn(ROWS, times, 6, generator=torch.Generator().manual_seed(0))
    private = private_for(model, (x, Y), chunk=times, batch=ROWS)
    for turned in (False, True):
        model.time_first = turned
        private.step(next(private.batches()))
        found = private.engine(places, 0).gradients(private.rows(places))
        torch.testing.assert_close(found.norms(), cw.per_sample(model, cw.cross_entropy, (x[:8], Y[:8])).norms())


def test_a_forward_pass_in_the_place_of_one_that_is_gone_is_another() -> None:
    """Memory is used again, and with it the number of a function."""
    model, seen = nn.Linear(6, 3), set[Any]()
    for forward in (lambda module, x: x, lambda module, x: x - x.mean(0)):
        model.forward = MethodType(forward, model)
        seen.add(modes(model, []))
        del model.forward
    assert len(seen) == 2


def test_a_hook_that_is_exchanged_for_another_is_tested() -> None:
    model = nn.Linear(6, 3)
    model.register_buffer("seen", torch.zeros(6))
    looks = model.register_forward_pre_hook(lambda module, inputs: None)
    private = private_for(model)
    private.step(next(private.batches()))
    looks.remove()
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 0 * module.seen.copy_(inputs[0].mean(0)),))
    with pytest.raises(Refused, match="buffer seen is computed from the batch"):
        private.step(next(private.batches()))
    assert not model.seen.any()


class Late(nn.Module):
    """A layer that may keep a mean of its inputs, in some way, once a number says so, which is no switch."""

    def __init__(self, keep: Any) -> None:
        super().__init__()
        self.layer, self.keep, self.rate = nn.Linear(6, 3), keep, 0.0
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        if self.rate:
            self.keep(self, self.rate * x.detach().mean(0))
        return self.layer(x - self.mean)


@pytest.mark.parametrize(
    "keep",
    [
        lambda module, mean: module.mean.add_(mean),
        lambda module, mean: module.mean.data.add_(mean),
        lambda module, mean: setattr(module, "mean", mean),
    ],
)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_buffer_that_the_batch_is_written_into_only_later_is_refused_and_left_as_it_was(
    keep: Any, steps: int
) -> None:
    """As the observers of quantisation, which are switched by a number in a buffer."""
    model = Late(keep)
    private = private_for(model)
    for _ in range(steps):
        private.step(next(private.batches()))
    model.rate = 0.1
    with pytest.raises(Refused, match=r"batch|samples"):
        private.step(next(private.batches()))
    assert not model.mean.any() and private.ledger.releases == steps


@pytest.mark.parametrize(
    "keep",
    [
        lambda module, mean: setattr(module, "none", mean),
        lambda module, mean: module.register_buffer("new", mean),
    ],
)
def test_a_buffer_that_is_made_of_the_batch_only_later_is_refused_and_gone(keep: Any) -> None:
    model = Late(keep)
    model.register_buffer("none", None)
    private = private_for(model)
    private.step(next(private.batches()))
    model.rate = 0.1
    with pytest.raises(Refused, match="computed from the batch"):
        private.step(next(private.batches()))
    assert [name for name, _ in model.named_buffers()] == ["mean"] and private.ledger.releases == 1


class Codes(nn.Module):
    """Rows are drawn to codes; one that nobody uses gets a row's place, once the time has come."""

    def __init__(self, write: Any) -> None:
        super().__init__()
        self.codes, self.last, self.write, self.now = nn.Parameter(torch.randn(5, 6)), nn.Linear(6, 3), write, 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.codes, x, self.now)
        return self.last(x + torch.cdist(x, self.codes).neg().softmax(1) @ self.codes)


def restarted(codes: Tensor, x: Tensor, now: int) -> None:
    if now:
        codes[4] = x[0]


def kept_short(codes: Tensor, x: Tensor, now: int) -> None:
    codes.clamp_(-3, 3)


def test_a_code_that_gets_a_sample_s_place_only_later_is_refused() -> None:
    """The sample itself was in the model, number for number."""
    for write in (kept_short, restarted):
        model = Codes(write)
        private = private_for(model)
        private.step(next(private.batches()))
        model.now = 1
        with nullcontext() if write is kept_short else pytest.raises(Refused, match="step 2 wrote into .* codes"):
            private.step(next(private.batches()))
        assert private.ledger.releases == (2 if write is kept_short else 1)


def test_a_buffer_that_is_not_a_number_stays_so_and_is_watched_like_others() -> None:
    """As statistics that nobody has taken yet."""
    model = Late(lambda module, mean: module.later.copy_(mean))
    model.register_buffer("later", torch.full((6,), torch.nan))
    private = private_for(model)
    private.step(next(private.batches()))
    model.rate = 0.1
    with pytest.raises(Refused, match="later is computed from the batch"):
        private.step(next(private.batches()))
    assert model.later.isnan().all() and private.ledger.releases == 1


class Bank:
    """Negatives of earlier batches, which take part once there are ``least`` of them."""

    def __init__(self, least: int) -> None:
        self.rows, self.least = deque[Tensor](maxlen=least), least

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        outputs = model(batch[0]).tanh()
        losses = F.cross_entropy(outputs, batch[1], reduction="none")
        if len(self.rows) == self.least:
            losses = losses + torch.logsumexp(outputs @ torch.stack(list(self.rows)).T, 1)
        self.rows.extend(outputs.detach())
        return losses


def test_what_mixes_samples_only_when_it_is_warm_is_refused_before_the_last_step() -> None:
    """One sample in a bank of 300 moved the sum of each step by 0.1 bounds, as long as it was there."""
    private = private_for(loss=Bank(6000), steps=500)
    with pytest.raises(Refused, match=r"other losses the second time.*; found only now, .* after 499 steps: ε may not"):
        list(map(private.step, private.batches()))
    assert private.steps_taken == 499


def test_a_table_that_grows_in_a_pass_is_named() -> None:
    class Table(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            if len(self.table) < x.shape[1]:
                self.table = torch.ones(x.shape[1])
            return super().forward(x * self.table)

    model = Table(6, 3)
    model.register_buffer("table", torch.ones(4))
    with pytest.raises(InputError, match=r"gave table the shape \[6\] for \[4\]"):
        private_for(model)
    model.table = torch.ones(6)
    private_for(model)


class Counting(nn.Module):
    """A layer that counts its passes, once it is told to, in a buffer as a temperature that falls would."""

    def __init__(self, counts: float = 1.0) -> None:
        super().__init__()
        self.layer, self.counts = nn.Linear(6, 3), counts
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.counts
        return self.layer(x)


@pytest.mark.parametrize("method", ["flat()", "p_average(flat(), 2)"])
def test_how_many_chunks_a_step_had_is_not_left_in_a_buffer(method: str) -> None:
    model = Counting()
    private = private_for(model, chunk=8, method=method)
    for batch in private.batches():
        private.step(batch)
    assert model.passes == private.steps


def test_a_spectral_norm_in_chunks_ends_as_in_one() -> None:
    """The vectors of its power iteration move in every pass."""
    found = []
    for chunk in (8, 64):
        torch.manual_seed(0)
        model = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))
        private = private_for(model, chunk=chunk)
        for batch in private.batches():
            private.step(batch)
        found.append({name: value for name, value in model.named_buffers() if name.endswith("_u")})
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


class Taught(nn.Module):
    """A network with a teacher of the same weights, which follow it by ``follow`` in every pass."""

    def __init__(self, follow: Callable[[Tensor, Tensor], object], *, table: Tensor | None = None) -> None:
        super().__init__()
        self.layer, self.follow = nn.Linear(6, 3), follow
        self.teacher = copy.deepcopy(self.layer).requires_grad_(False)
        self.register_buffer("table", table)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for own, of in zip(self.teacher.parameters(), self.layer.parameters(), strict=True):
                self.follow(own, of)
            if self.table is not None:
                self.table += 1
        return self.layer(x)


def nothing(own: Tensor, of: Tensor) -> None:
    pass


@pytest.mark.parametrize(
    ("follow", "table", "name"),
    [
        (lambda own, of: own.lerp_(of, 0.01), None, r"parameter teacher\.\w+"),
        (lambda own, of: setattr(own, "data", own.lerp(of, 0.01)), None, r"parameter teacher\.\w+"),
        (nothing, torch.zeros(2, dtype=torch.long), "buffer table"),
        (nothing, torch.zeros(2**22 + 1), "buffer table"),
    ],
)
def test_what_moves_in_every_pass_and_is_not_put_back_is_refused(
    follow: Callable[[Tensor, Tensor], object], table: Tensor | None, name: str
) -> None:
    """Ten chunks would leave a teacher ten times as near as one: whether a last chunk was needed is no secret then."""
    with pytest.raises(Refused, match=rf"the {name} moves in every forward pass: .* behind private\.step\(batch\)"):
        private_for(Taught(follow, table=table))


@pytest.mark.parametrize("follow", [nothing, lambda own, of: own.copy_(of), lambda own, of: own.clamp_(-0.1, 0.1)])
def test_what_stays_the_same_in_a_second_pass_is_trained(follow: Callable[[Tensor, Tensor], object]) -> None:
    private = private_for(Taught(follow), chunk=8)
    for batch in private.batches():
        private.step(batch)
    assert private.steps_taken == private.steps


def test_a_buffer_that_counts_only_later_is_no_statistic() -> None:
    model = Counting(0.0)
    private = private_for(model)
    private.step(next(private.batches()))
    model.counts = 1.0
    for batch in private.batches():
        private.step(batch)
    assert private.steps_taken == private.steps


@pytest.mark.parametrize("name", ["collate", "dataset"])
def test_what_reads_the_samples_cannot_be_exchanged_later(name: str) -> None:
    private = private_for(data=samples())
    with pytest.raises(Refused, match=rf"{name} is fixed .* spent=private\.ledger"):
        setattr(private.data, name, getattr(private.data, name))


# --------------------------------------------------------------------- samples with extreme values


def softmax_below(top: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    """Cross-entropy written out, its exponentials kept from overflowing."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0])
        logits = logits - top(logits)
        return logits.exp().sum(1).log() - logits.gather(1, batch[1][:, None]).squeeze(1)

    return loss


def in_half(model: nn.Module, batch: Any) -> Tensor:
    """Logits rounded to 16 bits, by one scale for all."""
    logits = model(batch[0])
    scale = logits.detach().abs().max()
    return nn.functional.cross_entropy((logits / scale).half().float() * scale, batch[1], reduction="none")


@pytest.mark.parametrize("loss", [softmax_below(torch.max), softmax_below(lambda z: z.detach().max())])
def test_a_largest_value_of_the_whole_batch_is_refused_though_it_cancels(loss: Any) -> None:
    """Below a sample of very large values the others' digits are lost: it moved the sum by 10.7 bounds."""
    with pytest.raises(Refused, match=r"the loss mixes .* very large values .*logits\.max\(1, keepdim=True\)"):
        private_for(loss=loss)


def test_a_scale_of_the_whole_batch_is_refused_though_it_cancels() -> None:
    with pytest.raises(Refused, match="the loss mixes the samples"):  # often it shows at usual values already
        private_for(loss=in_half)


def test_a_loss_that_skips_a_batch_with_a_sample_that_is_not_finite_is_refused() -> None:
    """The sample took all the others' terms with it: 7.7 bounds of 60 samples."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        losses = cw.cross_entropy(model, batch)
        return losses if losses.isfinite().all() else 0 * losses

    with pytest.raises(Refused, match=r"mixes .* one sample that is not a number .* skip no batch"):
        private_for(loss=loss)


def skipping(model: nn.Module, batch: Any) -> Tensor:
    losses = cw.cross_entropy(model, batch)
    return losses if losses.isfinite().all() else 0 * losses


def without_outliers(model: nn.Module, batch: Any) -> Tensor:
    losses = cw.cross_entropy(model, batch)
    own = losses.detach()
    return losses.clamp(max=float(own.mean() + 10 * own.std(unbiased=False)))


class OfWords(nn.Module):
    """A text's words and their places, as many as there are samples that are looked at closely."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.words, self.last = nn.Embedding(4, 8), nn.Embedding(10, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        places = self.places(torch.arange(4))
        return self.last((self.words(x) + places).relu().mean(1))


class OfBytes(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / 255)


WORDS = torch.randint(10, (ROWS, 4), generator=torch.Generator().manual_seed(1))
BYTES = torch.randint(256, (ROWS, 6), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


@pytest.mark.parametrize(("make", "x"), [(OfWords, WORDS), (lambda: OfBytes(6, 3), BYTES)], ids=["words", "bytes"])
@pytest.mark.parametrize("loss", [skipping, without_outliers, softmax_below(torch.max), cw.cross_entropy])
def test_extreme_values_are_looked_for_also_behind_the_first_layer_of_words_or_bytes(
    loss: Any, make: Any, x: Tensor
) -> None:
    """A text without a finite loss took all the others' terms with it: 4.1 bounds of 41 samples."""
    torch.manual_seed(0)
    with nullcontext() if loss is cw.cross_entropy else pytest.raises(Refused, match="mixes .* one sample "):
        private_for(make(), (x, Y), loss=loss)


class Hooked(nn.Module):
    """Two layers, and something that is done to the gradient between them."""

    def __init__(self, hook: Any) -> None:
        super().__init__()
        self.first, self.last, self.hook = nn.Linear(6, 8), nn.Linear(8, 3), hook

    def forward(self, x: Tensor) -> Tensor:
        between = self.first(x)
        if between.requires_grad:
            between.register_hook(self.hook)
        return self.last(between)


@pytest.mark.parametrize(
    "hook",
    [
        lambda gradient: gradient * (100 / gradient.norm()).clamp(max=1),
        lambda gradient: torch.zeros_like(gradient) if gradient.isnan().any() else gradient,
    ],
    ids=["clipped", "skipped"],
)
def test_a_limit_for_the_gradient_of_the_whole_batch_is_refused_before_it_is_reached(hook: Any) -> None:
    with pytest.raises(Refused, match="backward pass mixes the samples"):
        private_for(Hooked(hook))


@pytest.mark.parametrize("rows", [1, 2, ROWS])
def test_a_limit_for_the_gradient_of_each_sample_passes(rows: int) -> None:
    model = Hooked(lambda gradient: gradient * (100 / gradient.norm(dim=1, keepdim=True)).clamp(max=1))
    with torch.autograd.set_detect_anomaly(True):  # which looks for gradients that are not finite
        private_for(model, (X[:rows], Y[:rows]), batch=1, delta=1e-4)


@pytest.mark.parametrize(
    "loss",
    [
        softmax_below(lambda z: z.max(1, keepdim=True).values),
        lambda model, batch: cw.cross_entropy(model, batch).nan_to_num(0.0),
    ],
)
def test_what_is_done_to_each_sample_s_extremes_alone_passes(loss: Any) -> None:
    private_for(loss=loss)


def test_a_model_that_takes_no_large_values_passes() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if batch[0].abs().max() > 100:
            raise ValueError("not a standardised row")
        return cw.cross_entropy(model, batch)

    private_for(loss=loss)


class Categories(nn.Module):
    """The first number of a row is a category."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(3, 4), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.cat([self.table(x[:, 0].long()), x[:, 1:]], 1))


@pytest.mark.parametrize("loss", [softmax_below(torch.max), cw.cross_entropy])
def test_categories_among_fractions_stay_and_the_fractions_are_made_large(loss: Any) -> None:
    torch.manual_seed(0)  # with other weights it may be refused as well, for what is not a number
    x = torch.cat([torch.zeros(4, 1), X[:4, 1:]], 1)
    with pytest.raises(Refused, match="very large values") if loss is not cw.cross_entropy else nullcontext():
        refuse_extremes(Categories(), loss, (x, Y[:4]))


@pytest.mark.parametrize("shaken", [False, True])
def test_a_model_that_looks_up_categories_among_fractions_passes(shaken: bool) -> None:
    """One more than the last category is none."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return cw.cross_entropy(model, (torch.cat([x[:, :1], x[:, 1:] + torch.rand(5)], 1) if shaken else x, y))

    private_for(Categories(), (torch.cat([Y.flip(0)[:, None].float(), X[:, 1:]], 1), Y), loss=loss)


@pytest.mark.parametrize("shift", [torch.max, lambda z: z.max(1, keepdim=True).values], ids=["of all", "of each"])
def test_on_a_gpu_a_copy_on_the_processor_is_shown_extremes(shift: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A number that a kernel does not take, such as an index out of range, ends the process there."""
    torch.manual_seed(0)  # with other weights it may be refused as well, for what is not a number
    model, shown = nn.Linear(6, 3), list[nn.Module]()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        shown.append(model)
        return softmax_below(shift)(model, batch)

    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: tensor is model.weight))
    with pytest.raises(Refused, match="very large values") if shift is torch.max else nullcontext():
        refuse_extremes(model, loss, (X[:4], Y[:4]))
    assert shown and model not in shown


def test_a_loss_that_needs_the_gpu_is_not_shown_extremes(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(6, 3)

    def loss(own: nn.Module, batch: Any) -> Tensor:
        if own is not model:
            raise RuntimeError("Expected all tensors to be on the same device")
        return cw.cross_entropy(own, batch)

    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: tensor is model.weight))
    refuse_extremes(model, loss, (X[:4], Y[:4]))


@pytest.mark.parametrize("most", [0, 10_000], ids=["large", "small"])
def test_a_large_model_of_words_on_a_gpu_is_not_copied_to_the_processor(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Passes of long texts would take minutes there."""
    torch.manual_seed(0)
    model = OfWords()
    first = next(model.parameters())
    monkeypatch.setattr("clipwise.records.extremes.LARGE", most)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda tensor: tensor is first))
    with pytest.raises(Refused, match="mixes .* one sample ") if most else nullcontext():
        refuse_extremes(model, skipping, (WORDS[:4], Y[:4]))


def _cross_entropy_of_shares(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.binary_cross_entropy(torch.sigmoid(model(x)), y, reduction="none").flatten(1).mean(1)


@pytest.mark.parametrize(
    "shares",
    [
        pytest.param(lambda x: (x > x.median()).float(), id="labels that are 0 or 1"),
        pytest.param(lambda x: (x > x.max() - 1e-3).float(), id="of which nearly all are 0"),
        pytest.param(torch.sigmoid, id="fractions"),
    ],
)
def test_a_loss_that_takes_numbers_from_0_to_1_alone_passes(shares: Any) -> None:
    """Other numbers raise an error, and on a GPU would end the process."""
    private_for(nn.Linear(6, 1), (X, shares(X[:, :1])), loss=_cross_entropy_of_shares)


# --------------------------------------------------------------------- one draw, two releases


@pytest.mark.parametrize("again", [copy.deepcopy, copy.copy, pickle.dumps])
def test_a_run_is_not_copied(again: Any) -> None:
    private = private_for()
    next(private.batches())
    with pytest.raises(Refused, match=r"cannot be copied or pickled.* spent=private\.ledger"):
        again(private)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_makes_no_steps_that_the_first_one_s_ledger_would_not_count() -> None:
    private = private_for()
    batch = next(private.batches())
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        try:
            private.step(batch)
        except Refused as refusal:
            os.write(write, str(refusal).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    os.close(write)
    with open(read, encoding="utf-8") as said:
        assert "call make_private in the process that trains" in said.read()
    private.step(batch)
    assert private.ledger.releases == 1


def test_a_batch_is_not_used_a_second_time_from_within_its_own_step() -> None:
    waiting: list[Any] = []

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if waiting:
            private.step(waiting.pop())
        return cw.cross_entropy(model, batch)

    private = private_for(loss=loss)
    batch = next(private.batches())
    waiting.append(batch)
    with pytest.raises(Refused, match="one after another"):
        private.step(batch)
    assert private.ledger.releases == 0
    private.step(batch)  # it was not used
    assert private.ledger.releases == 1


def test_a_second_thread_neither_steps_nor_draws_while_a_step_is_made() -> None:
    """In a block of feedback it would draw from the group whose turn it was."""
    inside, over = threading.Event(), threading.Event()
    waits = [False]

    def loss(model: nn.Module, batch: Any) -> Tensor:
        if waits[0]:
            inside.set()
            over.wait(10)
        return cw.cross_entropy(model, batch)

    private = private_for(loss=loss)
    batch = next(private.batches())
    waits[0] = True
    first = threading.Thread(target=private.step, args=[batch])
    first.start()
    try:
        assert inside.wait(10)
        for again in (lambda: private.step(batch), lambda: next(private.batches())):
            with pytest.raises(Refused, match="one after another"):
                again()
    finally:
        over.set()
        first.join()
    assert private.ledger.releases == private.steps_taken == 1
