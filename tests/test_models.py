"""The networks: their published sizes and equations, their independence of samples, and what build refuses."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import clipwise as cw
from clipwise import models
from clipwise.cli import main
from clipwise.data.text import tokenised
from clipwise.models import MODELS, build, digits_cnn, mnist_cnn, resnet20_gn, small_transformer, takes_tokens
from clipwise.models.resnet import BLOCKS
from clipwise.models.standardise import Coordinates, StandardisedConv2d
from clipwise.records.checks import check_samples
from clipwise.records.standardise import pulled_back, standardise
from clipwise.types import InputError

# shapes of one sample that are smaller than those of the data that a network was made for, where it takes them
SMALL = {"mlp": (2, 5), "vit_small": (3, 32, 32), "resnet9": (3, 16, 16)}
OPTIONS = {"vit_small": "vit_small(depth=1)", "gpt2_small": "gpt2_small(depth=1)"}
# depths of one family are the same code: the deep ones are built and counted, the shallow ones tried
DEEP = ("resnet26", "resnet32", "resnet44", "resnet56", "wrn_40")
SHALLOW = [name for name in MODELS if not name.startswith(DEEP) and not name.endswith("_bn")]  # _bn: see Accompanied


def needed(name: str) -> None:
    if name in OPTIONS:
        pytest.importorskip("transformers")


def shape_of(name: str) -> tuple[int, ...]:
    network = MODELS[name]
    if takes_tokens(name):
        return (6,)
    return SMALL.get(name, (3, 8, 8) if network.takes.startswith("(channels") else network.data.shape)


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def samples(name: str, count: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (count, *shape_of(name))
    if takes_tokens(name):
        return torch.randint(11, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def made(name: str, classes: int = 3) -> nn.Module:
    needed(name)
    torch.manual_seed(0)
    return build(OPTIONS.get(name, name), shape_of(name), classes, vocabulary=11 if takes_tokens(name) else None)


def doubled(name: str, count: int) -> tuple[nn.Module, Tensor]:
    inputs = samples(name, count)
    return made(name).double(), inputs.double() if inputs.is_floating_point() else inputs


# ── sizes ───────────────────────────────────────────────────────────────────────────────────────────────────────────

PUBLISHED = {
    "resnet20_enhanced": 270_266,
    "resnet20_gn": 269_722,
    "gru": 32_002,
    "gru_enhanced": 32_002,
    "mnist_cnn": 26_010,
    "opacus_mnist": 26_010,
    "cifar_cnn": 550_570,
    "cifar_tutorial": 62_006,
    "resnet9": 2_448_714,
    "wrn_16_4": 2_753_818,
    "digits_cnn": 2_762,
}


def test_the_sizes_are_the_published_ones() -> None:
    assert size(mnist_cnn()) == 26_010
    assert size(resnet20_gn()) == 269_722
    assert size(digits_cnn()) == 2_762
    assert {name: MODELS[name].parameters for name in PUBLISHED} == PUBLISHED
    # Tramèr and Boneh give these in thousands: 155, 187, 33, and 40 for MNIST's linear classifier
    assert [MODELS[f"scattering_{head}"].parameters // 1000 for head in ("linear", "cnn", "mnist_cnn")] == [
        155,
        187,
        33,
    ]
    assert size(build("scattering_linear", (1, 28, 28), 10)) == 81 * 7 * 7 * 10 + 10


@pytest.mark.parametrize("name", MODELS)
def test_the_table_has_the_size_of_what_is_built(name: str) -> None:
    needed(name)
    data = MODELS[name].data
    with torch.device("meta"):  # sizes without numbers
        assert size(build(name, data.shape, data.classes, data.vocabulary)) == MODELS[name].parameters


@pytest.mark.parametrize(("depth", "blocks"), BLOCKS.items())
def test_a_residual_network_has_as_many_weighted_layers_as_its_name_says(depth: int, blocks: tuple[int, ...]) -> None:
    assert depth == 2 * sum(blocks) + 2
    for kind in ("gn", "enhanced"):
        with torch.device("meta"):
            model = build(f"resnet{depth}_{kind}", (3, 32, 32), 10)
        weights = [value for value in model.parameters() if value.dim() > 1]
        assert len(weights) == depth
        assert [sum(len(w) == width and w.dim() == 4 for w in weights) for width in (16, 32, 64)] == [
            2 * blocks[0] + 1,
            2 * blocks[1],
            2 * blocks[2],
        ]


def test_the_wide_networks_follow_the_count_of_their_layers() -> None:
    def count(depth: int, width: int) -> int:
        def layer(inputs: int, outputs: int, kernel: int) -> int:
            return 2 * inputs + kernel**2 * inputs * outputs + 2 * outputs  # norm, weight, gain and bias

        total, inputs = 27 * 16 + 2 * 16, 16
        for outputs in (16 * width, 32 * width, 64 * width):
            total += layer(inputs, outputs, 1) + layer(inputs, outputs, 3)
            total += (2 * (depth - 4) // 6 - 1) * layer(outputs, outputs, 3)
            inputs = outputs
        return total + 2 * inputs + 10 * inputs + 10

    assert [MODELS[f"wrn_{depth}_4"].parameters for depth in (16, 40)] == [count(16, 4), count(40, 4)]


# ── every network ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", SHALLOW)
def test_every_model_gives_one_logit_per_class(name: str) -> None:
    assert made(name, classes=7)(samples(name, 2)).shape == (2, 7)


@pytest.mark.parametrize("name", SHALLOW)
def test_a_sample_does_not_see_the_others_in_its_batch(name: str) -> None:
    model, inputs = made(name), samples(name, 4)
    assert torch.allclose(model(inputs)[:1], model(inputs[:1]), atol=1e-5)
    assert not [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


@pytest.mark.parametrize("name", SHALLOW)
def test_every_parameter_receives_a_gradient(name: str) -> None:
    model = made(name)
    model(samples(name, 4)).logsumexp(dim=1).sum().backward()
    assert [key for key, value in model.named_parameters() if value.grad is None or not value.grad.any()] == []


@pytest.mark.parametrize("name", SHALLOW)
def test_per_sample_gradients_are_those_of_the_oracle_without_a_fallback(name: str) -> None:
    model, inputs = doubled(name, 3)
    batch = (inputs, torch.arange(3))
    fast, slow = (engine(model, cw.cross_entropy, batch) for engine in (cw.per_sample, cw.oracle.per_sample))
    assert torch.allclose(fast.norms(), slow.norms(), rtol=1e-9)
    weights = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    ours, theirs = fast.weighted_sum(weights), slow.weighted_sum(weights)
    worst = max(float((ours[key] - theirs[key]).abs().max()) for key in theirs)
    assert worst <= 1e-10 * float(slow.norms().max())
    assert fast.fallbacks == fast.unused == ()


@pytest.mark.parametrize("name", [name for name in SHALLOW if len(shape_of(name)) == 3])
def test_gradients_are_the_same_with_channels_last_in_memory(name: str) -> None:
    model, inputs = doubled(name, 3)
    batch = (inputs, torch.arange(3))
    weights = torch.tensor([1.0, -0.5, 2.0], dtype=torch.float64)
    expected = cw.per_sample(model, cw.cross_entropy, batch).weighted_sum(weights)
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    found = cw.per_sample(model, cw.cross_entropy, batch).weighted_sum(weights)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in SHALLOW if MODELS[name].parameters < 200_000])
def test_the_self_test_at_start_up_passes(name: str) -> None:
    check_samples(made(name), cw.cross_entropy, (samples(name, 3), torch.arange(3)))


# ── weight standardisation ──────────────────────────────────────────────────────────────────────────────────────────


def one_output(weights: list[float], form: str) -> list[float]:
    """The published equations for one output channel, in Python's own numbers."""
    fan_in = len(weights)
    mean = sum(weights) / fan_in
    squares = sum((w - mean) ** 2 for w in weights)
    if form == "std":
        scale = 1 / (math.sqrt(squares / (fan_in - 1)) + 1e-6) / math.sqrt(fan_in)
    else:
        scale = 1 / math.sqrt(max(squares / fan_in * fan_in, 1e-4))
    return [(w - mean) * scale for w in weights]


@pytest.mark.parametrize("form", ["std", "variance"])
@pytest.mark.parametrize("spread", [1.0, 1e-5])
def test_standardised_weights_follow_the_published_equations(form: str, spread: float) -> None:
    torch.manual_seed(0)
    weight, gain = 2 + spread * torch.randn(5, 3, 2, 2, dtype=torch.float64), torch.rand(5, dtype=torch.float64)
    expected = torch.tensor([one_output(row.flatten().tolist(), form) for row in weight], dtype=torch.float64)
    expected = expected.view_as(weight)
    assert torch.allclose(standardise(weight, form=form), expected, rtol=1e-6, atol=1e-9)
    assert torch.allclose(standardise(weight, gain, form=form), expected * gain[:, None, None, None], atol=1e-9)


def test_whoever_follows_a_model_sees_the_standardisation_as_one_call() -> None:
    calls: list[tuple[object, tuple[object, ...], object]] = []

    class Listen(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            calls.append((function, args, kwargs))
            return function(*args, **(kwargs or {}))

    layer = StandardisedConv2d(3, 4, 3, form="variance", affine=True)
    with Listen():
        layer(torch.randn(2, 3, 5, 5))
    found = [(args, kwargs) for function, args, kwargs in calls if function is standardise]
    assert len(found) == 1
    (weight, gain), options = found[0]
    assert weight is layer.weight and gain is layer.gain and options == {"form": "variance"}
    assert not {"mean", "std", "var"} & {getattr(function, "__name__", "") for function, _, _ in calls}


@pytest.mark.parametrize("form", ["std", "variance"])
@pytest.mark.parametrize("spread", [1.0, 1e-3, 0.0])
def test_gradients_go_back_through_standardisation_as_autograd_takes_them(form: str, spread: float) -> None:
    torch.manual_seed(0)
    weight = (0.3 + spread * torch.randn(4, 3, 2, 2, dtype=torch.float64)).requires_grad_()
    gain = torch.randn(4, dtype=torch.float64, requires_grad=True)
    gradients = torch.randn(5, 4, 3, 2, 2, dtype=torch.float64)
    made = standardise(weight, gain, form=form)
    expected = torch.autograd.grad(made, (weight, gain), gradients, is_grads_batched=True)
    torch.testing.assert_close(pulled_back(gradients, weight, gain, form=form), expected)
    alone = standardise(weight, form=form)
    expected = torch.autograd.grad(alone, weight, gradients, is_grads_batched=True)
    torch.testing.assert_close(pulled_back(gradients, weight, form=form)[0], expected[0])


def test_a_weight_of_one_number_per_output_cannot_be_standardised() -> None:
    with pytest.raises(InputError, match=r"at least 2 numbers for each output, got shape \[4, 1, 1, 1\]"):
        standardise(torch.randn(4, 1, 1, 1), form="std")
    with pytest.raises(InputError, match="unknown form of standardisation 'sdt': did you mean 'std'"):
        standardise(torch.randn(4, 2), form="sdt")


def test_coordinates_have_mean_zero_and_unbiased_variance_one() -> None:
    torch.manual_seed(0)
    vectors = 3 + 2 * torch.randn(4, 7, 5, dtype=torch.float64)
    centred = vectors - vectors.mean(-1, keepdim=True)
    expected = centred / (centred.square().sum(-1, keepdim=True) / 4 + 1e-5).sqrt()
    assert torch.allclose(Coordinates(5)(vectors), expected, rtol=1e-12)


def test_a_constant_vector_has_a_finite_gradient() -> None:
    vector = torch.full((5,), 3.0, requires_grad=True)
    (Coordinates(5)(vector) * torch.arange(5)).sum().backward()
    assert vector.grad is not None and vector.grad.isfinite().all() and vector.grad.any()


# ── the equations of the networks ───────────────────────────────────────────────────────────────────────────────────


def normalised(x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """GroupNorm by its definition."""
    parts = x.reshape(len(x), groups, -1)
    parts = (parts - parts.mean(2, keepdim=True)) / (parts.var(2, correction=0, keepdim=True) + 1e-5).sqrt()
    y = parts.view_as(x)
    return y if weight is None or bias is None else y * weight[:, None, None] + bias[:, None, None]


def option_a(x: Tensor, channels: int) -> Tensor:
    if x.shape[1] == channels:
        return x
    y = x.new_zeros(len(x), channels, -(-x.shape[2] // 2), -(-x.shape[3] // 2))
    start = (channels - x.shape[1]) // 2
    y[:, start : start + x.shape[1]] = x[:, :, ::2, ::2]
    return y


def enhanced_resnet(values: Iterator[Tensor], blocks: tuple[int, ...], x: Tensor) -> Tensor:
    """METHODS of Xiao et al. 2023, §5.1, block by block."""

    def conv(x: Tensor, stride: int = 1) -> Tensor:
        w = next(values)
        rows = w.flatten(1)
        rows = (rows - rows.mean(1, keepdim=True)) / (rows.std(1, keepdim=True) + 1e-6) / rows.shape[1] ** 0.5
        return F.conv2d(x, rows.view_as(w), stride=stride, padding=1)

    x = normalised(F.elu(conv(x)), 4)
    for stage, width in enumerate((16, 32, 64)):
        for block in range(blocks[stage]):
            y = normalised(F.elu(conv(x, 2 if stage and not block else 1)), 4)
            y = normalised(conv(y), 4)
            x = normalised(F.elu(y + option_a(x, width)), 4)
    height, width = x.shape[2] // 2, x.shape[3] // 2
    pooled = x.reshape(len(x), 64, 2, height, 2, width).mean((3, 5)).flatten(1)
    centred = pooled - pooled.mean(1, keepdim=True)
    features = centred / (centred.square().sum(1, keepdim=True) / 255 + 1e-5).sqrt()
    return features @ next(values).T + next(values)


def over_rows(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """BatchNorm of [row, channel, …] by these rows' own statistics."""
    centred = x - x.mean((0, 2, 3), keepdim=True)
    y = centred / (centred.square().mean((0, 2, 3), keepdim=True) + 1e-5).sqrt()
    return y * weight[:, None, None] + bias[:, None, None]


def in_four_groups(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return normalised(x, 4, weight, bias)


def published_resnet(
    values: Iterator[Tensor],
    blocks: tuple[int, ...],
    x: Tensor,
    norm: Callable[[Tensor, Tensor, Tensor], Tensor] = in_four_groups,
) -> Tensor:
    """He et al. 2016, §4.2, with GroupNorm in BatchNorm's place unless ``norm`` says otherwise."""

    def conv(x: Tensor, stride: int = 1) -> Tensor:
        return norm(F.conv2d(x, next(values), stride=stride, padding=1), next(values), next(values))

    x = conv(x).relu()
    for stage, width in enumerate((16, 32, 64)):
        for block in range(blocks[stage]):
            y = conv(x, 2 if stage and not block else 1).relu()
            x = (conv(y) + option_a(x, width)).relu()
    return x.mean((2, 3)) @ next(values).T + next(values)


def wide_resnet(values: Iterator[Tensor], x: Tensor) -> Tensor:
    """De et al. 2022: activation, norm, convolution; WRN-16-4."""

    def conv(x: Tensor, stride: int = 1) -> Tensor:
        w, gain, bias = next(values), next(values), next(values)
        rows = w.flatten(1)
        spread = (rows.var(1, correction=0) * rows.shape[1]).clamp(min=1e-4).sqrt()
        rows = (rows - rows.mean(1, keepdim=True)) * (gain / spread)[:, None]
        return F.conv2d(x, rows.view_as(w), bias, stride=stride, padding=w.shape[2] // 2)

    def norm(x: Tensor) -> Tensor:
        return normalised(x.relu(), 16, next(values), next(values))

    x = conv(x)
    for stage in range(3):
        for block in range(2):
            stride = 2 if stage and not block else 1
            y = conv(norm(x), stride)
            y = conv(norm(y))
            x = y + (x if block else conv(norm(x), stride))
    return norm(x).mean((2, 3)) @ next(values).T + next(values)


def scale_norm_resnet(values: Iterator[Tensor], x: Tensor) -> Tensor:
    """Klause et al. 2022."""

    def norm(x: Tensor) -> Tensor:
        return normalised(x, 32, next(values), next(values))

    def layer(x: Tensor) -> Tensor:
        y = norm(F.conv2d(x, next(values), padding=1))
        return y * torch.tanh(torch.log1p(torch.exp(y)))

    def halved(x: Tensor) -> Tensor:
        return x.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).amax((3, 5))

    x = halved(layer(layer(x)))
    x = norm(layer(layer(x)) + x)
    x = halved(layer(halved(layer(x))))
    x = norm(layer(layer(x)) + x)
    return x.flatten(1) @ next(values).T + next(values)  # 2×2 pixels are left of 16×16


EQUATIONS: dict[str, Callable[[Iterator[Tensor], Tensor], Tensor]] = {
    "resnet14_enhanced": lambda values, x: enhanced_resnet(values, (2, 2, 2), x),
    "resnet22_enhanced": lambda values, x: enhanced_resnet(values, (3, 4, 3), x),
    "resnet20_gn": lambda values, x: published_resnet(values, (3, 3, 3), x),
    "wrn_16_4": wide_resnet,
    "resnet9": scale_norm_resnet,
}


@pytest.mark.parametrize("name", EQUATIONS)
def test_a_network_computes_what_its_paper_says(name: str) -> None:
    model, inputs = doubled(name, 2)
    with torch.no_grad():
        for parameter in model.parameters():  # gains of 1 and biases of 0 would hide a mistake
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    values = iter([parameter.detach() for parameter in model.parameters()])
    assert torch.allclose(model(inputs), EQUATIONS[name](values, inputs), rtol=1e-9, atol=1e-9)
    assert next(values, None) is None


def accompanied(companions: int) -> tuple[nn.Module, Tensor]:
    """resnet20_bn in float64 with numbers that hide nothing, and three units of one sample and its companions."""
    model, public = doubled("resnet20_bn", 5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    units = torch.randn(3, 1 + companions, 3, 8, 8, dtype=torch.float64)
    return models.Accompanied(model, public, companions), units


def test_the_network_with_batchnorm_is_the_published_one_over_a_sample_and_its_companions() -> None:
    model, units = accompanied(companions=2)
    for unit, logits in zip(units, model(units), strict=True):
        values = iter([parameter.detach() for parameter in model.parameters()])
        assert torch.allclose(logits, published_resnet(values, (3, 3, 3), unit, over_rows)[0], rtol=1e-8, atol=1e-9)


def test_per_sample_gradients_of_the_network_with_batchnorm_are_the_oracle_s_without_a_fallback() -> None:
    model, units = accompanied(companions=2)
    batch = (units, torch.arange(3))
    fast, slow = (engine(model, cw.cross_entropy, batch) for engine in (cw.per_sample, cw.oracle.per_sample))
    assert torch.allclose(fast.norms(), slow.norms(), rtol=1e-8)
    assert fast.fallbacks == fast.unused == ()


def test_companions_are_refused_for_a_network_in_which_they_change_nothing() -> None:
    with pytest.raises(InputError, match="change nothing in a network without BatchNorm.* --model resnet20_bn"):
        models.Accompanied(resnet20_gn(), torch.randn(4, 3, 8, 8), 2)


@pytest.mark.parametrize("name", ["gru", "gru_enhanced"])
def test_the_gated_networks_compute_what_their_paper_says(name: str) -> None:
    model, tokens = doubled(name, 3)
    table = next(model.buffers())
    w, u, b, c, head, offset = (value.detach() for value in _gru_parameters(model))

    def standard(v: Tensor) -> Tensor:
        return v if name == "gru" else (v - v.mean()) / (v.var() + 1e-5).sqrt()

    for sample, logits in zip(tokens, model(tokens), strict=True):
        h = torch.zeros(64, dtype=torch.float64)
        for token in sample.tolist():
            ahead, back = standard(w @ table[token] + b), standard(u @ h + c)
            r, z = torch.sigmoid(ahead[:64] + back[:64]), torch.sigmoid(ahead[64:128] + back[64:128])
            n = torch.tanh(ahead[128:] + r * back[128:])
            h = (1 - z) * n + z * h
        assert torch.allclose(logits, head @ h + offset, rtol=1e-9)


def _gru_parameters(model: nn.Module) -> list[Tensor]:
    """Input map, state map, their biases, head: torch's GRU names the maps first, two Linears each with its bias."""
    first, second, third, fourth, *head = model.parameters()
    return (
        [first, second, third, fourth, *head] if first.dim() == second.dim() else [first, third, second, fourth, *head]
    )


def test_resnet_shortcuts_subsample_and_pad_with_zero_channels() -> None:
    block = next(b for b in resnet20_gn().children() if hasattr(b, "shortcut") and b.shortcut.stride == 2)
    with torch.no_grad():
        block.norm2.weight.zero_()
    images = torch.rand(1, 16, 4, 4)
    output = block(images)
    assert torch.equal(output[:, 8:24], images[:, :, ::2, ::2])
    assert output[:, :8].count_nonzero() == output[:, 24:].count_nonzero() == 0


@pytest.mark.parametrize("kind", ["gn", "enhanced"])
def test_residual_networks_start_with_he_et_als_weights(kind: str) -> None:
    torch.manual_seed(0)
    for weight in build(f"resnet20_{kind}", (3, 32, 32), 10).parameters():
        if weight.numel() > 2000:
            fan_in = weight[0].numel()
            assert float(weight.detach().var()) * fan_in == pytest.approx(2, rel=0.15)


def test_the_transformer_tells_positions_apart_by_a_bare_parameter() -> None:
    torch.manual_seed(0)
    model = small_transformer(11, width=8, depth=1, heads=2, classes=3, length=6)
    tokens = torch.tensor([[1, 2, 3]])
    assert isinstance(model.get_parameter("positions.table"), nn.Parameter)
    assert not torch.allclose(model(tokens), model(tokens.flip(1)))
    with torch.no_grad():
        model.get_parameter("positions.table").zero_()
    assert torch.allclose(model(tokens), model(tokens.flip(1)), atol=1e-5)


def test_more_tokens_than_positions_is_an_error_that_says_what_to_write() -> None:
    with pytest.raises(InputError, match=r"at most 6 tokens, got 7: write length=7"):
        made("small_transformer")(torch.zeros(1, 7, dtype=torch.long))


# ── word vectors ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_word_vectors_are_frozen_and_the_same_whatever_the_seed_of_the_weights() -> None:
    tables = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = build("gru", (6,), 2, vocabulary=11)
        tables.append(dict(model.named_buffers())["0.table"])
        assert not [name for name, value in model.named_parameters() if value.shape == (11, 100)]
        assert not tables[-1][0].any() and tables[-1][1:].any(1).all()  # token 0 is padding
    assert torch.equal(*tables)
    other = build("gru(vector_seed=1)", (6,), 2, vocabulary=11)
    assert not torch.equal(tables[0], dict(other.named_buffers())["0.table"])


def test_word_vectors_come_from_the_file_that_is_named(tmp_path: Path) -> None:
    vectors = np.random.default_rng(0).normal(size=(11, 100))
    np.save(tmp_path / "vectors.npy", vectors)
    model = build(f"gru_enhanced(vectors={str(tmp_path / 'vectors.npy')!r})", (6,), 2, vocabulary=11)
    assert torch.equal(dict(model.named_buffers())["0.table"], torch.from_numpy(vectors).float())


def test_word_vectors_in_glove_format_stand_at_the_tokens_of_the_data(tmp_path: Path) -> None:
    words = ["the", "movie", "n't-2", "Movie", "great"]  # one is three words to the tokeniser, one is there already
    vectors = np.random.default_rng(0).normal(size=(5, 100)).round(4)
    lines = [f"{word} {' '.join(map(str, row))}\n" for word, row in zip(words, vectors.tolist(), strict=True)]
    (tmp_path / "glove.txt").write_text("".join(lines), encoding="utf-8")
    model = build(f"gru(vectors={str(tmp_path / 'glove.txt')!r})", (6,), 2, vocabulary=5000)
    table = dict(model.named_buffers())["0.table"]
    sentence = tokenised([("Great! The movie",)], 5000, 6)[0]
    expected = np.zeros((6, 100))  # padding in front, and "!" has no vector
    expected[[2, 4, 5]] = vectors[[4, 0, 1]]
    assert torch.allclose(table[sentence], torch.from_numpy(expected).float())
    assert int(table.any(1).sum()) == 3


@pytest.mark.parametrize("text", ["the 0.1 0.2\n", "the 0.5\n", f"the {'x ' * 100}\n", f"the {'nan ' * 100}\n"])
def test_a_line_that_is_no_vector_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "glove.txt").write_text(text)
    with pytest.raises(InputError, match=r"line 1 of .*glove.txt must hold a word and 100 numbers, got 'the"):
        build(f"gru(vectors={str(tmp_path / 'glove.txt')!r})", (6,), 2, vocabulary=11)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((10, 100)), r"must be finite numbers of shape \[11, 100\], got shape \[10, 100\]"),
        (np.full((11, 100), np.nan), r"must be finite numbers of shape \[11, 100\], got NaN"),
        (np.array([{}]), "cannot read word vectors from"),
        (None, "cannot read word vectors from"),
    ],
)
def test_a_file_without_a_vector_for_each_token_is_an_error(tmp_path: Path, array: object, message: str) -> None:
    if array is not None:
        np.save(tmp_path / "vectors.npy", array)
    with pytest.raises(InputError, match=message):
        build(f"gru(vectors={str(tmp_path / 'vectors.npy')!r})", (6,), 2, vocabulary=11)


# ── transformers' own ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("name", "shape"), [("vit_small", (3, 32, 32)), ("gpt2_small", (6,))])
def test_without_transformers_the_error_says_what_to_install(
    name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    with pytest.raises(InputError, match=f"{name} needs the package transformers .*: write pip install transformers"):
        build(name, shape, 2, vocabulary=11)


def test_a_vision_transformer_reads_a_checkpoint_and_enlarges_images(tmp_path: Path) -> None:
    needed("vit_small")
    first = build("vit_small(depth=1)", (3, 32, 32), 5)
    first.get_submodule("body").save_pretrained(tmp_path)  # type: ignore[operator]
    folder = str(tmp_path)
    second = build(f"vit_small(checkpoint={folder!r})", (3, 32, 32), 5)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(first(images), second(images))
    third = build(f"vit_small(checkpoint={folder!r}, image=32)", (3, 8, 8), 3)  # another number of classes
    assert third(torch.randn(2, 3, 8, 8)).shape == (2, 3)
    with pytest.raises(InputError, match=r"takes images of side 32, got 48: write vit_small\(image=32"):
        build(f"vit_small(checkpoint={folder!r})", (3, 48, 48), 5)
    with pytest.raises(InputError, match="multiple of 16, got 8: write vit_small"):
        build("vit_small", (3, 8, 8), 5)


def test_a_language_model_reads_a_checkpoint_that_has_the_tokens(tmp_path: Path) -> None:
    needed("gpt2_small")
    first = build("gpt2_small(depth=1)", (6,), 2, vocabulary=11)
    first.get_submodule("body").save_pretrained(tmp_path)  # type: ignore[operator]
    second = build(f"gpt2_small(checkpoint={str(tmp_path)!r})", (6,), 2, vocabulary=11)
    tokens = torch.randint(11, (2, 6))
    body, again = (model.get_submodule("body")(input_ids=tokens).last_hidden_state for model in (first, second))
    assert torch.equal(body, again)
    with pytest.raises(InputError, match="takes 1024 tokens of 11 kinds, got 6 of 12"):
        build(f"gpt2_small(checkpoint={str(tmp_path)!r})", (6,), 2, vocabulary=12)
    with pytest.raises(InputError, match="got no config.json there"):
        build(f"gpt2_small(checkpoint={str(tmp_path / 'none')!r})", (6,), 2, vocabulary=11)


# ── the table and what is asked of it ───────────────────────────────────────────────────────────────────────────────


def test_the_list_has_a_row_for_each_network() -> None:
    rows = models.list()
    assert [row.name for row in rows] == list(MODELS)
    row = next(row for row in rows if row.name == "resnet20_enhanced")
    assert (row.parameters, row.shape, row.data, row.paper) == (270_266, (3, 32, 32), "CIFAR-10", "Xiao 2023")


def test_the_command_prints_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in MODELS) and "2 753 818" in text and "De 2022" in text
    assert main(["models", "--json"]) == 0
    assert [row["name"] for row in json.loads(capsys.readouterr().out)] == list(MODELS)


def test_an_unknown_model_is_an_error_that_names_the_nearest() -> None:
    for text in ("digit_cnn", "digit_cnn(hidden=3)"):
        with pytest.raises(InputError, match=r"unknown model 'digit_cnn': did you mean 'digits_cnn'\?"):
            build(text, (1, 8, 8), 10)


def test_options_stand_in_brackets_after_the_name() -> None:
    assert size(build("mlp(hidden=3)", (4,), 2)) == 4 * 3 + 3 + 3 * 2 + 2
    assert size(build("mlp()", (4,), 2)) == size(build("mlp", (4,), 2))
    assert takes_tokens("gru(vector_seed=3)") and not takes_tokens("mlp(hidden=3)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mlp(hiden=3)", "unknown option of mlp 'hiden': did you mean 'hidden'"),
        ("mlp(3)", r"expected a model such as mlp or mlp\(hidden=32\), got 'mlp\(3\)'"),
        ("mlp(hidden=3", r"expected a model such as mlp or mlp\(hidden=32\), got"),
        ("mlp(hidden=open('x'))", r"expected a model such as mlp or mlp\(hidden=32\), got"),
        ("mlp(inputs=3)", "unknown option of mlp 'inputs'"),  # the data decide it
        ("mlp(hidden='a')", r"mlp refuses its options \(.*\): write mlp alone"),
        ("scattering_linear(groups=5)", r"scattering_linear refuses its options \(.*divisible.*\)"),
        ("digits_cnn(hidden=3)", "digits_cnn has no options, got hidden: write digits_cnn"),
    ],
)
def test_options_that_are_not_there_are_errors(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        build(text, (1, 8, 8), 2)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mnist_cnn", (1, 8, 8)),
        ("digits_cnn", (64,)),
        ("resnet20_gn", (3, 32)),
        ("resnet20_enhanced", (32, 32)),
        ("resnet9", (3, 4, 32)),
        ("wrn_16_4", (6,)),
        ("cifar_cnn", (3, 28, 28)),
        ("scattering_linear", (3, 30, 32)),
        ("scattering_cnn", (3, 4, 4)),
        ("vit_small", (3, 32, 48)),
        ("gru", (6, 100)),
        ("lstm_classifier", (3, 4)),
        ("mlp", ()),
    ],
)
def test_a_shape_that_does_not_fit_is_an_error_with_the_one_that_does(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=rf"{name} takes samples of shape \(.*\).*, got \("):
        build(name, shape, 10, vocabulary=5)


@pytest.mark.parametrize("name", ["resnet20_gn", "resnet9", "wrn_16_4", "cifar_cnn", "scattering_linear"])
def test_pictures_with_their_channels_last_are_refused_with_how_to_turn_them(name: str) -> None:
    with pytest.raises(
        InputError, match=r"got \(32, 32, 3\): put the channels first by x\.transpose\(0, 3, 1, 2\), or"
    ):
        build(name, (32, 32, 3), 10)
    build("mlp", (32, 32, 3), 10)


def test_features_of_few_pixels_are_not_taken_for_pictures_with_their_channels_last() -> None:
    build("scattering_linear", (243, 3, 3), 10)


@pytest.mark.parametrize("name", [name for name in MODELS if takes_tokens(name)])
def test_a_model_of_tokens_asks_for_the_vocabulary(name: str) -> None:
    with pytest.raises(InputError, match="write vocabulary="):
        build(name, (6,), 2)


def test_one_class_is_refused() -> None:
    with pytest.raises(InputError, match="classes must be a whole number of at least 2, got 1"):
        build("mlp", (4,), 1)


def test_a_regression_has_one_output() -> None:
    assert build("mlp", (4,), 1, task="regression")(torch.zeros(3, 4)).shape == (3, 1)
    with pytest.raises(InputError, match="a regression has one output, got classes=2: write classes=1"):
        build("mlp", (4,), 2, task="regression")


DOCUMENT = Path(__file__).parent.parent / "docs" / "models.md"


def test_the_document_shows_what_runs_and_sizes_that_are_true(capsys: pytest.CaptureFixture[str]) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        exec(compile(code, str(DOCUMENT), "exec"), {})
    assert capsys.readouterr().out.split("\n")[0] == f"{len(MODELS)} 2753818"
    for line in text.splitlines():
        names, sizes = (re.findall(r"`(\w+)`", line), re.findall(r"\d+(?: \d{3})+", line))
        if line.startswith("| `") and sizes:
            assert {f"{MODELS[name].parameters:,}".replace(",", " ") for name in names} == set(sizes)
