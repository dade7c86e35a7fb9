"""The compiled capture gives the numbers of the eager one, whatever the batch's size."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import clipwise
from clipwise.engine import ChunkEngine
from clipwise.losses import cross_entropy as loss
from clipwise.methods import (
    WEIGHTS,
    Steady,
    adaptive,
    bam,
    dice,
    flat,
    inner_momentum,
    layerwise,
    p_average,
    parse,
    self_augmentation,
)
from clipwise.records import Capture, kinds, per_sample, traced, trainable, weighing
from clipwise.records import compiled as compiled_module
from clipwise.records import lean as lean_module
from clipwise.records import replay as replay_module
from clipwise.records.compiled import CompiledCapture, GraphGradients
from clipwise.records.layers import products
from clipwise.records.trees import tensors
from clipwise.step import Rule, private_sum
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


def test_a_graph_of_another_precision_is_another_graph() -> None:
    net = model().float()
    rows = (batch(4)[0].float(), batch(4)[1])
    names = tuple(trainable(net))
    compiled = CompiledCapture(net, loss, ROWS, [names], {"backend": "aot_eager"})
    for narrow in (True, False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
            found, expected = (capture(rows).norms([names]) for capture in (compiled, Capture(net, loss)))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    assert len(compiled._graphs) == 2


def test_sums_have_the_strides_of_their_parameters() -> None:
    net = model().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    names = tuple(trainable(net))
    found = CompiledCapture(net, loss, ROWS, [names], {"backend": "aot_eager"})(batch(4))
    weights = torch.rand(4, 1).double()
    sums, expected = (g.weighted_sum(weights, [names]) for g in (found, Capture(net, loss)(batch(4))))
    assert all(sums[name].stride() == p.stride() for name, p in trainable(net).items())
    torch.testing.assert_close(sums, expected)


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
    real = compiled_module.ready

    def wrong(*given: Any, **named: Any) -> Any:
        run = real(*given, **named)
        return lambda *arguments: (lambda out: (1.1 * out[0], *out[1:]) if isinstance(out, tuple) else out)(
            run(*arguments)
        )

    monkeypatch.setattr(compiled_module, "ready", wrong)
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


def test_an_empty_batch_is_empty_and_a_larger_one_is_computed_eagerly(captures: Any) -> None:
    _, compiled, eager, _ = captures
    assert compiled(batch(0)).samples == 0
    larger = batch(ROWS + 1)
    assert torch.equal(compiled(larger).norms(), eager(larger).norms())


RUNS = (
    (flat(0.5), 20),
    (adaptive(0.5, count_share=0.1), 20),
    (inner_momentum(adaptive(0.5), horizon=1), 20),
    (dice(self_augmentation(flat(0.5), views=2, augment="none"), memory="none"), 20),
    (p_average(flat(0.5), 4), 3),  # units that are larger than a chunk
    (self_augmentation(flat(0.5), views=4, augment="flip"), 3),  # samples that are
)


@pytest.mark.parametrize(("method", "chunk"), RUNS, ids=str)
def test_a_compiled_run_is_the_eager_run(monkeypatch: pytest.MonkeyPatch, method: Any, chunk: int) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda graph, **given: real(graph, **{**given, "backend": "aot_eager"}))
    ends = []
    for compiled in (False, True):
        net, how = model(), {"noise_multiplier": 1.0, "steps": 3, "batch": 8, "chunk": chunk, "noise": 0}
        clipwise.train(net, loss, batch(40), method=method, compile=compiled, **how)
        ends.append(torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert torch.allclose(*ends, rtol=1e-6)


STEADY = [
    "inner_momentum(flat(0.1), horizon=2, decay=0.3)",
    "self_augmentation(flat(0.1), views=3, augment='flip')",
    "bam(flat(0.1), alpha=0.5)",
    "disk(layerwise(flat(0.1)))",
    "inner_momentum(self_augmentation(bam(psac(0.1)), views=2, augment='flip'), horizon=1)",
]


@pytest.mark.parametrize("text", STEADY)
def test_where_a_method_takes_gradients_is_compiled_with_it(text: str) -> None:
    net, method = model(), parse(text)
    groups = [block.names for block in method.blocks(tuple(trainable(net)))]
    fast = CompiledCapture(net, loss, ROWS * method.rows, groups, {"backend": "aot_eager"})
    for step, samples in enumerate((3, ROWS)):  # other samples, views and iterates at every step
        generator = torch.Generator().manual_seed(step)
        near = [
            {n: p + 0.1 * torch.randn(p.shape, generator=generator) for n, p in trainable(net).items()}
            for _ in range(method.past)
        ]
        keys = torch.randint(0, 1000, (samples,), generator=generator)
        eager = ChunkEngine(Capture(net, loss), keys, 10**12 + step, tuple(near))
        found, expected = (engine.of(method, batch(samples, step)) for engine in (replace(eager, fast=fast), eager))
        assert isinstance(found, GraphGradients) and not isinstance(expected, GraphGradients)
        assert torch.allclose(found.norms(groups), expected.norms(groups), rtol=1e-10)
        weights = torch.rand(samples, len(groups), dtype=torch.float64)
        sums, known = found.weighted_sum(weights, groups), expected.weighted_sum(weights, groups)
        assert all(torch.allclose(sums[n], known[n], rtol=1e-9, atol=1e-12) for n in known)
    assert len(fast._graphs) == 1


def test_methods_that_differ_in_weights_alone_share_what_is_compiled() -> None:
    one, other = (inner_momentum(self_augmentation(flat(norm), views=2)) for norm in (0.1, 0.2))
    assert one.probe == other.probe and hash(one.probe) == hash(other.probe)
    for another in (inner_momentum(self_augmentation(flat(), views=3)), inner_momentum(flat()), bam(flat())):
        assert one.probe != another.probe


@pytest.mark.parametrize("text", ["bam(flat(), form='exact')", "self_augmentation(flat(), augment='own')", "dp_sat()"])
def test_a_method_whose_look_no_graph_can_hold_is_not_compiled_whole(text: str) -> None:
    assert not isinstance(parse(text).probe, Steady)
    assert not isinstance(inner_momentum(parse(text)).probe, Steady)


def test_a_look_of_ones_own_makes_what_is_wrapped_around_it_one_that_is_not_compiled_whole() -> None:
    own = replace(bam(flat()), probe=lambda engine, rows: engine.gradients(rows))
    assert isinstance(inner_momentum(bam(flat())).probe, Steady) and not isinstance(inner_momentum(own).probe, Steady)


def normalised_graph() -> tuple[Any, dict[str, Tensor], Any]:
    """A traced graph of norms in which the compiler's two passes would compute statistics twice."""
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 4, 1), nn.Flatten(), nn.LayerNorm(16))
    net = nn.Sequential(*layers, nn.Linear(16, 3)).double().to(memory_format=torch.channels_last)
    rows = torch.randn(5, 2, 4, 4, dtype=torch.float64).to(memory_format=torch.channels_last)
    both = (rows, torch.tensor([0, 1, 2, 0, 1]))
    names = tuple(trainable(net))
    values = {name: p.detach() for name, p in trainable(net).items()}
    graph = traced(net, loss, both, lambda g: (g.norms([names]), g.weighted_sum(torch.ones(5, 1), [names])))
    return graph, values, both


class Lines(nn.Module):
    """Samples are [time, feature], as users have them, and a convolution reads what a normalisation wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv, self.head = nn.GroupNorm(4, 64), nn.Conv1d(64, 64, 3), nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.conv(self.norm(x.transpose(1, 2)))).mean(2))


def test_a_lean_graph_unfolds_what_it_is_given_in_whatever_order_it_lies() -> None:
    torch.manual_seed(0)
    net, both = Lines(), (torch.randn(6, 12, 64), torch.randint(0, 2, (6,)))
    values = {name: p.detach() for name, p in trainable(net).items()}
    expected = Capture(net, loss)(both).norms()
    graph: Any = traced(net, loss, both, lambda g: g.norms())
    torch.testing.assert_close(lean_module.lean(graph, values, both)(values, both), expected, rtol=1e-4, atol=0)


def test_a_graph_that_names_strides_stays_as_it_was_traced() -> None:
    graph = make_fx(lambda x: x.as_strided((2, 2), (1, 2)))(torch.zeros(4))
    assert lean_module.lean(graph, torch.zeros(4)) is graph


def test_norms_that_are_not_those_of_what_is_summed_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = compiled_module.ready
    # within what fusing may change beside the eager pass, but of other numbers than the records
    wrong = lambda *given, **named: _wrapped(real(*given, **named), 1.01)
    monkeypatch.setattr(compiled_module, "ready", wrong)
    net = model()
    with pytest.raises(Refused, match="norms and records"):
        CompiledCapture(net, loss, ROWS, [tuple(trainable(net))], {"backend": "aot_eager"})(batch(ROWS))


@pytest.mark.parametrize("written", [None, 0.7])
def test_a_recording_of_weights_that_goes_wrong_is_not_used_and_leaves_the_step_its_own(
    monkeypatch: pytest.MonkeyPatch, written: float | None
) -> None:
    norms = torch.tensor([[1.0], [2.0], [4.0]])
    weights = weighing.Weights(norms, None, None, {"backend": "eager"})
    found = weights(norms, 3, Rule(flat(1.0).blocks(("w",)))).weights.clone()

    def replay(*_: Any) -> Any:  # an empty recording, or one of other numbers
        return lambda _: None if written is None else weights.every.fill_(written)

    monkeypatch.setattr(weighing, "Replay", replay)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)
    assert weights._record(Rule(flat(1.0).blocks(("w",))), norms) is None
    assert torch.equal(weights.every, found) and bool((found > 0).all())


@pytest.mark.parametrize("name", [factory.__name__ for factory in WEIGHTS])
def test_a_rule_is_compiled_to_the_same_weights(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, made = weighing.compiled, list[Any]()
    monkeypatch.setattr(weighing, "compiled", lambda *given: made.append(real(*given)) or made[-1])
    blocks = parse(name).blocks(("one.weight", "two.weight"))
    norms, real_rows = torch.rand(40, len(blocks)), torch.arange(40) < 33
    norms[3], norms[5, 0] = 0.0, math.inf
    rule = Rule(tuple(blocks), 40)
    fast = weighing.fused(rule, norms, real_rows, {})
    assert made == [fast]  # compiled, and held against the rule
    weights, finite, lost = fast(norms, real_rows)
    expected, which = rule(norms, real_rows)
    torch.testing.assert_close(weights, expected, rtol=1e-5, atol=0)
    assert torch.equal(finite, which) and int(lost) == 1


def test_a_rule_that_a_compiler_gets_wrong_or_cannot_take_stays_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    norms, every = torch.rand(40, 1), torch.ones(40, dtype=torch.bool)
    rule = Rule(flat(0.1).blocks(("w",)))
    expected, _ = rule(norms, every)

    def wrong(graph: Any, options: Any) -> Any:  # only for a norm of zero
        return lambda n, r: (lambda w, *rest: (torch.where(n == 0, 1.0, w), *rest))(*graph(n, r))

    monkeypatch.setattr(weighing, "compiled", wrong)
    zero = torch.zeros(40, 1)
    assert torch.equal(weighing.fused(rule, norms, every, {})(zero, every)[0], rule(zero, every)[0])
    monkeypatch.undo()
    asking = lambda norms, real: (norms * (2 if float(norms.sum()) > 0 else 1), norms.isfinite().all(1))
    assert torch.equal(weighing.fused(asking, norms, every, {})(norms, every)[0], 2 * norms)
    assert torch.equal(weighing.fused(rule, norms, every, {"backend": "eager"})(norms, every)[0], expected)


def _wrapped(run: Any, factor: float) -> Any:
    return lambda *arguments: (lambda out: (factor * out[0], *out[1:]) if isinstance(out, tuple) else out)(
        run(*arguments)
    )


def calls(graph: Any, name: str) -> int:
    return sum(name in str(node.target) for node in graph.graph.nodes)


def test_a_lean_graph_computes_no_statistics_twice_and_gives_the_same_numbers() -> None:
    graph, values, both = normalised_graph()
    expected = graph(values, both)
    found = lean_module.lean(graph, values, both)
    assert (
        calls(found, "native_group_norm.default") == 0 and calls(found, "var_mean") == 2
    )  # of the group and the layer norm
    for one, other in zip(tensors(found(values, both)), tensors(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_copies_to_channels_first_before_a_group_norm_are_dropped_and_the_numbers_stay() -> None:
    def function(x: Tensor) -> Tensor:
        first = x.clone(memory_format=torch.contiguous_format)
        return torch.native_group_norm(first, None, None, 5, 4, 6, 2, 1e-5)[0].flatten(1)

    x = torch.randn(5, 4, 2, 3).to(memory_format=torch.channels_last)
    graph = make_fx(function)(x)
    assert calls(graph, "clone") == 1
    expected = graph(x)
    assert calls(lean_module.relaid(graph), "clone") == 0
    torch.testing.assert_close(graph(x), expected)


def test_what_is_written_in_place_is_neither_lost_nor_taken_for_a_repeat() -> None:
    def function(x: Tensor) -> Tensor:
        y = 2 * x
        before, y = y.exp(), y.relu_()
        normal = torch.native_group_norm(y.clone(memory_format=torch.contiguous_format), None, None, 5, 4, 6, 2, 1e-5)
        y.add_(1)
        return before + y.exp() + normal[0]

    x = torch.randn(5, 4, 2, 3)
    graph = make_fx(function)(x)
    assert calls(graph, "relu_") == 1
    torch.testing.assert_close(lean_module.lean(graph, x)(x), function(x))


def test_costly_repeats_are_done_once_and_what_is_cheap_random_or_of_another_type_is_left() -> None:
    def function(x: Tensor) -> Tensor:
        one, other = x.exp().sum(0), x.exp().sum(0)  # the sums are the same value, though their arguments are two nodes
        narrow = x.to(torch.bfloat16) @ x.T.to(torch.bfloat16) + x.to(torch.bfloat16) @ x.T.to(torch.bfloat16)
        return one + other + narrow.sum() + torch.rand_like(x) + torch.rand_like(x) + x.sum(0, keepdim=True) + x.sum(0)

    found = lean_module.without_repeats(make_fx(function)(torch.zeros(3, 3)))
    found.graph.eliminate_dead_code()
    assert (calls(found, "rand_like"), calls(found, "_to_copy"), calls(found, "mm")) == (2, 2, 1)
    assert calls(found, "sum.dim_IntList") == 3  # of exp, and of x in two ways


def test_the_compiler_is_told_not_to_pad_rows_and_to_round_where_the_model_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[dict[str, Any]] = []
    monkeypatch.setattr(torch, "compile", lambda graph, **options: given.append(options) or graph)
    net = model()
    names = tuple(trainable(net))
    CompiledCapture(net, loss, ROWS, [names], {"options": {"max_autotune": True}})(batch(ROWS))
    told = {"max_autotune": True, "comprehensive_padding": False, "emulate_precision_casts": True}
    assert len(given) == 2
    assert all(told.items() <= options["options"].items() for options in given)


def test_rows_are_rounded_and_padded_once_for_a_product_and_its_record(monkeypatch: pytest.MonkeyPatch) -> None:
    takes = lambda a, other: a.shape[2] > 1  # on a GPU, of what is in half precision
    for module in (products, kinds.outer, kinds.sums):
        monkeypatch.setattr(module, "by_kernel", takes)
    graphs: list[Any] = []
    monkeypatch.setattr(torch, "compile", lambda graph, **options: graphs.append(graph) or graph)
    monkeypatch.setattr(replay_module, "ROUNDS_FIRST", "2")  # nothing is compiled
    torch.manual_seed(0)
    net = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 13))
    names = tuple(trainable(net))

    def narrow(model: nn.Module, inputs: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(inputs)[:, :-1].float().square().sum((1, 2))

    inputs = torch.randn(ROWS, 8, 16)
    found = CompiledCapture(net, narrow, ROWS, [names])(inputs)
    expected = per_sample(net, narrow, inputs)
    assert torch.allclose(found.norms([names]), expected.norms([names]), rtol=1e-2)
    nodes = [node for node in graphs[0].graph.nodes if "val" in node.meta]
    narrowed = [
        n for n in nodes if n.target is torch.ops.aten._to_copy.default and n.meta["val"].dtype == torch.bfloat16
    ]
    assert sum(n.meta["val"].numel() == inputs.numel() for n in narrowed) == 1  # for the first product and its record
    assert calls(graphs[0], "constant_pad_nd") == 2  # the last output gradients, and the weight that they meet
    read = [node.args[0] for node in nodes if node.target is torch.ops.aten.mm.default]
    assert {rows.args[1][-1] for rows in read} == {16, 24}  # of 13 features, 16


def relu(dtype: torch.dtype = torch.bfloat16, least: float = 0.0) -> Any:
    """A ReLU in float32 whose output is rounded for a product, and its backward pass."""

    def function(x: Tensor, weight: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        out = x.relu()
        product = out.to(dtype) @ weight.to(dtype)
        return torch.ops.aten.threshold_backward(b, out.detach(), least), product

    return function


def relu_numbers() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(5, 6)
    x[0] = torch.tensor([0.0, -0.0, 1e-30, -1e-30, torch.inf, -torch.inf])
    return x, torch.randn(6, 4), torch.randn(5, 6)


def told_by(graph: Any) -> torch.dtype:
    """The format of what the one ReLU's backward pass looks at."""
    (mask,) = [node for node in graph.graph.nodes if "threshold_backward" in str(node.target)]
    return mask.args[1].meta["val"].dtype


def test_a_relu_is_passed_back_by_the_signs_of_the_copy_that_is_kept_all_the_same() -> None:
    numbers, function = relu_numbers(), relu()
    changed = lean_module.narrow_signs(make_fx(function, tracing_mode="fake")(*numbers))
    assert told_by(changed) == torch.bfloat16
    for one, other in zip(changed(*numbers), function(*numbers), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("other", [(torch.float16, 0.0), (torch.float64, 0.0), (torch.bfloat16, 0.1)])
def test_other_copies_and_thresholds_do_not_tell_a_sign(other: Any) -> None:
    assert told_by(lean_module.narrow_signs(make_fx(relu(*other), tracing_mode="fake")(*relu_numbers()))) == (
        torch.float32
    )


NOT_CUT = {
    "cut elsewhere": lambda b: F.pad(b, (0, 3))[..., 1:14],
    "cut further": lambda b: F.pad(b, (0, 3))[..., :10],
    "padded with ones": lambda b: F.pad(b, (0, 3), value=1.0)[..., :13],
    "padded in front": lambda b: F.pad(b, (3, 0))[..., :13],
    "padded along rows": lambda b: F.pad(b, (0, 3, 0, 1))[:, :-1, :13],
    "not padded": lambda b: torch.cat([b, b], 2)[..., :13],
    "turned after": lambda b: F.pad(b, (0, 3))[..., :13].transpose(1, 2).reshape(2, -1, 13),
}


@pytest.mark.parametrize("name", NOT_CUT)
def test_only_zeros_that_were_cut_away_are_multiplied(name: str) -> None:
    torch.manual_seed(0)
    b, weight = torch.randn(2, 5, 13), torch.randn(16, 4)

    def product(b: Tensor, weight: Tensor) -> Tensor:
        rows = NOT_CUT[name](b).flatten(0, 1)
        return rows @ weight[: rows.shape[-1]]

    graph = make_fx(product, tracing_mode="fake")(b, weight)
    before = calls(graph, "constant_pad_nd")
    changed = lean_module.padded_once(graph)
    assert calls(changed, "constant_pad_nd") == before
    assert torch.equal(changed(b, weight), product(b, weight))


def test_what_zeros_meet_in_a_padded_product_adds_nothing_even_where_it_is_not_finite() -> None:
    torch.manual_seed(0)
    b, weight = torch.randn(2, 5, 13), torch.randn(13, 4)
    product = lambda b, weight: F.pad(b, (0, 3))[..., :13].reshape(-1, 13) @ weight
    changed = lean_module.padded_once(make_fx(product, tracing_mode="fake")(b, weight))
    assert calls(changed, "constant_pad_nd") == 2
    assert torch.allclose(changed(b, weight), product(b, weight), rtol=1e-5, atol=1e-5)
    weight[3, 1] = torch.inf
    found, expected = changed(b, weight), product(b, weight)
    assert torch.equal(found.isfinite(), expected.isfinite())


class Pooled(nn.Module):
    """The mean over what a mask keeps: without a finite gradient where it keeps nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        kept: Tensor = self.inner(x).relu() * mask[..., None]
        return self.outer(kept.sum(1) / mask.sum(1, keepdim=True))


def test_rows_that_fill_a_chunk_add_nothing_even_where_zeros_have_no_gradient() -> None:
    torch.manual_seed(0)
    net = Pooled()

    def pooled_loss(model: nn.Module, rows: Any) -> Tensor:
        return F.cross_entropy(model(rows[0], rows[1]), rows[2], reduction="none")

    rows = (torch.randn(3, 5, 3), torch.ones(3, 5), torch.tensor([0, 1, 1]))
    names = [tuple(trainable(net))]
    fast = CompiledCapture(net, pooled_loss, ROWS, names, {"backend": "aot_eager"})(rows)
    slow = Capture(net, pooled_loss)(rows)
    weights = torch.rand(3, 1)
    first, second = fast.weighted_sum(weights, names), slow.weighted_sum(weights, names)
    for name in second:
        torch.testing.assert_close(first[name], second[name])


def test_a_row_that_only_fills_a_chunk_spoils_no_sum_where_it_alone_is_not_finite() -> None:
    class Drops(nn.Module):  # a copy of a row draws a mask of its own
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(1 / nn.functional.dropout(x)).squeeze(1)

    torch.manual_seed(0)
    net = Drops()
    names, parameters = tuple(trainable(net)), trainable(net)
    capture = CompiledCapture(net, lambda m, x: m(x), ROWS, [names], {"backend": "eager"})
    kept = 0
    for _ in range(60):
        gradients = capture(torch.ones(1, 4))
        private, seen = private_sum(flat(1.0), parameters, [gradients])
        finite = bool(gradients.norms([names]).isfinite().all())
        assert seen.non_finite == int(not finite)
        assert all(bool(value.isfinite().all()) for value in private.parts[0].value.values())
        kept += finite
    assert kept  # else no chunk was spoilt by a copy alone


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.times, self.function = nn.Linear(16, 3), 2.0, torch.tanh
        self.register_buffer("shift", torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.times * self.layer(self.function(x.flatten(1) + self.shift))


def set_weight(net: Scaled) -> None:
    net.layer.weight = nn.Parameter(2 * net.layer.weight.detach())


EXCHANGED = {
    "times": lambda net: setattr(net, "times", 3.0),
    "times ": lambda net: setattr(net, "times", torch.ones(3, dtype=torch.float64)),
    "shift": lambda net: setattr(net, "shift", torch.ones(16, dtype=torch.float64)),
    "layer": lambda net: setattr(net, "layer", nn.Linear(16, 3).double()),
    "weight": set_weight,
    "function": lambda net: setattr(net, "function", torch.sin),
    "_forward_hooks": lambda net: net.layer.register_forward_hook(lambda module, given, found: 3 * found),
    "forward": lambda net: setattr(net, "forward", lambda x: net.layer(x.flatten(1))),
}


@pytest.mark.parametrize("name", EXCHANGED)
def test_what_a_graph_took_for_a_constant_cannot_be_exchanged(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda graph, **given: real(graph, **{**given, "backend": "aot_eager"}))
    net = Scaled().double()
    how = {"noise_multiplier": 1.0, "steps": 4, "batch": 8, "delta": 1e-5, "noise": 0}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    private = clipwise.make_private(net, optimizer, batch(40), loss=loss, compile=True, **how)
    batches = private.batches()
    for _ in range(2):
        private.step(next(batches))
    net.shift.fill_(1.0)  # a buffer's values are no constants
    private.step(next(batches))
    EXCHANGED[name](net)
    with pytest.raises(InputError, match=f"{name.strip()} of the model is another than when its step was compiled"):
        private.step(next(batches))


def test_dropout_is_named_where_a_graph_cannot_be_held_against_the_eager_pass() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16, 3)).double()
    compiled = CompiledCapture(net, loss, ROWS, [tuple(trainable(net))], {"backend": "aot_eager"})
    with pytest.raises(Refused, match="draws at random while it trains"):
        compiled(batch(ROWS))
