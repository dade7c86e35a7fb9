"""A batch's diagnosis and the independence of sampling noise, against their definitions on written-out gradients.

Receives: explicit gradients in float64, and models'.
Gives: norms, sampling noise, cosines by norm, every method's effect overall and by layer, the noise of a release; what
a look says of itself and what it leaves alone.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clipwise as cw
import naive
from clipwise.diagnostics import ClippingBias, Diagnosis, Monitor, independence, measure
from clipwise.losses import cross_entropy as loss
from clipwise.methods import Method, parse
from clipwise.noise import release
from clipwise.records import SampleGradients, from_dense, oracle, per_sample
from clipwise.step import private_sum
from clipwise.types import Batch, InputError, PoissonGaussian
from streams import Ones

SIZES = {"a.weight": 4, "a.bias": 2, "b.weight": 5}
LAYERS = {"a": slice(0, 6), "b": slice(6, 11)}
LIKE = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
METHODS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "flat(clip_norm=1.5)": lambda g: naive.flat(g, 1.5),
    "automatic(clip_norm=1.0, gamma=0.1)": lambda g: naive.automatic(g, 1.0, 0.1),
    "psac(clip_norm=0.7, r=0.2)": lambda g: naive.psac(g, 0.7, 0.2),
    "global_(clip_norm=4.0)": lambda g: naive.global_(g, 4.0),
    "layerwise(base={'a': flat(clip_norm=0.5), 'b': flat(clip_norm=2.0)}, noise='equal')": lambda g: np.concatenate(
        naive.layerwise([g[:, :6], g[:, 6:]], [0.5, 2.0])
    ),
}


def rows(seed: int = 0, samples: int = 33) -> np.ndarray:
    """Skewed gradients of very different lengths, one of them zero."""
    rng = np.random.default_rng(seed)
    g = (rng.normal(size=(samples, 11)) + rng.normal(size=11)) * np.exp(rng.normal(0, 1.5, size=(samples, 1)))
    g[samples // 2] = 0
    return g


def gradients(g: np.ndarray) -> SampleGradients:
    pieces = torch.from_numpy(np.array(g)).split(list(SIZES.values()), 1)
    return from_dense(dict(zip(SIZES, pieces, strict=True)), LIKE)


def norm(v: np.ndarray) -> float:
    return math.sqrt(sum(float(x) ** 2 for x in v))


def test_quantiles_and_the_length_of_the_mean_are_their_definitions_overall_and_by_layer() -> None:
    g = rows()
    found = measure(gradients(g), [])
    assert list(found.layers) == ["a", "b"]
    for spread, own in [(found.spread, g), *((found.layers[name], g[:, columns]) for name, columns in LAYERS.items())]:
        norms = [norm(row) for row in own]
        for level, value in spread.quantiles.items():
            assert value == pytest.approx(float(np.quantile(norms, float(level.rstrip("%")) / 100)), abs=1e-12), level
        assert {"25%", "50%", "75%"} <= set(spread.quantiles)
        assert spread.mean_length == pytest.approx(norm(own.mean(0)))


def test_sampling_noise_is_definition_2_5_overall_and_by_layer() -> None:
    g = rows(1)
    found = measure(gradients(g), [])
    for spread, own in [(found.spread, g), *((found.layers[name], g[:, columns]) for name, columns in LAYERS.items())]:
        mean = sum(own) / len(own)
        assert spread.sampling_noise == pytest.approx(sum(norm(mean - row) ** 2 for row in own) / len(own))
    parts = sum(spread.sampling_noise for spread in found.layers.values())
    assert found.spread.sampling_noise == pytest.approx(parts)


def test_samples_that_agree_have_no_sampling_noise() -> None:
    same = np.tile(rows()[:1], (7, 1))
    assert measure(gradients(same), []).spread.sampling_noise == pytest.approx(0, abs=1e-12)


def test_cosines_are_those_of_single_samples_with_the_mean_by_norm() -> None:
    g = rows(2)
    mean = g.mean(0)
    ordered = sorted(g, key=norm)
    found = measure(gradients(g), []).buckets
    assert [bucket.samples for bucket in found] == [len(part) for part in np.array_split(np.arange(len(g)), 5)]
    start = 0
    for bucket in found:
        own = ordered[start : start + bucket.samples]
        start += bucket.samples
        cosines = [float(row @ mean) / (norm(row) * norm(mean)) if norm(row) else 0.0 for row in own]
        assert bucket.cosine == pytest.approx(sum(cosines) / len(cosines))
        assert (bucket.low, bucket.high) == pytest.approx((norm(own[0]), norm(own[-1])))
    assert start == len(g)


def test_the_histogram_counts_every_norm_above_zero() -> None:
    g = rows(3, samples=80)
    found = measure(gradients(g), [])
    norms = np.array([norm(row) for row in g])
    counts, edges = np.histogram(np.log10(norms[norms > 0]), bins=len(found.norm_counts))
    assert list(found.norm_counts) == counts.tolist() and sum(found.norm_counts) == 79
    assert found.norm_edges == pytest.approx(10**edges)


def test_every_method_s_effect_is_its_definition_overall_and_by_layer() -> None:
    g = rows(4)
    found = measure(gradients(g), [parse(text) for text in METHODS])
    assert list(found.methods) == list(METHODS)
    for text, weigh in METHODS.items():
        true, clipped = g.mean(0), weigh(g) / len(g)
        effect = found.methods[text]
        for bias, own in [(effect.whole, slice(None)), *((effect.layers[name], LAYERS[name]) for name in LAYERS)]:
            t, c = true[own], clipped[own]
            a = (c @ t) / (t @ t)
            # the margin for rounding shortens the clipped mean by 8e-6
            assert bias.magnitude == pytest.approx(norm(c - t), rel=1e-4)
            assert bias.cosine == pytest.approx(c @ t / norm(c) / norm(t), abs=1e-5)
            assert bias.along == pytest.approx(a, rel=1e-4) and bias.length == pytest.approx(norm(c), rel=1e-4)
            assert bias.across == pytest.approx(norm(c - a * t), abs=1e-4)
            assert bias.median_norm == pytest.approx(sorted(norm(row[own]) for row in g)[len(g) // 2])
            assert bias.noise is None and bias.signal_to_noise is None and bias.alignment is None


@pytest.mark.parametrize(
    ("method", "weight"),
    [
        (cw.flat(2.0), lambda n: naive.flat_weight(n, 2.0)),
        (cw.automatic(3.0, gamma=0.1), lambda n: naive.automatic_weight(n, 3.0, 0.1)),
        (cw.psac(2.5, r=0.2), lambda n: naive.psac_weight(n, 2.5, 0.2)),
        (cw.global_(4.0), lambda n: naive.global_weight(n, 4.0)),
    ],
)
def test_a_sample_is_clipped_when_its_weight_is_below_one(method: Method, weight: Callable[[float], float]) -> None:
    g = rows(10, samples=60)
    share = sum(norm(row) > 0 and weight(norm(row)) < 1 for row in g) / 60
    assert measure(gradients(g), [method]).methods[str(method)].whole.clipped == pytest.approx(share)
    assert 0.2 < share < 0.8


def test_a_layer_that_is_zero_is_not_clipped_whatever_its_weight() -> None:
    g = np.full((5, 11), 0.03)
    g[:, LAYERS["a"]] = 0
    method = cw.layerwise({"a": cw.psac(0.5), "b": cw.psac(2.0)})  # w(0) = 0.5 in a; b's short gradients are lengthened
    assert measure(gradients(g), [method]).methods[str(method)].whole.clipped == 0


def test_a_layer_is_clipped_when_its_own_block_is() -> None:
    g = np.ones((10, 11)) * 0.01
    g[:3, :6] = 5  # layer a of three samples
    found = measure(gradients(g), [cw.flat(1.0), cw.layerwise({"a": cw.flat(1.0), "b": cw.flat(1.0)})])
    flat, layered = found.methods.values()
    assert flat.whole.clipped == layered.whole.clipped == pytest.approx(0.3)
    assert {name: bias.clipped for name, bias in flat.layers.items()} == {"a": 0.3, "b": 0.3}
    assert {name: bias.clipped for name, bias in layered.layers.items()} == {"a": 0.3, "b": 0.0}


def assert_close(found: ClippingBias, expected: ClippingBias) -> None:
    for field in fields(ClippingBias):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        assert one == (pytest.approx(other, rel=1e-12, abs=1e-12) if isinstance(other, float) else other), field.name


def test_several_methods_at_once_are_each_as_by_itself() -> None:
    seen = gradients(rows(5))
    methods = [parse(text) for text in METHODS]
    together = measure(seen, methods)
    for method in methods:
        alone, beside = measure(seen, [method]).methods[str(method)], together.methods[str(method)]
        # a product with more columns may be rounded otherwise
        assert_close(alone.whole, beside.whole)
        assert_close(cw.clipping_bias(seen, method), beside.whole)
        assert alone.layers.keys() == beside.layers.keys()
        for name, bias in alone.layers.items():
            assert_close(bias, beside.layers[name])


@pytest.mark.parametrize(
    "text",
    [
        "flat(0.7)",
        "adaptive(0.7)",
        "layerwise(flat(1.3))",
        "layerwise({'a': flat(0.5), 'b': flat(2.0)})",
        "layerwise({'a': flat(0.5), 'b': flat(2.0)}, noise='proportional')",
        "p_average(flat(0.7), size=3)",
    ],
)
def test_the_noise_is_what_a_release_would_add(text: str) -> None:
    method, sigma, batch = parse(text), 1.7, 24.0
    empty, _ = private_sum(method, LIKE, [])
    released = release(empty, PoissonGaussian(sigma, 0.1), Ones(0)).gradient
    effect = measure(gradients(rows()), [method], noise_multiplier=sigma, expected_batch=batch).methods[str(method)]
    units = batch / method.unit
    for bias, names in [
        (effect.whole, list(SIZES)),
        (effect.layers["a"], ["a.weight", "a.bias"]),
        (effect.layers["b"], ["b.weight"]),
    ]:
        noise = norm(np.concatenate([released[name].numpy() for name in names])) / units
        assert bias.noise == pytest.approx(noise)
        assert bias.signal_to_noise == pytest.approx(bias.length / noise)


@pytest.mark.parametrize("memory", ["full", "none", "blocks", "bounded"])
def test_the_noise_of_feedback_is_that_of_the_run_s_own_step(memory: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(40, 3), torch.arange(40) % 2
    model = nn.Linear(3, 2)
    # next to no gradient, so that what is released is noise
    private = cw.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        (x, y),
        loss=lambda m, batch: 1e-9 * cw.cross_entropy(m, batch),
        method=f"dice(flat(0.7), feedback_norm=0.05, memory='{memory}', blocks=3)",
        noise_multiplier=1.7,
        delta=1e-3,
        steps=300,
        batch=10,
        noise=1,
    )
    squares = []
    for batch in private.batches():
        private.step(batch)
        squares.append(sum(float(g.square().sum()) for g in (private.state.released or {}).values()))
    seen = per_sample(model, cw.cross_entropy, (x, y))
    found = measure(seen, [private.method], noise_multiplier=1.7, expected_batch=10)
    noise = found.methods[str(private.method)].whole.noise
    # 300 steps of 8 numbers each: Var z² = 2
    assert noise is not None and np.mean(squares) / noise**2 == pytest.approx(1, abs=5 * math.sqrt(2 / 2400))


def test_alignment_is_the_cosine_of_a_released_gradient_with_the_true_mean() -> None:
    rng = np.random.default_rng(0)
    d, n, sigma, batch = 20_000, 40, 0.6, 30
    g = (rng.normal(size=(n, d)) + 2 * rng.normal(size=d)) * np.exp(rng.normal(0, 1, size=(n, 1)))
    seen = from_dense({"w": torch.from_numpy(g)}, {"w": torch.zeros(d, dtype=torch.float64)})
    bias = measure(seen, [cw.flat(1.0)], noise_multiplier=sigma, expected_batch=batch).methods["flat(clip_norm=1.0)"]
    true, clipped = g.mean(0), naive.flat(g, 1.0) / n
    cosines = []
    for _ in range(20):
        released = clipped + sigma * rng.normal(size=d) / batch
        cosines.append(released @ true / norm(released) / norm(true))
    assert bias.whole.alignment == pytest.approx(np.mean(cosines), abs=4 * np.std(cosines) / math.sqrt(20))
    assert 0.1 < np.mean(cosines) < bias.whole.cosine - 0.1  # the noise matters here


def test_half_of_the_release_s_numbers_is_an_error() -> None:
    with pytest.raises(InputError, match="both its noise_multiplier and its expected_batch"):
        measure(gradients(rows()), [cw.flat()], noise_multiplier=1.0)


def test_averages_of_p_samples_are_weighed_as_one() -> None:
    g = rows(6, samples=32)
    method = cw.p_average(cw.flat(4.0), size=4)
    bias = measure(gradients(g), [method]).methods[str(method)].whole
    averages = g.reshape(8, 4, 11).mean(1)
    clipped = naive.flat(averages, 4.0) / 8
    assert bias.magnitude == pytest.approx(norm(clipped - g.mean(0)), rel=1e-4)
    assert bias.clipped == pytest.approx(np.mean([norm(row) > 4.0 for row in averages]))
    assert 0 < bias.clipped < 1


def test_a_method_that_probes_elsewhere_is_an_estimate_of_the_mean_here() -> None:
    here, there = rows(7), rows(8)
    method = cw.bam(cw.flat(0.5))
    bias = measure(gradients(here), [method], taken={str(method): gradients(there)}).methods[str(method)].whole
    assert bias.magnitude == pytest.approx(norm(naive.flat(there, 0.5) / len(there) - here.mean(0)), rel=1e-4)


def test_a_method_that_probes_elsewhere_is_not_shown_as_if_it_did_not() -> None:
    with pytest.raises(InputError, match="bam takes its gradients elsewhere"):
        measure(gradients(rows()), [cw.bam()])


@pytest.mark.parametrize(("text", "word"), [("dice()", "feedback"), ("momentum_per_sample()", "momentum")])
def test_state_that_a_batch_does_not_show_is_named(text: str, word: str) -> None:
    found = measure(gradients(rows()), [parse(text)])
    assert word in next(iter(found.methods.values())).unseen and f"without its {word}" in found.text()


def test_a_sample_without_a_finite_gradient_is_counted_and_left_out() -> None:
    g = rows(9)
    bad = np.insert(g, [3, 20], g[:1], axis=0)
    bad[3, 2], bad[21, 9] = np.inf, np.nan
    methods = [parse(text) for text in METHODS]
    with_them, without = measure(gradients(bad), methods), measure(gradients(g), methods)
    assert (with_them.samples, with_them.non_finite) == (len(g) + 2, 2)
    assert with_them.spread.quantiles == pytest.approx(without.spread.quantiles)
    assert with_them.spread.sampling_noise == pytest.approx(without.spread.sampling_noise)
    assert [b.cosine for b in with_them.buckets] == pytest.approx([b.cosine for b in without.buckets])
    for name, effect in with_them.methods.items():
        for field in fields(ClippingBias):
            value = getattr(without.methods[name].whole, field.name)
            assert getattr(effect.whole, field.name) == pytest.approx(value), (name, field.name)


def test_a_batch_without_any_finite_gradient_still_gives_numbers() -> None:
    found = measure(gradients(np.full((4, 11), np.nan)), [cw.flat(), cw.normalised()])
    assert found.non_finite == 4 and found.spread.mean_length == 0
    assert "NaN" not in json.dumps(found.as_dict(), allow_nan=False)


def test_an_empty_batch_is_an_error() -> None:
    with pytest.raises(InputError, match="at least one sample"):
        measure(gradients(np.zeros((0, 11))), [])


@pytest.mark.parametrize("data", ["private", "public"])
def test_a_diagnosis_says_that_it_is_not_private_and_whose_data_it_read(data: str) -> None:
    found = measure(gradients(rows()), [cw.flat()], data=data, noise_multiplier=1.0, expected_batch=8, step=50)  # type: ignore[arg-type]
    values = json.loads(json.dumps(found.as_dict(), allow_nan=False))
    assert values["not_private"] is True and values["data"] == data and "not private" in values["note"]
    assert "not private" in found.text() and f"{data} samples" in found.text() and "after step 50" in found.text()
    assert ("costs the training data no privacy" in found.text()) == (data == "public")
    assert values["methods"]["flat(clip_norm=1.0)"]["layers"]["a"]["cosine"] == pytest.approx(
        found.methods["flat(clip_norm=1.0)"].layers["a"].cosine
    )


def test_a_batch_without_a_finite_gradient_is_not_called_unbiased() -> None:
    said = measure(gradients(rows() * math.nan), cw.flat()).text()
    assert f"{len(rows())} without a finite gradient: there is nothing to say of them" in said and "%" not in said


def test_one_method_and_expressions_are_as_good_as_a_list_of_methods() -> None:
    found = measure(gradients(rows()), [cw.flat(0.5)])
    assert measure(gradients(rows()), cw.flat(0.5)) == found
    assert measure(gradients(rows()), ["flat(0.5)"]) == measure(gradients(rows()), "flat(clip_norm=0.5)") == found
    bias = found.methods["flat(clip_norm=0.5)"].whole
    assert cw.clipping_bias(gradients(rows()), "flat(0.5)").cosine == pytest.approx(bias.cosine)
    with pytest.raises(InputError, match=r"unknown method 'flatt': did you mean 'flat'"):
        measure(gradients(rows()), "flatt")
    with pytest.raises(InputError, match=r"expected a method or its expression, got 0\.5: write clipwise\.flat\(\)"):
        measure(gradients(rows()), [0.5])  # type: ignore[list-item]


def test_data_that_are_neither_private_nor_public_are_an_error() -> None:
    with pytest.raises(InputError, match="unknown data 'publik': did you mean 'public'"):
        measure(gradients(rows()), [], data="publik")  # type: ignore[arg-type]


# A model's gradients


def network(dropout: float = 0.0) -> tuple[nn.Module, Batch]:
    torch.manual_seed(0)
    layers = [nn.Conv1d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Dropout(dropout), nn.Linear(12, 3)]
    batch = (torch.randn(12, 2, 5, dtype=torch.float64) * 4, torch.randint(0, 3, (12,)))
    return nn.Sequential(*layers).double(), batch


@dataclass(frozen=True)
class Here:
    """The part of a run's engine that a method without a probe needs."""

    model: nn.Module
    slow: bool = False

    def gradients(self, rows: Batch) -> SampleGradients:
        return (oracle.per_sample if self.slow else per_sample)(self.model, loss, rows)


def look(monitor: Monitor, engine: object, method: Method) -> Diagnosis:
    return monitor.look(engine, method, step=50, noise_multiplier=1.0, expected_batch=6)  # type: ignore[arg-type]


def test_a_model_s_diagnosis_is_that_of_its_written_out_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SampleGradients, "materialise", lambda self: pytest.fail("per-sample gradients written out"))
    model, batch = network()
    monitor = Monitor(batch, "private", (cw.psac(0.3), cw.layerwise(cw.flat(0.3))))
    fast, slow = (look(monitor, Here(model, slow=slow), cw.flat(0.3)) for slow in (False, True))
    assert list(fast.layers) == ["0", "4"] and fast.step == 50 and fast.seconds is not None and fast.seconds > 0
    left, right = (json.dumps(found.as_dict()) for found in (fast, slow))
    numbers = [[float(x) for x in _numbers(json.loads(text))] for text in (left, right)]
    assert numbers[0] == pytest.approx(numbers[1], rel=1e-6, abs=1e-9)


def _numbers(value: object) -> list[float]:
    if isinstance(value, dict):
        return [x for key, item in value.items() if key != "seconds" for x in _numbers(item)]
    if isinstance(value, list):
        return [x for item in value for x in _numbers(item)]
    return [float(value)] if isinstance(value, (int, float)) else []


def test_the_run_s_own_method_comes_first_and_no_method_twice() -> None:
    model, batch = network()
    found = look(Monitor(batch, "private", (cw.psac(), cw.flat(), cw.psac())), Here(model), cw.flat())
    assert list(found.methods) == [str(cw.flat()), str(cw.psac())]


def test_a_look_leaves_the_model_its_gradients_and_its_random_draws_alone() -> None:
    model, batch = network(dropout=0.5)
    before = [p.clone() for p in model.parameters()]
    state = torch.get_rng_state()
    look(Monitor(batch, "public"), Here(model), cw.flat())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None and torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True))


def test_a_monitor_asks_the_engine_where_a_method_s_gradients_are_taken() -> None:
    model, batch = network()
    method = cw.inner_momentum(cw.flat(0.3), horizon=1, decay=0.5)

    @dataclass(frozen=True)
    class Engine(Here):
        past: tuple[str, ...] = ("before",)

        def back(self, steps: int) -> Here:
            assert steps == 1
            return Here(moved)

    moved, _ = network()
    with torch.no_grad():
        for p in moved.parameters():
            p.add_(torch.randn_like(p))
    g, past = (_flat(oracle.per_sample(each, loss, batch)) for each in (model, moved))
    bias = look(Monitor(batch, "private"), Engine(model), method).methods[str(method)].whole
    clipped = naive.flat((g + 0.5 * past) / 1.5, 0.3) / 12
    assert bias.magnitude == pytest.approx(norm(clipped - g.mean(0)), rel=1e-4)


def test_a_look_is_due_every_n_steps() -> None:
    monitor = Monitor(network()[1], "private", every=20)
    assert [step for step in range(1, 61) if monitor.due(step)] == [20, 40, 60]


@pytest.mark.parametrize(
    ("change", "words"),
    [({"every": 0}, "every must be"), ({"data": "secret"}, "unknown data"), ({"rows": torch.zeros(0, 3)}, "one row")],
)
def test_a_monitor_that_could_not_look_is_an_error(change: dict[str, object], words: str) -> None:
    settings = {"rows": torch.zeros(4, 3), "data": "private", **change}
    with pytest.raises(InputError, match=words):
        Monitor(**settings)  # type: ignore[arg-type]


def test_a_run_that_is_looked_at_is_the_run_that_is_not() -> None:
    def trained(every: int) -> tuple[list[Tensor], float, list[Diagnosis]]:
        model, data = network(dropout=0.3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        method = cw.inner_momentum(cw.flat(0.3))
        private = cw.make_private(
            model, optimizer, data, method=method, noise_multiplier=1.0, steps=4, batch=6, delta=1e-3, noise=3
        )
        monitor = Monitor(private.rows(torch.arange(8)), "private", (cw.psac(), cw.bam()), every)
        found = []
        for batch in private.batches():
            private.step(batch)
            if monitor.due(private.steps_taken):
                engine = private.engine(torch.arange(8), 0)
                found.append(monitor.look(engine, private.method, step=private.steps_taken))
        return [p.detach() for p in model.parameters()], private.epsilon(), found

    (seen, spent, looks), (unseen, same, none) = trained(every=2), trained(every=1000)
    assert [each.step for each in looks] == [2, 4] and not none
    assert len(looks[0].methods) == 3
    assert spent == same and all(torch.equal(*pair) for pair in zip(seen, unseen, strict=True))


# Independence over iterates


def _flat(found: SampleGradients) -> np.ndarray:
    return torch.cat([part.flatten(1) for part in found.materialise().values()], 1).numpy()


def _by_definition(iterates: list[np.ndarray], length: int) -> float:
    """Mean of ‖(1/K0) Σ ξ_l‖ over samples and sliding windows (paper 0, before Fig. 5a)."""
    noises = [g - g.mean(0) for g in iterates]
    values = []
    for start in range(len(noises) - length + 1):
        window = sum(noises[start : start + length]) / length
        values += [norm(row) for row in window]
    return sum(values) / len(values)


def test_independence_is_the_sliding_window_of_figure_5a() -> None:
    iterates = [rows(seed) for seed in range(4)]
    iterates[2] = 0.7 * iterates[1] + 0.3 * iterates[2]  # correlated with the one before
    found = independence([gradients(g) for g in iterates])
    assert [window.length for window in found.windows] == [1, 2, 3, 4]
    for window in found.windows:
        assert window.noise == pytest.approx(_by_definition(iterates, window.length))
    noises = [g - g.mean(0) for g in iterates]
    for lag, cosine in enumerate(found.cosines, start=1):
        pairs = [(u, v) for left in range(4 - lag) for u, v in zip(noises[left], noises[left + lag], strict=True)]
        assert cosine == pytest.approx(sum(u @ v / norm(u) / norm(v) for u, v in pairs) / len(pairs))
    assert found.not_private and "not private" in json.dumps(found.as_dict())


def test_noise_that_repeats_does_not_cancel_and_noise_that_is_new_does() -> None:
    same = independence([gradients(rows())] * 4)
    assert [window.noise for window in same.windows] == pytest.approx([same.windows[0].noise] * 4)
    assert same.cosines == pytest.approx([1.0] * 3)
    rng = np.random.default_rng(0)
    like = {"w": torch.zeros(400, dtype=torch.float64)}
    fresh = independence([from_dense({"w": torch.from_numpy(rng.normal(size=(30, 400)))}, like) for _ in range(4)])
    for window in fresh.windows:
        assert window.noise == pytest.approx(window.independent, rel=0.03)
        assert window.independent == pytest.approx(fresh.windows[0].noise / math.sqrt(window.length), rel=0.01)
    assert fresh.cosines == pytest.approx([0] * 3, abs=0.05)


def test_a_model_s_independence_is_that_of_its_written_out_gradients() -> None:
    model, batch = network()
    fast, slow = [], []
    for _ in range(3):
        fast.append(per_sample(model, loss, batch))
        slow.append(_flat(oracle.per_sample(model, loss, batch)))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.05 * torch.randn_like(p))
    for window in independence(fast).windows:
        assert window.noise == pytest.approx(_by_definition(slow, window.length), rel=1e-6)


def test_a_sample_that_is_not_finite_at_one_iterate_is_left_out_of_all() -> None:
    iterates = [rows(seed) for seed in range(3)]
    bad = [np.concatenate([g, g[:1]]) for g in iterates]
    bad[1][-1, 3] = np.nan
    found, without = (independence([gradients(g) for g in each]) for each in (bad, iterates))
    assert found.samples == 33 and [w.noise for w in found.windows] == pytest.approx([w.noise for w in without.windows])


def test_iterates_of_different_samples_are_an_error() -> None:
    with pytest.raises(InputError, match="the same samples"):
        independence([gradients(rows(0, 5)), gradients(rows(0, 6))])
