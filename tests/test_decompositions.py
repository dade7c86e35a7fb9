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


def test_short_attention_and_its_backward_are_the_library_s(tf32: None) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, size, 4, requires_grad=True) for size in (5, 6, 6))
    expected = nn.functional.scaled_dot_product_attention(query, key, value, scale=0.3)
    gradient = torch.randn_like(expected)
    with torch.no_grad():
        both = attention(query, key, value, None, True, 0.0, scale=0.3)
        found = attention_backward(
            gradient, query, key, value, None, *both, 0.0, [True, True, True, False], False, scale=0.3
        )
    torch.testing.assert_close(both[0], expected)
    assert found[3] is None
    for own, theirs in zip(found, torch.autograd.grad(expected, (query, key, value), gradient), strict=False):
        torch.testing.assert_close(own, theirs)


def test_other_attention_is_left_to_the_library_s_kernel(tf32: None) -> None:
    short, long, mask = torch.randn(1, 1, 256, 2), torch.randn(1, 1, 257, 2), torch.zeros(1, 1, 256, 256)
    assert attention(short, short, short, None, True) is not NotImplemented
    others = (  # bias, whether lengths are wanted, dropout, causal
        (long, None, True, 0.0, False),
        (short.double(), None, True, 0.0, False),
        (short, None, True, 0.5, False),
        (short, mask, True, 0.0, False),
        (short, None, True, 0.0, True),
    )
    for q, *rest in others:
        assert attention(q, q, q, *rest) is NotImplemented
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
