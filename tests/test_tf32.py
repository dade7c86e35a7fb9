"""Factors rounded once where a GPU would round products to TF32. A processor has no TF32: here it is only said to."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clipwise as cw
from clipwise.losses import cross_entropy as loss
from clipwise.records import Capture, SampleGradients, forms, kinds, oracle, trainable
from clipwise.records.compiled import CompiledCapture
from clipwise.records.kinds import Convolution, Dense, Geometry, Halved, Indexed, Outer
from clipwise.records.tf32 import allowed, forbidden, halves, halves_by_position, rounds

SAMPLES = 4
WEIGHTS = torch.tensor([1.0, -2.0, 0.5, 0.0])


@pytest.fixture
def tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    def everywhere(one: Tensor, other: Tensor, *, convolution: bool) -> bool:
        return one.dtype == other.dtype == torch.float32

    for module in (kinds.outer, kinds.convolution, kinds.sums):
        monkeypatch.setattr(module, "rounds", everywhere)


def outer() -> Outer:
    a, b = torch.randn(SAMPLES, 1, 6, 5), 1e-7 * torch.randn(SAMPLES, 1, 6, 3)
    return Outer(a, b, torch.Size([3, 5]))


def convolution() -> Convolution:
    geometry = Geometry(torch.Size([6, 2, 3, 3]), (2, 1), (1, 1), (1, 1), 2)
    return Convolution(300 * torch.randn(SAMPLES, 4, 7, 6), torch.randn(SAMPLES, 6, 4, 6), geometry)


def line() -> Convolution:
    geometry = Geometry(torch.Size([6, 2, 3]), (2,), (1,), (2,), 2)
    return Convolution(1e-3 * torch.randn(SAMPLES, 4, 11), torch.randn(SAMPLES, 6, 5), geometry)


RECORDS = {"Outer": outer, "Convolution": convolution, "images": lambda: convolution().merged(1), "line": line}


def test_a_processor_and_other_formats_are_left_alone() -> None:
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        assert not rounds(*2 * [torch.ones(2, 2, dtype=dtype)], convolution=True)
    assert not outer().rounded and kinds.summed(record := outer()) is record


@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e-3, 1.0, 6e4, 1e37])
def test_numbers_keep_eleven_bits_whatever_their_size(size: float) -> None:
    torch.manual_seed(0)
    t = size * torch.cat([torch.randn(3, 50), torch.rand(3, 50) * 2.0**-20], 1).clamp(-3, 3)
    half, same, scale = halves(t, torch.ones(3, 1))
    assert half.dtype == same.dtype == torch.float16 and bool(half.isfinite().all())
    assert (torch.frexp(scale).mantissa == 0.5).all()
    back = half.double() * same.double() * scale.double()[:, None]
    # what is lost of a number: its twelfth bit, or all below 2⁻³⁸ of the largest; below 10⁻³⁸ float32 has none to lose
    room = 2.0**-11 * t.double().abs() + 2.0**-38 * t.double().abs().amax(1, keepdim=True) + 2.0**-124
    assert ((back - t.double()).abs() <= room).all()


def test_each_position_keeps_its_eleven_bits_beside_others_of_any_size() -> None:
    torch.manual_seed(0)
    sizes = 10.0 ** torch.tensor([[-12.0, 0.0, 12.0, -30.0], [0.0, 0.0, 0.0, 0.0], [3.0, -3.0, 9.0, -40.0]])
    a, b = (torch.randn(3, 1, 4, 5) * s[:, None, :, None] for s in (sizes, 1 / sizes.clamp(min=1e-30)))
    b[2] = 0
    one, other, scale = halves_by_position(a, b)
    assert one.dtype == other.dtype == torch.float16 and bool(one.isfinite().all() and other.isfinite().all())
    assert (torch.frexp(scale).mantissa == 0.5).all() and not other[2].any()
    found = one.double()[..., None] * other.double()[..., None, :] * scale.double()[:, None, None, None, None]
    exact = a.double()[..., None] * b.double()[..., None, :]  # [sample, block, position, p, q]
    most = exact.abs().amax((1, 2, 3, 4), keepdim=True)
    assert ((found - exact).abs() <= 2.0**-10 * exact.abs() + 2.0**-35 * most).all()


def test_what_is_zero_stays_zero_and_what_is_not_finite_is_seen(tf32: None) -> None:
    record = outer()
    record.a[0] = 0
    record.a[1, 0, 2, 1] = math.inf
    record.b[2, 0, 0, 0] = math.nan
    norms = record.sq_norm()
    assert norms[0] == 0 and norms[3] > 0 and not norms[1:3].isfinite().any()
    masked = record.masked(norms.isfinite())
    assert torch.equal(masked.sq_norm(), torch.where(norms.isfinite(), norms, 0.0))
    assert bool(masked.total(WEIGHTS).isfinite().all())
    assert record.scaled(torch.full((4,), 1e38)).sq_norm()[3].isinf()


@pytest.mark.parametrize("kind", RECORDS)
def test_a_rounded_record_does_what_its_written_out_twin_does(kind: str, tf32: None) -> None:
    torch.manual_seed(0)
    record = RECORDS[kind]()
    half = kinds.summed(record)
    assert isinstance(half, Halved) and half.samples == SAMPLES and half.one.dtype == torch.float16
    twin = Dense(half.widened().dense().double())
    exact = Dense(type(record)(*(v.double() if isinstance(v, Tensor) else v for v in vars(record).values())).dense())
    size = twin.sq_norm().sqrt()
    assert ((twin.value - exact.value).flatten(1).norm(dim=1) <= 2e-3 * size).all()
    u, keep = torch.randn(twin.value.shape[1:]), torch.tensor([True, False, True, True])
    for mine, other in (
        (record, twin),  # rounds by itself
        (half, twin),
        (half.scaled(WEIGHTS), twin.scaled(WEIGHTS.double())),
        (half.merged(2), twin.merged(2)),
        (half.masked(keep), twin.masked(keep)),
    ):
        close: dict[str, Any] = {"rtol": 2e-3, "atol": 1e-3 * float(size.max())}
        assert mine.samples == other.samples
        torch.testing.assert_close(mine.dense().double(), other.dense(), **close)
        torch.testing.assert_close(mine.sq_norm().double().sqrt(), other.sq_norm().sqrt(), **close)
        total = mine.total(WEIGHTS[: mine.samples]).double()
        torch.testing.assert_close(total, other.total(WEIGHTS[: other.samples].double()), **close)
        inner = mine.inner(u).double()
        assert ((inner - other.inner(u.double())).abs() <= 2e-3 * float(u.norm() * size.max())).all()


@pytest.mark.parametrize("kind", RECORDS)
def test_what_is_summed_is_what_was_measured_even_where_nearly_all_of_it_cancels(kind: str, tf32: None) -> None:
    torch.manual_seed(0)
    record = RECORDS[kind]()
    if isinstance(record, Outer):
        cancelling: Any = record.plus(Outer(record.a, -record.b * (1 + 1e-3 * torch.rand_like(record.b)), record.shape))
    else:
        other = Convolution(record.x, -record.b * (1 + 1e-3 * torch.rand_like(record.b)), record.geometry)
        cancelling = record.plus(other)
    assert isinstance(kinds.summed(cancelling), Halved)
    norms = cancelling.sq_norm().double().sqrt()
    full = type(cancelling)(*(v.double() if isinstance(v, Tensor) else v for v in vars(cancelling).values()))
    for i in range(SAMPLES):
        alone = torch.where(torch.arange(SAMPLES) == i, 1 / norms, 0.0)
        length = float(cancelling.total(alone.float()).double().norm())
        assert 0.8 < length <= 1 + 1e-3  # a norm computed apart from its sum is raised by what rounding may move
    assert (norms <= 2 * full.sq_norm().sqrt()).all()  # and it is still about that gradient


@pytest.mark.parametrize("merged", [1, 2])
def test_lines_go_through_the_kernels_as_images_of_height_one(merged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    record = line()
    half = Convolution(record.x.half(), record.b.half(), record.geometry).merged(merged)
    expected = [half.sq_norm(), half.dense(), half.total(WEIGHTS[: half.samples])]
    monkeypatch.setattr(Convolution, "_by_kernel", property(lambda self: True))  # the kernels' plain twins
    monkeypatch.setattr(forms, "choose", lambda *_, **__: forms.Form("fused", 0, 0, 0, 0))
    found = [half.sq_norm(), half.dense(), half.total(WEIGHTS[: half.samples])]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_convolution_without_such_a_kernel_is_exact(tf32: None) -> None:
    torch.manual_seed(0)
    geometry = Geometry(torch.Size([3, 2, 2, 2, 2]), (1, 1, 1), (0, 0, 0), (1, 1, 1), 1)
    record = Convolution(torch.randn(SAMPLES, 2, 3, 3, 3), torch.randn(SAMPLES, 3, 2, 2, 2), geometry)
    exact = Convolution(record.x.double(), record.b.double(), geometry)
    assert not record.rounded and record._double is not None
    for found, expected in (
        (record.sq_norm(), exact.sq_norm()),
        (record.dense(), exact.dense()),
        (record.total(WEIGHTS), exact.total(WEIGHTS.double())),
    ):
        assert torch.equal(found, expected.float())  # rounded once, at the end


def test_one_position_is_left_to_the_library_unless_another_record_can_cancel_it(tf32: None) -> None:
    torch.manual_seed(0)
    alone = Outer(torch.randn(SAMPLES, 1, 1, 5), torch.randn(SAMPLES, 1, 1, 9), torch.Size([9, 5]))
    assert kinds.summed(alone) is alone
    table = Indexed(torch.arange(9).expand(SAMPLES, 9), -alone.dense() * (1 + 1e-4), alone.shape)
    like = {"w": torch.zeros(9, 5)}
    gradients = SampleGradients({"w": (alone, table)}, like, SAMPLES)
    total = gradients.weighted_sum(torch.ones(SAMPLES))["w"]
    assert total.dtype == torch.float64  # the product's part was not rounded
    true = (alone.dense().double() + table.dense().double()).flatten(1).norm(dim=1)
    assert (gradients.norms().double() >= true * (1 - 1e-6)).all()


def test_either_name_of_pytorch_s_setting_is_read_and_put_back() -> None:
    cudnn, cublas = torch.backends.cudnn, torch.backends.cuda.matmul
    if not hasattr(cublas, "fp32_precision"):
        pytest.skip("this PyTorch has one name only")
    before = cublas.fp32_precision
    assert allowed(convolution=True) == cudnn.allow_tf32 and allowed(convolution=False) == cublas.allow_tf32
    with forbidden():
        assert not allowed(convolution=True) and not allowed(convolution=False)
    try:
        cublas.fp32_precision = "tf32"  # asked by its other name, PyTorch raises
        assert allowed(convolution=False)
        with forbidden():
            assert not allowed(convolution=True) and not allowed(convolution=False)
        assert allowed(convolution=False) and cublas.fp32_precision == "tf32"
    finally:
        cublas.fp32_precision = before
    assert allowed(convolution=True) == cudnn.allow_tf32 and allowed(convolution=False) == cublas.allow_tf32


def test_a_tied_table_is_measured_with_the_rounded_product(tf32: None) -> None:
    torch.manual_seed(0)
    table = Indexed(torch.randint(0, 9, (SAMPLES, 6)), torch.randn(SAMPLES, 6, 5), torch.Size([9, 5]))
    product = Outer(torch.randn(SAMPLES, 1, 7, 5), torch.randn(SAMPLES, 1, 7, 9), table.shape)
    expected = (table.dense().double() * product.halved().widened().dense().double()).flatten(1).sum(1)
    for pair in ((table, product), (product, table), (table, product.halved())):
        torch.testing.assert_close(kinds.cross(*pair).double(), expected, rtol=1e-5, atol=1e-4)


class Product(nn.Module):
    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.weight, self.turned = nn.Parameter(torch.randn((5, 3) if turned else (3, 5))), turned

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight if self.turned else F.linear(x, self.weight)


@pytest.mark.parametrize("turned", [False, True])
def test_what_a_layer_read_is_rounded_by_itself_and_its_gradient_padded_once(turned: bool, tf32: None) -> None:
    torch.manual_seed(0)
    model, x, sides = Product(turned), torch.randn(SAMPLES, 6, 5), list[Tensor]()
    for power in (1, 3):  # two losses: other gradients of the same input
        loss = lambda m, x, power=power: m(x).pow(power + 1).flatten(1).sum(1)
        (record,) = Capture(model, loss)(x).records["weight"]
        assert isinstance(record, Outer) and record.turned == turned
        read, gradient = (record.b, record.a) if turned else (record.a, record.b)
        assert torch.equal(read[:, 0], x) and gradient.shape[3] == 8 and not gradient[..., 3:].any()
        half, bare = record.halved(), record.unpadded().halved()
        sides.append(half.other if turned else half.one)
        assert torch.equal(half.scale, bare.scale) and torch.equal(half.dense(), bare.dense())
        torch.testing.assert_close(half.total(WEIGHTS), bare.total(WEIGHTS))
        own = record.unpadded()
        exact = (own.b.double().mT @ own.a.double()).view(SAMPLES, *own.shape)
        torch.testing.assert_close(half.dense().double(), exact, rtol=2e-3, atol=2e-3 * float(exact.abs().max()))
    assert torch.equal(*sides)


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.line, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, 6), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.tanh(self.conv(x)).flatten(2).transpose(1, 2)  # [sample, position, channel]
        return self.head(torch.tanh(self.line(seen)).flatten(1))


def test_graphs_keep_the_rounded_factors_and_give_the_eager_numbers(tf32: None) -> None:
    torch.manual_seed(0)
    model, batch = Network(), (torch.randn(5, 1, 4, 4), torch.randint(0, 3, (5,)))
    names = tuple(trainable(model))
    compiled = CompiledCapture(model, loss, 6, [names], {"backend": "aot_eager"})
    fast, slow, exact = compiled(batch), Capture(model, loss)(batch), oracle.per_sample(model, loss, batch)
    (graphs,) = compiled._graphs.values()
    assert graphs._build is not None
    kept = graphs._forward({n: p.detach() for n, p in trainable(model).items()}, _filled(batch, 6))[2]
    built = graphs._build(kept)
    assert all(isinstance(built[f"{layer}.weight"][0], Halved) for layer in ("conv", "line"))
    assert isinstance(built["head.weight"][0], Outer)  # one position: nothing to cancel
    weights = torch.rand(5, 1)
    torch.testing.assert_close(fast.norms([names]), slow.norms([names]), rtol=1e-5, atol=0)
    torch.testing.assert_close(fast.norms(), exact.norms(), rtol=2e-3, atol=0)
    for gradients in (fast, fast.masked(torch.ones(5, dtype=torch.bool))):
        for name, total in slow.weighted_sum(weights, [names]).items():
            torch.testing.assert_close(gradients.weighted_sum(weights, [names])[name], total, rtol=1e-4, atol=1e-5)


def _filled(batch: Any, rows: int) -> Any:
    return tuple(torch.cat([t, t[:1].expand(rows - len(t), *t.shape[1:])]) for t in batch)


def processor_s() -> str:
    """What float32 products on a processor may be computed in."""
    onednn = getattr(torch.backends.mkldnn, "matmul", None)  # since PyTorch 2.9
    return str(torch.get_float32_matmul_precision() if onednn is None else onednn.fp32_precision)


def test_a_step_on_a_processor_is_in_float32_where_its_products_may_be_in_bfloat16() -> None:
    before, seen = torch.get_float32_matmul_precision(), list[str]()

    def loss(model: nn.Module, batch: Any) -> Tensor:
        seen.append(processor_s())
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    model = nn.Linear(3, 2)
    torch.set_float32_matmul_precision("medium")
    try:
        allowed_here = processor_s()
        private = cw.make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            (torch.randn(20, 3), torch.arange(20) % 2),
            loss=loss,
            noise_multiplier=1.0,
            steps=1,
            batch=20,
            delta=1e-3,
        )
        seen.clear()
        private.step(next(private.batches()))
        assert set(seen) <= {"ieee", "highest"} and seen
        assert processor_s() == allowed_here
    finally:
        torch.set_float32_matmul_precision(before)
