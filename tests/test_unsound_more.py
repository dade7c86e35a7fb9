"""More ways to a false ε: chance of one's own, rows and releases that go uncounted, rounding that is magnified.

Receives: small runs, and somebody who tampers with them.
Gives: that they are refused or warned of, with the words that say why, and that their honest kin pass.
"""

import itertools
import random
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

import clipwise as cw
from clipwise.cli.parts import network, splits_for
from clipwise.config import TrainConfig
from clipwise.data import as_dataset
from clipwise.data.copies import refuse_private, refuse_shared, warn_of_copies, warn_of_numbers
from clipwise.data.datasets import held
from clipwise.data.fitted import warn_of_fitted
from clipwise.data.parts import warn_of_parts
from clipwise.records.chance import seeded
from clipwise.report import read
from clipwise.types import InputError, Refused
from made import Made

ROWS = 120
X = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(0))
Y = torch.arange(ROWS) % 3
WIDE = torch.randn(30, 8, generator=torch.Generator().manual_seed(2))


def private_for(model: nn.Module | None = None, data: Any = (X, Y), **changed: Any) -> cw.Private:
    model = nn.Linear(6, 3) if model is None else model
    settings = {"noise_multiplier": 1.0, "steps": 4, "batch": 30, "delta": 1e-3, "noise": 1, **changed}
    optimizer = settings.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    return cw.make_private(model, optimizer, data, **settings)


# --------------------------------------------------------------------- chance of one's own


def labelled(samples: int, make: Callable[[int], Any]) -> Made:
    return Made(samples, lambda i: (make(i), Y[i % ROWS]))


def noisy(draw: Callable[[], float]) -> Made:
    return labelled(ROWS, lambda i: X[i] + draw())


def of_numpy() -> Callable[[], float]:
    return np.random.default_rng(0).random


def of_torch() -> Callable[[], float]:
    generator = torch.Generator().manual_seed(0)
    return lambda: float(torch.rand((), generator=generator))


def of_python() -> Callable[[], float]:
    return random.Random(0).random


@pytest.mark.parametrize("make", [of_numpy, of_torch, of_python])
def test_a_data_set_that_draws_from_a_generator_of_its_own_is_refused(make: Any) -> None:
    with pytest.raises(Refused, match="generator of its own"):
        private_for(data=noisy(make()))


@pytest.mark.parametrize("draw", [np.random.random, lambda: float(torch.rand(())), random.random, lambda: 0.0])
def test_a_data_set_that_draws_from_the_generators_that_a_step_seeds_passes(draw: Any) -> None:
    private_for(data=noisy(draw))


def test_a_collate_function_that_draws_from_a_generator_of_its_own_is_refused() -> None:
    draw = of_numpy()

    def mixed(items: list[Any]) -> Any:
        x, y = (torch.stack(column) for column in zip(*items, strict=True))
        return x + draw() * x.roll(1, 0), y

    with pytest.raises(Refused, match="generator of its own"):
        private_for(data=noisy(lambda: 0.0), collate=mixed)


# --------------------------------------------------------------------- what is kept beside buffers


class Largest(nn.Module):
    """Keeps the largest input that it saw where checkpoints hold it and buffers do not."""

    def __init__(self, keep: bool) -> None:
        super().__init__()
        self.layer, self.largest, self.keep = nn.Linear(6, 3), torch.zeros(()), keep

    def forward(self, x: Tensor) -> Tensor:
        if self.keep:
            self.largest = torch.maximum(self.largest, x.detach().abs().max())
        outputs: Tensor = self.layer(x)
        return outputs

    def get_extra_state(self) -> Any:
        return {"largest": self.largest}

    def set_extra_state(self, state: Any) -> None:
        self.largest = state["largest"]


@pytest.mark.parametrize("inside", [False, True])
def test_an_extra_state_that_keeps_something_of_the_batch_is_refused_and_left_as_it_was(inside: bool) -> None:
    model = Largest(keep=True)
    with pytest.raises(Refused, match=r"the state (0\.)?_extra_state\[0\] is computed from the batch"):
        private_for(nn.Sequential(model) if inside else model)
    assert float(model.largest) == 0


@pytest.mark.parametrize("place", [0, 40, 79, 119])  # those that are looked at closely
def test_a_largest_number_is_found_to_be_kept_whichever_sample_has_it(place: int) -> None:
    x = X.clone()
    x[place, 2] = 10.0
    with pytest.raises(Refused, match=r"the state _extra_state\[0\] is computed from the batch"):
        private_for(Largest(keep=True), (x, Y))


class BesideATensor(Largest):
    """A number beside a tensor that stays as it is."""

    def get_extra_state(self) -> Any:
        return {"scale": torch.ones(3), "largest": float(self.largest)}

    def set_extra_state(self, state: Any) -> None:
        self.largest = torch.tensor(state["largest"])


class NeverPutBack(Largest):
    """Nobody has written how it is loaded."""

    set_extra_state = nn.Module.set_extra_state


class OwnWay(NeverPutBack):
    """In a checkpoint by a way of its own."""

    get_extra_state = nn.Module.get_extra_state

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "largest"] = self.largest


@pytest.mark.parametrize("make", [BesideATensor, NeverPutBack, OwnWay])
def test_what_a_checkpoint_holds_of_the_batch_in_any_other_way_is_refused(make: type[Largest]) -> None:
    with pytest.raises(Refused, match=r"the state (_extra_state|largest)\[\d\] is computed from the batch"):
        private_for(make(keep=True))
    private_for(make(keep=False))


def test_an_extra_state_that_keeps_nothing_passes() -> None:
    private_for(Largest(keep=False))


class Preconditioned(torch.optim.SGD):
    """SGD that divides by the size of a layer's inputs, which it sees by a hook, as implementations of K-FAC do."""

    def __init__(self, layer: nn.Linear, see: Callable[[Any], Any]) -> None:
        super().__init__(layer.parameters(), lr=0.1)
        self.layer, self.size = layer, torch.ones(())
        layer.register_forward_pre_hook(see(self))

    def look(self, module: nn.Module, inputs: Any) -> None:
        self.size = inputs[0].detach().norm()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.layer.weight.grad /= self.size
        super().step(closure)


def test_an_optimizer_that_sees_private_activations_is_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 3))
    with pytest.raises(Refused, match="Preconditioned has a hook on 0, as K-FAC has"):
        private_for(model, optimizer=Preconditioned(model[0], lambda own: own.look))


def test_a_hook_of_something_that_cannot_be_copied_passes() -> None:
    class Monitor:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def __deepcopy__(self, memo: Any) -> Any:
            return object.__new__(Monitor)  # without what it has seen

        def look(self, module: nn.Module, inputs: Any) -> None:
            self.seen.append(len(inputs[0]))

    model = nn.Linear(6, 3)
    model.register_forward_pre_hook(Monitor().look)
    private_for(model)


class FirstMean(nn.Module):
    """A network that subtracts the mean of the first rows that it ever sees."""

    def __init__(self, keep: Callable[[nn.Module, Tensor], None]) -> None:
        super().__init__()
        self.keep, self.shift, self.layer = keep, nn.Parameter(torch.zeros(6)), nn.Linear(6, 3)
        self.seen = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.seen:
            self.keep(self, x.detach().mean(0))
        self.seen = True
        return self.layer(x - getattr(self, "mean", 0.0) - self.shift)


def by_attribute(module: nn.Module, mean: Tensor) -> None:
    module.mean = mean  # type: ignore[assignment]


def by_number(module: nn.Module, mean: Tensor) -> None:
    module.mean = float(mean[0])  # type: ignore[assignment]


def by_buffer(module: nn.Module, mean: Tensor) -> None:
    module.register_buffer("mean", mean)


def by_parameter(module: nn.Module, mean: Tensor) -> None:
    module.shift.data.copy_(mean)  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("keep", [by_attribute, by_number, by_buffer, by_parameter])
def test_a_model_that_keeps_something_of_the_first_batch_it_sees_is_refused(keep: Any) -> None:
    with pytest.raises(Refused, match="it keeps something of its first batch"):
        private_for(FirstMean(keep))


def test_a_model_that_only_remembers_that_it_was_used_passes() -> None:
    private_for(FirstMean(lambda module, mean: None))


class LargestMet:
    """Divides losses by the largest value that it has met, which begins at ``most``."""

    def __init__(self, most: float, of: Callable[[Tensor], Tensor]) -> None:
        self.most, self.of = most, of

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        before = self.most
        self.most = max(before, float(self.of(batch[0]).max()))
        return cw.cross_entropy(model, batch) / before


def words_in(texts: Tensor) -> Tensor:
    return (texts > 0).sum(1)


def test_a_loss_that_scales_by_the_largest_value_it_has_met_is_refused() -> None:
    """Such a value soon stays as it is: it was found only where a new one came up in the midst of the self-test."""
    texts = torch.ones(ROWS, 12, dtype=torch.long)
    texts[::5, 6:] = 0
    texts[:2, 3:] = 0
    model = nn.Sequential(nn.Embedding(2, 4), nn.Flatten(), nn.Linear(48, 3))
    with pytest.raises(Refused, match="once it has seen others: it keeps something"):
        private_for(model, (texts, Y), loss=LargestMet(1.0, words_in))
    with pytest.raises(Refused, match="once it has seen a sample of very large values: it keeps something"):
        private_for(loss=LargestMet(50.0, torch.abs))  # more than any usual number
    private_for(model, (texts, Y), loss=LargestMet(12.0, words_in))


class Running:
    """Divides by a slow average of the losses that it saw, which begins near to them."""

    def __init__(self, rate: float) -> None:
        self.rate, self.average = rate, 1.1

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        losses = cw.cross_entropy(model, batch)
        if self.rate:  # 0 times what is no number is none
            self.average += self.rate * (float(losses.detach().mean()) - self.average)
        return losses / self.average


@pytest.mark.parametrize("rate", [0.1, 1e-3, 1e-4])
def test_a_loss_that_follows_the_batches_however_slowly_is_refused(rate: float) -> None:
    """One row of an absurd loss would be in the average for good, and so in all others' weights."""
    rows, model = torch.randint(0, 9, (200, 4)), nn.Sequential(nn.Embedding(9, 3), nn.Flatten(), nn.Linear(12, 3))
    data = rows, rows[:, 0] % 3
    with pytest.raises(Refused, match="other losses the second time"):
        private_for(model, data, loss=Running(rate), batch=20)
    private_for(model, data, loss=Running(0.0), batch=20)


def rounded_anew(model: nn.Module, batch: Any) -> Tensor:
    """What sums in another order each time gives."""
    losses = cw.cross_entropy(model, batch)
    return losses * (1 + 1e-6 * next(ANEW))


ANEW = itertools.cycle([0.3, -0.2, 0.9, -1.0, 0.1, 0.6, -0.7])


def test_a_loss_that_is_rounded_anew_each_time_passes() -> None:
    private_for(nn.Linear(4, 3), (torch.randn(200, 4), torch.arange(200) % 3), loss=rounded_anew, batch=20)


def test_a_model_that_cannot_be_copied_passes() -> None:
    model = nn.Linear(6, 3)
    model.made = model.weight * 2  # type: ignore[assignment]  # of which torch makes no deep copy
    private_for(model)


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_that_mixes_samples_is_found_also_where_it_comes_later(register: str) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    private = private_for(model)
    batches = private.batches()
    private.step(next(batches))

    def centred(module: nn.Module, inputs: Any, output: Tensor | None = None) -> Tensor:
        rows = inputs[0] if output is None else output
        return rows - rows.mean(0)

    getattr(model[2], register)(centred)
    with pytest.raises(Refused, match="mixes the samples"):
        private.step(next(batches))


# --------------------------------------------------------------------- releases that nobody would count


def trained(**how: Any) -> cw.Run:
    model = how.pop("model", None) or nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 3))
    settings = {"noise_multiplier": 1.0, "delta": 1e-3, "steps": 3, "batch": 30, **how}
    return cw.train(model, cw.cross_entropy, (X, Y), **settings)


def averaged() -> nn.Module:
    return trained(average=0.9).model


def wrapped() -> nn.Module:
    return nn.Sequential(trained().model)


def in_part() -> nn.Module:
    first = trained().model
    assert isinstance(first, nn.Sequential)
    return nn.Sequential(first[0], nn.ReLU(), nn.Linear(4, 3))


@pytest.mark.parametrize("make", [averaged, wrapped, in_part])
def test_what_a_run_gives_back_is_known_wherever_it_is_trained_again(make: Any) -> None:
    with pytest.warns(UserWarning, match="trained by a private run before"):
        trained(model=make())


def test_what_two_models_share_without_training_it_is_not_warned_of() -> None:
    frozen, act = nn.Linear(6, 6).requires_grad_(False), nn.ReLU()
    with warnings.catch_warnings(action="error"):
        for _ in range(2):
            trained(model=nn.Sequential(frozen, act, nn.Linear(6, 3)))


class Stop(Exception):
    pass


def stopped(folder: Path, **how: Any) -> None:
    def progress(private: cw.Private, row: Any) -> None:
        if private.steps_taken == 1:
            private.method = cw.psac()
        if private.steps_taken == 2:
            raise Stop

    with pytest.raises(Stop):
        trained(model=nn.Linear(6, 3), folder=folder, progress=progress, **how)


def test_a_resumed_run_names_every_method_that_it_used(tmp_path: Path) -> None:
    stopped(tmp_path / "run")
    run = trained(model=nn.Linear(6, 3), folder=tmp_path / "run", resume=True)
    assert run.statement.method == "flat(clip_norm=1.0); from step 1: psac(clip_norm=1.0, r=0.1)"


def test_a_run_without_a_self_test_is_not_resumed_with_one(tmp_path: Path) -> None:
    stopped(tmp_path / "run", self_test=False)
    with pytest.raises(InputError, match="self_test must be what the run began with, False, got True"):
        trained(model=nn.Linear(6, 3), folder=tmp_path / "run", resume=True)


# --------------------------------------------------------------------- rounding that is magnified


def test_a_look_ahead_so_short_that_it_magnifies_rounding_is_refused() -> None:
    cw.disk(gain=0.01, ahead=1.0)
    for how in ({"ahead": 1e-3}, {"gain": 1e-3}, {"gain": 1e-10, "ahead": 1e-10}):
        with pytest.raises(InputError, match=r"^\(1 − gain\)/\(gain · ahead\) must be at most 100, got "):
            cw.disk(**how)


class Shifted(nn.Module):
    """A shift of all logits alike, which a softmax does not see: its gradient is nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(30, 10), nn.Linear(10, 3)
        self.shift = nn.ParameterDict({"by": nn.Parameter(torch.zeros(4))})

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.first(x).tanh()) + self.shift["by"].sum()
        return outputs


def test_a_block_of_nothing_but_rounding_is_refused_where_it_would_be_made_long() -> None:
    data = (torch.randn(ROWS, 30, generator=torch.Generator().manual_seed(0)), Y)
    for text in ("normalised(1.0)", "layerwise(flat(1.0))", "layerwise(automatic(1.0))"):
        torch.manual_seed(0)
        private_for(Shifted(), data, method=text)
    torch.manual_seed(0)
    with pytest.raises(Refused, match=r"what shift\.by adds to a step follows who else is in it"):
        private_for(Shifted(), data, method="layerwise(normalised(1.0))")


# --------------------------------------------------------------------- samples that stand in several places

SERIES = torch.randn(ROWS + 5, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    "x",
    [
        SERIES.unfold(0, 6, 1),
        torch.cat([SERIES] * 3).unfold(0, 6, 3)[:ROWS],
        np.lib.stride_tricks.sliding_window_view(SERIES.numpy(), 6),
    ],
)
def test_windows_that_slide_over_a_series_are_refused(x: Any) -> None:
    with pytest.raises(Refused, match=r"the rows of data\[0\] share entries"):
        private_for(data=(x, Y))


def test_one_row_that_stands_for_all_is_refused() -> None:
    with pytest.raises(Refused, match="one row that stands for all"):
        private_for(data=(X[:1].expand(ROWS, 6), Y[:1].expand(ROWS)))


@pytest.mark.parametrize(
    "x",
    [
        X.t().contiguous().t(),
        torch.cat([X, X])[::2],
        torch.cat([X, X], 1)[:, 3:9],
        torch.cat([SERIES] * 6)[: 6 * ROWS].unfold(0, 6, 6),
        X[:, None].expand(ROWS, 4, 6).reshape(ROWS, 24)[:, :6],
        torch.randn(2, ROWS, 3).transpose(0, 1),
        torch.randn(ROWS, 7).unfold(1, 2, 1),
        X[:, :3, None].expand(ROWS, 3, 2),
        np.asfortranarray(X.numpy()),
        X.numpy()[::-1],
    ],
)
def test_rows_that_lie_in_memory_in_any_order_but_apart_pass(x: Any) -> None:
    cw.data.as_dataset((x, Y, torch.ones(1).expand(ROWS)))


def test_one_tensor_in_two_data_sets_is_refused_and_two_halves_of_it_pass() -> None:
    with pytest.raises(Refused, match="index 0 repeated"):
        private_for(data=ConcatDataset([TensorDataset(X, Y), TensorDataset(X, Y)]))
    with pytest.raises(Refused, match="repeated"):
        private_for(data=ConcatDataset([TensorDataset(X[:70], Y[:70]), TensorDataset(X[60:], Y[60:])]))
    for one, other in ((slice(60), slice(60, None)), (slice(0, None, 2), slice(1, None, 2))):
        private_for(data=ConcatDataset([TensorDataset(X[one], Y[one]), TensorDataset(X[other], Y[other])]))


@pytest.mark.parametrize("private", [True, False])
def test_public_inputs_that_are_private_ones_are_refused(private: bool) -> None:
    public = torch.randn(10, 6, generator=torch.Generator().manual_seed(1))
    if private:
        public[9] = X[50]
    network = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))
    method = cw.batch_clipping(cw.flat(1.0), companions=2)

    def make() -> cw.Private:
        return private_for(cw.models.Accompanied(network, public, 2), method=method, public=public)

    if not private:
        make()
        return
    with pytest.raises(Refused, match="got the private sample 50 among them"):
        make()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_public_inputs_of_another_format_are_compared_in_it(dtype: torch.dtype) -> None:
    public = torch.randn(10, 6, generator=torch.Generator().manual_seed(1)).to(dtype)
    refuse_private(public, as_dataset((X, Y)))
    public[9] = X[50]
    with pytest.raises(Refused, match="got the private sample 50 among them"):
        refuse_private(public, as_dataset((X, Y)))


def test_rows_of_one_s_own_file_that_are_taken_as_public_are_said_to_be_in_the_model_s_file(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x=X.reshape(-1, 1, 2, 3).numpy(), y=Y.numpy())
    config = TrainConfig(
        data=f"npz:{tmp_path / 'own.npz'}", model="resnet20_bn", method="batch_clipping(companions=2)", public=5
    )
    with pytest.warns(UserWarning, match="--public 5 takes so many rows of your own file as public"):
        network(config, splits_for(config))


def test_a_report_says_which_runs_it_leaves_out(tmp_path: Path) -> None:
    trained(folder=tmp_path / "one")
    stopped(tmp_path / "two")
    with pytest.warns(UserWarning, match="two did not finish"):
        assert len(read([tmp_path])) == 1


# --------------------------------------------------------------------- Ctrl-C


@pytest.mark.parametrize("name", ["_hidden", "_taken"])
@pytest.mark.parametrize("memory", ["blocks", "bounded", "full"])
def test_ctrl_c_between_a_step_s_number_and_its_memory_makes_no_group_take_part_twice(
    name: str, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = private_for(method=f"dice(flat(0.01), 0.01, memory={memory!r}, blocks=3)")
    plain, armed = cw.Private.__setattr__, True

    def interrupted(self: cw.Private, key: str, value: Any) -> None:
        nonlocal armed
        if key == name and value is not None and armed:
            armed = False
            raise KeyboardInterrupt
        plain(self, key, value)

    batch = next(private.batches())
    monkeypatch.setattr(cw.Private, "__setattr__", interrupted)
    with pytest.raises(KeyboardInterrupt):
        private.step(batch)
    assert private.hidden is None  # of this step, which counts and may be made again, nothing is left
    assert private.ledger.releases == 1
    private.step(next(private.batches()))
    assert private.hidden is not None


def test_rows_that_are_copied_to_balance_classes_are_warned_of() -> None:
    x = torch.randn(ROWS, 9, generator=torch.Generator().manual_seed(0))
    few = Y == 0
    with pytest.warns(UserWarning, match="80 rows of the data are copies of others"):
        private_for(nn.Linear(9, 3), (torch.cat([x, x[few], x[few]]), torch.cat([Y, Y[few], Y[few]])))


PICTURES = torch.randn(ROWS, 2, 5, 5, generator=torch.Generator().manual_seed(3))
BYTES = torch.randint(256, (ROWS, 3, 6, 6), generator=torch.Generator().manual_seed(5)) / 255
MIRRORED_OR_TURNED = [
    lambda x: x.flip(-1),
    lambda x: x.flip(-2),
    lambda x: x.rot90(1, (-2, -1)),
    lambda x: x.rot90(2, (-2, -1)),
    lambda x: x.rot90(3, (-2, -1)),
    lambda x: x.mT,
]


@pytest.mark.parametrize("change", MIRRORED_OR_TURNED)
@pytest.mark.parametrize("shape", ["channels first", "channels last", "gray"])
def test_pictures_that_are_others_mirrored_or_turned_are_warned_of(
    change: Callable[[Tensor], Tensor], shape: str
) -> None:
    """A person then moves the sum by both; where ``rows_per_person`` says so, ε is for both."""
    x = torch.cat([PICTURES, change(PICTURES)])
    x = x.movedim(1, -1).contiguous() if shape == "channels last" else x[:, 0] if shape == "gray" else x
    with pytest.warns(UserWarning, match="120 rows of the data are others mirrored or turned"):
        warn_of_copies(as_dataset(x))
    with warnings.catch_warnings(action="error"):
        warn_of_copies(as_dataset(x), rows_per_person=2)


@pytest.mark.parametrize("data", [{"label": Y.repeat(2), "x": PICTURES.repeat(2, 1, 1, 1)}, (Y, PICTURES[Y])])
def test_copies_are_warned_of_also_behind_their_labels(data: Any) -> None:
    with pytest.warns(UserWarning, match="rows of the data are copies of others"):
        warn_of_copies(as_dataset(data))


def test_copies_of_pictures_in_bytes_are_warned_of() -> None:
    x = (BYTES * 255).round().byte()
    with pytest.warns(UserWarning, match="120 rows of the data are copies of others"):
        warn_of_copies(as_dataset(x.repeat(2, 1, 1, 1)))
    with pytest.warns(UserWarning, match="120 rows of the data are others mirrored or turned"):
        warn_of_copies(as_dataset((Y.repeat(2), torch.cat([x, x.flip(-1)]))))
    with warnings.catch_warnings(action="error"):
        warn_of_copies(as_dataset(x))
        warn_of_copies(as_dataset((torch.arange(ROWS), PICTURES[Y])))  # what is known of an item, by many users
        warn_of_copies(as_dataset((x > 127).byte().repeat(2, 1, 1, 1)))  # few numbers: by chance
        warn_of_copies(as_dataset(x.flatten(1).repeat(2, 1)))  # a table's whole numbers may be alike


def test_more_copies_than_a_person_may_have_rows_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="240 rows of the data are copies of others"):
        warn_of_copies(as_dataset(PICTURES.repeat(3, 1, 1, 1)), rows_per_person=2)


TABLE = torch.rand(ROWS, 4, generator=torch.Generator().manual_seed(4)) * torch.tensor([90.0, 1e5, 3, 1]) + 17
ONE_HOT = torch.eye(30)[torch.arange(ROWS) % 30]


def standardised(x: Tensor, over: Any = 0, correction: int = 1) -> Tensor:
    return (x - x.mean(over, keepdim=True)) / x.std(over, keepdim=True, correction=correction)


def from_0_to_1(x: Tensor) -> Tensor:
    return (x - x.amin(0)) / (x.amax(0) - x.amin(0))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (standardised(TABLE), "data has exactly a mean of 0"),
        (standardised(TABLE, correction=0).numpy(), "data has exactly a mean of 0"),
        ((torch.cat([ONE_HOT, standardised(TABLE)], 1), Y), r"data\[0\] has exactly a mean of 0"),
        ({"x": TABLE, "y": standardised(TABLE[:, 0])}, r"data\['y'\] has exactly a mean of 0"),
        (standardised(BYTES, (0, 2, 3)), "data has exactly a mean of 0"),
        (standardised(BYTES.movedim(1, -1).contiguous(), (0, 1, 2)), "data has exactly a mean of 0"),
        (standardised(BYTES, (0, 1, 2, 3)), "data has exactly a mean of 0"),
        (from_0_to_1(TABLE), "data has exactly a range from end to end"),
        (torch.cat([2 * from_0_to_1(TABLE) - 1, ONE_HOT], 1), "data has exactly a range from end to end"),
    ],
)
def test_data_that_were_scaled_by_their_own_statistics_are_warned_of(data: Any, said: str) -> None:
    """One outlier less, and everybody's rows are others."""
    with pytest.warns(UserWarning, match=said):
        warn_of_fitted(as_dataset(data))


def test_a_run_on_data_that_were_scaled_by_their_own_statistics_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="scale by constants that are known without these data"):
        private_for(nn.Linear(4, 3), (standardised(TABLE), Y))


class Held(Dataset[Any]):
    """A data set of one's own that holds all its rows."""

    def __init__(self, x: Any, y: Any = Y) -> None:
        self.names, self.x, self.y = np.array([f"row {i}" for i in range(len(x))]), x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return torch.as_tensor(self.x[index]), int(self.y[index % ROWS])


@pytest.mark.parametrize("as_held", [Tensor.clone, Tensor.numpy])
def test_the_rows_that_a_data_set_of_one_s_own_holds_are_looked_at(as_held: Callable[[Tensor], Any]) -> None:
    with pytest.warns(UserWarning, match="scale by constants that are known without these data"):
        private_for(nn.Linear(4, 3), Held(as_held(standardised(TABLE))))
    x = torch.randn(ROWS, 9)
    with pytest.warns(UserWarning, match="100 rows of the data are copies of others"):
        private_for(nn.Linear(9, 3), Held(as_held(torch.cat([x, x[7:107]]))))
    with warnings.catch_warnings(action="error"):
        private_for(nn.Linear(9, 3), Held(as_held(x)))
        warn_of_fitted(held(as_dataset(Held(as_held(x / 0)))))  # not finite; nothing says that it is used


@pytest.mark.parametrize(
    "data",
    [
        TABLE,
        (TABLE - 50) / 50,
        BYTES,
        BYTES.flatten(1),
        2 * BYTES.flatten(1) - 1,
        (BYTES - 0.5) / 0.5,
        (BYTES.round(), ONE_HOT, 2.0 * (Y > 0) - 1),
        torch.randn(ROWS, 4),
        standardised(BYTES, (1, 2, 3)),  # each row by its own
        standardised(BYTES, (2, 3)),
        torch.nn.functional.layer_norm(TABLE, (4,)),
        torch.ones(ROWS, 2).mul_(torch.tensor([1.0, -1.0]).repeat(ROWS // 2)[:, None]),
        TABLE[:, :1] * 0,
        torch.linspace(0, 1, ROWS)[:, None],
        torch.cartesian_prod(torch.linspace(-1, 1, 10), torch.linspace(-1, 1, 12)),
        (from_0_to_1(TABLE).clip(0.1, 0.9) - 0.1) / 0.8,  # cut to a range that is known
        torch.zeros(ROWS, 0),
        TABLE[:1],
    ],
)
def test_data_that_were_scaled_by_constants_or_row_by_row_are_not_warned_of(
    data: Any, recwarn: pytest.WarningsRecorder
) -> None:
    warn_of_fitted(as_dataset(data))
    assert not recwarn.list


def test_a_data_set_that_repeats_its_samples_mirrored_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="sample 60 of the data is sample 0 again, .* mirrored"):
        refuse_shared(
            as_dataset(labelled(ROWS, lambda i: PICTURES[i % 60].flip(-1) if i >= 60 else 1 * PICTURES[i])), seeded
        )


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(ROWS, 9),
        torch.ones(ROWS, 9),
        torch.arange(9.0).repeat(ROWS, 1),
        torch.cat([PICTURES[:60, 0, :3, :3], PICTURES[:60, 0, :3, :3].roll(1, -1)]),  # the same numbers elsewhere
    ],
)
def test_rows_that_may_be_alike_by_chance_are_not_warned_of(x: Tensor) -> None:
    with warnings.catch_warnings(action="error"):
        private_for(nn.Sequential(nn.Flatten(), nn.Linear(9, 3)), (x, Y))


SERIES = torch.randn(6 * ROWS, generator=torch.Generator().manual_seed(1))


def read_only() -> Any:
    series = SERIES.numpy().copy()
    series.setflags(write=False)
    return series


@pytest.mark.parametrize("series", [SERIES, read_only()])
def test_a_data_set_of_windows_that_slide_over_a_series_is_refused(series: Any) -> None:
    with pytest.raises(Refused, match="samples of this data set share entries"):
        private_for(data=labelled(ROWS, lambda i: series[2 * i : 2 * i + 6]))


def window(i: int) -> Tensor:
    return SERIES[i : i + 12].clone()


def partner(i: int) -> dict[str, Tensor]:
    return {"x": WIDE[i], "other": WIDE[(i + 7) % len(WIDE)]}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (labelled(ROWS, window), "if windows slide over a series"),
        (labelled(ROWS, lambda i: window(4 * i).reshape(6, 2)), "if windows slide over a series"),
        (Subset(labelled(ROWS, window), torch.randperm(ROWS).tolist()), "if windows slide over a series"),
        ((torch.stack([window(i) for i in range(ROWS)]), Y), "if windows slide over a series"),
        (labelled(30, partner), "in pairs or triplets of samples"),
        ((WIDE, WIDE.roll(-1, 0), Y[:30]), "in pairs or triplets of samples"),
    ],
)
def test_samples_that_hold_copies_of_what_others_hold_are_warned_of(data: Any, said: str) -> None:
    """A person is in as many samples as windows reach back, or as have drawn them for a partner."""
    with pytest.warns(UserWarning, match=f"holds what sample .* number for number: {said}"):
        warn_of_parts(as_dataset(data), seeded)


@pytest.mark.parametrize(
    "data",
    [
        labelled(ROWS, lambda i: window(12 * (i % 50))),  # one after another, and later again
        labelled(30, lambda i: {"x": WIDE[i], "same": WIDE[i], "map": SERIES}),
        (torch.zeros(ROWS, 12), Y),
        (torch.eye(16)[torch.arange(ROWS) % 16], Y),
        (torch.randn(30, 3, 8, 8), torch.randn(30, 8)),
        (torch.randn(30, 1, 8, 8).expand(-1, 3, -1, -1), torch.randn(30)),  # gray pictures
        (torch.randint(9, (ROWS, 40)), Y),
        (torch.randn(30), torch.randn(30)),
        (torch.randn(30, 0), torch.randn(30, 4)),
    ],
)
def test_samples_without_parts_of_others_are_not_warned_of(data: Any, recwarn: pytest.WarningsRecorder) -> None:
    warn_of_parts(as_dataset(data), seeded)
    assert not recwarn.list


@pytest.mark.parametrize("draw", [lambda: int(torch.randint(ROWS, ())), lambda: random.randrange(ROWS)])
def test_a_data_set_whose_samples_are_drawn_whatever_their_number_is_refused(draw: Any) -> None:
    """As random windows of one text; a part of sample i that is drawn at random passes."""
    with pytest.raises(Refused, match="is whatever its generator draws, and so is every other"):
        private_for(data=Made(ROWS, lambda _: (X[i := draw()], Y[i])))  # whatever number is asked for
    private_for(data=labelled(ROWS, lambda i: X[i].roll(draw())))


COLUMNS = SERIES.reshape(6, ROWS)


@pytest.mark.parametrize(
    "make",
    [lambda i: SERIES[6 * i : 6 * i + 6], lambda i: COLUMNS[:, i], lambda i: {"x": X[i], "edges": SERIES}["x"]],
)
def test_samples_of_a_data_set_that_lie_apart_pass(make: Any, recwarn: pytest.WarningsRecorder) -> None:
    private_for(data=labelled(ROWS, make))
    assert not [w for w in recwarn if "again" in str(w.message)]


OTHER_BYTES, LONG = X.numpy().astype(">f4"), X.numpy().astype(np.longdouble)


@pytest.mark.parametrize("make", [lambda i: X[i].to_sparse(), OTHER_BYTES.__getitem__, LONG.__getitem__])
def test_samples_that_only_collate_makes_plain_tensors_of_pass(make: Any) -> None:
    def plain(x: Any) -> Tensor:
        return x.to_dense() if isinstance(x, Tensor) else torch.from_numpy(x.astype(np.float32))

    private_for(data=labelled(ROWS, make), collate=lambda items: default_collate([(plain(x), y) for x, y in items]))


def shaken(index: int) -> Tensor:
    return WIDE[index] + torch.rand(8)


@pytest.mark.parametrize("which", [lambda i: i % 30, lambda i: i // 4])
@pytest.mark.parametrize("make", [WIDE.__getitem__, shaken])
def test_a_data_set_that_repeats_its_samples_is_warned_of(which: Any, make: Any) -> None:
    with pytest.warns(UserWarning, match="is sample 0 again"):
        private_for(nn.Linear(8, 3), labelled(ROWS, lambda i: make(which(i))))


# --------------------------------------------------------------------- rows that are not where a run looks for them


class Centres(nn.Module):
    """Distances to rows that it holds, in one way or another, and a layer of them."""

    def __init__(self, rows: Tensor, hold: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.rows = hold(rows.clone())
        self.last = nn.Linear(len(rows), 3)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows[0] if isinstance(self.rows, list) else self.rows
        return self.last(torch.exp(-((x[:, None] - rows) ** 2).mean(2)))


@pytest.mark.parametrize(
    "hold", [nn.Parameter, nn.Buffer, lambda rows: rows, lambda rows: [rows]], ids=["centres", "bank", "plain", "list"]
)
def test_a_model_that_holds_private_samples_is_refused(hold: Any) -> None:
    """A learning rate of 1e-9 would have left them as they are, to be read off the weights."""
    data = (WIDE, torch.arange(30) % 3)
    with pytest.raises(Refused, match="rows of the model holds the private sample 4, number for number"):
        private_for(Centres(WIDE[4:9], hold), data, batch=10)
    private_for(Centres(torch.randn(5, 8), hold), data, batch=10)


def test_a_loss_that_names_private_samples_is_warned_of(recwarn: pytest.WarningsRecorder) -> None:
    rows, number = WIDE.clone(), len(WIDE)

    def to_the_mean(model: nn.Module, batch: Any) -> Tensor:
        return cw.cross_entropy(model, batch) + (model(batch[0]) - model(rows).detach().mean(0)).square().sum(1)

    def by_number(model: nn.Module, batch: Any) -> Tensor:
        return cw.cross_entropy(model, batch) / number

    data = (WIDE, torch.arange(30) % 3)
    private_for(nn.Linear(8, 3), data, batch=10, loss=by_number)
    assert not [w for w in recwarn if "the loss names" in str(w.message)]
    with pytest.warns(UserWarning, match="the loss names rows, which holds the private sample 0"):
        private_for(nn.Linear(8, 3), data, batch=10, loss=to_the_mean)


def test_numbers_for_a_report_that_are_measured_on_private_samples_are_warned_of(
    recwarn: pytest.WarningsRecorder,
) -> None:
    y, others = torch.arange(30) % 3, torch.randn(30, 8)

    def trained(rows: Tensor) -> None:
        def accuracy(model: nn.Module) -> dict[str, float]:
            return {"accuracy": float((model(rows).argmax(1) == y).float().mean())}

        cw.train(nn.Linear(8, 3), cw.cross_entropy, (WIDE, y), evaluate=accuracy, epsilon=3, steps=2, batch=10)

    trained(others)
    assert not [w for w in recwarn if "evaluate names" in str(w.message)]
    with pytest.warns(UserWarning, match="evaluate names rows, which holds the private sample 0"):
        trained(WIDE)


BANK = WIDE.clone()


def nearness(x: Tensor) -> Tensor:
    return torch.cdist(x, BANK).mean(1)


def by_a_function(model: nn.Module, batch: Any) -> Tensor:
    return cw.cross_entropy(model, batch) * nearness(batch[0])


class Nearest:
    """Weighs a sample by the nearest of the rows that it was given."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __call__(self, model: nn.Module, batch: Any) -> Tensor:
        return cw.cross_entropy(model, batch) * torch.cdist(batch[0], self.rows).amin(1)


def by_an_argument(rows: Tensor, model: nn.Module, batch: Any) -> Tensor:
    return cw.cross_entropy(model, batch) * torch.cdist(batch[0], rows).amin(1)


def by_a_model_beside() -> Callable[[nn.Module, Any], Tensor]:
    teacher = Centres(WIDE.clone(), nn.Parameter).requires_grad_(False)
    return lambda model, batch: (model(batch[0]) - teacher(batch[0])).square().sum(1)


@pytest.mark.parametrize(
    ("loss", "name"),
    [
        (by_a_function, "BANK"),
        (Nearest(WIDE), r"Nearest\.rows"),
        (partial(by_an_argument, WIDE), "argument 1"),
        (by_a_model_beside(), "teacher"),
    ],
)
def test_a_loss_that_holds_private_samples_elsewhere_is_warned_of(loss: Any, name: str) -> None:
    with pytest.warns(UserWarning, match=f"the loss names {name}, which holds the private sample 0"):
        private_for(nn.Linear(8, 3), (WIDE, torch.arange(30) % 3), batch=10, loss=loss, self_test=False)
    with warnings.catch_warnings(action="error"):
        other = (torch.randn(30, 8), torch.arange(30) % 3)
        private_for(nn.Linear(8, 3), other, batch=10, loss=loss, self_test=False)


class Scaled(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """A data set of somebody's own, whose samples come out of it otherwise than they lie in it."""

    def __init__(self) -> None:
        self.rows = WIDE.clone()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.rows[i] / 3, i % 3


def test_samples_that_a_data_set_of_one_s_own_holds_are_found_in_a_model_and_in_a_loss() -> None:
    with pytest.raises(Refused, match="rows of the model holds the private sample 4, number for number"):
        private_for(Centres(WIDE[4:9], nn.Parameter), Scaled(), batch=10)
    with pytest.warns(UserWarning, match="the loss names BANK, which holds the private sample 0"):
        private_for(nn.Linear(8, 3), Scaled(), batch=10, loss=by_a_function, self_test=False)


def test_views_that_mix_a_row_with_private_samples_are_warned_of() -> None:
    """Mixup with the training rows: one of them less moves the views of all others."""

    def views(row: Any, count: int, generator: torch.Generator) -> Any:
        others = BANK[torch.randint(len(BANK), (count,), generator=generator)]
        return (row[0] + others) / 2, row[1].expand(count)

    method = cw.self_augmentation(cw.flat(), views=2, augment="own")
    with pytest.warns(UserWarning, match="views names BANK, which holds the private sample 0"):
        private_for(nn.Linear(8, 3), (WIDE, torch.arange(30) % 3), batch=10, method=method, views=views)


def test_weights_that_are_rows_of_the_data_by_chance_pass() -> None:
    model = nn.Linear(8, 3)
    nn.init.eye_(model.weight)  # and samples that are categories, one-hot
    private_for(model, (torch.eye(8)[torch.arange(ROWS) % 8], Y))


class Nodes(nn.Module):
    """A node's class from its own row and its neighbours', which the model holds: the samples are numbers of nodes."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        rows = torch.cat([1 + X[:-1].abs(), torch.full((1, 6), -1e4)])[:nodes]  # the last is unlike all others
        self.mixed = nn.Buffer(rows + rows.mean(0))
        self.last = nn.Linear(6, 3)

    def forward(self, node: Tensor) -> Tensor:
        return self.last(self.mixed[node.flatten()])


def test_one_node_less_moves_a_graph_s_sum_by_many_bounds_so_that_numbers_as_samples_are_warned_of() -> None:
    def summed(nodes: int) -> Tensor:
        model = Nodes(nodes)
        nn.init.zeros_(model.last.weight)
        settings = {"noise_multiplier": 1e-9, "steps": 1, "batch": nodes}
        step = torch.optim.SGD(model.parameters(), lr=float(nodes))
        with pytest.warns(UserWarning, match="the samples are only their own numbers, 0 to"):
            private = private_for(model, (torch.arange(nodes), 0 * Y[:nodes]), optimizer=step, **settings)
        for batch in private.batches():
            private.step(batch)
        return model.last.weight.detach()

    assert (summed(ROWS) - summed(ROWS - 1)).norm() > 100  # expected at most 1


@pytest.mark.parametrize("data", [range(ROWS), torch.arange(ROWS)[:, None], TensorDataset(torch.arange(ROWS), Y)])
def test_numbers_as_samples_are_warned_of_however_they_come(data: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        nodes = batch[0] if isinstance(batch, (tuple, list)) else batch
        return nn.functional.cross_entropy(model(nodes), Y[nodes.flatten()], reduction="none")

    with pytest.warns(UserWarning, match="the samples are only their own numbers"):
        private_for(Nodes(ROWS), data, loss=loss)


@pytest.mark.parametrize("data", [(torch.arange(ROWS), X, Y), (Y, Y), (torch.randperm(ROWS) + ROWS, Y)])
def test_numbers_beside_rows_and_other_whole_numbers_are_not_warned_of(data: Any) -> None:
    with warnings.catch_warnings(action="error", category=UserWarning):
        warn_of_numbers(as_dataset(data))


@pytest.mark.parametrize(
    "first",
    [np.str_("a text"), np.bytes_(b"a text"), np.datetime64("2024-02-29"), np.timedelta64(5, "D"), 2**70, 1j],
    ids=lambda first: type(first).__name__,
)
def test_samples_of_which_torch_makes_no_tensor_are_no_numbers_of_rows(first: Any) -> None:
    """A collate function makes them so: whoever asks for numbers may not stumble over them."""
    with warnings.catch_warnings(action="error", category=UserWarning):
        warn_of_numbers(as_dataset(labelled(ROWS, lambda _: first), lambda items: X[: len(items)]))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.parametrize("sparse", [Tensor.to_sparse, Tensor.to_sparse_csr], ids=["coo", "csr"])
def test_a_model_with_a_sparse_buffer_is_trained(sparse: Callable[[Tensor], Tensor]) -> None:
    class Mixed(nn.Module):
        """A layer of a row times a sparse matrix, which is as wide as the row."""

        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Buffer(sparse(torch.rand(8, 8).sub(0.5).relu()))
            self.last = nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last((self.matrix @ x.T).T)

    private = private_for(Mixed(), (WIDE, torch.arange(30) % 3), batch=10)
    for batch in private.batches():
        private.step(batch)


# --------------------------------------------------------------------- numbers by the order of reading

WORDS = [f"word {i}" for i in torch.randint(90, (ROWS, 4), generator=torch.Generator().manual_seed(3)).flatten()]


class Texts(Dataset[Any]):
    """Four words of each sample, as ``number`` numbers them."""

    def __init__(self, number: Callable[[str], int]) -> None:
        self.number = number

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([self.number(word) for word in WORDS[4 * index : 4 * index + 4]]), Y[index]


def embedded() -> nn.Module:
    return nn.Sequential(nn.Embedding(100, 4), nn.Flatten(), nn.Linear(16, 3))


def by_setdefault() -> Callable[[str], int]:
    known: dict[str, int] = {}
    return lambda word: known.setdefault(word, len(known))


def by_defaultdict() -> Callable[[str], int]:
    known: dict[str, int] = defaultdict(itertools.count().__next__)
    return lambda word: known[word]


class ByList:
    """Numbers words by their place in a list that it makes."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def __call__(self, word: str) -> int:
        if word not in self.words:
            self.words.append(word)
        return self.words.index(word)


@pytest.mark.parametrize("make", [by_setdefault, by_defaultdict, ByList])
@pytest.mark.parametrize("through", [lambda data: data, lambda data: Subset(data, range(100))])
def test_words_that_are_numbered_as_they_are_first_read_are_refused(make: Any, through: Any) -> None:
    # one row less gave all words that followed other numbers, and moved the sum by 6 bounds
    with pytest.raises(Refused, match="numbers words or classes as it meets them"):
        private_for(embedded(), through(Texts(make())))


def test_classes_that_are_numbered_as_they_are_first_read_are_refused() -> None:
    known: dict[str, int] = {}
    data = [(X[i], "abcd"[int(i**0.5) % 4]) for i in range(ROWS)]

    def collate(items: list[Any]) -> tuple[Tensor, Tensor]:
        return torch.stack([x for x, _ in items]), torch.tensor([known.setdefault(y, len(known)) for _, y in items])

    with pytest.raises(Refused, match="from 1 to 4 entries long"):
        private_for(nn.Linear(6, 4), data, collate=collate)


class Cached(Texts):
    """Keeps what it has read, and a list of it."""

    def __init__(self, number: Callable[[str], int]) -> None:
        super().__init__(number)
        self.cache: dict[int, tuple[Tensor, Tensor]] = {}
        self.read: list[int] = []

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read.append(index)
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        words, label = self.cache[index]
        return words[torch.randperm(4)], label


class OverLargest(Dataset[Any]):
    """Samples over the largest number that was read so far, which ``keep`` holds."""

    def __init__(self, keep: Any, seen: bool = True) -> None:
        self.keep, self.seen, self.largest, self.read_at = keep, seen, torch.zeros(()), 0.0

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read_at += 0.5
        return X[index] / self.keep(self, X[index].abs().max() if self.seen else torch.ones(())), Y[index]


def as_attribute(data: OverLargest, value: Tensor) -> Tensor:
    data.largest = torch.maximum(data.largest, value)
    return data.largest


def in_place(data: OverLargest, value: Tensor) -> Tensor:
    return torch.maximum(data.largest, value, out=data.largest)


class InADictionary:
    def __init__(self) -> None:
        self.known = {"largest": 0.0}

    def __call__(self, _: OverLargest, value: Tensor) -> Tensor:
        self.known["largest"] = max(self.known["largest"], float(value))
        return torch.tensor(self.known["largest"])


@pytest.mark.parametrize("keep", [as_attribute, in_place, InADictionary()])
def test_a_data_set_that_scales_by_the_largest_number_it_has_read_is_refused(keep: Any) -> None:
    """One row of a large number less gave all rows others: it moved the sum by 3.5 bounds."""
    with pytest.raises(Refused, match=r"reading them has changed .*largest.*: .* follows what it reads"):
        private_for(data=OverLargest(keep))
    private_for(data=OverLargest(as_attribute, seen=False))


def test_a_list_of_words_that_is_there_and_a_cache_of_what_was_read_pass() -> None:
    known = {f"word {i}": i for i in range(90)}
    private_for(embedded(), Cached(known.__getitem__))
