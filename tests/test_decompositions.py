"""Operations taken apart: the library's numbers, and no pass over the data that a compiler could not share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clipwise.records import trainable
from clipwise.records.capture import traced
from clipwise.records.decompositions import attention, attention_backward, group_norm, group_norm_backward
from clipwise.records.lean import lean
from clipwise.types import Batch

aten = torch.ops.aten


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("shape", [(3, 8, 5), (2, 6, 4, 3), (2, 4, 2, 3, 2)])
@pytest.mark.parametrize("groups", [1, 2])
def test_group_norm_and_its_backward_are_the_library_s(affine: bool, shape: tuple[int, ...], groups: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x, b = (torch.randn(shape, generator=generator, dtype=torch.float64) + 2 for _ in range(2))
    w, bias = (torch.randn(shape[1], generator=generator, dtype=torch.float64) if affine else None for _ in range(2))
    sizes = (shape[0], shape[1], x[0, 0].numel(), groups)
    out, mean, rate = aten.native_group_norm(x, w, bias, *sizes, 1e-5)
    for own, theirs in zip(group_norm(x, w, bias, *sizes, 1e-5), (out, mean, rate), strict=True):
        torch.testing.assert_close(own, theirs.view_as(own))
    wanted = [True, affine, affine]
    found = group_norm_backward(b, x, mean, rate, w, *sizes, wanted)
    for gradient, theirs in zip(
        found, aten.native_group_norm_backward(b, x, mean, rate, w, *sizes, wanted), strict=True
    ):
        if gradient is not None:
            torch.testing.assert_close(gradient, theirs)
        else:
            assert not affine


@pytest.mark.parametrize("masked", [None, "causal", "bias", "a row without a place"])
def test_short_attention_and_its_backward_are_the_library_s(masked: str | None, tf32: None) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, size, 4, requires_grad=True) for size in (5, 6, 6))
    bias = None if masked in (None, "causal") else torch.randn(2, 1, 5, 6, requires_grad=True)
    if bias is not None and masked != "bias":
        bias = bias.detach().clone()
        bias[1, :, 2] = -torch.inf
    causal = masked == "causal"
    expected = nn.functional.scaled_dot_product_attention(query, key, value, bias, is_causal=causal, scale=0.3)
    with torch.no_grad():
        out, lengths, seed, offset = attention(query, key, value, bias, True, 0.0, causal, scale=0.3)
    torch.testing.assert_close(out, torch.nan_to_num(expected))
    if masked != "a row without a place":  # where the library's reference has no gradient
        gradient = torch.randn_like(out)
        inputs = (query, key, value) if bias is None else (query, key, value, bias)
        theirs = torch.autograd.grad(expected, inputs, gradient)
        for wanted in (True, False):  # the bias's gradient, where there is one
            both = (out, lengths, seed, offset, 0.0, [True, True, True, wanted])
            with torch.no_grad():
                found = attention_backward(gradient, query, key, value, bias, *both, causal, scale=0.3)
            assert (found[3] is None) == (bias is None or not wanted)
            for own, other in zip(found, theirs, strict=False):
                if own is not None:
                    torch.testing.assert_close(own, other)


def test_long_attention_is_left_to_the_library_s_kernel_and_so_is_what_must_not_be_rounded(tf32: None) -> None:
    short, long = torch.randn(1, 1, 256, 2), torch.randn(1, 1, 257, 2)
    assert attention(short, short, short, None, True) is not NotImplemented
    for q, dropout in ((long, 0.0), (short.double(), 0.0), (short, 0.5)):
        assert attention(q, q, q, None, True, dropout) is NotImplemented
    torch.backends.cuda.matmul.allow_tf32 = False
    assert attention(short, short, short, None, True) is NotImplemented


@pytest.fixture
def tf32() -> Any:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def test_the_gradients_of_scale_and_shift_share_their_sums_with_the_input_s() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 8, 3, bias=False), nn.GroupNorm(2, 8), nn.Flatten(), nn.Linear(8 * 36, 1))
    batch = (torch.randn(4, 2, 8, 8),)

    def loss(model: nn.Module, batch: Batch) -> Tensor:
        return model(batch[0])[:, 0].square()

    graph: Any = traced(model, loss, batch, lambda found: found.norms())
    values = {name: p.detach() for name, p in trainable(model).items()}
    expected = graph(values, batch)
    apart: Any = lean(graph, values, batch)
    torch.testing.assert_close(apart(values, batch), expected)
    sums = [
        node
        for node in apart.graph.nodes
        if node.target in (aten.sum.dim_IntList, aten.var_mean.correction)
        and node.args[0].meta["val"].numel() >= 4 * 8 * 36
    ]
    assert len(sums) == 3  # mean and variance; Σ b x̂; Σ b
