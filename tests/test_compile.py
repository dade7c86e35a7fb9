"""Forward, backward, norms and sums as one graph that compilers accept whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from cases import integers, normal, off
from clipwise.losses import cross_entropy as loss
from clipwise.records import SampleGradients, oracle, per_sample, traced, trainable
from clipwise.records.replay import ROUNDS_FIRST, ready
from clipwise.types import Gradient, InputError

Batch = tuple[Tensor, Tensor]
Step = tuple[Tensor, Tensor, Gradient]


class Transformer(nn.Module):
    """A table, positions, one encoder layer and a class token."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.token = nn.Embedding(11, 8), nn.Parameter(torch.randn(1, 1, 8))
        self.positions = nn.Parameter(torch.randn(6, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, ids: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(ids), -1, -1), self.table(ids)], 1) + self.positions
        return self.head(self.layer(x)[:, 0])


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.table, self.cell = nn.Embedding(11, 6), kind(6, 5, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.cell(self.table(ids))[0][:, -1])


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 6, 3, padding=1, groups=2),
        nn.Flatten(), nn.Linear(54, 3),
    )  # fmt: skip


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "CNN": (cnn, lambda: normal(1, 7, 7)),
    "transformer": (Transformer, lambda: integers(11, 5)),
    "LSTM": (lambda: Recurrent(nn.LSTM), lambda: integers(11, 4)),
    "GRU": (lambda: Recurrent(nn.GRU), lambda: integers(11, 4)),
}


def clipped(gradients: SampleGradients) -> Step:
    norms = gradients.norms()
    assert gradients.losses is not None
    return gradients.losses, norms, gradients.weighted_sum((0.5 / norms).clamp(max=1))


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().double()


def drawn(name: str, seed: int = 1) -> Batch:
    torch.manual_seed(seed)
    return MODELS[name][1](), integers(3)


def changed(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.75).add_(0.05)
    return model


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trainable(model).items()}


def assert_same(found: Step, expected: Step, tolerance: float = 1e-10) -> None:
    assert torch.allclose(found[0], expected[0], rtol=tolerance)
    assert torch.allclose(found[1], expected[1], rtol=tolerance)
    assert off(found[2], expected[2]) < tolerance


@pytest.fixture(scope="module")
def graphs() -> dict[str, Any]:
    """Traced once for each model: tracing is the slow part."""
    return {name: traced(made(name), loss, drawn(name), clipped) for name in MODELS}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


every_model = pytest.mark.parametrize("name", MODELS)


@every_model
def test_the_graph_gives_the_numbers_of_the_eager_step_and_of_the_oracle(name: str, graphs: dict[str, Any]) -> None:
    model, batch = made(name), drawn(name)
    found = graphs[name](values(model), batch)
    assert_same(found, clipped(per_sample(model, loss, batch)))
    assert torch.allclose(found[1], oracle.per_sample(model, loss, batch).norms(), rtol=1e-9)


@every_model
def test_the_graph_follows_changed_parameters_and_batches(name: str, graphs: dict[str, Any]) -> None:
    model = changed(made(name))
    for seed in (2, 3):
        batch = drawn(name, seed)
        assert_same(graphs[name](values(model), batch), clipped(per_sample(model, loss, batch)))


@every_model
def test_the_graph_has_no_side_effects(name: str, graphs: dict[str, Any]) -> None:
    parameters, batch = values(made(name)), drawn(name)
    kept, rows = {n: p.clone() for n, p in parameters.items()}, [t.clone() for t in batch]
    generator = torch.get_rng_state()
    first, second = (graphs[name](parameters, batch) for _ in range(2))
    assert_same(first, second, 1e-15)
    assert all(torch.equal(p, kept[n]) and p.grad is None and not p.requires_grad for n, p in parameters.items())
    assert all(torch.equal(now, then) for now, then in zip(batch, rows, strict=True))
    assert torch.equal(torch.get_rng_state(), generator)


def test_tracing_leaves_the_model_alone() -> None:
    model, batch = made("CNN"), drawn("CNN")
    before = values(model)
    graph = traced(model, loss, batch, clipped)
    assert all(torch.equal(p, before[n]) and p.grad is None and p.is_leaf for n, p in model.named_parameters())
    changed(model)
    assert_same(graph(before, batch), clipped(per_sample(made("CNN"), loss, batch)))


@every_model
def test_the_compiler_sees_one_graph(name: str, graphs: dict[str, Any]) -> None:
    """``fullgraph=True`` is an error where anything is left out; the numbers are the eager ones, and follow."""
    from torch._dynamo.backends.debugging import aot_eager

    seen: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        seen.append(graph)
        return aot_eager(graph, inputs)

    compiled = torch.compile(graphs[name], fullgraph=True, backend=backend)
    model = made(name)
    for seed in (1, 2):
        batch = drawn(name, seed)
        assert_same(compiled(values(model), batch), clipped(per_sample(model, loss, batch)))
        model = changed(model)
    assert len(seen) == 1


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler")
def test_the_default_backend_compiles_a_small_model_to_the_same_numbers() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    batch = (torch.randn(4, 4), integers(3))
    compiled = torch.compile(traced(model, loss, batch, clipped), fullgraph=True)
    for _ in range(2):
        assert_same(compiled(values(model), batch), clipped(per_sample(model, loss, batch)), 1e-4)
        changed(model)


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_graph_s_norms_are_of_numbers_as_they_are_rounded(dtype: torch.dtype) -> None:
    # left to itself the compiler squares what it has not rounded yet, and the sum reads what it has
    function: Any = lambda x: (x.to(dtype), x.to(dtype).float().square().sum(1))
    example = (torch.randn(64, 257, generator=torch.Generator().manual_seed(0)),)
    graph = make_fx(function, tracing_mode="fake")(*example)
    if torch.__version__ < ROUNDS_FIRST:
        with pytest.raises(InputError, match="leave compile out"):
            ready(graph, example, {})
        return
    rounded, squares = ready(graph, example, {})(*example)
    torch.testing.assert_close(squares, rounded.float().square().sum(1), rtol=2e-6, atol=0)
