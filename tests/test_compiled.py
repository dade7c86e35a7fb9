"""The compiled capture gives the numbers of the eager one, whatever the batch's size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clipwise
from clipwise.methods import adaptive, flat, layerwise
from clipwise.records import Capture, trainable
from clipwise.records import compiled as compiled_module
from clipwise.records.compiled import CompiledCapture, GraphGradients
from clipwise.step import private_sum
from clipwise.types import InputError, Refused

ROWS = 6


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3))
    return nn.Sequential(*layers).double()


def batch(samples: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(samples, 1, 4, 4, generator=generator, dtype=torch.float64),
        torch.randint(0, 3, (samples,), generator=generator),
    )


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.fixture(scope="module", params=["flat", "layerwise"])
def captures(request: pytest.FixtureRequest) -> tuple[Any, CompiledCapture, Capture, list[tuple[str, ...]]]:
    net = model()
    method = flat(0.1) if request.param == "flat" else layerwise(flat(0.1))
    groups = [block.names for block in method.blocks(tuple(trainable(net)))]
    return method, CompiledCapture(net, loss, ROWS, groups, {"backend": "aot_eager"}), Capture(net, loss), groups


@pytest.mark.parametrize("samples", [1, 4, ROWS])
def test_norms_and_sums_are_the_eager_ones_for_every_batch_up_to_the_chunk(captures: Any, samples: int) -> None:
    _, compiled, eager, groups = captures
    fast, slow = compiled(batch(samples, samples)), eager(batch(samples, samples))
    assert isinstance(fast, GraphGradients) and fast.samples == samples
    assert torch.allclose(fast.norms(groups), slow.norms(groups), rtol=1e-10)
    weights = torch.rand(samples, len(groups), dtype=torch.float64)
    first, second = fast.weighted_sum(weights, groups), slow.weighted_sum(weights, groups)
    assert all(torch.allclose(first[name], second[name], rtol=1e-10, atol=1e-12) for name in second)


def test_the_ordinary_algebra_sees_only_the_real_rows(captures: Any) -> None:
    _, compiled, eager, _ = captures
    fast, slow = compiled(batch(4)), eager(batch(4))
    assert torch.allclose(fast.norms(), slow.norms(), rtol=1e-10)
    assert torch.allclose((2.0 * fast + slow).norms(), 3 * slow.norms(), rtol=1e-10)
    assert fast.materialise()["0.weight"].shape[0] == 4


def test_it_follows_parameters_that_move(captures: Any) -> None:
    _, compiled, eager, groups = captures
    with torch.no_grad():
        for parameter in compiled.model.parameters():
            parameter.add_(0.05)
    assert torch.allclose(compiled(batch(3)).norms(groups), eager(batch(3)).norms(groups), rtol=1e-10)


def test_it_follows_parameters_whose_memory_is_another(captures: Any) -> None:
    _, compiled, eager, groups = captures
    for parameter in compiled.model.parameters():
        parameter.data = parameter.data * 1.1  # as a recurrent layer does when it flattens its weights
    assert torch.allclose(compiled(batch(3)).norms(groups), eager(batch(3)).norms(groups), rtol=1e-10)


def test_a_graph_that_disagrees_with_the_eager_pass_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = compiled_module._ready

    def wrong(*given: Any, **named: Any) -> Any:
        run = real(*given, **named)
        return lambda *arguments: (lambda out: (1.1 * out[0], *out[1:]) if isinstance(out, tuple) else out)(
            run(*arguments)
        )

    monkeypatch.setattr(compiled_module, "_ready", wrong)
    net = model()
    with pytest.raises(Refused, match="compile=False"):
        CompiledCapture(net, loss, ROWS, [tuple(trainable(net))], {"backend": "aot_eager"})(batch(ROWS))


def test_the_private_sum_is_the_eager_one_also_with_a_sample_that_is_not_finite(captures: Any) -> None:
    method, compiled, eager, _ = captures
    parameters = trainable(compiled.model)
    for broken in (False, True):
        inputs, labels = batch(5)
        if broken:
            inputs[2, 0, 0, 0] = torch.nan
        (fast, seen), (slow, _) = (private_sum(method, parameters, [c((inputs, labels))]) for c in (compiled, eager))
        assert seen.non_finite == int(broken)
        for one, other in zip(fast.parts, slow.parts, strict=True):
            assert all(torch.allclose(one.value[n], other.value[n], rtol=1e-9, atol=1e-12) for n in other.value)


def test_an_empty_batch_is_empty_and_a_larger_one_is_an_error(captures: Any) -> None:
    _, compiled, *_ = captures
    assert compiled(batch(0)).samples == 0
    with pytest.raises(InputError, match=f"at most {ROWS} rows, got {ROWS + 1}"):
        compiled(batch(ROWS + 1))


@pytest.mark.parametrize("method", [flat(0.5), adaptive(0.5, count_share=0.1)])
def test_a_compiled_run_is_the_eager_run(monkeypatch: pytest.MonkeyPatch, method: Any) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda graph, **given: real(graph, **{**given, "backend": "aot_eager"}))
    ends = []
    for compiled in (False, True):
        net = model()
        clipwise.train(
            net, loss, batch(40), method=method, noise_multiplier=1.0, steps=3, batch=8, noise=0, compile=compiled
        )
        ends.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert torch.allclose(*ends, rtol=1e-6)
