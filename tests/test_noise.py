"""The only door from private to public: how much noise, how often, from where, and what it refuses.

Receives: private sums, events and streams.
Gives: the measured scale for every method, one draw whatever the chunks, and the event that was really made.
"""

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor, nn

import clipwise as cw
from clipwise.methods import METHODS, parse
from clipwise.noise import release
from clipwise.randomness import SecureStream, SeededStream
from clipwise.records import from_dense
from clipwise.step import private_sum
from clipwise.types import InputError, Part, PoissonGaussian, PrivateSum, Refused
from streams import Noting

LIKE = {"a.weight": torch.zeros(40, 50), "a.bias": torch.zeros(1000), "b.weight": torch.zeros(60, 50)}
EVENT = PoissonGaussian(1.7, 0.1)
EVERY = {
    "flat": "flat(0.3)",
    "normalised": "normalised(2.0)",
    "automatic": "automatic(0.5)",
    "psac": "psac(0.1)",
    "global_": "global_(8.0)",
    "layerwise": "layerwise({'a': flat(0.3), 'b': psac(4.0)})",
    "adaptive": "adaptive(0.7, count_share=0.3)",
    "schedule": "schedule([(0, flat(1.0)), (3, global_(50.0))], step=5)",
    "inner_momentum": "inner_momentum(psac(0.3))",
    "momentum_per_sample": "momentum_per_sample(normalised(0.3))",
    "self_augmentation": "self_augmentation(layerwise(flat(0.3)))",
    "bam": "bam(adaptive(0.3))",
    "dp_sat": "dp_sat(flat(0.3))",
    "p_average": "p_average(adaptive(0.3))",
    "batch_clipping": "batch_clipping(flat(0.3))",
    "dice": "dice(flat(0.3))",
    "disk": "disk(flat(0.3))",
}
EXTRA = ("layerwise(flat(1.0))", "layerwise({'a': flat(0.3), 'b': psac(4.0)}, noise='proportional')")


def nothing(method: cw.Method) -> PrivateSum:
    """The sum over an empty batch: what is released is noise alone."""
    return private_sum(method, LIKE, [])[0]


def assert_scale(draws: Tensor, scale: float, tail: float = 1e-7) -> None:
    """Fails once in 1/tail times where draws are N(0, scale²), and where the scale is off by a few per cent."""
    n = draws.numel()
    ratio = float(draws.double().square().sum()) / scale**2  # χ² with n degrees
    low, high = stats.chi2.ppf([tail / 2, 1 - tail / 2], n)
    assert low <= ratio <= high, f"standard deviation {math.sqrt(ratio / n) * scale:.4g}, expected {scale:.4g}"
    assert abs(float(draws.double().mean())) <= scale * stats.norm.isf(tail / 2) / math.sqrt(n)


def test_every_method_s_noise_is_measured() -> None:
    assert set(EVERY) == set(METHODS)


@pytest.mark.parametrize("text", [*EVERY.values(), *EXTRA])
def test_the_measured_noise_of_each_block_is_its_bound_over_the_root_of_its_share(text: str) -> None:
    method = parse(text)
    private = nothing(method)
    released = release(private, EVENT, SeededStream(3))
    joint = 0.0
    for block, part in zip(method.blocks(tuple(LIKE)), private.parts, strict=False):
        bound = method.moves * block.bound
        scale = 1.7 * bound / math.sqrt(block.share)
        assert (part.bound, part.share) == (bound, block.share)
        for name in block.names:
            assert_scale(released.gradient[name], scale)
        joint += (bound / scale) ** 2
    if method.count is not None:
        counts = [float(release(private, EVENT, SeededStream(seed)).counts["count"]) for seed in range(2000)]
        scale = 1.7 * 0.5 * method.moves / math.sqrt(method.count.share)
        assert_scale(torch.tensor(counts), scale)
        joint += (0.5 * method.moves / scale) ** 2
    assert 1 / math.sqrt(joint) == pytest.approx(1.7, rel=1e-9), "jointly one Gaussian with the event's multiplier"


@pytest.mark.parametrize("sigma", [0.01, 1.0, 300.0])
def test_the_noise_follows_the_multiplier(sigma: float) -> None:
    released = release(nothing(cw.flat(0.5)), PoissonGaussian(sigma, 0.1), SecureStream())
    assert_scale(torch.cat([v.flatten() for v in released.gradient.values()]), 0.5 * sigma, tail=1e-9)


def test_the_noise_is_gaussian() -> None:
    draws = torch.cat([v.flatten() for v in release(nothing(cw.flat(1.0)), EVENT, SeededStream(4)).gradient.values()])
    assert stats.kstest(draws.double().numpy() / 1.7, "norm").pvalue > 1e-4


def test_noise_is_drawn_once_over_all_chunks_and_for_every_number_that_leaves() -> None:
    chunk = from_dense({name: torch.ones(2, *v.shape) for name, v in LIKE.items()}, LIKE)
    for method in (cw.flat(1.0), cw.layerwise(), cw.adaptive()):
        noting = Noting(5)
        release(private_sum(method, LIKE, [chunk] * 7)[0], EVENT, noting)
        drawn = sum(count for count, _ in noting.drawn)
        assert drawn == sum(v.numel() for v in LIKE.values()) + (method.count is not None)


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_a_step_s_noise_is_the_same_whatever_the_chunks(chunk: int) -> None:
    model = nn.Linear(50, 40)
    data = (torch.randn(60, 50), torch.randint(0, 40, (60,)))
    before = torch.cat([p.detach().clone().flatten() for p in model.parameters()])
    private = cw.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        data,
        loss=lambda m, batch: cw.cross_entropy(m, batch) * 0,  # the sum is zero, so what moves the model is noise
        method=cw.flat(0.4),
        noise_multiplier=3.0,
        steps=1,
        batch=30,
        chunk=chunk,
        noise=6,
        self_test=False,
    )
    for batch in private.batches():
        private.step(batch)
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    assert_scale(moved * 30, 3.0 * 0.4)


def test_noise_is_added_in_float64_and_only_the_noisy_sum_is_rounded() -> None:
    secret = torch.randn(LIKE["a.bias"].shape, generator=torch.Generator().manual_seed(7)) * 100
    private = PrivateSum((Part({"w": secret}, 0.3, 1.0),))
    noise = 1.7 * 0.3 * SeededStream(8).normal([1000], narrow=True)
    assert noise.dtype == torch.float64
    once = (secret.double() + noise).to(secret.dtype)
    twice = secret + noise.float()  # rounded before the addition too
    assert torch.equal(release(private, EVENT, SeededStream(8)).gradient["w"], once)
    assert not torch.equal(once, twice)


def test_what_stays_in_float64_takes_two_draws_and_what_is_rounded_one() -> None:
    small, large = torch.ones(3), torch.ones(5, dtype=torch.float64)
    parts = (Part({"a": small}, 1.0, 0.25), Part({"b": large}, 1.0, 0.25), Part({"a": large}, 1.0, 0.5, is_count=True))
    released = release(PrivateSum(parts), EVENT, noting := Noting(1))
    assert noting.drawn == [(3, True), (5, False), (5, False)]
    assert released.gradient["a"].dtype == torch.float32 and released.gradient["b"].dtype == torch.float64
    release(PrivateSum(parts), EVENT, noting := Noting(1), 2.0, torch.float32)
    assert noting.drawn == [(8, True), (5, False)]  # a count keeps its own format


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_release_keeps_format_and_shape_and_leaves_the_secret_alone(dtype: torch.dtype) -> None:
    secret = torch.ones(2, 3, dtype=dtype)
    released = release(PrivateSum((Part({"w": secret}, 1.0, 1.0),)), EVENT, SeededStream(9))
    assert released.gradient["w"].dtype == dtype and released.gradient["w"].shape == (2, 3)
    assert torch.equal(secret, torch.ones(2, 3, dtype=dtype))


def test_the_event_is_the_one_whose_multiplier_scaled_the_noise() -> None:
    for sigma in (0.3, 5.0):
        event = PoissonGaussian(sigma, 0.25)
        released = release(nothing(cw.flat(2.0)), event, SeededStream(10))
        assert released.event == event
        assert_scale(released.gradient["b.weight"], 2.0 * released.event.noise_multiplier)


@pytest.mark.parametrize("streams", [(SecureStream(), SecureStream()), (SeededStream(1).at(0), SeededStream(1).at(1))])
def test_steps_have_independent_noise(streams: tuple[Any, Any]) -> None:
    first, second = (
        torch.cat([v.flatten() for v in release(nothing(cw.flat(1.0)), EVENT, stream).gradient.values()]).double()
        for stream in streams
    )
    correlation = float(torch.corrcoef(torch.stack([first, second]))[0, 1])
    assert abs(correlation) <= stats.norm.isf(1e-9) / math.sqrt(len(first))


def test_blocks_of_one_release_have_independent_noise() -> None:
    released = release(nothing(cw.layerwise(cw.flat(1.0))), EVENT, SeededStream(11)).gradient
    a, b = released["a.weight"].flatten().double(), released["b.weight"].flatten().double()[:2000]
    assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) <= stats.norm.isf(1e-7) / math.sqrt(len(a))


@pytest.mark.parametrize("thing", [None, 1.0, torch.zeros(3), {"w": torch.zeros(3)}, Part({}, 1.0, 1.0), (1, 2)])
def test_only_a_private_sum_can_be_released(thing: Any) -> None:
    with pytest.raises(InputError, match="PrivateSum"):
        release(thing, EVENT, SeededStream(1))


@pytest.mark.parametrize("event", [None, 1.0, (1.0, 0.1), type("Other", (PoissonGaussian,), {})(1.0, 0.1)])
def test_only_a_known_event_can_be_made(event: Any) -> None:
    with pytest.raises(InputError, match="PoissonGaussian"):
        release(nothing(cw.flat()), event, SeededStream(1))


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.nan, math.inf, True, "1"])
def test_noise_that_is_no_positive_number_is_an_input_error(sigma: Any) -> None:
    with pytest.raises(InputError, match="noise_multiplier"):
        release(nothing(cw.flat()), PoissonGaussian(sigma, 0.1), SeededStream(1))


@pytest.mark.parametrize("shares", [(), (1.1,), (0.6, 0.6), (0.0, 1.0), (-0.1, 1.0), (math.nan,), (math.nan, 1.0)])
def test_shares_that_are_not_positive_or_add_up_to_more_than_one_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(Refused, match="shares"):
        PrivateSum(tuple(Part({f"w{i}": torch.zeros(1)}, 1.0, share) for i, share in enumerate(shares)))


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan, math.inf])
def test_a_bound_that_is_no_positive_number_is_an_input_error(bound: float) -> None:
    with pytest.raises(InputError, match="bound"):
        PrivateSum((Part({"w": torch.zeros(1)}, bound, 1.0),))


def test_the_secure_generator_is_the_default_and_is_fresh_each_time() -> None:
    data = (torch.randn(20, 3), torch.randint(0, 2, (20,)))
    ends = []
    for _ in range(2):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        private = cw.make_private(
            model,
            torch.optim.SGD(model.parameters(), lr=1.0),
            data,
            noise_multiplier=1.0,
            steps=1,
            batch=20,
            self_test=False,
        )
        for batch in private.batches():
            private.step(batch)
        assert private.statement().generator == SecureStream.name
        ends.append(model.weight.detach().clone())
    assert not torch.equal(*ends)


def test_a_release_is_over_the_divisor_and_rounded_once_but_its_counts_are_not() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(3, 4, generator=generator), torch.randn(5, generator=generator, dtype=torch.float64)
    parts = (
        Part({"a": a}, 0.5, 0.25),
        Part({"b": b}, 3.0, 0.5),
        Part({"count": torch.tensor(7.0, dtype=torch.float64)}, 0.5, 0.25, is_count=True),
    )
    released = release(PrivateSum(parts), EVENT, SeededStream(3), divisor=32.0, dtype=torch.float32)
    stream = SeededStream(3)
    noise, counted = stream.normal([17], narrow=True), stream.normal([1])
    scales = [1.7 * 0.5 / math.sqrt(0.25), 1.7 * 3.0 / math.sqrt(0.5), 1.7 * 0.5 / math.sqrt(0.25)]
    expected = (a.double() + scales[0] * noise[:12].view(3, 4)) / 32, (b + scales[1] * noise[12:17]) / 32
    for name, value in zip("ab", expected, strict=True):
        assert released.gradient[name].dtype == torch.float32 and torch.equal(released.gradient[name], value.float())
    assert released.deviation == {"a": scales[0] / 32, "b": scales[1] / 32}
    assert torch.equal(released.counts["count"], 7.0 + scales[2] * counted[0])


@pytest.mark.parametrize("divisor", [0.0, -2.0, math.nan])
def test_a_divisor_is_positive(divisor: float) -> None:
    with pytest.raises(InputError, match="divisor must be"):
        release(nothing(cw.flat()), EVENT, SeededStream(1), divisor)
