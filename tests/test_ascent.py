"""Displaced gradients and curvature: each sample at its own parameters, without a weight for each sample."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel

from cases import CASES, SAMPLES, Largest, Parts, integers, loss, normal, off
from clipwise.records import Capture, SampleGradients, displacement, from_dense, oracle, swapped, trainable
from clipwise.records.ascent import curvature, displaced
from clipwise.records.capture import graph_of
from clipwise.records.kinds import Convolution, Dense, Geometry, Outer
from clipwise.records.layers import convolutions, products
from clipwise.records.trees import tensors
from clipwise.types import Gradient, InputError

RADIUS = 0.5
VARIED = [
    "deep Linear",
    "Conv2d with padding",
    "Conv2d with stride",  # whose record is kept: on a GPU its weights are written a few units at a time
    "ConvTranspose2d with groups",
    "Embedding with repeated ids",
    "GroupNorm",
    "TransformerEncoderLayer",
    "LSTM of two layers in both directions",
    "GRU",
    "class token by expand",
    "scalar",
    "weight standardisation of a Conv2d",
    "einsum",
]
EVEN, ODD = list(CASES)[::2], list(CASES)[1::2]  # half each, where all would say little more and take long
# torch has no second derivative of the first, and a wrong one of the second (its norm is taken for a constant)
NO_SECOND_DERIVATIVE = ("EmbeddingBag", "weight norm")


# ── the plainest definitions ────────────────────────────────────────────────────────────────────────────────────────


def single_gradient(model: nn.Module, own: Gradient, row: tuple[Tensor, ...], *, again: bool = False) -> list[Tensor]:
    """The gradient of one sample's loss at these parameters."""
    value = loss(lambda *given: functional_call(model, own, given), row)[0]
    found = torch.autograd.grad(value, list(own.values()), allow_unused=True, create_graph=again)
    return [torch.zeros_like(p) if g is None else g.to_dense() for g, p in zip(found, own.values(), strict=True)]


def leaves(values: Gradient) -> Gradient:
    return {name: value.detach().clone().requires_grad_() for name, value in values.items()}


def at_displaced(model: nn.Module, batch: tuple[Tensor, ...], v: Gradient, radius: Tensor) -> Gradient:
    """One sample at a time, each with parameters of its own: θ + r v/‖v‖."""
    units = len(radius)
    views, rows = len(batch[0]) // units, []
    for i in range(len(batch[0])):
        unit = i // views
        norm = math.sqrt(sum(float(t[unit].square().sum()) for t in v.values()))
        step = float(radius[unit]) / norm if norm > 0 and math.isfinite(norm) else 0.0
        own = {name: p + step * v[name][unit] if step else p for name, p in trainable(model).items()}
        rows.append(single_gradient(model, leaves(own), tuple(t[i : i + 1] for t in batch)))
    return stacked(model, rows)


def hessian_times(
    model: nn.Module, batch: tuple[Tensor, ...], v: Gradient, views: int, *, differences: bool
) -> Gradient:
    """One sample at a time: the gradient of ⟨∇ℓ, v⟩; or, where torch has none, a central difference of gradients."""
    rows = []
    for i in range(len(batch[0])):
        row, unit = tuple(t[i : i + 1] for t in batch), i // views
        if differences:
            step = 1e-5 / max(math.sqrt(sum(float(t[unit].square().sum()) for t in v.values())), 1e-9)
            ends = [
                single_gradient(
                    model, leaves({n: p + sign * step * v[n][unit] for n, p in trainable(model).items()}), row
                )
                for sign in (1, -1)
            ]
            rows.append([(a - b) / (2 * step) for a, b in zip(*ends, strict=True)])
            continue
        own = leaves(trainable(model))
        with sdpa_kernel(SDPBackend.MATH):  # the fused form of attention has no second derivative
            gradients = single_gradient(model, own, row, again=True)
        inner = sum((g * v[n][unit]).sum() for g, n in zip(gradients, own, strict=True))
        found = (
            torch.autograd.grad(inner, list(own.values()), allow_unused=True) if inner.requires_grad else [None] * 99
        )
        rows.append([torch.zeros_like(p) if g is None else g for g, p in zip(found, own.values(), strict=False)])
    return stacked(model, rows)


def stacked(model: nn.Module, rows: list[list[Tensor]]) -> Gradient:
    return {name: torch.stack([row[k] for row in rows]) for k, name in enumerate(trainable(model))}


@cache
def recorded(name: str) -> tuple[Capture, tuple[Tensor, ...], SampleGradients]:
    case = CASES[name]
    capture, batch = Capture(case.model(), loss), case.batch()
    return capture, batch, capture(batch)


def same(radius: float, units: int = SAMPLES) -> Tensor:
    return torch.full((units,), radius, dtype=torch.float64)


# ── every layer ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", CASES)
def test_each_sample_is_differentiated_at_its_own_displaced_parameters(name: str) -> None:
    capture, batch, along = recorded(name)
    found = displaced(capture, batch, along, RADIUS)
    expected = at_displaced(capture.model, batch, along.materialise(), same(RADIUS))
    assert off(found.materialise(), expected) < 1e-9
    assert off(along.materialise(), expected) > 1e-4, "the displacement must matter for this to be a test"


@pytest.mark.parametrize("name", EVEN)
def test_consecutive_rows_share_their_units_displacement(name: str) -> None:
    capture, batch, along = recorded(name)
    units = along.merged(2)
    found = displaced(capture, batch, units, RADIUS)
    assert found.samples == SAMPLES
    expected = at_displaced(capture.model, batch, units.materialise(), same(RADIUS, SAMPLES // 2))
    assert off(found.materialise(), expected) < 1e-9


@pytest.mark.parametrize("name", sorted({*ODD, *VARIED}))
def test_curvature_is_each_samples_hessian_times_its_direction(name: str) -> None:
    capture, batch, along = recorded(name)
    differences = any(part in name for part in NO_SECOND_DERIVATIVE)
    expected = hessian_times(capture.model, batch, along.materialise(), 1, differences=differences)
    assert off(curvature(capture, batch, along).materialise(), expected) < (1e-6 if differences else 1e-9)


@pytest.mark.parametrize("name", VARIED)
def test_curvature_of_rows_that_share_a_direction(name: str) -> None:
    capture, batch, along = recorded(name)
    units = along.merged(2)
    expected = hessian_times(capture.model, batch, units.materialise(), 2, differences=False)
    assert off(curvature(capture, batch, units).materialise(), expected) < 1e-9


@pytest.mark.parametrize("name", VARIED)
def test_the_slow_way_ships_and_agrees(name: str) -> None:
    capture, batch, along = recorded(name)
    arguments = capture.model, loss, batch, along
    assert (
        off(displaced(capture, batch, along, RADIUS).materialise(), oracle.displaced(*arguments, RADIUS).materialise())
        < 1e-9
    )
    assert off(curvature(capture, batch, along).materialise(), oracle.curvature(*arguments).materialise()) < 1e-9


# ── edges ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", VARIED)
def test_a_radius_of_zero_gives_the_plain_gradients_exactly(name: str) -> None:
    capture, batch, along = recorded(name)
    plain, found = along.materialise(), displaced(capture, batch, along, 0.0).materialise()
    assert all(torch.equal(plain[key], found[key]) for key in plain)
    assert off(displaced(capture, batch, along, same(0.0)).materialise(), plain) < 1e-12


@pytest.mark.parametrize("name", VARIED)
def test_each_unit_may_have_its_own_radius(name: str) -> None:
    capture, batch, along = recorded(name)
    radius = torch.tensor([0.5, 0.0, 2.0, 0.25], dtype=torch.float64)
    expected = at_displaced(capture.model, batch, along.materialise(), radius)
    assert off(displaced(capture, batch, along, radius).materialise(), expected) < 1e-9


@pytest.mark.parametrize("name", VARIED)
def test_a_direction_of_zero_displaces_nothing(name: str) -> None:
    capture, batch, along = recorded(name)
    some = torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64) * along
    found, plain = displaced(capture, batch, some, RADIUS).materialise(), along.materialise()
    expected = at_displaced(capture.model, batch, some.materialise(), same(RADIUS))
    assert off(found, expected) < 1e-9
    assert all((found[key][1] - plain[key][1]).abs().max() < 1e-9 for key in plain)
    assert all(t[1].abs().max() < 1e-12 for t in curvature(capture, batch, some).materialise().values())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("name", VARIED)
def test_a_direction_that_is_not_finite_displaces_nothing_and_poisons_no_other(name: str, bad: float) -> None:
    capture, batch, along = recorded(name)
    factors = torch.tensor([1.0, 1.0, bad, 1.0], dtype=torch.float64)
    found, plain = displaced(capture, batch, factors * along, RADIUS).materialise(), along.materialise()
    expected = at_displaced(capture.model, batch, plain, torch.tensor([RADIUS, RADIUS, 0.0, RADIUS]))
    assert off(found, expected) < 1e-9
    curved, whole = (curvature(capture, batch, v).materialise() for v in (factors * along, along))
    kept = torch.tensor([0, 1, 3])
    assert off({k: t[kept] for k, t in curved.items()}, {k: t[kept] for k, t in whole.items()}) < 1e-9
    assert all(t[2].abs().max() < 1e-12 for t in curved.values())


@pytest.mark.parametrize("name", VARIED)
def test_a_sample_that_is_not_finite_leaves_the_others_as_they_are(name: str) -> None:
    capture, batch, along = recorded(name)
    if not batch[0].is_floating_point():
        return
    broken = (batch[0].clone(), *batch[1:])
    broken[0][1] = math.nan
    found = displaced(capture, broken, capture(broken), RADIUS).materialise()
    expected = at_displaced(capture.model, batch, along.materialise(), same(RADIUS))
    kept = torch.tensor([0, 2, 3])
    assert off({k: t[kept] for k, t in found.items()}, {k: t[kept] for k, t in expected.items()}) < 1e-9


@pytest.mark.parametrize("name", VARIED)
def test_displacement_starts_from_the_point_that_the_model_is_at(name: str) -> None:
    capture, batch, along = recorded(name)
    model = CASES[name].model()
    point = {n: (p.detach() * 1.1).requires_grad_() for n, p in trainable(capture.model).items()}
    with torch.no_grad():
        for n, p in trainable(model).items():
            p.copy_(point[n])
    with swapped(capture.model, point):
        found, curved = displaced(capture, batch, along, RADIUS), curvature(capture, batch, along)
    assert off(found.materialise(), at_displaced(model, batch, along.materialise(), same(RADIUS))) < 1e-9
    assert off(curved.materialise(), hessian_times(model, batch, along.materialise(), 1, differences=False)) < 1e-9


def test_a_batch_without_rows_gives_none() -> None:
    capture, (x,), _ = recorded("deep Linear")
    for found in (
        displaced(capture, (x[:0],), capture((x[:0],)), RADIUS),
        curvature(capture, (x[:0],), capture((x[:0],))),
    ):
        assert found.samples == 0 and found.norms().shape == (0,)


def test_rows_that_do_not_fit_the_directions_are_an_error() -> None:
    capture, (x,), along = recorded("deep Linear")
    with pytest.raises(InputError, match="4 rows, or a multiple.*got 3"):
        displaced(capture, (x[:3],), along, RADIUS)
    other = from_dense({"else": torch.ones(SAMPLES, 2)}, {"else": torch.ones(2)})
    with pytest.raises(InputError, match="this model's trainable parameters"):
        curvature(capture, (x,), other)


def test_the_model_is_left_as_it_was() -> None:
    for name in VARIED:
        case = CASES[name]
        model, batch = case.model(), case.batch()
        capture = Capture(model, loss)
        state, own = {k: v.clone() for k, v in model.state_dict().items()}, dict(trainable(model))
        along = capture(batch)
        before = {k: v.clone() for k, v in along.materialise().items()}
        displaced(capture, batch, along, RADIUS), curvature(capture, batch, along)
        assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
        assert all(p is own[n] and p.grad is None and p.requires_grad for n, p in trainable(model).items())
        assert all(torch.equal(before[k], v) for k, v in along.materialise().items()), (
            "the direction is not overwritten"
        )


# ── parameters in unusual places ────────────────────────────────────────────────────────────────────────────────────


def agree(model: nn.Module, batch: tuple[Tensor, ...], *, curved: bool = True) -> tuple[Capture, SampleGradients]:
    capture = Capture(model, loss)
    along = capture(batch)
    v = along.materialise()
    assert (
        off(displaced(capture, batch, along, RADIUS).materialise(), at_displaced(model, batch, v, same(RADIUS))) < 1e-9
    )
    if curved:
        expected = hessian_times(model, batch, v, 1, differences=False)
        assert off(curvature(capture, batch, along).materialise(), expected) < 1e-9
    return capture, along


def tied(use: Callable[[Any, Tensor], Tensor], vocabulary: int = 7) -> nn.Module:
    torch.manual_seed(0)
    return Parts(
        lambda m, ids: use(m, m.table(ids).tanh() + m.table(ids).sin()), table=nn.Embedding(vocabulary, 3)
    ).double()


def test_records_of_all_uses_of_a_tied_weight_displace_it() -> None:
    for use in (
        lambda m, x: F.linear(x, m.table.weight),
        lambda m, x: x @ m.table.weight.T,
        lambda m, x: F.linear(x, m.table.weight).tanh() @ m.table.weight,
        lambda m, x: (x + m.table.weight[0]) @ m.table.weight.T.exp(),
    ):
        agree(tied(use), (integers(7, 5),))
    torch.manual_seed(0)
    layer = nn.Linear(3, 3)
    agree(Parts(lambda m, x: m.layer(m.layer(x).tanh()), layer=layer).double(), (normal(5, 3),))
    conv = nn.Conv2d(2, 2, 3, padding=1)
    agree(Parts(lambda m, x: m.conv(m.conv(x).tanh()), conv=conv).double(), (normal(2, 4, 4),))


def test_a_constant_made_from_parameters_follows_their_displacement() -> None:
    """A straight-through estimator: the value of a function, the gradient of the identity."""

    def through(m: Any, x: Tensor) -> Tensor:
        w = m.layer.weight
        return F.linear(x, w + ((w * 3).sin() - w).detach().mul(1.0), m.layer.bias)

    torch.manual_seed(0)
    agree(Parts(through, layer=nn.Linear(3, 4)).double(), (normal(5, 3),), curved=False)


def test_a_weight_that_is_changed_in_place_before_it_is_used() -> None:
    def changed(m: Any, x: Tensor) -> Tensor:
        w = m.layer.weight * 1.0
        w[0] = w[1] * 2
        w += 1
        w.mul_(m.layer.weight)
        return F.linear(x, w, m.layer.bias)

    torch.manual_seed(0)
    agree(Parts(changed, layer=nn.Linear(3, 4)).double(), (normal(5, 3),))


def test_a_spectral_norm_in_training_mode_keeps_its_vectors() -> None:
    torch.manual_seed(0)
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)).double()
    capture, x = Capture(model, loss), normal(5, 4)
    along = capture((x,))
    model.eval()
    expected = displaced(Capture(model, loss), (x,), Capture(model, loss)((x,)), RADIUS)
    model.train()
    assert expected.norms().isfinite().all() and displaced(capture, (x,), along, RADIUS).norms().isfinite().all()


@pytest.mark.parametrize("share", [2, 3])
@pytest.mark.parametrize("name", [name for name in CASES if "Conv2d" in name or "ConvTranspose1d" in name])
def test_units_may_share_a_group_of_a_convolution(name: str, share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As they do on a GPU; three do not divide the units, so some are filled up with zeros."""
    capture, batch, along = recorded(name)
    plain = displaced(capture, batch, along, RADIUS).materialise()
    monkeypatch.setattr(convolutions, "_share", lambda x, shape: share)
    assert off(displaced(capture, batch, along, RADIUS).materialise(), plain) < 1e-9


@pytest.mark.parametrize("kept", [0, math.inf], ids=["written for each use", "written once"])
@pytest.mark.parametrize(
    "name",
    [
        *(name for name in CASES if name.startswith("Conv1d")),
        "Conv2d with stride",
        "Conv2d with stride that leaves a rest",
        "Conv2d with uneven options",
        "Conv2d of one pixel",
        "Conv2d that sees the whole image",
        "Conv2d with its bias frozen",
        "Conv2d with groups, stride and dilation",
        "Conv3d with stride",
        "ConvTranspose2d plain",
    ],
)
def test_a_convolutions_weights_may_be_written_a_few_units_at_a_time(
    name: str, kept: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are on a GPU; some of several views each, some written already, and curvature, which does not."""
    capture, batch, along = recorded(name)
    assert any(isinstance(r, Convolution) for rs in along.records.values() for r in rs)
    runs = [
        lambda: displaced(capture, batch, along, RADIUS),
        lambda: displaced(capture, batch, along.merged(2), RADIUS),
        lambda: displaced(capture, batch, from_dense(along.materialise(), along.like), RADIUS),
        lambda: curvature(capture, batch, along),
    ]
    plain = [run().materialise() for run in runs]
    images = lambda record: isinstance(record, Convolution) or (isinstance(record, Dense) and record.value.dim() > 3)
    monkeypatch.setattr(displacement, "apart", images)
    monkeypatch.setattr(displacement, "KEPT", kept)
    monkeypatch.setattr(convolutions, "WRITTEN", 1)  # two pieces of these few units
    for run, expected in zip(runs, plain, strict=True):
        assert off(run().materialise(), expected) < 1e-9


# ── what it costs ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_no_weight_is_written_for_each_sample_where_pairs_are_cheaper() -> None:
    torch.manual_seed(0)
    for model, batch, size in (
        (nn.Sequential(nn.Linear(40, 50), nn.Tanh(), nn.Linear(50, 40)), (torch.randn(8, 2, 40),), 40 * 50),
        (
            Parts(lambda m, i: m.e(i).tanh() @ m.e.weight.T, e=nn.Embedding(500, 8)),
            (integers(500, 3, samples=8),),
            500 * 8,
        ),
    ):
        capture = Capture(model, loss)
        along = capture(batch)
        with Largest() as largest:
            displaced(capture, batch, along, RADIUS)
        assert largest.numel < 8 * size


def test_curvature_keeps_pairs_with_twice_the_positions() -> None:
    for name, kind in (("deep Linear", Outer), ("Conv2d with padding", Convolution)):
        capture, batch, along = recorded(name)
        curved = curvature(capture, batch, along)
        assert all(type(r) in (kind, Dense) for rs in curved.records.values() for r in rs)
        assert any(type(r) is kind for rs in curved.records.values() for r in rs)


def test_a_weight_that_would_cost_more_by_pairs_is_written() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6)).double()
    agree(model, (normal(40, 6),))


def test_a_convolutions_large_weights_are_neither_kept_nor_all_written_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 5), nn.Tanh(), nn.Conv2d(16, 16, 5)).double()
    capture, batch = Capture(model, loss), (torch.randn(9, 8, 10, 10).double(),)
    along = capture(batch)
    assert isinstance(along.records["2.weight"][0], Convolution)
    written = along.samples * model[2].weight.numel()
    with Largest() as before:
        expected = displaced(capture, batch, along, RADIUS)
    monkeypatch.setattr(displacement, "apart", lambda record: isinstance(record, Convolution))
    monkeypatch.setattr(convolutions, "WRITTEN", 1)
    with Largest() as largest:
        found = displaced(capture, batch, along, RADIUS)
    assert off(found.materialise(), expected.materialise()) < 1e-9
    assert largest.numel < written <= before.numel


@pytest.mark.parametrize(("dtype", "kept"), [(torch.float32, True), (torch.float16, False)])
def test_a_convolutions_direction_is_kept_where_it_takes_no_more_memory_than_its_record(
    dtype: torch.dtype, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of float16 it is written in float32, and as many numbers take twice as much."""
    monkeypatch.setattr(displacement, "apart", lambda record: isinstance(record, Convolution))
    geometry = Geometry(torch.Size([4, 3, 3, 3]), (1, 1), (0, 0), (1, 1), 1)  # 108 numbers
    record = Convolution(torch.ones(2, 3, 6, 6, dtype=dtype), torch.ones(2, 4, 4, 4, dtype=dtype), geometry)  # 172
    (found,) = displacement.ready((record,))
    assert isinstance(found, Dense if kept else Convolution)


@pytest.mark.parametrize(("kept", "times"), [(displacement.KEPT, 2), (0, 3)])
def test_a_small_convolutions_direction_is_written_once(kept: int, times: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU every writing is a launch: one does for the norm, the forward pass and, but in the first layer, back."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 3, 3, bias=False), nn.Tanh(), nn.Conv2d(3, 2, 3, bias=False)).double()
    capture, batch = Capture(model, loss), (torch.randn(5, 4, 6, 6).double(),)
    along, writes = capture(batch), list[Convolution]()
    assert all(isinstance(r, Convolution) for (r,) in along.records.values())
    written = Convolution.written
    monkeypatch.setattr(displacement, "apart", lambda record: isinstance(record, (Convolution, Dense)))
    monkeypatch.setattr(displacement, "KEPT", kept)
    monkeypatch.setattr(Convolution, "written", lambda record: writes.append(record) or written(record))
    displaced(capture, batch, along, RADIUS)
    assert len(writes) == times


def test_displaced_weights_are_gone_once_their_layers_backward_pass_is_over() -> None:
    """The graph alone holds them; the first layer's, whose input has no gradient, not even until then."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Conv2d(4, 8, 3)).double()
    capture, batch = Capture(model, loss), (torch.randn(5, 3, 7, 7).double(),)
    along, made, counts = capture(batch), list[Any](), list[int]()
    own: Any = vars(displacement.Own)["lent"].fget

    def noted(self: Any) -> Tensor:
        value = own(self)
        made.append(StorageWeakRef(value.untyped_storage()))
        return value

    def look(gradient: Tensor) -> None:
        counts.append(sum(not storage.expired() for storage in made))

    handle = model[0].register_forward_hook(lambda module, given, out: out.register_hook(look) and None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(displacement.Own, "lent", property(noted))
        displaced(capture, batch, along, RADIUS)
    handle.remove()
    assert len(made) == 2 and counts == [0]


def test_what_belongs_to_the_directions_is_left_as_it_was() -> None:
    capture, batch, along = recorded("Conv2d with padding")
    before = {name: value.clone() for name, value in along.materialise().items()}
    displaced(capture, batch, along, RADIUS)
    assert off(along.materialise(), before) == 0


def alive(model: nn.Module, rows: Tensor, run: Callable[[Capture, tuple[Tensor]], object]) -> list[Any]:
    """The activations that are still there after their results are gone, without the garbage collector's help."""
    seen: list[Any] = []
    note = lambda *a: seen.extend(weakref.ref(t) for t in tensors(a[2]))
    handles = [m.register_forward_hook(note) for m in model.modules()]
    capture = Capture(model, loss)
    capture((rows,))
    seen.clear()
    gc.collect()
    gc.disable()
    try:
        run(capture, (rows,))
        return [r() for r in seen if r() is not None]
    finally:
        gc.enable()
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("name", ["Embedding with repeated ids", "LSTM"])
def test_nothing_outlives_its_result(name: str) -> None:
    case = CASES[name]
    for run in (
        lambda capture, batch: capture(batch),
        lambda capture, batch: displaced(capture, batch, capture(batch), RADIUS),
        lambda capture, batch: curvature(capture, batch, capture(batch)),
    ):
        assert not alive(case.model(), case.batch()[0], run)


# ── formats and graphs ──────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", VARIED)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.25)])
def test_narrow_formats_agree_as_far_as_they_reach(name: str, dtype: torch.dtype, tolerance: float) -> None:
    case = CASES[name]
    model, batch = case.model().to(dtype), tuple(t.to(dtype) if t.is_floating_point() else t for t in case.batch())
    capture = Capture(model, loss)
    along = capture(batch)
    found = displaced(capture, batch, along, RADIUS)
    model.double()
    wide = tuple(t.double() if t.is_floating_point() else t for t in batch)
    expected = at_displaced(model, wide, {k: t.double() for k, t in along.materialise().items()}, same(RADIUS))
    assert off({k: t.double() for k, t in found.materialise().items()}, expected) < tolerance


@pytest.mark.parametrize("layer", ["pairs", "written", "vmap", "convolution"])
def test_a_displacement_is_not_rounded_away_in_half_precision(layer: str) -> None:
    """Weights of one and inputs that cancel: y = 0, and r√p when displaced; θ + δ itself would round to θ."""
    p, radius = 1024, 2.0**-9
    parts: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor]]] = {
        "pairs": (lambda: nn.Linear(p, 1, bias=False), lambda m, x: m.part(x)[:, 0]),
        "written": (
            lambda: nn.Linear(p, 1, bias=False),
            lambda m, x: m.part(F.pad(x[:, None], (0, 0, 0, 63)))[:, 0, 0],
        ),
        "vmap": (lambda: nn.Linear(p, 1, bias=False), lambda m, x: torch.einsum("bp,qp->b", x, m.part.weight)),
        "convolution": (lambda: nn.Conv1d(p, 1, 1, bias=False), lambda m, x: m.part(x[:, :, None])[:, 0, 0]),
    }
    make, run = parts[layer]
    model = Parts(run, part=make()).to(torch.bfloat16)
    nn.init.ones_(model.part.weight)

    def line(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        y = model(*batch).float()
        return y + y.square() / 2  # ∇ = (1 + y) x

    x = (torch.tensor([1.0, -1.0]).repeat(2, p // 2).to(torch.bfloat16),)
    capture = Capture(model, line)
    along = capture(x)
    found = displaced(capture, x, along, radius)
    assert torch.allclose(found.norms() / along.norms(), torch.tensor(1 + radius * math.sqrt(p)), rtol=5e-3)


def test_under_autocast_displacement_is_of_the_same_format() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3))
    x = torch.randn(SAMPLES, 4, 16)
    exact = at_displaced(model.double(), (x.double(),), Capture(model, loss)((x.double(),)).materialise(), same(RADIUS))
    model.float()
    with torch.autocast("cpu", torch.bfloat16):
        capture = Capture(model, lambda m, b: loss(lambda *g: m(*g).float(), b))
        along = capture((x,))
        found = displaced(capture, (x,), along, RADIUS)
    assert off({k: t.double() for k, t in found.materialise().items()}, exact) < 5e-2


def test_biases_gradients_added_by_a_kernel_keep_their_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 3)), (torch.randn(SAMPLES, 4, 16),)

    def narrow(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return model(*batch).float().square().sum((1, 2))

    capture, calls = Capture(model, narrow), list[Tensor]()
    plain = [capture(x), displaced(capture, x, capture(x), RADIUS), curvature(capture, x, capture(x))]
    kernel = products.positions_total
    monkeypatch.setattr(products, "_added_by_kernel", lambda rows: rows.dtype == torch.bfloat16)  # as on a GPU
    monkeypatch.setattr(products, "positions_total", lambda rows: calls.append(rows) or kernel(rows))
    found = [capture(x), displaced(capture, x, capture(x), RADIUS), curvature(capture, x, capture(x))]
    assert len(calls) == 8  # two in each pass but the last
    for one, other in zip(found, plain, strict=True):
        assert off(one.materialise(), other.materialise()) < 1e-6


@pytest.mark.parametrize(
    "name", ["Conv2d with padding", "TransformerEncoderLayer", "weight standardisation of a Linear"]
)
def test_both_passes_are_one_graph(name: str) -> None:
    capture, batch, _ = recorded(name)

    def step(parameters: Gradient, batch: tuple[Tensor, ...]) -> Any:
        own = {n: p.detach().requires_grad_() for n, p in parameters.items()}
        with swapped(capture.model, own), torch.backends.cudnn.flags(enabled=False):
            found = displaced(capture, batch, capture(batch), RADIUS)
            norms = found.norms()
            return norms, found.weighted_sum(1 / norms)

    values = {n: p.detach() for n, p in trainable(capture.model).items()}
    graph = graph_of(step, values, batch)
    other = tuple(t.flip(0) for t in batch)  # values may not have been asked for
    with torch.no_grad():
        norms, total = graph(values, other)
    found = displaced(capture, other, capture(other), RADIUS)
    assert torch.allclose(norms, found.norms()) and off(total, found.weighted_sum(1 / found.norms())) < 1e-9


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("name", VARIED)
def test_on_a_gpu_the_numbers_are_the_same(name: str) -> None:
    capture, batch, along = recorded(name)
    model, rows = CASES[name].model().cuda(), tuple(t.cuda() for t in batch)
    there = Capture(model, cuda_loss)
    v = there(rows)
    for found, expected in (
        (displaced(there, rows, v, RADIUS), displaced(capture, batch, along, RADIUS)),
        (displaced(there, rows, v.merged(2), RADIUS), displaced(capture, batch, along.merged(2), RADIUS)),
        (curvature(there, rows, v), curvature(capture, batch, along)),
    ):
        assert off({k: t.cpu() for k, t in found.materialise().items()}, expected.materialise()) < 1e-6


def cuda_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    flat = model(*batch).flatten(1)
    weights = torch.linspace(0.5, 1.5, flat.shape[1], dtype=flat.dtype).cuda()
    return ((flat + flat.square() / 2) * weights).sum(1)
