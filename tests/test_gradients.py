"""SampleGradients: forms of the norm, weights used several times, layouts, laws of the algebra, and edge cases."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from cases import CASES, SAMPLES, Largest, Parts, direction, fast, flat, groups, integers, loss, normal, off, slow
from clipwise.losses import cross_entropy
from clipwise.methods import flat as flat_method
from clipwise.records import SampleGradients, forms, from_dense, kinds, oracle, per_sample
from clipwise.records.kernels import gram_sq_norm
from clipwise.records.kinds import Convolution, Dense, Geometry, Indexed, Outer
from clipwise.records.layers import products
from clipwise.step import weigh
from clipwise.types import InputError

CLOSE = 1e-10


def model(run: Callable[..., Tensor], **parts: Callable[[], Any]) -> nn.Module:
    torch.manual_seed(0)
    return Parts(run, **{name: make() for name, make in parts.items()}).double()


def assert_exact(model: nn.Module, *batch: Tensor) -> SampleGradients:
    found, expected = per_sample(model, loss, batch), oracle.per_sample(model, loss, batch)
    assert off(found.materialise(), expected.materialise()) < CLOSE
    whole = expected.norms().square().max()
    for names in (None, groups(expected.names)):
        assert (found.norms(names).square() - expected.norms(names).square()).abs().max() <= CLOSE * whole
    weights = torch.linspace(-1, 2, found.samples, dtype=torch.float64)
    assert off(found.weighted_sum(weights), expected.weighted_sum(weights)) < CLOSE
    u = direction(expected.like)
    size = expected.norms().max() * flat(u).norm()
    assert (found.inner(u) - expected.inner(u)).abs().max() <= CLOSE * size
    return found


# ── forms of the norm ───────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def force(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    counted = forms.choose

    def as_form(name: str) -> None:
        monkeypatch.setattr(forms, "choose", lambda *sizes, **more: replace(counted(*sizes, **more), name=name))

    return as_form


@pytest.mark.parametrize("form", ["gram", "written", "streamed"])
@pytest.mark.parametrize(
    "name",
    [
        "deep Linear",
        "Conv1d with stride that leaves a rest",
        "Conv2d with groups, stride and dilation",
        "Conv3d with circular padding",
        "ConvTranspose2d with output padding",
        "TransformerEncoderLayer",
        "LSTM of two layers in both directions",
        "GRU",
        "GPT-2's Conv1D",
        "product x @ W.T",
        "weight norm of a Conv2d",
    ],
)
def test_every_form_gives_the_same_norms_and_sums(name: str, form: str, force: Callable[[str], None]) -> None:
    case = CASES[name]
    force(form)
    found = assert_exact(case.model(), *case.batch())
    assert {site.form.name for site in found.sites if site.form is not None} == {form}


@pytest.mark.parametrize("name", ["deep Linear", "TransformerEncoderLayer", "GPT-2's Conv1D", "product x @ W.T"])
def test_rows_padded_for_a_kernel_are_passed_on_without_their_padding(
    name: str, force: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    takes = lambda a, other: a.shape[2] > 1  # on a GPU, of what is in half precision
    for module in (products, kinds.outer, kinds.sums):
        monkeypatch.setattr(module, "by_kernel", takes)
    force("gram")
    case = CASES[name]
    found = assert_exact(case.model(), *case.batch())
    records = [record for own in found.records.values() for record in own if isinstance(record, Outer)]
    assert any(max(record.spare) for record in records)
    for record in records:
        assert record.a.shape[3] - record.spare[0] == record.unpadded().a.shape[3]
        assert not record.b[..., record.b.shape[3] - record.spare[1] :].any()


@pytest.mark.parametrize(
    "name", ["deep Linear", "Conv2d with groups, stride and dilation", "TransformerEncoderLayer", "GPT-2's Conv1D"]
)
def test_norms_and_sums_are_of_the_gradients_as_they_were_rounded_to_be_kept(
    name: str, force: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = lambda factors, cuda: factors if factors == torch.bfloat16 else torch.promote_types(factors, torch.float32)
    for module in (products, kinds.outer, kinds.convolution):  # as it is on a GPU
        monkeypatch.setattr(module, "written_format", narrow)
    force("written")
    case = CASES[name]
    model, batch = case.model().float(), [t.float() if t.is_floating_point() else t for t in case.batch()]

    def rounded(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss(model, batch).float()

    found = per_sample(model, rounded, batch)
    kept = [record.value.dtype for own in found.records.values() for record in own if isinstance(record, Dense)]
    assert torch.bfloat16 in kept
    written = {name: value.double() for name, value in found.materialise().items()}
    norms = torch.cat([value.reshape(found.samples, -1) for value in written.values()], 1).norm(dim=1)
    torch.testing.assert_close(found.norms().double(), norms, rtol=1e-5, atol=0)
    weights = torch.linspace(-1, 2, found.samples)
    # a third is no number of bfloat16, and neither are most sums
    for other, times in (((1 / 3) * found, 1 / 3), (found.plus((1 / 3) * found), 4 / 3), (found.merged(1), 1.0)):
        torch.testing.assert_close(other.norms().double(), times * norms, rtol=1e-5, atol=0)
    units = torch.cat([(value[::2] + value[1::2]).reshape(found.samples // 2, -1) for value in written.values()], 1)
    torch.testing.assert_close(found.merged(2).norms().double(), units.norm(dim=1), rtol=1e-5, atol=0)
    for parameter, total in found.weighted_sum(weights).items():
        expected = torch.tensordot(weights.double(), written[parameter], 1)
        torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5 * float(norms.max()))


def test_streaming_in_pieces_gives_the_same_norms(
    monkeypatch: pytest.MonkeyPatch, force: Callable[[str], None]
) -> None:
    force("streamed")
    monkeypatch.setattr(forms, "STREAM_FLOATS", 1)  # one sample at a time
    most: list[int] = []
    dense = Outer.dense
    monkeypatch.setattr(Outer, "dense", lambda record: most.append(record.samples) or dense(record))
    case = CASES["deep Linear"]
    found = per_sample(case.model(), loss, case.batch())
    assert torch.allclose(found.norms(), slow("deep Linear").norms(), rtol=1e-12)
    assert set(most) == {1}


EXTREMES = {
    "one position, wide features": ((1, 512, 512, None), "gram"),
    "few positions, a large vocabulary": ((8, 64, 50_000, None), "gram"),
    "many positions, few features": ((1024, 3, 16, None), "written"),
    "an image of 20 × 20 with 256 channels": ((400, 256 * 9, 256, 256 * 400), "streamed"),
}


@pytest.mark.parametrize("shape", EXTREMES)
def test_where_one_form_is_clearly_best_it_is_chosen(shape: str) -> None:
    (*sizes, raw_inputs), form = EXTREMES[shape]
    assert forms.choose(*sizes, raw_inputs=raw_inputs).name == form


ON_A_GPU = {  # positions, p, q, raw inputs, whether it unfolds
    "ResNet's 16 channels at 32 × 32": ((1024, 144, 16, 16 * 1024, True), "written"),
    "256 channels at 8 × 8": ((64, 2304, 256, 256 * 64, True), "fused"),
    "a transformer's layer, 128 tokens": ((128, 768, 3072, None, False), "gram"),
    "the same, 1024 tokens": ((1024, 768, 3072, None, False), "written"),
    "a vision transformer's, 197 patches": ((197, 384, 384, None, False), "gram"),
}


@pytest.mark.parametrize("shape", ON_A_GPU)
def test_with_kernels_a_gpu_writes_little_and_never_unfolds(shape: str) -> None:
    (*sizes, raw_inputs, unfolds), form = ON_A_GPU[shape]
    assert forms.choose(*sizes, raw_inputs=raw_inputs, cuda=True, kernel=True, unfolds=unfolds).name == form


def test_a_tied_weight_whose_parts_nearly_cancel_is_not_under_estimated() -> None:
    torch.manual_seed(0)
    shape = torch.Size([50, 16])
    for positions in (1, 2, 3):
        for apart in torch.logspace(-5, -2, 12).tolist():
            product = Outer(torch.randn(8, 1, positions, 16), torch.randn(8, 1, positions, 50), shape)
            close = -product.dense() * (1 + apart * torch.randn(8, 50, 16))
            table = Indexed(torch.arange(50).expand(8, 50), close, shape)
            for record in (product, Dense(product.dense()), Dense(product.dense().bfloat16())):
                both = SampleGradients({"w": (record, table)}, {"w": torch.zeros(shape)}, 8)
                true = (record.dense().double() + table.dense().double()).flatten(1).norm(dim=1)
                assert (both.norms().double() >= true * (1 - 1e-6)).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_written_gradient_beside_rows_of_its_table_is_their_sum(dtype: torch.dtype) -> None:
    shape, like = torch.Size([7, 3]), {"w": torch.zeros(7, 3, dtype=torch.float64)}
    ids = integers(7, 5).mT.contiguous().mT  # rows that are met several times, and no order of memory
    table, (rest, more) = Indexed(ids, normal(5, 3), shape), (Dense(normal(7, 3).to(dtype)) for _ in range(2))
    keep = torch.tensor([True, False] * (SAMPLES // 2))
    for order in ([table, rest, more], [rest, more, table]):
        one = SampleGradients({"w": kinds.joined(order)}, like, SAMPLES)
        assert len((one + one).records["w"]) == 2  # no table is written
        written = from_dense({"w": sum(record.dense().double() for record in order)}, like)
        for change in (lambda g: g, lambda g: g + g, lambda g: g.merged(2), lambda g: g.masked(keep)):
            found, expected = change(one), change(written)
            torch.testing.assert_close(found.norms(), expected.norms(), rtol=1e-5, atol=0)
            weights = torch.linspace(-1, 2, found.samples, dtype=torch.float64)
            sums = (g.weighted_sum(weights)["w"].double() for g in (found, expected))
            torch.testing.assert_close(*sums, rtol=1e-5, atol=1e-5)


def test_a_gradient_is_written_only_where_it_takes_no_more_memory_than_its_records() -> None:
    sizes = (1024, 768, 2304)  # 1.77 M numbers, in the place of 3.15 M of half the width
    assert forms.choose(*sizes, cuda=True, kernel=True).name == "written"
    for formats, form in (((torch.float16, torch.float32), "gram"), ((torch.bfloat16, torch.bfloat16), "written")):
        assert forms.choose(*sizes, cuda=True, kernel=True, formats=formats).name == form


@pytest.mark.parametrize("spare", [(0, 0), (0, 5), (3, 0)])
def test_features_to_spare_are_no_part_of_a_written_gradient(
    spare: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kinds.outer, "written_format", lambda factors, *, cuda: factors)  # as on a GPU
    random = torch.Generator().manual_seed(0)
    a, b = (F.pad(torch.randn(2, 1, 9, 8, generator=random), (0, more)).bfloat16() for more in spare)
    record = Outer(a, b, torch.Size([8, 8]), spare)
    exact = (b.double().mT @ a.double())[:, 0, :8, :8]
    found = record.written()
    assert found.shape == (2, 8, 8)
    assert found.stride(0) == (8 + spare[1]) * 8  # rows to spare are not copied away
    torch.testing.assert_close(found.double(), exact, rtol=2.0**-7, atol=1e-6)
    kept = Dense(found)
    torch.testing.assert_close(kept.sq_norm().double(), found.double().square().sum((1, 2)), rtol=1e-6, atol=0)
    torch.testing.assert_close(kept.total(torch.ones(2)).double(), found.double().sum(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("first", ["samples", "positions"])
def test_a_sum_over_positions_copies_no_factor_into_another_order(first: str) -> None:
    """Recurrent layers and attention hold positions first."""
    a, b = (normal(1, 7, size) for size in (3, 8))
    if first == "positions":
        a, b = (t.permute(2, 1, 0, 3).contiguous().permute(2, 1, 0, 3) for t in (a, b))
    weights = torch.linspace(-1, 2, SAMPLES, dtype=torch.float64)
    graph = make_fx(lambda *given: Outer(*given[:2], torch.Size([8, 3])).total(given[2]))(a, b, weights)
    assert not [node for node in graph.graph.nodes if node.target is torch.ops.aten.clone.default]
    torch.testing.assert_close(graph(a, b, weights), torch.einsum("i,itq,itp->qp", weights, b[:, 0], a[:, 0]))


def test_the_norm_of_a_large_written_gradient_is_a_few_operations_in_a_graph() -> None:
    value = torch.randn(2, 100 * kinds.PIECE + 7)
    graph = make_fx(lambda v: Dense(v).sq_norm())(value)
    assert len(graph.graph.nodes) < 20
    torch.testing.assert_close(graph(value).double(), value.double().square().sum(1), rtol=1e-6, atol=0)


sizes = st.integers(1, 300)


@settings(max_examples=200, deadline=None)
@given(positions=sizes, inputs=sizes, outputs=sizes, blocks=st.integers(1, 4))
def test_the_choice_follows_the_counted_cost(positions: int, inputs: int, outputs: int, blocks: int) -> None:
    form = forms.choose(positions, inputs, outputs, blocks=blocks)
    assert form.gram_cost == blocks * positions * positions * (inputs + outputs)
    assert form.written_cost == blocks * positions * inputs * outputs
    assert form.written_floats == blocks * inputs * outputs
    assert form.record_floats == blocks * positions * (inputs + outputs)
    if form.name == "gram":
        assert form.gram_cost <= form.written_cost
    if form.name == "streamed":
        assert form.written_cost <= form.gram_cost
    assert form == forms.choose(positions, inputs, outputs, blocks=blocks)
    # more positions never make the Gram form, which is quadratic in them, the better one
    assert form.name == "gram" or forms.choose(positions + 1, inputs, outputs, blocks=blocks).name != "gram"


@pytest.mark.parametrize("shape", [(1,), (3,), (8, 1)])
def test_weights_that_are_not_one_for_each_sample_are_refused(shape: tuple[int, ...]) -> None:
    found = per_sample(nn.Linear(4, 2), cross_entropy, (torch.randn(8, 4), torch.zeros(8, dtype=torch.long)))
    with pytest.raises(InputError, match=r"a weight for each sample, of shape \[8\], got"):
        found.weighted_sum(torch.ones(shape))
    with pytest.raises(InputError, match=r"of shape \[8, 1\], got \[8\]"):
        found.weighted_sum(torch.ones(8), groups=(found.names,))


def test_a_notebook_shows_gradients_in_one_line() -> None:
    found = per_sample(nn.Linear(4, 2), cross_entropy, (torch.randn(8, 4), torch.zeros(8, dtype=torch.long)))
    assert repr(found) == "<gradients of 8 samples for 2 parameters>"


def test_explain_shows_each_weights_form_and_costs() -> None:
    found = fast("Conv2d plain")
    (line,) = [line for line in found.explain().splitlines() if "layer.weight" in line]
    form = next(site.form for site in found.sites if "layer.weight" in site.parameters)
    assert form.name in line
    assert f"{form.gram_cost:,}" in line and f"{form.written_cost:,}" in line
    measured = next(line for line in found.explain(measure=True).splitlines() if "layer.weight" in line)
    assert measured.startswith(line) and all(float(took) > 0 for took in measured.removeprefix(line).split())
    assert len(measured.removeprefix(line).split()) == 2
    assert "vmap" in fast("einsum").explain()
    assert "backward" in fast("LayerNorm").explain()


class Attention(nn.Module):
    """Queries, keys and values from the same inputs, as most transformers have them."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(12, 10) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x)).flatten(1)


class LastState(nn.Module):
    """A recurrent layer whose two weights meet the same gates."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer = kind(12, 10, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0][:, -1]


@pytest.mark.parametrize(
    ("make", "pairs"), [(Attention, 1), (partial(LastState, nn.LSTM), 1), (partial(LastState, nn.GRU), 2)]
)
def test_weights_with_a_factor_in_common_share_its_gram_matrix(
    make: Callable[[], nn.Module], pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, batch = make().double(), (normal(4, 12), integers(10))
    expected = oracle.per_sample(model, cross_entropy, batch).norms()
    found = per_sample(model, cross_entropy, batch)
    calls: list[Tensor] = []
    monkeypatch.setattr(kinds.sums, "gram_sq_norm", lambda a, b: calls.append(a) or gram_sq_norm(a, b))
    assert off({"all": found.norms()}, {"all": expected}) < 1e-10
    assert len(calls) == pairs  # a GRU's gates are not one sum


# ── rounding ────────────────────────────────────────────────────────────────────────────────────────────────────────


def cancelling(positions: int, features: int, rest: float, kind: str) -> tuple[Tensor, Tensor]:
    """Positions whose outer products nearly add up to nothing: all along one direction, with weights that cancel."""
    torch.manual_seed(positions + features)
    draw = {"normal": torch.randn, "positive": torch.rand, "constant": lambda *s: torch.full(s, 0.1)}[kind]
    lengths, signs = torch.rand(8, 1, positions, 1) + 0.3, torch.randn(8, 1, positions, 1)
    signs -= (signs * lengths).sum(2, keepdim=True) * lengths / lengths.square().sum(2, keepdim=True)
    a, b = (draw(8, 1, 1, features) * along for along in (lengths, signs))
    return a + rest * torch.randn_like(a), b + rest * torch.randn_like(b)


@pytest.mark.parametrize("kind", ["normal", "positive", "constant"])
@pytest.mark.parametrize("features", [64, 768])
@pytest.mark.parametrize("positions", [2, 7, 32])
def test_a_gram_norm_of_cancelling_positions_is_never_under_estimated(positions: int, features: int, kind: str) -> None:
    for rest in (0.0, 1e-5, 1e-4, 1e-3, 1e-2, 1.0):
        a, b = cancelling(positions, features, rest, kind)
        exact = (b.double().mT @ a.double()).square().sum((1, 2, 3)).sqrt()
        found = gram_sq_norm(a, b).double().sqrt()
        assert (found >= exact * (1 - 1e-5)).all()
        # and what is added is small beside the terms that cancel
        terms = (a.double().norm(dim=3) * b.double().norm(dim=3)).sum((1, 2))
        assert (found <= exact * (1 + 1e-5) + 2e-3 * terms).all()


def test_the_slack_matters_where_positions_cancel() -> None:
    """Without it the plain Gram sum, in float32, falls below the norm: what the guarantee is for."""
    under = 0.0
    for rest in (1e-5, 1e-4, 3e-4, 1e-3):
        a, b = cancelling(32, 512, rest, "normal")
        exact = (b.double().mT @ a.double()).square().sum((1, 2, 3)).sqrt()
        plain = ((a @ a.mT) * (b @ b.mT)).sum((1, 2, 3)).clamp(min=0).double().sqrt()
        under = max(under, float((1 - plain / exact).max()))
    assert under > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_float32_is_close_to_float64(name: str) -> None:
    case = CASES[name]
    batch = tuple(t.float() if t.is_floating_point() else t for t in case.batch())
    found, expected = per_sample(case.model().float(), loss, batch), slow(name)
    written_out = {n: v.double() for n, v in found.materialise().items()}
    assert off(written_out, expected.materialise()) < 1e-4
    assert (found.norms() - expected.norms()).abs().max() <= 1e-4 * expected.norms().max()
    assert all(v.dtype == torch.float32 for v in found.weighted_sum(torch.ones(SAMPLES)).values())


# ── weights used several times ──────────────────────────────────────────────────────────────────────────────────────


def language_model(words: int, width: int) -> nn.Module:
    made = model(
        lambda m, ids: m.out(torch.tanh(m.hidden(m.table(ids)))),
        table=lambda: nn.Embedding(words, width),
        hidden=lambda: nn.Linear(width, width),
        out=lambda: nn.Linear(width, words),
    )
    made.out.weight = made.table.weight
    return made


def test_a_tied_table_is_never_written_out_for_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    words, width, samples, steps = 3000, 32, 8, 3
    tied = language_model(words, width)
    ids = integers(words, steps, samples=samples)
    ids[:, 1] = ids[:, 0]
    expected = oracle.per_sample(tied, loss, (ids,))
    weights = torch.linspace(-1, 1, samples, dtype=torch.float64)

    def refuse(record: Indexed) -> Tensor:
        raise AssertionError(f"wrote out [sample, {record.shape[0]}, {record.shape[1]}]")

    monkeypatch.setattr(Indexed, "dense", refuse)
    with Largest() as largest:
        found = per_sample(tied, loss, (ids,))
        norms, sums = found.norms(), found.weighted_sum(weights)
        units = found.merged(2).norms()
        twice = (found + found).norms()
    assert torch.allclose(norms, expected.norms(), rtol=1e-10)
    assert torch.allclose(units, expected.merged(2).norms(), rtol=1e-10)
    assert torch.allclose(twice, 2 * norms, rtol=1e-10)
    assert off(sums, expected.weighted_sum(weights)) < CLOSE
    assert largest.numel < samples * words * width


def test_a_table_is_never_made_one_hot_or_written_out_for_each_sample() -> None:
    words, width, samples = 2000, 8, 8
    table = model(lambda m, ids: m.table(ids), table=lambda: nn.Embedding(words, width))
    ids = integers(words, 5, samples=samples)
    with Largest() as largest:
        found = per_sample(table, loss, (ids,))
        found.norms(), found.inner(direction(found.like)), found.weighted_sum(torch.ones(samples, dtype=torch.float64))
    assert largest.numel <= 2 * words * width  # the table itself and its sum, with room for alignment
    assert torch.allclose(found.norms(), oracle.per_sample(table, loss, (ids,)).norms(), rtol=1e-12)


def tied_linears() -> nn.Module:
    made = model(lambda m, x: m.b(m.a(x).tanh()), a=lambda: nn.Linear(4, 4), b=lambda: nn.Linear(4, 4))
    made.b.weight = made.a.weight
    return made


REUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "an embedding and a linear that share a table": (lambda: language_model(11, 5), lambda: integers(11, 6)),
    "an embedding looked up twice": (
        lambda: model(lambda m, ids: m.e(ids) * m.e(ids.flip(1)), e=lambda: nn.Embedding(7, 3)),
        lambda: integers(7, 4),
    ),
    "two linears that share a weight": (tied_linears, lambda: normal(5, 4)),
    "a weight and its transpose": (
        lambda: model(lambda m, x: F.linear(torch.tanh(m.a(x)), m.a.weight.t()), a=lambda: nn.Linear(4, 6)),
        lambda: normal(5, 4),
    ),
    "a linear used three times on different positions": (
        lambda: model(lambda m, x: m.a(m.a(m.a(x).tanh()).sum(1)), a=lambda: nn.Linear(4, 4)),
        lambda: normal(5, 4),
    ),
    "a convolution used twice on different sizes": (
        lambda: model(lambda m, x: m.c(m.c(x).tanh()), c=lambda: nn.Conv2d(2, 2, 3)),
        lambda: normal(2, 7, 6),
    ),
    "a convolution's weight also used as numbers": (
        lambda: model(lambda m, x: m.c(x) * m.c.weight.square().sum(), c=lambda: nn.Conv1d(2, 3, 3)),
        lambda: normal(2, 6),
    ),
    "a norm used twice": (
        lambda: model(lambda m, x: m.n(m.n(x) ** 3), n=lambda: nn.LayerNorm(4)),
        lambda: normal(5, 4),
    ),
    "an attention used twice": (
        lambda: model(
            lambda m, x: m.a(*[m.a(x, x, x)[0]] * 3)[0], a=lambda: nn.MultiheadAttention(4, 2, batch_first=True)
        ),
        lambda: normal(5, 4),
    ),
    "a recurrence used twice": (
        lambda: model(lambda m, x: m.r(m.r(x)[0])[0], r=lambda: nn.LSTM(4, 4, batch_first=True)),
        lambda: normal(5, 4),
    ),
    "a weight used by a linear and by arithmetic": (
        lambda: model(lambda m, x: m.a(x) + x @ m.a.weight * m.a.bias, a=lambda: nn.Linear(4, 4)),
        lambda: normal(5, 4),
    ),
}


@pytest.mark.parametrize("name", REUSED)
def test_a_parameter_used_several_times_has_the_sum_of_its_gradients(name: str) -> None:
    build, data = REUSED[name]
    torch.manual_seed(1)
    assert_exact(build(), data())


# ── layouts ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def frames(m: Any, x: Tensor) -> Tensor:
    """[sample, frame, channel, height, width] through a CNN that knows images only."""
    each = m.norm(m.conv(x.flatten(0, 1)).relu())
    return m.head(each.flatten(1)).unflatten(0, x.shape[:2])


LAYOUTS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "[time, sample, feature]": (
        lambda: model(lambda m, x: m.a(x.transpose(0, 1)).transpose(0, 1), a=lambda: nn.Linear(3, 2)),
        (5, 3),
    ),
    "[time, sample, feature] with as many steps as samples": (
        lambda: model(lambda m, x: m.n(m.a(x.transpose(0, 1))).transpose(0, 1), a=lambda: nn.Linear(3, 2),
                      n=lambda: nn.LayerNorm(2)),
        (SAMPLES, 3),
    ),
    "a recurrence with as many steps and features as samples, sequence first": (
        lambda: model(lambda m, x: m.r(x.transpose(0, 1))[0].transpose(0, 1), r=lambda: nn.GRU(SAMPLES, SAMPLES)),
        (SAMPLES, SAMPLES),
    ),
    "a transformer with as many positions as samples, sequence first": (
        lambda: model(lambda m, x: m.t(x.transpose(0, 1)).transpose(0, 1),
                      t=lambda: nn.TransformerEncoderLayer(SAMPLES, 2, 8, dropout=0.0)),
        (SAMPLES, SAMPLES),
    ),
    "[sample · time, feature]": (
        lambda: model(lambda m, x: m.n(m.a(x.flatten(0, 1))).unflatten(0, x.shape[:2]), a=lambda: nn.Linear(3, 2),
                      n=lambda: nn.LayerNorm(2)),
        (5, 3),
    ),
    "[sample · time, feature] with as many steps as samples": (
        lambda: model(lambda m, x: m.a(x.flatten(0, 1)).unflatten(0, x.shape[:2]), a=lambda: nn.Linear(3, 2)),
        (SAMPLES, 3),
    ),
    "[feature, sample]": (
        lambda: model(lambda m, x: (x.t() * m.p + m.p).t(), p=lambda: nn.Parameter(torch.rand(3, 1))),
        (3,),
    ),
    "[sample · head, position, feature]": (
        lambda: model(lambda m, x: m.a(x.unflatten(2, (2, 3)).transpose(1, 2).flatten(0, 1)).unflatten(0, (-1, 2)),
                      a=lambda: nn.Linear(3, 2)),
        (5, 6),
    ),
    "frames through a CNN": (
        lambda: model(frames, conv=lambda: nn.Conv2d(2, 4, 3), norm=lambda: nn.GroupNorm(2, 4),
                      head=lambda: nn.Linear(16, 3)),
        (3, 2, 4, 4),
    ),
    "as many frames as samples through a CNN": (
        lambda: model(frames, conv=lambda: nn.Conv2d(2, 4, 3), norm=lambda: nn.BatchNorm2d(4).eval(),
                      head=lambda: nn.Linear(16, 3)),
        (SAMPLES, 2, 4, 4),
    ),
    "frames through a transposed convolution": (
        lambda: model(lambda m, x: m.c(x.flatten(0, 1)).unflatten(0, x.shape[:2]),
                      c=lambda: nn.ConvTranspose2d(2, 3, 2, stride=2)),
        (3, 2, 2, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("form", ["planned", "gram", "written", "streamed"])
def test_samples_are_found_wherever_the_model_puts_them(name: str, form: str, force: Callable[[str], None]) -> None:
    build, shape = LAYOUTS[name]
    if form != "planned":
        force(form)
    torch.manual_seed(1)
    assert_exact(build(), normal(*shape))


# ── frozen and unused parameters ────────────────────────────────────────────────────────────────────────────────────


def two_parts(m: Any, x: Tensor) -> Tensor:
    return m.last(m.first(x).tanh())


def test_frozen_parameters_have_no_gradient_and_pass_it_on() -> None:
    made = model(two_parts, first=lambda: nn.Linear(4, 5), last=lambda: nn.Linear(5, 3))
    made.last.requires_grad_(False)
    found = assert_exact(made, normal(2, 4))
    assert found.names == ("first.weight", "first.bias")


def test_a_frozen_beginning_costs_nothing_to_record() -> None:
    made = model(two_parts, first=lambda: nn.Linear(4, 5), last=lambda: nn.Linear(5, 3))
    made.first.requires_grad_(False)
    found = assert_exact(made, normal(2, 4))
    assert {name for site in found.sites for name in site.parameters} == {"last.weight"}


def test_parameters_without_a_gradient_are_named_and_are_zero() -> None:
    made = model(lambda m, x: m.a(x), a=lambda: nn.Linear(4, 3), spare=lambda: nn.Linear(4, 2))
    found = assert_exact(made, normal(2, 4))
    assert found.unused == ("spare.weight", "spare.bias")
    assert not found.materialise()["spare.weight"].any()
    assert found.weighted_sum(torch.ones(SAMPLES))["spare.weight"].shape == (2, 4)
    assert not found.norms([["spare.weight", "spare.bias"]]).any()
    assert (found + found).unused == found.merged(2).unused == found.unused


def test_a_parameter_that_meets_samples_but_not_the_loss_is_unused() -> None:
    made = model(lambda m, x: (m.spare(x), m.a(x))[1], a=lambda: nn.Linear(4, 3), spare=lambda: nn.Linear(4, 2))
    assert assert_exact(made, normal(2, 4)).unused == ("spare.weight", "spare.bias")


def test_a_model_with_nothing_to_train_is_an_error_that_says_what_to_write() -> None:
    with pytest.raises(InputError, match="requires_grad_"):
        per_sample(nn.Linear(4, 3).requires_grad_(False).double(), loss, (normal(4),))


# ── the algebra ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Mixed(nn.Module):
    """Every kind of record: Indexed, Outer, Convolution, Dense, and a table tied to a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(9, 6), nn.LayerNorm(6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.wide, self.narrow, self.scale = nn.Linear(6, 40), nn.Linear(40, 6), nn.Parameter(torch.ones(()))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.table(ids))
        x = x + self.conv(x.transpose(1, 2)).transpose(1, 2)
        x = self.narrow(self.wide(x.mean(1)).tanh()) * self.scale
        return F.linear(x, self.table.weight)


UNITS = 6


def mixed(seed: int) -> SampleGradients:
    torch.manual_seed(7)
    network = Mixed().double()
    torch.manual_seed(seed)
    return per_sample(network, loss, (integers(9, 5, samples=UNITS),))


seeds = st.integers(0, 1000)
factors = st.lists(st.floats(-3, 3), min_size=UNITS, max_size=UNITS).map(lambda c: torch.tensor(c, dtype=torch.float64))
laws = settings(max_examples=10, deadline=None)


def assert_same(found: SampleGradients, expected: SampleGradients, scale: SampleGradients) -> None:
    """Equal as written out, and as the operations see them."""
    ours, theirs = found.materialise(), expected.materialise()
    size = float(scale.norms().max())
    assert float((flat(ours) - flat(theirs)).abs().max()) <= 1e-11 * size
    assert (found.norms().square() - expected.norms().square()).abs().max() <= 1e-11 * size**2


def test_the_laws_are_tried_on_records_of_every_kind_that_can_be_added() -> None:
    found = {type(r) for records in mixed(0).records.values() for r in records}
    assert {Indexed, Outer, Dense} <= found


@laws
@given(u=seeds.map(mixed), v=seeds.map(mixed), c=factors)
def test_scaling_distributes_over_sums(u: SampleGradients, v: SampleGradients, c: Tensor) -> None:
    assert_same(c * (u + v), c * u + c * v, 6.0 * u + 6.0 * v)


@laws
@given(u=seeds.map(mixed), v=seeds.map(mixed), w=seeds.map(mixed))
def test_adding_is_commutative_and_associative(u: SampleGradients, v: SampleGradients, w: SampleGradients) -> None:
    assert_same(u + v, v + u, u + v)
    assert_same((u + v) + w, u + (v + w), u + v + w)


@laws
@given(u=seeds.map(mixed), v=seeds.map(mixed), size=st.sampled_from([1, 2, 3, 6]))
def test_merging_commutes_with_sums(u: SampleGradients, v: SampleGradients, size: int) -> None:
    assert_same((u + v).merged(size), u.merged(size) + v.merged(size), 6.0 * (u + v))


@laws
@given(u=seeds.map(mixed), size=st.sampled_from([2, 3, 6]))
def test_a_merged_unit_is_the_sum_of_its_samples(u: SampleGradients, size: int) -> None:
    units = {n: v.unflatten(0, (-1, size)).sum(1) for n, v in u.materialise().items()}
    assert_same(u.merged(size), from_dense(units, u.like), 6.0 * u)


@laws
@given(u=seeds.map(mixed), v=seeds.map(mixed), c=factors, s=st.floats(-3, 3))
def test_inner_products_are_linear_in_both_arguments(
    u: SampleGradients, v: SampleGradients, c: Tensor, s: float
) -> None:
    first = direction(u.like)
    second = {name: d.cos() for name, d in first.items()}
    size = float((u.norms() + v.norms()).max() * flat(first).norm()) * 10
    joint = {name: first[name] + s * second[name] for name in first}
    assert (u.inner(joint) - u.inner(first) - s * u.inner(second)).abs().max() <= 1e-12 * size
    assert ((c * u + v).inner(first) - c * u.inner(first) - v.inner(first)).abs().max() <= 1e-12 * size


@laws
@given(u=seeds.map(mixed), v=seeds.map(mixed), c=factors, w=factors)
def test_weighted_sums_are_linear(u: SampleGradients, v: SampleGradients, c: Tensor, w: Tensor) -> None:
    size = float((u.norms() + v.norms()).sum()) * 10
    both, one, other = (flat(g) for g in ((c * u + v).weighted_sum(w), u.weighted_sum(c * w), v.weighted_sum(w)))
    assert (both - one - other).abs().max() <= 1e-12 * size
    # ⟨Σ w_i v_i, d⟩ = Σ w_i ⟨v_i, d⟩
    d = direction(u.like)
    assert abs(float(other @ flat(d) - w @ v.inner(d))) <= 1e-12 * size * float(flat(d).norm())


@laws
@given(u=seeds.map(mixed), v=seeds.map(mixed), c=factors)
def test_norms_are_norms(u: SampleGradients, v: SampleGradients, c: Tensor) -> None:
    assert torch.allclose((c * u).norms(), c.abs() * u.norms(), rtol=1e-7, atol=1e-9)
    assert ((u + v).norms() <= u.norms() + v.norms() + 1e-9).all()
    each = [[name] for name in u.names]
    assert torch.allclose(u.norms(each).square().sum(1).sqrt(), u.norms(), rtol=1e-10)


def test_probes_added_at_once_are_written_out_where_so_many_positions_make_that_cheaper() -> None:
    probes = []
    for seed in range(3):
        torch.manual_seed(seed)
        outer = Outer(torch.randn(4, 1, 8, 8).double(), torch.randn(4, 1, 8, 32).double(), torch.Size([32, 8]))
        probes.append(SampleGradients({"weight": (outer,)}, {"weight": torch.zeros(32, 8).double()}, 4))
    assert forms.choose(8, 8, 32).name == "streamed" and forms.choose(24, 8, 32).name == "written"
    at_once = probes[0].plus(*probes[1:])
    assert isinstance(at_once.records["weight"][0], Dense)
    expected = sum(probe.materialise()["weight"] for probe in probes)
    assert torch.allclose(at_once.materialise()["weight"], expected, rtol=1e-12)
    assert torch.allclose(at_once.norms(), expected.flatten(1).norm(dim=1), rtol=1e-12)


def test_only_gradients_of_the_same_samples_and_parameters_add_up() -> None:
    whole = mixed(0)
    with pytest.raises(InputError, match="expected 6 samples, got 3"):
        whole + whole.merged(2)
    with pytest.raises(InputError):
        whole + fast("Linear on 2 dimensions")


@pytest.mark.parametrize("size", [0, -1, 4, 7])
def test_units_that_do_not_divide_the_batch_are_refused(size: int) -> None:
    with pytest.raises(InputError, match="multiple"):
        mixed(0).merged(size)


# ── samples that are not finite, or not there ───────────────────────────────────────────────────────────────────────


def broken(model: nn.Module, batch: tuple[Any, Tensor]) -> Tensor:
    """The case's loss, times a factor of each sample that may be anything."""
    rows, factor = batch
    return loss(model, rows) * factor


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", CASES)
def test_a_sample_that_is_not_finite_is_masked_to_exact_zeros_and_touches_no_other(name: str, bad: float) -> None:
    case, expected = CASES[name], slow(name)
    rows = case.batch()
    for tensor in rows:
        if tensor.is_floating_point():
            tensor[1] = bad
    factor = torch.tensor([1.0, bad, 1.0, 1.0], dtype=torch.float64)
    found = per_sample(case.model(), broken, (rows, factor))
    keep = torch.tensor([True, False, True, True])
    assert not found.norms()[1].isfinite()
    assert torch.equal(found.norms().isfinite(), keep)
    masked = found.masked(keep)
    others = {n: v * keep.reshape(-1, *[1] * (v.dim() - 1)) for n, v in expected.materialise().items()}
    assert off(masked.materialise(), others) < CLOSE
    assert not any(v[1].any() for v in masked.materialise().values())
    assert masked.norms()[1] == 0
    assert all(v.isfinite().all() for v in masked.weighted_sum(torch.ones(SAMPLES, dtype=torch.float64)).values())
    assert masked.inner(direction(masked.like))[1] == 0


@pytest.mark.parametrize("name", CASES)
def test_an_empty_batch_has_no_norms_and_sums_of_zero(name: str) -> None:
    made = CASES[name].model()
    empty = per_sample(made, loss, tuple(t[:0] for t in CASES[name].batch()))
    assert empty.samples == 0 and empty.losses is not None and empty.losses.shape == (0,)
    for same in (empty, torch.zeros(0) * empty, 2.0 * empty, empty + empty, empty.merged(3)):
        assert same.norms().shape == (0,)
        assert same.norms(groups(same.names)).shape == (0, len(groups(same.names)))
        assert same.inner(direction(same.like)).shape == (0,)
        sums = same.weighted_sum(torch.zeros(0))
        assert sums.keys() == same.like.keys()
        assert all(not v.any() and v.shape == same.like[n].shape for n, v in sums.items())
        assert all(v.shape == (0, *same.like[n].shape) for n, v in same.materialise().items())


def test_the_oracles_empty_batch_is_the_same() -> None:
    case = CASES["deep Linear"]
    empty = oracle.per_sample(case.model(), loss, tuple(t[:0] for t in case.batch()))
    assert empty.norms().shape == (0,) and empty.norms().dtype == torch.float64
    assert not flat(empty.weighted_sum(torch.zeros(0, dtype=torch.float64))).any()


@pytest.mark.parametrize("name", CASES)
def test_a_batch_of_one_is_the_first_of_many(name: str) -> None:
    case = CASES[name]
    found = per_sample(case.model(), loss, tuple(t[:1] for t in case.batch()))
    first = {n: v[:1] for n, v in slow(name).materialise().items()}
    assert off(found.materialise(), first) < CLOSE
    assert torch.allclose(found.norms(), slow(name).norms()[:1], rtol=1e-9)


# ── records on their own ────────────────────────────────────────────────────────────────────────────────────────────


def outer() -> Outer:
    return Outer(normal(2, 5, 3), normal(2, 5, 4), torch.Size([8, 3]))


def convolution() -> Convolution:
    geometry = Geometry(torch.Size([4, 1, 3, 2]), (2, 1), (1, 0), (1, 2), 2)
    return Convolution(normal(2, 5, 6), normal(4, 3, 4), geometry)


def indexed() -> Indexed:
    return Indexed(integers(5, 6), normal(6, 3), torch.Size([5, 3]))


RECORDS: dict[str, Callable[[], kinds.Record]] = {
    "Outer": outer,
    "Convolution": convolution,
    "Indexed": indexed,
    "Indexed without a position": lambda: Indexed(integers(5, 0), normal(0, 3), torch.Size([5, 3])),
    "Dense": lambda: Dense(normal(4, 3)),
    "Dense of a scalar": lambda: Dense(normal()),
}


@pytest.mark.parametrize("kind", RECORDS)
def test_every_kind_does_what_its_written_out_twin_does(kind: str) -> None:
    torch.manual_seed(0)
    record = RECORDS[kind]()
    twin = Dense(record.dense())
    weights, keep = torch.tensor([1.0, -2.0, 0.5, 0.0], dtype=torch.float64), torch.tensor([True, False, True, True])
    u = torch.randn(twin.value.shape[1:], dtype=torch.float64)
    for mine, other in (
        (record, twin),
        (record.scaled(weights), twin.scaled(weights)),
        (record.merged(2), twin.merged(2)),
        (record.masked(keep), twin.masked(keep)),
    ):
        assert mine.samples == other.samples
        assert torch.allclose(mine.dense(), other.dense())
        assert torch.allclose(mine.sq_norm(), other.sq_norm(), rtol=1e-12, atol=1e-12)
        assert torch.allclose(mine.inner(u), other.inner(u))
        assert torch.allclose(mine.total(weights[: mine.samples]), other.total(weights[: mine.samples]))
    assert torch.allclose(kinds.cross(record, twin), twin.sq_norm())


def test_a_table_and_a_product_have_the_inner_product_of_their_written_out_twins() -> None:
    torch.manual_seed(0)
    table = indexed()
    product = Outer(normal(1, 7, 3), normal(1, 7, 5), table.shape)
    expected = (table.dense() * product.dense()).flatten(1).sum(1)
    assert torch.allclose(kinds.cross(table, product), expected)
    assert torch.allclose(kinds.cross(product, table), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", RECORDS)
def test_sums_and_norms_of_half_precision_records_are_float32(kind: str, dtype: torch.dtype) -> None:
    record = RECORDS[kind]()
    half = replace(
        record, **{n: v.to(dtype) for n, v in vars(record).items() if isinstance(v, Tensor) and v.is_floating_point()}
    )
    assert half.sq_norm().dtype == half.total(torch.ones(SAMPLES)).dtype == half.dense().dtype == torch.float32
    assert half.inner(torch.ones(half.dense().shape[1:])).dtype == torch.float32


# ── what cancels, after rounding ────────────────────────────────────────────────────────────────────────────────────


class Tied(nn.Module):
    """A table that is also an output layer: a logit less a row's product with the same numbers; and others beside."""

    def __init__(self, others: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(12, 16), nn.Parameter(torch.zeros(1, dtype=dtype))
        self.more = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(others)])

    def forward(self, ids: Tensor, keys: Tensor, rows: Tensor) -> Tensor:
        chosen = F.linear(keys, self.table.weight).gather(2, ids[:, :, None])[:, :, 0]
        found = (chosen - (self.table(ids) * rows).sum(2)).sum(1) + self.other.to(keys.dtype)[0]
        return sum((31.9 * p[0] for p in self.more), found)


class Looked(nn.Module):
    """A table alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 16)

    def forward(self, ids: Tensor, rows: Tensor) -> Tensor:
        return (self.table(ids) * rows).flatten(1).sum(1)


class Convolved(nn.Module):
    """A convolution whose norm is streamed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(64, 64, 3, bias=False)

    def forward(self, x: Tensor, b: Tensor) -> Tensor:
        return (self.conv(x) * b).flatten(1).sum(1)


def longest_clipped(model: nn.Module, batch: tuple[Tensor, ...]) -> float:
    """The length of the longest term that is summed, of samples clipped to 1 as a step clips them."""
    found = per_sample(model, lambda m, b: m(*b), batch)
    weights = weigh(flat_method(1.0).blocks(found.names), found.norms([found.names]))[:, 0]
    each = [found.weighted_sum(torch.where(torch.arange(len(weights)) == i, weights, 0)) for i in range(len(weights))]
    return max(float(torch.cat([v.double().flatten() for v in own.values()]).norm()) for own in each)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tied_table_that_cancels_keeps_its_bound_beside_any_format(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    keys = 1e5 * torch.randn(100, 1, 16)
    batch = (torch.randint(0, 12, (100, 1)), keys, keys + 100 * torch.randn(100, 1, 16))
    assert longest_clipped(Tied(dtype=dtype), batch) <= 1


@pytest.mark.parametrize("others", [0, 100, 300])
def test_many_parameters_beside_a_tied_table_that_cancels_are_all_counted(others: int) -> None:
    keys = torch.full((2, 1, 16), 2.0**15)
    assert longest_clipped(Tied(others), (torch.zeros(2, 1, dtype=torch.long), keys, keys.clone())) <= 1


@pytest.mark.parametrize("size", [1e4, 1e5, 1e7])
def test_rows_of_a_table_that_cancel_keep_their_bound(size: float) -> None:
    torch.manual_seed(0)
    rows = size * torch.randn(64, 2, 16)
    rows[:, 1] = -rows[:, 0] + torch.randn(64, 16)
    assert longest_clipped(Looked(), (torch.randint(0, 12, (64, 1)).expand(64, 2).contiguous(), rows)) <= 1


@pytest.mark.parametrize("size", [1e4, 1e6, 1e7])
def test_positions_of_a_convolution_that_cancel_keep_their_bound(size: float) -> None:
    torch.manual_seed(0)
    x, b = torch.zeros(4, 64, 14, 14), torch.zeros(4, 64, 12, 12)
    x[..., 1:5] = torch.randn(4, 64, 14, 4)
    x[..., 7:11] = x[..., 1:5]
    b[..., 2:3] = size * torch.randn(4, 64, 12, 1)
    b[..., 8:9] = -b[..., 2:3] + torch.randn(4, 64, 12, 1)
    model = Convolved()
    (site,) = per_sample(model, lambda m, batch: m(*batch), (x, b)).sites
    assert site.form is not None and site.form.name == "streamed"
    assert longest_clipped(model, (x, b)) <= 1


def test_small_parameters_are_put_side_by_side_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where each would be a launch: once for their norms and every sum, in each group of its own."""
    torch.manual_seed(0)
    values = {"w": torch.randn(5, 2, 3), "b": torch.randn(5, 4), "s": torch.randn(5)}
    like = {name: torch.zeros(value.shape[1:]) for name, value in values.items()}
    weights, groups = torch.rand(5, 2), [["w", "s"], ["b"]]
    plain = from_dense(values, like)
    norms, sums = plain.norms(groups), [plain.weighted_sum(w, groups) for w in (weights, 1 - weights)]
    joins, cat = list[int](), torch.cat
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(torch, "cat", lambda parts, *rest: joins.append(len(parts)) or cat(parts, *rest))
    found = from_dense(values, like)
    torch.testing.assert_close(found.norms(groups), norms)
    for own, expected in zip((weights, 1 - weights), sums, strict=True):
        torch.testing.assert_close(found.weighted_sum(own, groups), expected)
    assert joins == [2, 1]
