"""What runs on a CPU runs on a GPU: the same numbers, and the bound after rounding. Skipped where there is no CUDA."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clipwise
from clipwise import models
from clipwise.engine import ChunkEngine
from clipwise.methods import flat, normalised, parse
from clipwise.records import Capture, oracle, trainable
from clipwise.records.checks import check_samples
from clipwise.records.compiled import CompiledCapture
from clipwise.records.extremes import refuse_extremes
from clipwise.records.kinds import Convolution, Geometry, Outer
from clipwise.step import GPU_MARGIN, MARGIN, private_sum, weigh
from clipwise.types import Refused

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
N = 6


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Text(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.places = nn.Embedding(11, 8), nn.Parameter(torch.randn(5, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.memory, self.head = nn.LSTM(8, 6, batch_first=True), nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.memory(self.layer(self.table(ids) + self.places))[0][:, -1])


def pictures() -> tuple[nn.Module, Any]:
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()]
    depthwise = [nn.Conv2d(32, 32, 3, groups=32), nn.Tanh(), nn.Conv2d(32, 8, 1), nn.Flatten(), nn.Linear(8, 3)]
    return nn.Sequential(*layers, *depthwise), (torch.randn(N, 3, 7, 7), torch.randint(0, 3, (N,)))


def words() -> tuple[nn.Module, Any]:
    return Text(), (torch.randint(0, 11, (N, 5)), torch.randint(0, 3, (N,)))


def moved(batch: Any, dtype: torch.dtype) -> Any:
    return tuple(t.to("cuda", dtype if t.is_floating_point() else t.dtype) for t in batch)


@pytest.fixture(params=[pictures, words], ids=["pictures", "words"])
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    made: tuple[nn.Module, Any] = request.param()
    return made


@pytest.fixture(params=[True, False], ids=["TF32", "float32"])
def tf32(request: pytest.FixtureRequest) -> Any:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = request.param
    yield request.param
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_in_float64_norms_and_sums_are_the_oracle_s(case: Any) -> None:
    model, batch = case
    slow = oracle.per_sample(
        copy.deepcopy(model).double(), loss, tuple(t.double() if t.is_floating_point() else t for t in batch)
    )
    fast = Capture(model.to("cuda").double(), loss)(moved(batch, torch.float64))
    assert torch.allclose(fast.norms().cpu(), slow.norms(), rtol=1e-8)
    weights = torch.rand(N, dtype=torch.float64)
    first, second = fast.weighted_sum(weights.cuda()), slow.weighted_sum(weights)
    assert all(torch.allclose(first[n].cpu(), second[n], rtol=1e-7, atol=1e-10) for n in second)


def test_graphs_give_the_eager_numbers_and_follow_parameters_and_batches(case: Any, tf32: bool) -> None:
    model, batch = case
    model.to("cuda")
    names = tuple(trainable(model))
    compiled, eager = CompiledCapture(model, loss, N, [names]), Capture(model, loss)
    for samples in (N, 4):
        part = tuple(t[:samples] for t in moved(batch, torch.float32))
        fast, slow = compiled(part), eager(part)
        close = 5e-3 if tf32 else 1e-4
        assert torch.allclose(fast.norms([names]), slow.norms([names]), rtol=close)
        weights = torch.rand(samples, 1, device="cuda")
        first, second = fast.weighted_sum(weights, [names]), slow.weighted_sum(weights, [names])
        for name in names:
            assert (
                torch.linalg.vector_norm(first[name] - second[name])
                <= close * torch.linalg.vector_norm(second[name]) + 1e-5
            )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)


LOOKS = ("inner_momentum(flat(0.1))", "self_augmentation(flat(0.1), views=2, augment='flip')", "bam(flat(0.1))")


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("text", LOOKS)
def test_where_a_method_takes_gradients_is_compiled_with_it(text: str, narrow: bool) -> None:
    torch.manual_seed(0)
    model, (x, y) = pictures()
    method, names = parse(text), tuple(trainable(model.to("cuda")))

    def losses(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=narrow):
            return loss(model, batch)

    fast, close = CompiledCapture(model, losses, N * method.rows, [names]), 5e-2 if narrow else 1e-3
    for step, samples in enumerate((N, 4, N)):  # other samples, views and iterates at every step
        near = [{n: 1.1 * p.detach() + step / 50 for n, p in trainable(model).items()} for _ in range(method.past)]
        eager = ChunkEngine(Capture(model, losses), torch.arange(samples) + 10 * step, step, tuple(near))
        part = x[:samples].cuda() + step, y[:samples].cuda()
        kept = [{n: p.clone() for n, p in point.items()} for point in near]
        found, expected = (engine.of(method, part) for engine in (replace(eager, fast=fast), eager))
        assert torch.allclose(found.norms([names]), expected.norms([names]), rtol=close)
        weights = torch.rand(samples, 1, device="cuda")
        sums, known = found.weighted_sum(weights, [names]), expected.weighted_sum(weights, [names])
        apart = sum(float((sums[n] - known[n]).double().square().sum()) for n in names) ** 0.5
        assert apart <= close * sum(float(known[n].double().square().sum()) for n in names) ** 0.5
        # a recording copies what it is given: the iterates themselves stay
        assert all(torch.equal(p, kept[i][n]) for i, point in enumerate(near) for n, p in point.items())
    assert len(fast._graphs) == 1


@pytest.mark.parametrize("narrow", [False, True], ids=["as it is", "bfloat16"])
def test_every_summed_term_keeps_the_bound_after_rounding(case: Any, tf32: bool, narrow: bool) -> None:
    model, batch = case
    model.to("cuda")

    def losses(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=narrow):
            return loss(model, batch)

    gradients = Capture(model, losses)(moved(batch, torch.float32))
    for method in (flat(1e-3), normalised(2.0)):
        blocks = method.blocks(gradients.names)
        weights = weigh(blocks, gradients.norms([b.names for b in blocks]))
        for sample in range(N):
            alone = torch.zeros_like(weights)
            alone[sample] = weights[sample]
            term = gradients.weighted_sum(alone, [b.names for b in blocks])
            length = torch.sqrt(sum(t.double().square().sum() for t in term.values()))
            assert float(length) <= method.bound


def test_a_private_run_on_the_gpu_counts_and_moves(case: Any) -> None:
    model, batch = case
    model.to("cuda")
    before = [p.detach().clone() for p in model.parameters()]
    run = clipwise.train(model, loss, batch, noise_multiplier=1.0, steps=2, batch=3, delta=1e-5)
    assert run.statement.releases == 2 and "ChaCha20" in run.statement.generator
    assert all(
        p.is_cuda and bool(p.isfinite().all()) and not torch.equal(p, q)
        for p, q in zip(model.parameters(), before, strict=True)
    )


def test_a_sum_over_chunks_is_the_sum_over_the_batch(case: Any) -> None:
    model, batch = case
    model.to("cuda")
    capture, parameters, data = Capture(model, loss), trainable(model), moved(batch, torch.float32)
    whole, _ = private_sum(flat(0.1), parameters, [capture(data)])
    pieces, _ = private_sum(flat(0.1), parameters, [capture(tuple(t[i : i + 2] for t in data)) for i in range(0, N, 2)])
    for name, value in whole.parts[0].value.items():
        assert torch.allclose(value, pieces.parts[0].value[name], rtol=1e-2, atol=1e-4)


class Language(nn.Module):
    """A table tied to its output layer, with a number of words that no alignment likes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(5003, 64), nn.LayerNorm(64)

    def forward(self, ids: Tensor) -> Tensor:
        return F.linear(self.norm(self.table(ids)), self.table.weight).transpose(1, 2)


@pytest.mark.parametrize("narrow", [False, True], ids=["as it is", "bfloat16"])
def test_graphs_that_return_rows_of_odd_width_give_the_eager_numbers(narrow: bool) -> None:
    # with padded rows, torch 2.11's compiler read what nothing had written
    torch.manual_seed(0)
    model, ids = Language().cuda(), torch.randint(0, 5003, (N, 33), device="cuda")

    def losses(model: nn.Module, ids: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=narrow):
            return F.cross_entropy(model(ids[:, :-1]), ids[:, 1:], reduction="none").mean(1)

    names = tuple(trainable(model))
    fast, slow = CompiledCapture(model, losses, N, [names])(ids), Capture(model, losses)(ids)
    assert torch.allclose(fast.norms([names]), slow.norms([names]), rtol=2e-2 if narrow else 2e-3)
    weights = torch.rand(N, 1, device="cuda")
    first, second = fast.weighted_sum(weights, [names]), slow.weighted_sum(weights, [names])
    for name in names:
        assert torch.linalg.vector_norm(first[name] - second[name]) <= 3e-2 * torch.linalg.vector_norm(second[name])


def test_convolutions_in_bfloat16_give_the_float64_norms_and_sums_of_what_they_saw() -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 64, 3, stride=2), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Conv2d(64, 128, 3), nn.Flatten(), nn.Linear(128 * 25, 3)).cuda()
    model = model.to(memory_format=torch.channels_last)
    batch = torch.randn(N, 3, 16, 16, device="cuda"), torch.randint(0, 3, (N,), device="cuda")

    def losses(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return loss(model, batch)

    found = Capture(model, losses)(batch)
    weights = torch.rand(N, device="cuda")
    norms, sums = found.norms(), found.weighted_sum(weights)
    wide = {
        name: [r.__class__(*(f.double() if isinstance(f, Tensor) else f for f in vars(r).values())) for r in records]
        for name, records in found.records.items()
    }
    squares = sum(record.sq_norm() for records in wide.values() for record in records)
    torch.testing.assert_close(norms.double().square(), squares, rtol=1e-4, atol=0)
    for name, (record,) in wide.items():
        expected = record.total(weights.double())
        assert (sums[name].double() - expected).norm() <= 1e-4 * (weights.double() @ record.sq_norm().sqrt())


@pytest.mark.parametrize(
    "text",
    [
        "psac(1.0)",
        "layerwise(flat(0.5))",
        "inner_momentum(flat(0.5), horizon=2)",
        "self_augmentation(automatic(), views=3)",
        "inner_momentum(self_augmentation(psac(), views=2), horizon=1)",
        "bam(flat(0.5), radius=0.1)",
        "dp_sat(flat(0.5), radius=0.1)",
        "disk(flat(0.5))",
    ],
)
def test_every_method_sums_on_the_gpu_what_it_sums_on_the_cpu(text: str) -> None:
    torch.manual_seed(0)
    model, batch = pictures()
    model.double()
    past = tuple({n: p + 0.01 * torch.randn_like(p) for n, p in trainable(model).items()} for _ in range(2))
    method = clipwise.methods.parse(text)
    sums = []
    for device in ("cpu", "cuda"):
        own = copy.deepcopy(model).to(device)

        def there(values: Any, device: str = device) -> Any:
            return {n: p.detach().to(device) for n, p in values.items()}

        engine = ChunkEngine(Capture(own, loss), torch.arange(N), 1, tuple(map(there, past)), there(past[0]))
        rows = tuple(t.to(device, torch.float64 if t.is_floating_point() else t.dtype) for t in batch)
        private, _ = private_sum(method, trainable(own), [method.gradients(engine, rows)])
        sums.append({n: v.cpu() for n, v in private.parts[0].value.items()})
    shorter = (1 + MARGIN) / (1 + GPU_MARGIN)  # what is held back for rounding
    for name, value in sums[0].items():
        torch.testing.assert_close(sums[1][name], shorter * value, rtol=1e-7, atol=1e-9)


def test_chunks_fit_the_gpu_unless_the_user_says_otherwise() -> None:
    model, data = nn.Linear(64, 10).cuda(), (torch.randn(3000, 64), torch.randint(0, 10, (3000,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan: dict[str, Any] = {"noise_multiplier": 1.0, "steps": 2, "batch": 2000, "noise": 0}
    assert clipwise.make_private(model, optimizer, data, **plan)._passes.chunk > 2000
    assert clipwise.make_private(model, optimizer, data, chunk=100, **plan)._passes.chunk == 100


@pytest.mark.parametrize("name", ["resnet20_gn", "resnet20_enhanced", "wrn_16_4"])
def test_networks_pass_the_self_test_where_products_are_in_tf32_and_in_bfloat16(name: str, tf32: bool) -> None:
    torch.manual_seed(0)
    model = models.build(name, (3, 32, 32), 10).cuda()
    batch = (torch.rand(4, 3, 32, 32, device="cuda"), torch.randint(0, 10, (4,), device="cuda"))
    check_samples(model, loss, batch)

    def narrow(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            return loss(model, batch)

    check_samples(model, narrow, batch)


DRAWN = {
    "noise": lambda x: x + torch.randn_like(x),
    "as its values say": lambda x: torch.poisson(x.abs()),
    "for all at once": lambda x: x.flip(1) if torch.rand((), device=x.device) < 0.5 else x,
}


def vectors() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return nn.Linear(8, 3).cuda(), (torch.randn(4, 8, device="cuda"), torch.randint(0, 3, (4,), device="cuda"))


@pytest.mark.parametrize("kind", DRAWN)
def test_what_a_loss_draws_on_the_gpu_is_each_sample_s_own(kind: str) -> None:
    model, batch = vectors()
    before = torch.cuda.get_rng_state()
    check_samples(model, lambda model, batch: loss(model, (DRAWN[kind](batch[0]), batch[1])), batch)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_samples_that_a_draw_on_the_gpu_mixes_are_refused() -> None:
    def mixed(model: nn.Module, batch: Any) -> Tensor:
        x = batch[0]
        return loss(model, (0.7 * x + 0.3 * x[torch.randperm(len(x), device=x.device)].detach(), batch[1]))

    model, batch = vectors()
    with pytest.raises(Refused, match="sample"):
        check_samples(model, mixed, batch)


def test_in_tf32_what_is_summed_is_what_was_measured_even_where_it_cancels() -> None:
    # rounded by the library, w b would have other factors than the norm was taken of
    torch.manual_seed(0)
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    try:
        a, b = torch.randn(4, 1, 32, 64, device="cuda"), torch.randn(4, 1, 32, 48, device="cuda")
        rows = Outer(torch.cat([a, a], 2), torch.cat([b, -b * (1 + 2.0**-9)], 2), torch.Size([48, 64]))
        x, y = torch.randn(4, 16, 8, 8, device="cuda"), torch.randn(4, 32, 8, 8, device="cuda")
        geometry = Geometry(torch.Size([32, 16, 3, 3]), (1, 1), (1, 1), (1, 1), 1)
        images = Convolution(x, y, geometry).plus(Convolution(x, -y * (1 + 2.0**-9), geometry))
        for record in (rows, images):
            norms = record.sq_norm().double().sqrt()
            for i in range(4):
                alone = torch.where(torch.arange(4, device="cuda") == i, 1 / norms, 0.0).float()
                assert abs(float(record.total(alone).double().norm()) - 1) < 1e-3
        weighted = (rows.b / rows.sq_norm().sqrt()[:, None, None, None]).transpose(2, 3) @ rows.a
        assert float(weighted.flatten(1).norm(dim=1).max()) > 1.003
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def test_weights_are_recorded_where_the_rule_stays_the_same_and_are_the_eager_ones(case: Any) -> None:
    model, batch = case
    model.to("cuda")
    names, parameters, data = tuple(trainable(model)), trainable(model), moved(batch, torch.float32)
    compiled, eager = CompiledCapture(model, loss, N, [names], {"backend": "eager"}), Capture(model, loss)
    asked = replace(flat(0.1), weigh=lambda n: n * 0 + float(n.mean() > -1))  # cannot be recorded: it asks for a value
    methods = [*4 * [flat(0.1)], flat(0.2), *4 * [asked], *3 * [flat(0.3)]]
    for step, method in enumerate(methods):
        samples = N - step % 3
        rows = [t[:samples].clone() for t in data]
        broken = step in (3, 11) and rows[0].is_floating_point()
        if broken:
            rows[0][1] = torch.nan
        (fast, seen), (slow, _) = (private_sum(method, parameters, [c(tuple(rows))]) for c in (compiled, eager))
        assert seen.samples == samples and seen.non_finite == int(broken)
        for name, value in slow.parts[0].value.items():
            assert (fast.parts[0].value[name] - value).norm() <= 5e-3 * value.norm() + 1e-6
        (graphs,) = compiled._graphs.values()
        recorded = graphs._weights._recorded is not None
        assert recorded == (step in (1, 2, 3, 10, 11))


def test_a_compiled_sum_does_not_wait_for_the_device_and_leaves_the_caller_s_batch_alone(case: Any) -> None:
    model, batch = case
    model.to("cuda")
    names, parameters, data = tuple(trainable(model)), trainable(model), moved(batch, torch.float32)
    first = tuple(t.clone() for t in data)
    compiled = CompiledCapture(model, loss, N, [names], {"backend": "eager"})
    for _ in range(3):  # until the weights are recorded
        private_sum(flat(0.1), parameters, [compiled(data)], alone=True)
    rows = tuple(t.flip(0) for t in data)
    if rows[0].is_floating_point():
        rows[0][2] = torch.inf
    torch.cuda.set_sync_debug_mode("error")
    try:
        private, seen = private_sum(flat(0.1), parameters, [compiled(rows)], alone=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert seen.non_finite == int(rows[0].is_floating_point())
    expected, _ = private_sum(flat(0.1), parameters, [Capture(model, loss)(rows)])
    for name, value in expected.parts[0].value.items():
        assert (private.parts[0].value[name] - value).norm() <= 5e-3 * value.norm() + 1e-6
    assert all(map(torch.equal, data, first))


def test_a_run_is_begun_without_moving_the_device_s_generator() -> None:
    """Also on samples that are read one by one, for which generators are seeded alike."""
    model = nn.Linear(3, 2).to("cuda")
    rows = [(torch.randn(3), torch.tensor(i % 2)) for i in range(8)]
    data = torch.utils.data.Subset(rows, range(8))  # type: ignore[arg-type, var-annotated]
    before = torch.cuda.get_rng_state()
    clipwise.make_private(
        model, torch.optim.SGD(model.parameters()), data, noise_multiplier=1.0, steps=1, batch=4, delta=0.1
    )
    assert torch.equal(torch.cuda.get_rng_state(), before)


@pytest.mark.parametrize("fractions", [False, True], ids=["labels of 0 and 1", "fractions"])
def test_the_self_test_gives_no_kernel_a_number_that_it_does_not_take(fractions: bool) -> None:
    """Such a kernel would end the process: nothing could be computed on the device any more."""
    model, x = nn.Linear(6, 1).to("cuda"), torch.randn(60, 6)
    y = torch.sigmoid(x[:, :1]) if fractions else (x[:, :1] > 0).float()

    def shares(model: nn.Module, batch: Any) -> Tensor:
        return F.binary_cross_entropy(torch.sigmoid(model(batch[0])), batch[1], reduction="none").mean(1)

    private = clipwise.make_private(
        model, torch.optim.SGD(model.parameters()), (x, y), loss=shares, noise_multiplier=1.0, steps=1, batch=20
    )
    for batch in private.batches():
        private.step(batch)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_one_sample_of_extreme_values_is_looked_at_on_the_processor() -> None:
    seen = set[str]()

    def below_the_largest(model: nn.Module, batch: Any) -> Tensor:
        logits = model(batch[0])
        seen.add(logits.device.type)
        logits = logits - logits.max()
        return logits.exp().sum(1).log() - logits.gather(1, batch[1][:, None]).squeeze(1)

    model, rows = nn.Linear(6, 3).to("cuda"), (torch.randn(4, 6, device="cuda"), torch.arange(4, device="cuda") % 3)
    with pytest.raises(Refused, match="very large values"):
        refuse_extremes(model, below_the_largest, rows)
    assert seen == {"cpu"} and all(p.is_cuda for p in model.parameters())


def test_a_run_may_be_made_with_cuda_as_the_default_device() -> None:
    with torch.device("cuda"):
        model, x, y = nn.Linear(6, 3), torch.randn(60, 6), torch.arange(60) % 3
        run = clipwise.train(model, loss, (x, y), noise_multiplier=1.0, steps=2, batch=20, delta=1e-3)
    assert run.statement.releases == 2 and all(p.is_cuda for p in model.parameters())
