"""The networks: their published sizes, their independence of samples, and what build refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from clipwise.models import MODELS, build, digits_cnn, mnist_cnn, resnet20_gn, small_transformer
from clipwise.types import InputError

SHAPES = {
    "digits_cnn": (1, 8, 8),
    "lstm_classifier": (6,),
    "mlp": (2, 5),
    "mnist_cnn": (1, 28, 28),
    "resnet20_gn": (3, 16, 16),
    "small_transformer": (6,),
}


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def samples(name: str, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (count, *SHAPES[name])
    if len(SHAPES[name]) == 1:
        return torch.randint(11, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def made(name: str, classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return build(name, SHAPES[name], classes, vocabulary=11 if len(SHAPES[name]) == 1 else None)


def test_the_sizes_are_the_published_ones() -> None:
    assert size(mnist_cnn()) == 26_010
    assert size(resnet20_gn()) == 269_722
    assert size(digits_cnn()) == 2_762


@pytest.mark.parametrize("name", MODELS)
def test_every_model_gives_one_logit_per_class(name: str) -> None:
    assert made(name, classes=7)(samples(name, 2)).shape == (2, 7)


@pytest.mark.parametrize("name", MODELS)
def test_a_sample_does_not_see_the_others_in_its_batch(name: str) -> None:
    model, inputs = made(name), samples(name, 4)
    assert torch.allclose(model(inputs)[:1], model(inputs[:1]), atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_receives_a_gradient(name: str) -> None:
    model = made(name)
    model(samples(name, 4)).logsumexp(dim=1).sum().backward()
    assert [key for key, value in model.named_parameters() if value.grad is None or not value.grad.any()] == []


def test_resnet_shortcuts_subsample_and_pad_with_zero_channels() -> None:
    block = next(module for module in resnet20_gn().modules() if getattr(module, "stride", None) == 2)
    with torch.no_grad():
        block.norm2.weight.zero_()
    images = torch.rand(1, 16, 4, 4)
    output = block(images)
    assert torch.equal(output[:, 8:24], images[:, :, ::2, ::2])
    assert output[:, :8].count_nonzero() == output[:, 24:].count_nonzero() == 0


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


def test_an_unknown_model_is_an_error_that_names_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown model 'digit_cnn': did you mean 'digits_cnn'\?"):
        build("digit_cnn", (1, 8, 8), 10)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mnist_cnn", (1, 8, 8)),
        ("digits_cnn", (64,)),
        ("resnet20_gn", (3, 32)),
        ("lstm_classifier", (3, 4)),
        ("mlp", ()),
    ],
)
def test_a_shape_that_does_not_fit_is_an_error_with_the_one_that_does(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=rf"{name} takes samples of shape \(.*\), got \("):
        build(name, shape, 10, vocabulary=5)


@pytest.mark.parametrize("name", ["small_transformer", "lstm_classifier"])
def test_a_model_of_tokens_asks_for_the_vocabulary(name: str) -> None:
    with pytest.raises(InputError, match="write vocabulary="):
        build(name, (6,), 2)


def test_one_class_is_refused() -> None:
    with pytest.raises(InputError, match="classes must be a whole number of at least 2, got 1"):
        build("mlp", (4,), 1)
