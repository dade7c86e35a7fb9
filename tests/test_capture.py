"""Capture: the model is left as it was, no weight gradient is computed, and what cannot be followed says so."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from cases import CASES, SAMPLES, Raw, each, integers, loss, normal, off
from clipwise.records import Capture, batch_size, oracle, per_sample, trainable
from clipwise.records import compiled as compiled_module
from clipwise.records import replay as replay_module
from clipwise.types import InputError, Refused

VARIED = [
    "deep Linear",
    "Conv2d with padding",
    "Embedding with repeated ids",
    "GroupNorm",
    "TransformerEncoderLayer",
    "LSTM of two layers in both directions",
    "class token by expand",
    "weight norm of a Linear",
    "einsum",
]


class Classifier(nn.Module):
    """Convolution, norm, dropout, product: what most models are made of."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(64, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.norm(self.conv(x)).relu().flatten(1)))


def classifier(dropout: float = 0.0) -> Classifier:
    torch.manual_seed(0)
    return Classifier(dropout).double()


def images() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return normal(1, 6, 6), integers(3)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(model(x), y, reduction="none")


# ── nothing is left behind ──────────────────────────────────────────────────────────────────────────────────────────


def hooks(model: nn.Module) -> list[str]:
    kinds = [name for name in vars(nn.Module()) if "hook" in name]
    return [name for module in model.modules() for name in kinds if getattr(module, name)]


@pytest.mark.parametrize("name", VARIED)
def test_nothing_is_left_on_the_model(name: str) -> None:
    case = CASES[name]
    model, batch = case.model(), case.batch()
    attributes = [sorted(vars(module)) for module in model.modules()]
    own_hooks = hooks(model)
    before, state = model(*batch), {k: v.clone() for k, v in model.state_dict().items()}
    identities = [id(p) for p in model.parameters()]
    forwards = [type(module).forward for module in model.modules()]
    rows = [t.clone() for t in batch]
    per_sample(model, loss, batch).norms()
    assert hooks(model) == own_hooks
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert [type(module).forward for module in model.modules()] == forwards
    assert all(p.grad is None and p.is_leaf and p.requires_grad and not vars(p) for p in model.parameters())
    assert [id(p) for p in model.parameters()] == identities
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(model(*batch), before)
    assert all(torch.equal(now, then) and not now.requires_grad for now, then in zip(batch, rows, strict=True))


def test_gradients_that_the_user_gathered_stay() -> None:
    model = classifier()
    cross_entropy(model, images()).mean().backward()
    kept = {name: p.grad.clone() for name, p in model.named_parameters()}
    per_sample(model, cross_entropy, images())
    assert all(torch.equal(p.grad, kept[name]) for name, p in model.named_parameters())


def test_a_failed_capture_leaves_nothing_either() -> None:
    model = classifier()
    with pytest.raises(InputError):
        per_sample(model, lambda m, b: cross_entropy(m, b).mean(), images())
    assert hooks(model) == [] and all(p.grad is None for p in model.parameters())
    assert model(images()[0]).shape == (SAMPLES, 3)


def test_ordinary_training_goes_on_as_if_nothing_had_been() -> None:
    models = [classifier(), classifier()]
    per_sample(models[0], cross_entropy, images())
    for model in models:
        cross_entropy(model, images()).mean().backward()
    for one, other in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_records_do_not_keep_the_autograd_graph() -> None:
    found = per_sample(classifier(), cross_entropy, images())
    assert not found.norms().requires_grad and not found.losses.requires_grad
    assert not any(v.requires_grad for v in found.weighted_sum(torch.ones(SAMPLES, dtype=torch.float64)).values())


def test_it_works_where_gradients_are_switched_off() -> None:
    model = classifier()
    with torch.no_grad():
        found = per_sample(model, cross_entropy, images())
    assert off(found.materialise(), oracle.per_sample(model, cross_entropy, images()).materialise()) < 1e-10


# ── no weight gradient ──────────────────────────────────────────────────────────────────────────────────────────────


class Weights(TorchDispatchMode):
    """Notes operations that make a tensor of a weight's shape, and convolutions asked for a weight's gradient."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.shapes = {p.shape for p in model.parameters() if p.dim() > 1}
        self.shapes |= {shape[::-1] for shape in self.shapes if len(shape) == 2}
        self.made: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if "convolution_backward" in str(func) and args[-1][1]:
            self.made.append(str(func))
        if str(func).startswith(("aten.mm", "aten.addmm", "aten.bmm")) and result.shape in self.shapes:
            self.made.append(str(func))
        return result


class Wide(nn.Module):
    """Layers whose norm is taken in the Gram form, so that nothing of a weight's size is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.first, self.last = nn.Conv2d(16, 64, 3), nn.Linear(256, 300), nn.Linear(300, 310)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.conv(x).flatten(1)).tanh())


def test_no_weight_gradient_is_computed() -> None:
    torch.manual_seed(0)
    model, batch = Wide(), (torch.randn(5, 16, 4, 4),)
    capture = Capture(model, loss)
    capture(batch)  # scouting is over
    with Weights(model) as plain:
        loss(model, batch).sum().backward()
    assert len(plain.made) == 3, "an ordinary backward makes one for each weight: this test can see them"
    model.zero_grad(set_to_none=True)
    with Weights(model) as watched:
        found = capture(batch)
        found.norms()
    assert watched.made == []
    assert all(p.grad is None for p in model.parameters())


def test_there_is_one_forward_and_one_backward_after_scouting() -> None:
    model, calls = classifier(), []

    def counted(model: nn.Module, batch: Any) -> Tensor:
        calls.append(len(batch[0]))
        return cross_entropy(model, batch)

    capture = Capture(model, counted)
    capture(images())
    scouted = len(calls)
    assert calls[-1] == SAMPLES and max(calls[:-1]) <= 3
    capture(tuple(t[:2] for t in images()))
    capture(tuple(t[:1] for t in images()))
    assert calls[scouted:] == [2, 1], "the plan does not depend on the batch size"
    model.eval()
    capture(images())
    assert len(calls) > scouted + 3, "in another mode the model may take another path"


def test_parameters_may_change_between_calls() -> None:
    model = classifier()
    capture = Capture(model, cross_entropy)
    capture(images())
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5).add_(0.1)
    expected = oracle.per_sample(model, cross_entropy, images())
    assert off(capture(images()).materialise(), expected.materialise()) < 1e-10


def test_freezing_between_calls_is_noticed() -> None:
    model = classifier()
    capture = Capture(model, cross_entropy)
    capture(images())
    model.conv.requires_grad_(False)
    expected = oracle.per_sample(model, cross_entropy, images())
    assert off(capture(images()).materialise(), expected.materialise()) < 1e-10


# ── random numbers and statistics ───────────────────────────────────────────────────────────────────────────────────


def test_scouting_draws_no_random_numbers() -> None:
    """The capture draws as much as one forward pass does, whether or not it has scouted."""
    model = classifier(dropout=0.5)
    torch.manual_seed(5)
    cross_entropy(model, images())
    torch.manual_seed(5)
    batch = images()  # draws with a seed of its own
    torch.manual_seed(5)
    cross_entropy(model, batch)
    expected = torch.get_rng_state()
    torch.manual_seed(5)
    per_sample(model, cross_entropy, batch)
    assert torch.equal(torch.get_rng_state(), expected)


def test_a_model_without_randomness_leaves_the_generator_alone() -> None:
    model, batch = classifier(), images()
    before = torch.get_rng_state()
    per_sample(model, cross_entropy, batch)
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_gives_the_gradients_of_the_masks_that_were_drawn() -> None:
    model, batch = classifier(dropout=0.5), images()
    torch.manual_seed(5)
    found = per_sample(model, cross_entropy, batch)
    torch.manual_seed(5)
    losses = cross_entropy(model, batch)
    assert torch.equal(found.losses, losses.detach())
    expected = torch.autograd.grad(losses.sum(), list(model.parameters()))
    total = found.weighted_sum(torch.ones(SAMPLES, dtype=torch.float64))
    assert off(total, dict(zip(total, expected, strict=True))) < 1e-10


def test_statistics_change_as_in_one_forward_pass() -> None:
    """A spectral norm in training mode takes a step of its power iteration in every forward."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(parametrizations.spectral_norm(nn.Linear(4, 3)).double())
    x = normal(4)
    per_sample(models[0], loss, (x,))
    models[1](x)
    assert all(torch.equal(a, b) for a, b in zip(*(m.state_dict().values() for m in models), strict=True))


# ── mixed precision ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", [name for name in CASES if "relu" not in name])  # a kink turns rounding into a jump
def test_under_autocast_gradients_are_close_to_float32_and_kept_in_it(name: str) -> None:
    case = CASES[name]
    model = case.model().float()
    batch = tuple(t.float() if t.is_floating_point() else t for t in case.batch())

    def half(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(*batch)
        return each(output.float())

    found, expected = per_sample(model, half, batch), oracle.per_sample(model, loss, batch)
    assert off(found.materialise(), expected.materialise()) < 0.05
    assert (found.norms() - expected.norms()).abs().max() <= 0.05 * expected.norms().max()
    values = [found.norms(), *found.weighted_sum(torch.ones(SAMPLES)).values(), *found.materialise().values()]
    assert all(v.dtype == torch.float32 for v in values)


@pytest.mark.parametrize("layer", [lambda: nn.Linear(6, 5), lambda: nn.Conv1d(3, 4, 2)])
def test_under_autocast_a_layers_wide_input_is_not_kept_beside_the_narrow_one(layer: Callable[[], nn.Module]) -> None:
    made: list[StorageWeakRef] = []
    kept: list[bool] = []

    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer()

        def forward(self, x: Tensor) -> Tensor:
            wide = 2 * x
            made.append(StorageWeakRef(wide.untyped_storage()))
            return self.layer(wide)

    def narrow(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x).float()
        kept.append(not made[-1].expired())
        return out.square().sum((1, 2))

    per_sample(Doubled(), narrow, torch.randn(4, 3, 6))
    assert kept and not any(kept)


def test_autocast_around_the_capture_is_the_same_as_in_the_loss() -> None:
    model = classifier().float()
    x, y = images()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outside = per_sample(
            model, lambda m, b: F.cross_entropy(m(b[0]).float(), b[1], reduction="none"), (x.float(), y)
        )
    expected = oracle.per_sample(model, cross_entropy, (x.float(), y))
    assert torch.allclose(outside.norms(), expected.norms(), rtol=0.05)


@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_around_a_whole_step_is_not_for_norms_and_sums(
    compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", lambda graph, **options: graph)
    monkeypatch.setattr(replay_module, "ROUNDS_FIRST", "2")  # nothing is compiled
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 3))
    names, batch = tuple(trainable(model)), torch.randn(SAMPLES, 5, 40)
    narrow = lambda model, batch: model(batch).float().square().mean((1, 2))
    capture = compiled_module.CompiledCapture(model, narrow, SAMPLES, [names])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = capture(batch) if compiled else per_sample(model, narrow, batch)
        norms = found.norms([names])
        sums, inner = found.weighted_sum(1 / norms, [names]), found.inner(trainable(model))
    written = {name: value.double() for name, value in found.materialise().items()}
    expected = torch.cat([value.flatten(1) for value in written.values()], 1).norm(dim=1)
    torch.testing.assert_close(norms[:, 0].double(), expected, rtol=1e-5, atol=0)
    for name, value in written.items():
        assert sums[name].dtype == torch.float32
        expected = torch.tensordot(1 / norms[:, 0].double(), value, 1)
        torch.testing.assert_close(sums[name].double(), expected, rtol=1e-5, atol=1e-6)
    expected = torch.stack([(value * trainable(model)[name]).flatten(1).sum(1) for name, value in written.items()])
    torch.testing.assert_close(inner.double(), expected.detach().sum(0), rtol=1e-5, atol=1e-6)


def test_a_model_of_two_formats_keeps_float32_sums() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.low, self.high = nn.Linear(6, 5).bfloat16(), nn.Linear(5, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.high(self.low(x.bfloat16()).float())

    torch.manual_seed(0)
    model, x = Two(), torch.randn(SAMPLES, 2, 6)
    found = per_sample(model, loss, (x,))
    same = Two()
    same.load_state_dict(model.state_dict())
    expected = oracle.per_sample(same, loss, (x,))
    assert torch.allclose(found.norms(), expected.norms(), rtol=0.05)
    assert all(v.dtype == torch.float32 for v in found.weighted_sum(torch.ones(SAMPLES)).values())


# ── losses ──────────────────────────────────────────────────────────────────────────────────────────────────────────

WRONG: dict[str, tuple[Callable[[nn.Module, Any], Any], str]] = {
    "a mean": (lambda m, b: F.cross_entropy(m(b[0]), b[1]), r"shape \[\]"),
    "a sum that keeps its dimension": (lambda m, b: cross_entropy(m, b).sum()[None], r"got shape \[1\]"),
    "a value per class": (lambda m, b: m(b[0]), r"got shape \[\d, 3\]"),
    "a column": (lambda m, b: cross_entropy(m, b)[:, None], r"got shape \[\d, 1\]"),
    "a number": (lambda m, b: float(cross_entropy(m, b).mean()), "got float"),
    "nothing": (lambda m, b: None, "got NoneType"),
    "a dictionary": (lambda m, b: {"loss": cross_entropy(m, b)}, "got dict"),
    "a tuple": (lambda m, b: (cross_entropy(m, b), m(b[0])), "got tuple"),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("entry", [per_sample, oracle.per_sample], ids=["engine", "oracle"])
def test_a_loss_that_is_not_one_value_per_sample_shows_the_line_to_write(name: str, entry: Any) -> None:
    wrong, got = WRONG[name]
    if entry is oracle.per_sample and name in ("a sum that keeps its dimension", "a number"):
        pytest.skip("one sample at a time, it is one value, or no tensor under torch.func")
    with pytest.raises(InputError, match=got) as caught:
        entry(classifier(), wrong, images())
    columns = name in ("a value per class", "a column")
    assert ("write values.flatten(1).mean(1)" if columns else "reduction='none'") in str(caught.value)
    assert "one value per sample" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_loss_that_no_parameter_reaches_has_every_parameter_unused() -> None:
    model = classifier()
    found = per_sample(model, lambda m, b: b[0].flatten(1).sum(1), images())
    assert found.unused == found.names
    assert not found.norms().any()


# ── batches ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


BATCHES: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "tuple": (lambda x, y: (x, y), lambda b: b),
    "list": (lambda x, y: [x, y], lambda b: (b[0], b[1])),
    "named tuple": (Pair, lambda b: (b.x, b.y)),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda b: (b["x"], b["y"])),
    "mapping": (lambda x, y: UserDict(x=x, y=y), lambda b: (b["x"], b["y"])),
    "nested": (lambda x, y: ({"x": [x]}, (y,)), lambda b: (b[0]["x"][0], b[1][0])),
    "with a number for all samples": (lambda x, y: (x, y, torch.tensor(2.0)), lambda b: (b[0] * b[2] / 2, b[1])),
    "with things that are no tensors": (lambda x, y: {"x": x, "y": y, "name": "a", "n": 3}, lambda b: (b["x"], b["y"])),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_may_be_any_tree_of_tensors(name: str) -> None:
    make, take = BATCHES[name]
    model, batch = classifier(), make(*images())
    nested = lambda m, b: cross_entropy(m, take(b))
    expected = oracle.per_sample(model, cross_entropy, images()).materialise()
    assert off(per_sample(model, nested, batch).materialise(), expected) < 1e-10
    assert off(oracle.per_sample(model, nested, batch).materialise(), expected) < 1e-10
    assert batch_size(batch) == SAMPLES


def test_a_batch_that_is_one_tensor() -> None:
    model = classifier()
    found = per_sample(model, lambda m, x: each(m(x)), images()[0])
    assert found.samples == SAMPLES


@pytest.mark.parametrize(
    ("batch", "got"),
    [
        ((torch.zeros(3, 1, 6, 6), torch.zeros(4)), r"\[3, 4\] rows"),
        ({}, "no tensor"),
        ((torch.tensor(1.0),), "no tensor"),
        (("text", 3), "no tensor"),
    ],
)
def test_a_batch_whose_rows_do_not_match_is_an_error(batch: Any, got: str) -> None:
    with pytest.raises(InputError, match=got):
        per_sample(classifier(), cross_entropy, batch)
    with pytest.raises(InputError, match=got):
        batch_size(batch)


def test_a_captures_plan_serves_batches_of_other_lengths() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2)).double()
    capture = Capture(model, lambda m, ids: m(ids).square().sum((1, 2)))
    for length in (5, 2, 5, 1):
        ids = integers(7, length)
        expected = oracle.per_sample(model, capture.loss, ids)
        assert torch.allclose(capture(ids).norms(), expected.norms(), rtol=1e-10)


# ── what cannot be followed ─────────────────────────────────────────────────────────────────────────────────────────


class Runs(nn.Module):
    def __init__(self, run: Callable[..., Tensor], part: nn.Module | None = None) -> None:
        super().__init__()
        self.run, self.part = run, part or nn.Linear(3, 3)

    def forward(self, *batch: Tensor) -> Tensor:
        return self.run(self.part, *batch)


def runs(run: Callable[..., Tensor], part: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return Runs(run, part).double()


def one_at_a_time(part: nn.Module, x: Tensor) -> Tensor:
    return torch.cat([part(row[None]) for row in x])


def only_for_four(part: nn.Module, x: Tensor) -> Tensor:
    return part(x) * part.bias if len(x) == SAMPLES else part(x)


def packed_tokens(part: nn.Module, x: Tensor, real: Tensor) -> Tensor:
    """Only the real tokens, of all samples in one list."""
    output = torch.zeros_like(x)
    output[real] = part(x[real])
    return output


@pytest.mark.parametrize(
    ("run", "why"), [(one_at_a_time, "different path"), (only_for_four, "(another|different) path")]
)
def test_a_path_that_depends_on_the_batch_size_is_a_clear_error(run: Callable[..., Tensor], why: str) -> None:
    with pytest.raises(InputError, match=why) as caught:
        per_sample(runs(run), loss, (normal(3),))
    assert "call each layer once for the whole batch" in str(caught.value) or "let no layer be" in str(caught.value)


class Masked(nn.Module):
    """As some Hugging Face models do: the mask is left out where no sample of the batch needs it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.drop, self.head = nn.Parameter(torch.rand(5)), nn.Dropout(0.5), nn.Linear(5, 3)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        bias = self.bias if real.all() else torch.where(real, self.bias, -1.0)
        return self.head(self.drop(x + bias))


@pytest.mark.parametrize("orders", ["first", "last"])
def test_a_path_that_depends_on_the_values_of_a_batch_is_followed(orders: str) -> None:
    """Whichever path was seen first, each batch has its own; and the random numbers are those of one forward pass."""
    torch.manual_seed(0)
    model = Masked().double()
    full = torch.ones(SAMPLES, 5, dtype=torch.bool)
    some = full.clone()
    some[2, 3:] = False  # not the first sample
    capture = Capture(model, loss)
    for real in (full, some, full, some) if orders == "first" else (some, full, some, full):
        x = normal(5)
        for train in (False, True):
            model.train(train)
            torch.manual_seed(3)
            found = capture((x, real))
            torch.manual_seed(3)
            losses = loss(model, (x, real))
            assert torch.allclose(found.losses, losses.detach())
            total = found.weighted_sum(torch.ones(SAMPLES, dtype=torch.float64))
            sums = torch.autograd.grad(losses.sum(), list(model.parameters()))
            assert off(total, dict(zip(total, sums, strict=True))) < 1e-10
            if not train:
                assert off(found.materialise(), oracle.per_sample(model, loss, (x, real)).materialise()) < 1e-10


def time_first(part: nn.Module, x: Tensor) -> Tensor:
    """[time · sample, feature]: a sample's entries are not side by side."""
    return part(x.transpose(0, 1).flatten(0, 1)).unflatten(0, (x.shape[1], -1)).transpose(0, 1)


MIXING: dict[str, Callable[..., Tensor]] = {
    "time and samples in one dimension, time first": time_first,
    "the batch's mean": lambda part, x: part(x) - part(x).mean(0),
    "samples in another order": lambda part, x: part(x).flip(0),
    "attention between samples": lambda part, x: part(x) * part(x).flatten(1).mean(1).softmax(0)[:, None, None],
    "a norm over the batch": lambda part, x: F.batch_norm(part(x).flatten(1), None, None, training=True),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_model_whose_samples_cannot_be_told_apart_is_refused(name: str) -> None:
    with pytest.raises(Refused, match="sample"):
        per_sample(runs(MIXING[name]), loss, (normal(SAMPLES, 3),))


def test_batch_norm_in_training_mode_is_refused_with_the_fix() -> None:
    for layers in ([nn.BatchNorm1d(3)], [nn.Linear(3, 3), nn.BatchNorm1d(3)]):
        with pytest.raises(Refused, match=r"nn\.GroupNorm.*eval\(\)"):
            per_sample(nn.Sequential(*layers).double(), loss, (normal(3),))


def test_refusing_a_model_leaves_its_buffers_as_they_were() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(Refused, match="mixes the samples"):
        per_sample(model, loss, (normal(3),))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_torch_s_own_batch_norm_in_training_mode_is_refused_too() -> None:
    model = Raw(lambda m, x: torch.batch_norm(x, m.w, m.b, None, None, True, 0.1, 1e-5, False), w=(3,), b=(3,))
    with pytest.raises(Refused, match=r"nn\.GroupNorm"):
        per_sample(model.double(), loss, (normal(3),))


def test_an_embedding_with_max_norm_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Embedding(7, 3, max_norm=1.0)).double()
    with pytest.raises(Refused, match=r"1\.weight.*max_norm=1\.0.*write max_norm=None"):
        per_sample(model, lambda m, ids: m[1](ids).sum((1, 2)), integers(7, 5))


def test_refusing_max_norm_leaves_the_table_as_it_was() -> None:
    model = nn.Embedding(7, 3, max_norm=0.1).double()
    before = model.weight.detach().clone()
    with pytest.raises(Refused):
        per_sample(model, lambda m, ids: m(ids).sum((1, 2)), integers(7, 5))
    assert torch.equal(model.weight, before)


def test_a_frozen_table_with_max_norm_is_refused_too_and_left_as_it_was() -> None:
    model = nn.Sequential(nn.Embedding(7, 3, max_norm=0.1), nn.Linear(3, 1)).double()
    before = model[0].weight.detach().clone()
    model[0].weight.requires_grad_(False)
    with pytest.raises(Refused, match=r"max_norm=0\.1: it rewrites the rows.*write max_norm=None"):
        per_sample(model, lambda m, ids: m(ids).sum((1, 2)), integers(7, 5))
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_scale_grad_by_freq_is_refused_by_name(kind: Any) -> None:
    model = nn.Sequential(kind(7, 3, scale_grad_by_freq=True)).double()
    with pytest.raises(Refused, match=r"0\.weight.*scale_grad_by_freq=False"):
        per_sample(model, lambda m, ids: m(ids).flatten(1).sum(1), integers(7, 5))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_recurrence_over_the_samples_is_an_error_that_says_what_to_write(kind: Any) -> None:
    def steps_are_samples(model: nn.Module, batch: Any) -> Tensor:
        return model(batch)[0].flatten(1).sum(1)

    with pytest.raises((InputError, Refused), match="batch_first=True"):
        per_sample(kind(4, 3).double(), steps_are_samples, normal(5, 4))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_packed_sequence_is_an_error_that_says_what_to_write(kind: Any) -> None:
    def packed(model: nn.Module, batch: Any) -> Tensor:
        x, lengths = batch
        output, _ = model(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return output.data.sum().expand(len(x))

    with pytest.raises(InputError, match="packed") as caught:
        per_sample(kind(4, 3, batch_first=True).double(), packed, (normal(5, 4), torch.tensor([5, 3, 2, 1])))
    assert "padded" in str(caught.value) and "mask" in str(caught.value)


@pytest.mark.parametrize(
    "lengths",
    [(3, 2, 1, 3), (2, 1, 3, 2), (1, 1, 2, 0)],
    ids=["with another total", "with the total of equal samples", "with as many tokens as samples"],
)
def test_samples_with_unequal_numbers_of_packed_tokens_are_an_error(lengths: tuple[int, ...]) -> None:
    """Where the total is what equal samples would give, no size tells."""
    real = torch.arange(3) < torch.tensor(lengths)[:, None]
    with pytest.raises(InputError, match="sample"):
        per_sample(runs(packed_tokens), loss, (normal(3, 3), real))


def test_a_mask_that_is_the_same_for_all_samples_may_pick_positions() -> None:
    keep = torch.tensor([True, False, True, True])
    run = lambda part, x: part(x[:, keep].flatten(0, 1)).unflatten(0, (-1, 3))
    model, x = runs(run), normal(4, 3)
    found, expected = per_sample(model, loss, (x,)), oracle.per_sample(model, loss, (x,))
    assert off(found.materialise(), expected.materialise()) < 1e-10


def test_an_operation_that_vmap_does_not_know_names_the_parameter() -> None:
    def into(part: nn.Module, x: Tensor) -> Tensor:
        x = x.clone()
        x[:, 0] = part.bias
        return part(x)

    with pytest.raises(InputError, match=r"part\.bias.*__setitem__") as caught:
        per_sample(runs(into), loss, (normal(2, 3),))
    assert "\n" not in str(caught.value)
