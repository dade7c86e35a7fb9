"""The measured choice of a form: here with a made-up clock on a CPU, and at the end with a real one on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from clipwise.records import Capture, forms, kinds, memory, trainable, tuning
from clipwise.records.capture import traced
from clipwise.records.compiled import CompiledCapture
from clipwise.records.kinds import Convolution, Dense, Geometry, Halved, Outer
from clipwise.records.kinds.outer import outer_form
from clipwise.types import Refused

N = 16


class Clock:
    """Milliseconds by form, as a test says; an exception is raised. It remembers what was asked."""

    def __init__(self) -> None:
        self.says: dict[str, float | Exception] = {}
        self.asked: list[tuple[str, int]] = []
        self.seen: list[tuple[Tensor, Tensor]] = []

    def __call__(self, record: Any, name: forms.Name, weights: Tensor) -> float:
        self.asked.append((name, record.samples))
        said = self.says.get(name, 1.0)
        if isinstance(said, Exception):
            raise said
        self.seen.append(tuning.step(record, name, weights))  # what a real clock would run
        return said


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(tuning, "DEVICES", ("cpu",))
    monkeypatch.setattr(tuning, "_times", {})
    monkeypatch.setattr(tuning, "took", made)
    monkeypatch.setattr(forms, "FAR", 8)  # so that small layers have several forms to choose from
    return made


def outer(samples: int = N, positions: int = 24, p: int = 24, q: int = 32, dtype: torch.dtype = torch.float64) -> Outer:
    torch.manual_seed(0)
    a, b = (torch.randn(samples, 1, positions, size, dtype=dtype) for size in (p, q))
    return Outer(a, b, torch.Size([q, p]))


def convolution(samples: int = N) -> Convolution:
    torch.manual_seed(0)
    geometry = Geometry(torch.Size([6, 2, 3, 3]), (2, 1), (1, 1), (1, 1), 2)
    return Convolution(torch.randn(samples, 4, 7, 6), torch.randn(samples, 6, 4, 6), geometry)


# ── what is chosen ──────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("fastest", ["gram", "streamed", "written"])
def test_the_fastest_form_is_taken_and_all_were_timed_once(clock: Clock, fastest: str) -> None:
    clock.says = {fastest: 0.5}
    form = outer().form
    assert form.name == fastest
    assert form.milliseconds == {"gram": 1.0, "streamed": 1.0, "written": 1.0, fastest: 0.5}
    assert [name for name, _ in clock.asked] == list(form.worth) * tuning.TURNS and len(form.worth) == 3
    assert {samples for _, samples in clock.asked} == {form.trial}
    again = outer().form
    assert again == form and len(clock.asked) == 3 * tuning.TURNS


@pytest.mark.parametrize(("time", "left"), [(0.96, False), (0.94, True)])
def test_only_a_clearly_faster_form_takes_the_counted_one_s_place(clock: Clock, time: float, left: bool) -> None:
    counted = forms.choose(24, 24, 32).name
    assert counted == "written"
    clock.says = {"gram": time}
    assert outer().form.name == ("gram" if left else counted)


def test_what_slows_the_device_for_a_while_does_not_decide(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = forms.choose(24, 24, 32).name
    asked: list[str] = []

    def busy(record: Any, name: forms.Name, weights: Tensor) -> float:
        asked.append(name)
        return 9.0 if name == counted and asked.count(name) == 1 else 1.0

    monkeypatch.setattr(tuning, "took", busy)
    assert outer().form.name == counted and asked.count(counted) == 2


def test_the_step_that_is_timed_gives_every_form_s_norm_and_sum(clock: Clock) -> None:
    _ = outer().form
    assert len(clock.seen) == 3 * tuning.TURNS
    for norms, total in clock.seen[1:]:
        torch.testing.assert_close(norms, clock.seen[0][0])
        torch.testing.assert_close(total, clock.seen[0][1])


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError("full"), Refused("no kernel"), RuntimeError("driver")])
def test_a_form_that_fails_is_no_candidate(clock: Clock, failure: Exception) -> None:
    clock.says = {"written": failure, "gram": 3.0, "streamed": 2.0}
    form = outer().form
    assert form.name == "streamed" and set(form.milliseconds) == {"gram", "streamed"}


def test_where_every_form_fails_counting_decides_and_nothing_is_tried_again(clock: Clock) -> None:
    clock.says = dict.fromkeys(["gram", "streamed", "written"], Refused("no kernel"))
    assert outer().form == forms.choose(24, 24, 32)
    asked = len(clock.asked)
    assert outer().form == forms.choose(24, 24, 32) and len(clock.asked) == asked


def test_records_that_are_kept_although_writing_is_faster_take_the_next_form(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.says = {"written": 0.1, "gram": 0.2, "streamed": 0.3, "fused": 0.4}
    monkeypatch.setattr(Convolution, "_by_kernel", property(lambda self: True))  # the kernels' plain twins
    for record, next_one in ((outer(), "gram"), (convolution(), "fused")):
        form = record.form
        assert form.name == "written" and form.kept == next_one
        used: list[str] = []
        by = type(record).norm_by
        monkeypatch.setattr(type(record), "norm_by", lambda r, name, by=by, used=used: used.append(name) or by(r, name))
        torch.testing.assert_close(record.sq_norm(), record.dense().flatten(1).square().sum(1))
        assert used == [next_one]
    assert forms.choose(24, 24, 32).kept == "written"  # counted: as it always was


# ── what is not tried ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_cpu_keeps_to_counting(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "DEVICES", ("cuda",))
    clock.says = {"gram": 0.1}
    assert outer().form == forms.choose(24, 24, 32) and not clock.asked


def test_a_gradient_that_takes_more_memory_than_its_records_is_not_written_however_fast(clock: Clock) -> None:
    clock.says = {"written": 1e-6}
    positions, p, q = 6, 16, 24  # 240 numbers, in the place of 384
    assert outer(positions=positions, p=p, q=q).form.name != "written"
    assert clock.asked and "written" not in {name for name, _ in clock.asked}


def test_gram_matrices_that_take_more_memory_than_the_records_are_not_tried(clock: Clock) -> None:
    clock.says = {"gram": 1e-6}
    assert outer(positions=29).form.name != "gram"
    assert clock.asked and "gram" not in {name for name, _ in clock.asked}
    assert outer(positions=28).form.name == "gram"  # as much as the records


def test_what_counts_far_more_is_not_tried() -> None:
    assert forms.choose(48, 48, 64).worth == ("streamed", "written")
    assert forms.choose(256, 256, 256, cuda=True, kernel=True).worth == ("fused", "gram", "written")
    assert forms.choose(512, 64, 64, cuda=True, kernel=True).worth == ("fused", "written")
    image = partial(forms.choose, 64, 2304, 256, raw_inputs=256 * 64, cuda=True, kernel=True, unfolds=True)
    assert image().worth == ("fused",) and image(not_unfolded=3_000_000).worth == ("fused", "gram")


def test_one_position_has_nothing_to_choose(clock: Clock) -> None:
    assert outer(positions=1).form.name == "gram" and not clock.asked


def test_too_few_samples_are_not_tuned_with_but_read_what_is_known(clock: Clock) -> None:
    clock.says = {"gram": 0.1}
    assert outer(tuning.LEAST - 1).form.name == "written" and not clock.asked
    assert outer(0).form.name == "written" and not clock.asked
    assert outer(tuning.LEAST).form.name == "gram"
    assert outer(3).form.name == "gram" and outer(1000).form.name == "gram"


def test_the_passes_that_measure_memory_choose_alike_and_scouting_and_the_self_test_tune_nothing() -> None:
    assert 4 < tuning.LEAST <= memory.FEW


def test_a_trial_is_of_many_samples_unless_they_are_large(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outer().form.trial == tuning.MOST
    monkeypatch.setattr(tuning, "CUDA_STREAM_FLOATS", 100 * 24 * 56)
    tuning._times.clear()
    assert tuning.LEAST < outer().form.trial < 100
    monkeypatch.setattr(tuning, "CUDA_STREAM_FLOATS", 1)
    tuning._times.clear()
    assert outer().form.trial == tuning.LEAST


# ── what it is remembered by ────────────────────────────────────────────────────────────────────────────────────────


def test_another_shape_or_format_is_measured_apart(clock: Clock) -> None:
    different = [
        outer(),
        outer(positions=23),
        outer(p=32, q=24),
        outer(p=9),
        outer(dtype=torch.float32),
        outer(dtype=torch.bfloat16),
        outer().plus(outer()),
    ]
    for count, record in enumerate(different, 1):
        _ = record.form, record.scaled(torch.ones(N)).form, record.rows(0, 9).form
        assert len(tuning._times) == count


def test_a_record_whose_factors_change_places_is_the_one_that_is_measured(clock: Clock) -> None:
    record = outer(dtype=torch.float32)
    swapped = Outer(record.b.double(), record.a, torch.Size([24, 32]))
    made = outer_form(record.a, 32, torch.float64, swap=True)
    assert made == swapped.form and len(tuning._times) == 1
    _ = outer_form(record.a, 32, torch.float64)
    assert len(tuning._times) == 2


def test_rounded_factors_are_measured_as_they_are_kept_and_found_again_in_float16(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: Callable[..., bool] = lambda one, other, **_: one.dtype == other.dtype == torch.float32
    kinds_seen = []
    step = tuning.step
    monkeypatch.setattr(tuning, "step", lambda record, *rest: kinds_seen.append(type(record)) or step(record, *rest))
    for module in (kinds.outer, kinds.convolution, kinds.sums):
        monkeypatch.setattr(module, "rounds", rounds)
    monkeypatch.setattr(Convolution, "_by_kernel", property(lambda self: True))
    for count, record in enumerate((outer(dtype=torch.float32), convolution()), 1):
        clock.says = {"fused": 0.1}
        form = record.form
        assert form.milliseconds and form.name == "fused"
        half = kinds.summed(record)
        assert isinstance(half, Halved)
        inner = half.record.form  # type: ignore[attr-defined]
        assert (inner.name, inner.milliseconds) == (form.name, form.milliseconds)
        assert len(tuning._times) == count
    assert set(kinds_seen) == {Halved}


@pytest.mark.parametrize("merged", [1, 2])
def test_convolutions_with_a_kernel_are_measured_and_others_are_not(
    clock: Clock, merged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock.says = {"written": 0.1, "fused": 0.2}
    record = convolution(2 * N).merged(merged) if merged > 1 else convolution()
    assert not record.form.milliseconds and not clock.asked
    monkeypatch.setattr(Convolution, "_by_kernel", property(lambda self: True))  # the kernels' plain twins
    form = record.form
    assert form.name == "written" and form.milliseconds == {"fused": 0.2, "written": 0.1} and form.kept == "fused"
    for norms, total in clock.seen[1:]:
        torch.testing.assert_close(norms, clock.seen[0][0], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(total, clock.seen[0][1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("space", [1, 2])
def test_random_images_have_the_sizes_of_the_real_ones_and_channels_last(space: int) -> None:
    geometry = Geometry(torch.Size([6, 4, *[3] * space]), (1,) * space, (1,) * space, (1,) * space, 1)
    real = Convolution(torch.randn(4, 4, *[5] * space), torch.randn(4, 6, *[5] * space), geometry)
    for record in (real, real.merged(2)):
        made = record._random(7)
        assert isinstance(made, Convolution) and made.samples == 7
        for mine, other in ((made.x, record.x), (made.b, record.b)):
            assert mine.shape[1:] == other.shape[1:] and mine.stride(-1 - space) == 1


# ── inside a pass ───────────────────────────────────────────────────────────────────────────────────────────────────


class Model(nn.Module):
    """A product of several positions, one with a turned weight, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convolution = nn.Conv2d(2, 3, 3, padding=1)
        self.first, self.turned = nn.Linear(6, 5), nn.Parameter(torch.randn(5, 4))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.convolution(x).flatten(2).transpose(1, 2).reshape(-1, 10, 6)
        return self.drop(torch.tanh(self.first(y)) @ self.turned).sum(1)


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def batch(samples: int = N) -> Any:
    torch.manual_seed(1)
    return torch.randn(samples, 2, 4, 5), torch.randint(0, 4, (samples,))


def chosen(sites: Any) -> dict[str, Any]:
    return {name: site.form for site in sites for name in site.parameters if site.form is not None}


@pytest.mark.parametrize("written", [False, True])
def test_a_graph_chooses_as_the_eager_pass_before_it_did(clock: Clock, written: bool) -> None:
    clock.says = {"written": 0.1 if written else 9.0, "gram": 0.5, "streamed": 0.6}
    model, data = Model().eval(), batch()
    eager = Capture(model, losses)(data)
    asked = len(clock.asked)
    assert asked and (chosen(eager.sites)["first.weight"].name == "written") == written
    assert (chosen(eager.sites)["turned"].name == "written") == written
    norms = eager.norms()
    assert len(clock.asked) == asked  # the shapes of the records are those of the pass
    kept = {name: [type(r) for r in records] for name, records in eager.records.items()}
    assert (kept["turned"] == [Dense]) == written
    made: list[Any] = []
    graph = traced(model, losses, data, lambda found: made.append(found) or found.norms())
    assert chosen(made[0].sites) == chosen(eager.sites) and len(clock.asked) == asked
    assert {name: [type(r) for r in records] for name, records in made[0].records.items()} == kept
    parameters = {name: p.detach() for name, p in trainable(model).items()}
    torch.testing.assert_close(graph(parameters, data), norms)
    names = [tuple(parameters)]
    compiled = CompiledCapture(model, losses, N, names, {"backend": "eager"})(data)
    torch.testing.assert_close(compiled.norms(names)[:, 0], norms)
    assert chosen(compiled.sites) == chosen(eager.sites) and "ms for" in compiled.explain()


def test_a_graph_of_a_shape_that_was_never_met_is_counted_and_leaves_nothing_behind(clock: Clock) -> None:
    clock.says = {"streamed": 0.01}
    model, data = Model().eval(), batch()
    made: list[Any] = []
    traced(model, losses, data, lambda found: made.append(found) or found.norms())
    assert not clock.asked and not tuning._times
    assert not any(form.milliseconds for form in chosen(made[0].sites).values())
    with FakeTensorMode() as mode:
        record = outer()
        assert isinstance(record.a, torch._subclasses.FakeTensor) and mode is not None
        assert record.form == forms.choose(24, 24, 32)
    assert not clock.asked and not tuning._times


def test_what_is_written_whatever_it_costs_is_not_measured(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Convolution, "_by_kernel", property(lambda self: True))  # the kernels' plain twins

    def made(model: Any, data: Any) -> Tensor:
        y = F.conv2d(data[0], 2 * model.convolution.weight, padding=1).flatten(2).transpose(1, 2).reshape(-1, 10, 6)
        return F.linear(y, model.first.weight.tanh()).square().sum((1, 2))

    model = Model()
    model.turned.requires_grad_(False)
    found = Capture(model, made)(batch())
    assert not clock.asked and {"convolution.weight", "first.weight"} == set(chosen(found.sites))
    assert all(isinstance(record, Dense) for records in found.records.values() for record in records)


def test_tuning_disturbs_neither_randomness_nor_what_is_followed_nor_autograd(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, data = Model().train(), batch()
    calls: list[list[Any]] = [[], []]

    class Watch(TorchFunctionMode):
        def __init__(self, into: list[Any]) -> None:
            super().__init__()
            self.into = into

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if getattr(func, "__name__", "") != "__get__":  # a size or a device that is asked for
                self.into.append(func)
            return func(*args, **(kwargs or {}))

    found = []
    for into, devices in zip(calls, [(), ("cpu",)], strict=True):
        monkeypatch.setattr(tuning, "DEVICES", devices)
        torch.manual_seed(5)
        with Watch(into):
            gradients = Capture(model, losses)(data)
        found.append((gradients, torch.rand(3)))
    assert clock.asked and calls[0] == calls[1]
    (counted, before), (tuned, after) = found
    assert torch.equal(before, after)
    torch.testing.assert_close(tuned.norms(), counted.norms())  # with the same dropout
    assert not any(t.requires_grad for pair in clock.seen for t in pair)


def test_a_pass_in_autocast_is_tuned_in_the_format_that_norms_are_computed_in(clock: Clock) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        _ = outer(dtype=torch.float32).form
    assert clock.seen and {t.dtype for pair in clock.seen for t in pair} == {torch.float32}


def test_explain_shows_what_was_measured_and_for_how_many_samples(clock: Clock) -> None:
    clock.says = {"gram": 0.25, "streamed": 1.5, "written": 0.125}
    found = Capture(Model().eval(), losses)(batch())
    for measure in (False, True):
        lines = {line.split()[0]: line for line in found.explain(measure=measure).splitlines() if line}
        assert lines["first.weight"].endswith(f"written 0.125 ms for {tuning.MOST} samples")
        assert "streamed 1.500" in lines["first.weight"] and lines["first.weight"].split()[2] == "written"
        assert "ms for" not in lines["convolution.weight"]  # on a CPU there is no kernel for it


def test_several_images_of_a_sample_are_one_unit_for_the_choice_too() -> None:
    torch.manual_seed(0)

    class Frames(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(2, 3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.flatten(0, 1)).reshape(len(x), -1)

    found = Capture(Frames(), lambda m, x: m(x).square().sum(1))(torch.randn(4, 5, 2, 6, 6))
    (site,) = [site for site in found.sites if site.parameters == ("layer.weight",)]
    assert site.form is not None and site.form.gram_cost == (5 * 16) ** 2 * (18 + 3)


# ── on a GPU ────────────────────────────────────────────────────────────────────────────────────────────────────────

cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    monkeypatch.setattr(tuning, "_times", {})
    monkeypatch.setattr(forms, "FAR", 8)
    return tuning._times


def on_gpu(dtype: torch.dtype) -> dict[str, Any]:
    torch.manual_seed(0)
    a, b = torch.randn(64, 1, 128, 96, device="cuda"), torch.randn(64, 1, 128, 160, device="cuda")
    x, y = torch.randn(64, 16, 32, 32, device="cuda"), torch.randn(64, 16, 32, 32, device="cuda")
    geometry = Geometry(torch.Size([16, 16, 3, 3]), (1, 1), (1, 1), (1, 1), 1)
    return {
        "Outer": Outer(a.to(dtype), b.to(dtype), torch.Size([160, 96])),
        "Convolution": Convolution(x.to(dtype), y.to(dtype), geometry),
    }


@cuda
@pytest.mark.parametrize("kind", ["Outer", "Convolution"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, "TF32"], ids=str)
def test_every_form_worth_it_is_measured_and_the_fastest_chosen(kind: str, dtype: Any, fresh: dict[Any, Any]) -> None:
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = dtype == "TF32"
    try:
        record = on_gpu(torch.float32 if dtype == "TF32" else dtype)[kind]
        _ = record.form  # what the library allocates once is not the trial's
        fresh.clear()
        drawn, taken = torch.cuda.get_rng_state(), torch.cuda.memory_allocated()
        form = record.form
        assert len(form.worth) > 1 and set(form.milliseconds) == set(form.worth)  # none failed
        assert all(time > 0 for time in form.milliseconds.values())
        assert form.milliseconds[form.name] <= min(form.milliseconds.values()) / tuning.BETTER
        assert torch.equal(torch.cuda.get_rng_state(), drawn) and torch.cuda.memory_allocated() == taken
        norms, size = record.sq_norm().double(), record.dense().double().flatten(1).square().sum(1)
        assert len(fresh) == 1  # rounded factors are found by what was measured of them
        torch.testing.assert_close(norms, size, rtol=1e-3, atol=0)
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@cuda
@pytest.mark.parametrize("narrow", [False, True], ids=["as it is", "bfloat16"])
def test_on_a_gpu_graphs_choose_as_the_eager_pass_did(narrow: bool, fresh: dict[Any, Any]) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.Flatten(2)]
    model = nn.Sequential(*layers, nn.Linear(256, 64), nn.Tanh(), nn.Linear(64, 48), nn.Flatten(), nn.Linear(1536, 4))
    model.cuda()
    data = torch.randn(32, 3, 32, 32, device="cuda"), torch.randint(0, 4, (32,), device="cuda")

    def own(model: nn.Module, batch: Any) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=narrow):
            return losses(model, batch)

    names = [tuple(trainable(model))]
    eager = Capture(model, own)(data)
    known = dict(fresh)
    assert known and "ms for" in eager.explain()
    compiled = CompiledCapture(model, own, 32, names, {"backend": "eager"})(data)
    assert chosen(compiled.sites) == chosen(eager.sites) and dict(fresh) == known
    torch.testing.assert_close(compiled.norms(names), eager.norms(names), rtol=2e-2 if narrow else 5e-3, atol=0)
    weights = torch.rand(32, 1, device="cuda")
    first, second = compiled.weighted_sum(weights, names), eager.weighted_sum(weights, names)
    for name, value in second.items():
        assert (first[name] - value).norm() <= 3e-2 * value.norm()


@cuda
def test_nothing_is_measured_while_a_cuda_graph_is_recorded(fresh: dict[Any, Any]) -> None:
    record = on_gpu(torch.bfloat16)["Outer"]
    asked = []
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda").add_(1)
        asked.append(record.form)
    assert not fresh and not asked[0].milliseconds
