"""Every layer's records against the oracle, in float64: each operation of SampleGradients for each case."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from cases import (
    CASES,
    SAMPLES,
    Case,
    Raw,
    direction,
    each,
    fast,
    flat,
    groups,
    layer,
    loss,
    normal,
    off,
    one_by_one,
    slow,
)
from clipwise.records import SampleGradients, oracle, per_sample
from clipwise.records.gradients import from_dense
from clipwise.types import Gradient

CLOSE = 1e-10
WEIGHTS = torch.tensor([0.5, -1.25, 2.0, 0.75], dtype=torch.float64)
every_case = pytest.mark.parametrize("name", CASES)
few = settings(max_examples=12, deadline=None)


def assert_norms_agree(found: SampleGradients, expected: SampleGradients) -> None:
    """Squares are compared with the whole gradient's: a group may be zero in theory. None may be under-estimated."""
    names = groups(expected.names)
    whole = expected.norms().square().max()
    for ours, theirs in ((found.norms(), expected.norms()), (found.norms(names), expected.norms(names))):
        assert ours.shape == theirs.shape
        difference = ours.square() - theirs.square()
        assert difference.abs().max() <= CLOSE * whole
        assert difference.min() >= -1e-13 * whole


def assert_agree(found: SampleGradients, expected: SampleGradients) -> None:
    assert found.samples == expected.samples
    assert off(found.materialise(), expected.materialise()) < CLOSE
    assert_norms_agree(found, expected)


def plain_loop(case: Case) -> SampleGradients:
    batch = case.batch()
    model = case.model()
    rows = [tuple(t[i : i + 1] for t in batch) for i in range(SAMPLES)]
    return from_dense(one_by_one(model, loss, rows), dict(model.named_parameters()))


@pytest.mark.parametrize(
    "name",
    [
        "deep Linear",
        "Conv2d with groups, stride and dilation",
        "Embedding with repeated ids",
        "attention with padding and a mask",
        "LSTM of two layers in both directions",
        "class token by expand",
        "weight standardisation of a Conv2d",
    ],
)
def test_the_oracle_is_a_plain_loop_of_autograd(name: str) -> None:
    assert off(slow(name).materialise(), plain_loop(CASES[name]).materialise()) < 1e-14


@every_case
def test_materialise_is_the_oracles(name: str) -> None:
    assert off(fast(name).materialise(), slow(name).materialise()) < CLOSE


@every_case
def test_losses_are_those_of_the_model(name: str) -> None:
    case = CASES[name]
    expected = loss(case.model(), case.batch())
    assert torch.allclose(fast(name).losses, expected.detach(), rtol=1e-10)


@every_case
def test_norms_are_the_oracles_also_by_groups(name: str) -> None:
    assert_norms_agree(fast(name), slow(name))


@every_case
def test_inner_products_are_the_oracles(name: str) -> None:
    found, expected = fast(name), slow(name)
    u = direction(expected.like)
    size = expected.norms().max() * flat(u).norm()
    assert (found.inner(u) - expected.inner(u)).abs().max() <= CLOSE * size


@every_case
def test_weighted_sums_are_the_oracles_also_by_groups(name: str) -> None:
    found, expected = fast(name), slow(name)
    assert off(found.weighted_sum(WEIGHTS), expected.weighted_sum(WEIGHTS)) < CLOSE
    names = groups(expected.names)
    weights = torch.stack([WEIGHTS * (k + 1) + k for k in range(len(names))], 1)
    assert off(found.weighted_sum(weights, names), expected.weighted_sum(weights, names)) < CLOSE


@every_case
def test_scaling_scales_each_sample(name: str) -> None:
    assert_agree(WEIGHTS * fast(name), WEIGHTS * slow(name))
    assert_agree(-2.5 * fast(name), -2.5 * slow(name))


@every_case
def test_adding_adds_sample_by_sample(name: str) -> None:
    model, batch = CASES[name].model(), CASES[name].batch()
    turned = tuple(t.roll(1, 0) for t in batch)  # every sample meets another one
    other, others = per_sample(model, loss, turned), oracle.per_sample(model, loss, turned)
    assert_agree(fast(name) + WEIGHTS * other, slow(name) + WEIGHTS * others)
    assert_agree(fast(name) + -1.0 * fast(name) + other, others)


@every_case
def test_merging_makes_units_with_the_sum_of_their_samples(name: str) -> None:
    found, expected = fast(name), slow(name)
    for size in (1, 2, SAMPLES):
        assert_agree(found.merged(size), expected.merged(size))
    assert off(found.merged(2).weighted_sum(WEIGHTS[:2]), expected.merged(2).weighted_sum(WEIGHTS[:2])) < CLOSE
    u = direction(expected.like)
    size = expected.norms().max() * flat(u).norm()
    assert (found.merged(2).inner(u) - expected.merged(2).inner(u)).abs().max() <= CLOSE * size


@every_case
def test_every_operation_after_another_is_the_oracles(name: str) -> None:
    found, expected = fast(name), slow(name)
    twice = lambda v: (WEIGHTS * v + 0.5 * v).merged(2) + 3.0 * v.merged(2)
    assert_agree(twice(found), twice(expected))


@every_case
def test_only_operations_without_a_fast_path_are_listed_as_fallbacks(name: str) -> None:
    operation = CASES[name].fallback
    found = fast(name).fallbacks
    assert bool(found) == bool(operation)
    assert all(entry.startswith(operation + "(") for entry in found)


@every_case
def test_every_trainable_parameter_is_used_and_every_weight_explained(name: str) -> None:
    gradients = fast(name)
    assert gradients.unused == ()
    assert gradients.names == tuple(n for n, p in CASES[name].model().named_parameters() if p.requires_grad)
    lines = gradients.explain()
    assert all(parameter in lines for parameter, p in gradients.like.items() if p.dim() > 1)


def test_a_fallback_names_the_operation_and_its_parameters() -> None:
    assert fast("Bilinear").fallbacks == ("bilinear(layer.bias, layer.weight)",)
    assert fast("einsum").fallbacks == ("einsum(w)",)


# ── shapes ──────────────────────────────────────────────────────────────────────────────────────────────────────────

small = st.integers(1, 4)


def assert_matches(case: Case) -> None:
    found, expected = (f(case.model(), loss, case.batch()) for f in (per_sample, oracle.per_sample))
    assert_agree(found, expected)
    weights = torch.linspace(-1, 2, found.samples, dtype=torch.float64)
    assert off(found.weighted_sum(weights), expected.weighted_sum(weights)) < CLOSE
    assert_agree(found + found, 2.0 * expected)
    assert_agree(found.merged(found.samples), expected.merged(found.samples))


@few
@given(samples=small, lead=st.lists(small, max_size=3), inputs=small, outputs=small, bias=st.booleans())
def test_linear_of_any_shape(samples: int, lead: list[int], inputs: int, outputs: int, bias: bool) -> None:
    data = lambda: (normal(*lead, inputs, samples=samples),)
    assert_matches(layer("", lambda: nn.Linear(inputs, outputs, bias=bias), data=data))


@few
@given(
    samples=small,
    channels=st.sampled_from([(1, 1, 1), (2, 4, 1), (2, 4, 2), (3, 3, 3), (4, 2, 2)]),
    kernel=st.tuples(small, small),
    stride=st.tuples(small, small),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    extra=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)
def test_conv2d_of_any_shape(
    samples: int,
    channels: tuple[int, int, int],
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    dilation: tuple[int, int],
    extra: tuple[int, int],
) -> None:
    inputs, outputs, in_groups = channels
    # at least as large as the spread kernel, so that there is an output
    size = [d * (k - 1) + 1 + e for d, k, e in zip(dilation, kernel, extra, strict=True)]
    make = lambda: nn.Conv2d(inputs, outputs, kernel, stride, padding, dilation, in_groups)
    assert_matches(layer("", make, data=lambda: (normal(inputs, *size, samples=samples),)))


@few
@given(data=st.data(), rows=st.integers(1, 5), width=small, samples=small, lead=st.lists(small, max_size=2))
def test_embedding_of_any_shape(data: st.DataObject, rows: int, width: int, samples: int, lead: list[int]) -> None:
    padding = data.draw(st.none() | st.integers(-rows, rows - 1))
    ids = torch.randint(0, rows, (samples, *lead), generator=torch.Generator().manual_seed(rows + width))
    assert_matches(layer("", lambda: nn.Embedding(rows, width, padding_idx=padding), data=lambda: (ids,)))


# ── random parts of the forward ─────────────────────────────────────────────────────────────────────────────────────


class Mask(nn.Module):
    """Dropout with the masks given, one for each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)) * keep)


def test_dropout_is_followed_sample_by_sample() -> None:
    """The forward draws once for the whole batch; given the same masks, the oracle sees the same network."""
    torch.manual_seed(0)
    model = Mask().double()
    x = normal(5, 4)

    def with_dropout(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        (x,) = batch
        return each(model(x, nn.functional.dropout(torch.ones(len(x), 5, 6, dtype=torch.float64), 0.5)))

    torch.manual_seed(3)
    keep = nn.functional.dropout(torch.ones(SAMPLES, 5, 6, dtype=torch.float64), 0.5)
    torch.manual_seed(3)
    found = per_sample(model, with_dropout, (x,))
    assert_agree(found, oracle.per_sample(model, loss, (x, keep)))


def test_a_parameter_that_is_detached_is_a_constant() -> None:
    build = lambda: Raw(lambda m, x: x * m.p + x * m.p.detach(), p=(3,))
    case = Case("", build, lambda: (normal(5, 3),))
    model, batch = case.model(), case.batch()
    expected: Gradient = oracle.per_sample(model, loss, batch).materialise()
    assert off(per_sample(model, loss, batch).materialise(), expected) < CLOSE
