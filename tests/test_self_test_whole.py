"""The self-test at the size of a step: what touches samples only there, by chance or backwards is refused.

Receives: small models, losses, data sets and collate functions, unsound and honest.
Gives: that the unsound ones are refused with what to write, that the honest ones pass, and that nothing is left behind.
"""

import random
import warnings
from collections.abc import Callable, Container
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import clipwise as cw
from clipwise import self_test as whole
from clipwise.records.chance import generators, seeded, still
from clipwise.types import Batch, InputError, Refused

ROWS = 300
X = torch.randn(ROWS, 10, generator=torch.Generator().manual_seed(0))
Y = torch.arange(ROWS) % 3
RARE = (torch.arange(ROWS) % 20 == 7).long()  # of two classes, one in twenty


def private_for(model: nn.Module | None = None, data: Any = (X, Y), **changed: Any) -> cw.Private:
    model = network() if model is None else model
    settings = {"noise_multiplier": 1.0, "steps": 2, "batch": 64, "delta": 1e-4, "noise": 1, **changed}
    return cw.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), data, **settings)


def network(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(10, 16), *middle, nn.ReLU(), nn.Linear(16, 3))


class Does(nn.Module):
    """A module that does something to its input, told whether it is in training mode."""

    def __init__(self, does: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.does = does

    def forward(self, x: Tensor) -> Tensor:
        return self.does(x, self.training)


class Rows(Dataset[Any]):
    """A list of samples."""

    def __init__(self, samples: list[Any], change: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        self.samples, self.change = samples, change

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        x, y = self.samples[index]
        return self.change(x), y


PLAIN = list(zip(X, Y.tolist(), strict=True))


# ── samples that touch each other only where there are many ─────────────────────────────────────────────────────────


@pytest.mark.parametrize("least", [5, 32, 64])
def test_statistics_of_the_batch_that_begin_with_many_rows_are_refused_by_name(least: int) -> None:
    model = network(Does(lambda x, _: x - x.detach().mean(0) if len(x) >= least else x))
    with pytest.raises(Refused, match=r"1 \(Does\) treats a sample differently among 96 rows.*sample alone"):
        private_for(model)


def mined(model: nn.Module, batch: Batch) -> Tensor:
    """The hardest seven eighths of the batch."""
    losses = cw.cross_entropy(model, batch)
    return losses * (losses >= losses.detach().kthvalue(max(1, len(losses) // 8)).values)


def balanced(model: nn.Module, batch: Batch) -> Tensor:
    """Classes weighted by their counts in the batch."""
    counts = torch.bincount(batch[1], minlength=3)
    return len(batch[1]) / (3 * counts.clamp(min=1))[batch[1]] * cw.cross_entropy(model, batch)


@pytest.mark.parametrize(("loss", "data"), [(mined, (X, Y)), (balanced, (X, RARE))])
def test_a_loss_by_ranks_or_counts_of_the_batch_is_refused(loss: Any, data: Any) -> None:
    with pytest.raises(Refused, match=r"the loss treats a sample differently.*ranks or counts of the batch"):
        private_for(data=data, loss=loss, batch=ROWS, chunk=ROWS)  # all are read, the rare ones too


def test_experts_that_take_only_so_many_samples_are_refused() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(10, 4), nn.ModuleList(nn.Linear(10, 3) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            shares = self.gate(x).softmax(-1)
            # 28 of 96, and of their pieces 1 of 1, 9 of 31 and 19 of 64: one more in all, whichever pieces are drawn
            most, given = max(4, int(1.2 * len(x) / 4)), torch.zeros(len(x), 3)
            for number, expert in enumerate(self.experts):
                chosen = shares.argmax(-1) == number
                first = chosen & (chosen.cumsum(0) <= most)
                given = given + expert(x) * (shares[:, number] * first)[:, None]
            return given

    torch.manual_seed(0)
    model = Experts()
    with torch.no_grad():
        model.gate.bias[0] += 50  # all go to the first one
    with pytest.raises(Refused, match=r"the model \(Experts\) treats a sample differently"):
        private_for(model)


def padded(items: list[Any]) -> Batch:
    return pad_sequence([x for x, _ in items], batch_first=True), torch.tensor([y for _, y in items])


class Words(nn.Module):
    """The mean over a text's words, of which 0 is none; with or without a mask."""

    def __init__(self, *, masked: bool) -> None:
        super().__init__()
        self.table, self.layer, self.masked = nn.Embedding(50, 8), nn.Linear(8, 3), masked

    def forward(self, ids: Tensor) -> Tensor:
        real = (ids != 0).float()[..., None] if self.masked else torch.ones(*ids.shape, 1)
        return self.layer((self.table(ids) * real).sum(1) / real.sum(1))  # type: ignore[no-any-return]


def texts(longer: Container[int]) -> Rows:
    """All alike in length but some; the four samples that are looked at closely are."""
    lengths = [40 if index in longer else 10 for index in range(ROWS)]
    generator = torch.Generator().manual_seed(0)
    return Rows([(torch.randint(1, 50, (n,), generator=generator), i % 3) for i, n in enumerate(lengths)])


def test_padding_to_the_longest_is_refused_without_a_mask_and_passes_with_one() -> None:
    # all are read, and one is longer: whichever pieces are drawn, those without it are shorter than the whole
    how = {"data": texts([5]), "collate": padded, "batch": ROWS, "chunk": ROWS}
    with pytest.raises(Refused, match="where collate pads, a mask"):
        private_for(Words(masked=False), **how)
    private_for(Words(masked=True), **how)


def test_padding_is_found_also_where_nearly_all_texts_are_the_longest() -> None:
    # one text in ten is shorter; of 64 that are tried alone none is, in both looks, once in two million
    how = {"data": texts([i for i in range(ROWS) if i % 10 != 3]), "collate": padded, "batch": ROWS, "chunk": ROWS}
    with pytest.raises(Refused, match="where collate pads, a mask"):
        private_for(Words(masked=False), **how)


class Kept(nn.Module):
    """A mean of many rows in a parameter that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(16), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) > 8:
            with torch.no_grad():
                self.mean.lerp_(x.mean(0), 0.5)
        return x


def test_a_frozen_parameter_that_keeps_a_mean_of_many_rows_is_refused_and_left_as_it_was() -> None:
    model = network(Kept())
    with pytest.raises(Refused, match=r"the parameter 1\.mean is computed from the batch"):
        private_for(model)
    assert not model[1].mean.any()


class Sorted(nn.Module):
    """Computes with rows sorted by length, as for packing, and puts them back at the end: every loss is right."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        order = (x[:, 0] > 1.3).sort(stable=True).indices  # one in ten or so
        return self.second(self.first(x).tanh()[order])[order.argsort()]


def test_rows_that_a_model_sorts_and_puts_back_are_refused() -> None:
    with pytest.raises(Refused, match=r"let row i of every layer be sample i|puts their entries in another order"):
        private_for(Sorted())


# ── by chance ───────────────────────────────────────────────────────────────────────────────────────────────────────


def torch_chance() -> float:
    return float(torch.rand(()))


@pytest.mark.parametrize("chance", [torch_chance, random.random, np.random.random])
@pytest.mark.parametrize("least", [0, 32])
def test_mixing_once_in_a_while_is_refused(chance: Callable[[], float], least: int) -> None:
    def mixup(x: Tensor, training: bool) -> Tensor:
        if not training or len(x) < least or chance() >= (0.3 if least == 0 else 0.7):
            return x
        return 0.7 * x + 0.3 * x[torch.randperm(len(x))].detach()

    with pytest.raises(Refused, match=r"1 \(Does\) mixes the samples of a batch"):
        private_for(network(Does(mixup)))


def test_mixing_that_the_loss_does_is_not_blamed_on_the_first_layer() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        x, y = batch
        return cw.cross_entropy(model, (0.7 * x + 0.3 * x.flip(0), y))

    with pytest.raises(Refused, match=r"what is computed before 0 \(Linear\) mixes"):
        private_for(loss=loss)


def stacked(items: list[Any]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])


def mixed_up(items: list[Any]) -> Batch:
    x, y = stacked(items)
    share = np.random.beta(1.0, 1.0)
    return share * x + (1 - share) * x[torch.randperm(len(x))], y


def centred_with_noise(items: list[Any]) -> Batch:
    x, y = stacked(items)
    return x - x.mean(0) + 0.01 * torch.randn_like(x), y


@pytest.mark.parametrize("collate", [mixed_up, centred_with_noise])
def test_a_collate_function_that_mixes_and_draws_at_random_is_refused(collate: Any) -> None:
    with pytest.raises(Refused, match="collate mixes the samples.*each row of one sample alone"):
        private_for(data=Rows([(x.round(), y) for x, y in PLAIN]), collate=collate)  # permuted, their mean is the same


class Transformed(Rows):
    """Reads several at once through one transform of them all, as Hugging Face's set_transform does."""

    def __init__(self, transform: Any) -> None:
        super().__init__(PLAIN)
        self.transform = transform

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        x, y = self.transform([super(Transformed, self).__getitem__(index) for index in indices])
        return list(zip(x, y, strict=True))


def noisy(items: list[Any]) -> Batch:
    x, y = stacked(items)
    return x + 0.1 * torch.randn_like(x), y


@pytest.mark.parametrize("transform", [mixed_up, centred_with_noise])
def test_a_transform_of_several_samples_that_mixes_and_draws_at_random_is_refused(transform: Any) -> None:
    """One sample read alone has nobody to be mixed with."""
    with pytest.raises(Refused, match="the data set mixes the samples.*each row of one sample alone"):
        private_for(data=Transformed(transform))


def test_a_transform_of_several_samples_that_draws_for_each_passes() -> None:
    private = private_for(data=Transformed(noisy))
    private.step(next(private.batches()))


# ── backwards ───────────────────────────────────────────────────────────────────────────────────────────────────────


class Normalised(torch.autograd.Function):
    """Divides the gradient by its length over the whole batch."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None: ...

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


def hooked(x: Tensor) -> Tensor:
    x = 1 * x
    if x.requires_grad:
        x.register_hook(lambda gradient: gradient / gradient.norm())
    return x


@pytest.mark.parametrize("how", [Normalised.apply, hooked])
@pytest.mark.parametrize(
    ("least", "match"),
    [
        (0, "differ from those computed one sample at a time.*a hook, an autograd function"),
        (32, "the backward pass treats"),
    ],
)
def test_gradients_that_mix_in_training_mode_alone_are_refused(how: Any, least: int, match: str) -> None:
    model = network(Does(lambda x, training: how(x) if training and len(x) >= least else x))
    with pytest.raises(Refused, match=match):
        private_for(model)


def test_a_backward_hook_of_a_module_may_look_and_not_mix() -> None:
    model, seen = network(), list[int]()
    handle = model[0].register_full_backward_hook(lambda module, to, by: seen.append(len(by[0])))
    with warnings.catch_warnings(action="ignore"):  # torch's, that the first layer's inputs have no gradient
        private_for(model)
    assert seen
    handle.remove()
    model[2].register_full_backward_hook(lambda module, to, by: (to[0] / to[0].norm(),))
    with pytest.raises(Refused, match="a hook, an autograd function"):
        private_for(model)


@pytest.mark.parametrize("backward", [Tensor.backward, lambda loss: torch.autograd.backward(loss)])
def test_a_loss_that_calls_backward_is_refused(backward: Any) -> None:
    other = nn.Linear(10, 1)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        backward(other(batch[0]).sum())
        return cw.cross_entropy(model, batch)

    with pytest.raises(Refused, match=r"calls backward\(\).*gradients without noise"):
        private_for(loss=loss)
    assert other.weight.grad is None


# ── what is kept, and what cannot be told apart ─────────────────────────────────────────────────────────────────────


class Counting(nn.Module):
    """How many rows it saw, from so many on, in a buffer that is written to or exchanged."""

    def __init__(self, *, in_place: bool, least: int) -> None:
        super().__init__()
        self.layer, self.in_place, self.least = nn.Linear(10, 3), in_place, least
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        more = len(x) if len(x) >= self.least else 0
        if self.in_place:
            self.seen += more
        else:
            self.seen = self.seen + more
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("least", [0, 32])
def test_a_buffer_that_counts_rows_is_refused_and_left_as_it_was(in_place: bool, least: int) -> None:
    model = Counting(in_place=in_place, least=least)
    with pytest.raises(Refused, match="the buffer seen is computed from the batch, its values or its size"):
        private_for(model)
    assert model.seen == 0


def test_a_loss_that_writes_into_its_batch_is_told_so() -> None:
    def loss(model: nn.Module, batch: Batch) -> Tensor:
        batch[0].mul_(2)
        return cw.cross_entropy(model, batch)

    with pytest.raises(Refused, match="writes into its batch.*work on a copy"):
        private_for(loss=loss)
    private_for(nn.Sequential(nn.ReLU(inplace=True), nn.Linear(10, 3)))  # which a second pass does not notice


def test_noise_from_a_generator_of_one_s_own_is_told_so() -> None:
    own = torch.Generator()
    with pytest.raises(Refused, match="draws from a generator of its own.*draw without generator"):
        private_for(network(Does(lambda x, _: x + torch.randn(x.shape, generator=own))))


@pytest.mark.parametrize("late", [False, True])
def test_samples_of_different_lengths_without_collate_are_told_what_to_write(late: bool) -> None:
    lengths = [11 if late and i == 200 else 10 + (not late) * i % 7 for i in range(ROWS)]
    with pytest.raises(InputError, match="write collate=.*pad_sequence"):
        private_for(data=Rows([(torch.zeros(n), 0) for n in lengths]), batch=ROWS, chunk=ROWS)  # all are read


def scripted() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):
        return torch.jit.trace(network(), X[:2])  # type: ignore[no-any-return, no-untyped-call]


def compiled_in_place() -> nn.Module:
    model = network()
    model.compile()
    return model


@pytest.mark.parametrize(
    ("make", "write"),
    [
        (lambda: torch.compile(network()), "compile=True"),
        (compiled_in_place, "compile=True"),
        (scripted, "pass the model that was scripted or traced"),
    ],
)
def test_a_model_that_was_compiled_already_is_told_what_to_pass(make: Callable[[], nn.Module], write: str) -> None:
    with pytest.raises(InputError, match=write):
        private_for(make())


def test_a_model_that_takes_another_path_on_the_way_is_an_input_error() -> None:
    restless, calls = [False], [0]

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        calls[0] += restless[0]
        losses = cw.cross_entropy(model, batch)
        return losses + cw.cross_entropy(model, batch) if calls[0] % 2 else losses

    private = private_for(loss=loss)
    restless[0] = True
    with pytest.raises(InputError, match="path"):
        private.step(next(private.batches()))
    assert private.ledger.releases == 0


# ── what is honest passes, and nothing is left behind ───────────────────────────────────────────────────────────────


class Encoder(nn.Module):
    """A transformer's layer with its dropouts, in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.TransformerEncoderLayer(10, 2, 16, dropout=0.2, batch_first=True), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x[:, None].expand(-1, 3, -1)).mean(1))  # type: ignore[no-any-return]


class Sequence(nn.Module):
    """Two recurrent layers with dropout between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(5, 8, 2, dropout=0.3, batch_first=True), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x.view(-1, 2, 5))[0][:, -1])  # type: ignore[no-any-return]


HONEST: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: network(nn.Dropout(0.5)),
    "dropout as a function": lambda: network(Does(lambda x, training: F.dropout(x, 0.3, training))),
    "alpha dropout": lambda: network(nn.AlphaDropout(0.3)),
    "a transformer with dropout": Encoder,
    "recurrent layers with dropout": Sequence,
    "noise": lambda: network(Does(lambda x, training: x + 0.1 * torch.randn_like(x) if training else x)),
    "samples left out": lambda: network(Does(lambda x, training: x * (torch.rand(len(x), 1) < 0.8) if training else x)),
    "a spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(10, 8)), nn.Linear(8, 3)),
    "a layer norm": lambda: network(nn.LayerNorm(16)),
}


@pytest.mark.parametrize("name", HONEST)
@pytest.mark.parametrize("training", [True, False])
def test_an_honest_model_passes(name: str, training: bool) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        private_for(HONEST[name]().train(training))


READ: dict[str, tuple[Dataset[Any], Any]] = {
    "noise": (Rows(PLAIN, lambda x: x + torch.randn(10)), None),
    "signs": (Rows(PLAIN, lambda x: x if np.random.random() < 0.5 else -x), None),
    "a part of a random one": (torch.utils.data.Subset(Rows(PLAIN, lambda x: x * random.random()), range(200)), None),
    "noise in collate": (Rows(PLAIN), lambda items: stacked([(x + torch.randn(10), y) for x, y in items])),
    "lengths and masks in collate": (
        texts(range(5, ROWS, 10)),
        lambda items: padded([(torch.where(torch.rand(len(x)) < 0.15, 1, x), y) for x, y in items]),
    ),
    "a mask over the padded batch": (
        texts(range(5, ROWS, 10)),
        lambda items: (lambda x, y: (torch.where(torch.rand(x.shape) < 0.15, x.clamp(max=1), x), y))(*padded(items)),
    ),
}


@pytest.mark.parametrize("name", READ)
def test_random_augmentation_of_each_sample_passes(name: str) -> None:
    data, collate = READ[name]
    words = name.endswith(("in collate", "batch")) and "noise" not in name
    for _ in range(3):
        private_for(Words(masked=True) if words else None, data, collate=collate)


class Autoencoder(nn.Module):
    """A variational one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(10, 8), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        mean, size = self.encoder(x).chunk(2, 1)
        return self.decoder(mean + torch.randn_like(mean) * size.exp())


def rebuilt(change: Callable[[Tensor], Tensor]) -> Callable[[nn.Module, Batch], Tensor]:
    """The loss of building a sample again from what was made of it."""
    return lambda model, batch: (model(change(batch[0])) - batch[0]).square().mean(1)


def diffused(x: Tensor) -> Tensor:
    time = torch.randint(10, (len(x), 1)) / 10
    return (1 - time) * x + time * torch.empty_like(x).normal_()


DRAWN_FOR_EACH: dict[str, Callable[[Tensor], Tensor]] = {
    "noise": lambda x: x + torch.randn_like(x),
    "a mask": lambda x: x * (torch.rand(x.shape) < 0.5),
    "diffusion": diffused,
    "several for each": lambda x: x + torch.randn(10 * len(x)).view_as(x),
    "one for all": lambda x: x * torch.rand(1) + torch.randn(10),
    "as much as a sample's values say": lambda x: torch.poisson(5 * x.abs()),
    "a slope for what is negative": lambda x: F.rrelu(x, training=True),
    "inside torch": lambda x: F.gumbel_softmax(x),
    "a class": lambda x: x * torch.multinomial(torch.ones(len(x), 5), 1),
    "nothing": lambda x: x,
}


@pytest.mark.parametrize("name", DRAWN_FOR_EACH)
@pytest.mark.parametrize("method", ["flat", "inner_momentum", "self_augmentation(views=2, augment='none')"])
def test_a_loss_or_a_model_that_draws_for_each_sample_passes(name: str, method: str) -> None:
    private = private_for(Autoencoder(), loss=rebuilt(DRAWN_FOR_EACH[name]), method=method)
    for batch in private.batches():
        private.step(batch)


class Skips(nn.Module):
    """A network that leaves a layer out at random, for all samples at once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(10, 10), nn.Linear(10, 10), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if not self.training or torch.rand(()) < 0.5:
            x = x + self.second(x)
        return self.last(x)


DRAWN_FOR_ALL: dict[str, Callable[[Tensor], Tensor]] = {
    "torch": lambda x: x.flip(1) if torch.rand(()) < 0.5 else x,
    "Python": lambda x: x.flip(1) if random.random() < 0.5 else x,
    "NumPy": lambda x: x * np.random.random(),
}


@pytest.mark.parametrize("name", [*DRAWN_FOR_ALL, "a layer"])
def test_what_is_drawn_for_all_samples_at_once_passes(name: str) -> None:
    model = Skips() if name == "a layer" else network(nn.Linear(16, 16))
    change = DRAWN_FOR_ALL.get(name, lambda x: x)
    private = private_for(
        model, loss=lambda model, batch: F.cross_entropy(model(change(batch[0])), batch[1], reduction="none"), steps=8
    )
    for batch in private.batches():
        private.step(batch)


MIXED_BY_CHANCE: dict[str, Callable[[Tensor], Tensor]] = {
    "a mean of the noise": lambda x: x + (noise := torch.randn_like(x)) - noise.mean(0),
    "samples as noise": lambda x: x + 0.1 * x[torch.randint(len(x), (len(x),))],
    "samples by their weights": lambda x: x + 0.1 * x[torch.multinomial(torch.ones(len(x)), len(x), replacement=True)],
    "their number": lambda x: x * (1 + 1 / len(x)) + torch.randn_like(x),
}


@pytest.mark.parametrize("name", MIXED_BY_CHANCE)
def test_a_loss_that_draws_and_mixes_is_refused(name: str) -> None:
    with pytest.raises(Refused):
        private_for(Autoencoder(), loss=rebuilt(MIXED_BY_CHANCE[name]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_that_computes_in_half_precision_passes(dtype: torch.dtype) -> None:
    def narrow(model: nn.Module, batch: Batch) -> Tensor:
        with torch.autocast("cpu", dtype):
            return cw.cross_entropy(model, batch)

    for seed in range(3):
        torch.manual_seed(seed)
        private_for(network(nn.ReLU(), nn.Linear(16, 16)), loss=narrow)


class Adapter(nn.Module):
    """A frozen layer in half precision, and a path of two float32 matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x.float())).to(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_adapters_in_float32_on_a_frozen_model_in_half_precision_pass(dtype: torch.dtype) -> None:
    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Sequential(nn.LayerNorm(16), Adapter(nn.Linear(16, 16)), nn.GELU()) for _ in range(6)]
            self.layers = nn.Sequential(nn.Linear(10, 16), *layers, nn.Linear(16, 3))
            for name, p in self.named_parameters():
                if "down" not in name and "up" not in name:
                    p.requires_grad_(False).data = p.data.to(dtype)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x.to(dtype)).float()

    for seed in range(3):
        torch.manual_seed(seed)
        private_for(Adapted())


@pytest.mark.parametrize("size", [1.0, 30.0, 1000.0])
def test_a_model_that_is_sure_of_nearly_all_its_labels_passes(size: float) -> None:
    torch.manual_seed(0)
    model = network()
    with torch.no_grad():
        model[-1].weight.mul_(size)
        labels = model(X).argmax(1)
    for _ in range(3):
        private_for(model, (X, labels))


def test_a_run_that_is_to_be_compiled_passes() -> None:
    assert private_for(network(nn.Dropout(0.5)), compile=True).statement().self_tested


@pytest.mark.parametrize("method", ["flat(1.0)", "p_average(flat(1.0), 2)", "self_augmentation(flat(1.0), 2, 'own')",
                                    "bam(flat(1.0))", "momentum_per_sample(flat(1.0))"])  # fmt: skip
def test_what_a_method_shows_the_model_is_tested_at_the_size_of_a_step(method: str) -> None:
    def views(rows: Batch, count: int, generator: torch.Generator) -> Batch:
        return tuple(t.repeat_interleave(count, 0) for t in rows)

    how = {"method": method, "views": views, "batch": ROWS, "chunk": 100}
    private_for(**how)
    with pytest.raises(Refused, match=r"1 \(Does\) treats a sample differently among 100 rows"):
        private_for(network(Does(lambda x, _: x - x.detach().mean(0) if len(x) >= 50 else x)), **how)


def test_where_the_memory_does_not_hold_a_whole_step_fewer_samples_are_looked_at(monkeypatch: Any) -> None:
    sizes: list[int] = []
    look = whole._look

    def small(*given: Any, **more: Any) -> None:
        sizes.append(len(given[3]))
        if sizes[-1] > 30:
            raise torch.cuda.OutOfMemoryError
        look(*given, **more)

    monkeypatch.setattr(whole, "_look", small)
    private_for()
    assert sizes == [96, 48, 24, 24]


@pytest.mark.parametrize("model", ["noise", "dropout", "a spectral norm"])
def test_generators_buffers_and_modes_are_left_as_they_were(model: str) -> None:
    made = HONEST[model]()
    values = {name: value.clone() for name, value in made.state_dict().items()}
    data = cw.data.as_dataset(Rows(PLAIN, lambda x: x * random.random() + np.random.random()))
    before = generators()
    private_for(made, data)
    assert generators() == before and made.training
    assert all(torch.equal(value, values[name]) for name, value in made.state_dict().items())


def test_dropout_is_held_still_and_comes_back() -> None:
    attention, recurrent = nn.MultiheadAttention(4, 2, dropout=0.5), nn.LSTM(4, 4, 2, dropout=0.5)
    model = nn.ModuleList([attention, recurrent, nn.Dropout(0.5)])
    x = torch.randn(3, 2, 4)

    def values() -> list[Tensor]:
        seeded(0)
        product = F.scaled_dot_product_attention(x, x, x, None, 0.5)
        named = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        return [attention(x, x, x)[0], recurrent(x)[0], model[2](x), F.dropout2d(input=x), product, named]

    with still(model):
        seeded(0)
        before = generators()
        values()
        assert generators() == before
    for dropped, complete in zip(values(), _stilled(model, values), strict=True):
        assert not torch.equal(dropped, complete)
    assert attention.dropout == recurrent.dropout == 0.5


def _stilled(model: nn.Module, values: Callable[[], list[Tensor]]) -> list[Tensor]:
    with still(model):
        return values()
