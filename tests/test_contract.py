"""What every clipping method promises, over the whole registry × cases.

Receives: METHODS with several settings each, combinations of them, models, and explicit gradients.
Gives: bound, sensitivity, non-finite samples, empty batches, order, chunks, formats, expressions and bad settings.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import clipwise as cw
from clipwise.methods import METHODS, WRAPPERS, parse
from clipwise.noise import release
from clipwise.randomness import SeededStream
from clipwise.records import SampleGradients, from_dense
from clipwise.step import Rule, private_sum, weigh
from clipwise.types import InputError, PoissonGaussian, PrivateSum, Refused

BASES = ("flat(0.7)", "normalised(0.7)", "automatic(0.7)", "psac(0.7)", "global_(0.7)")
PHASES = "[(0, psac(0.5)), (3, global_(2.0)), (5, layerwise(automatic(1.0))), (7, adaptive(0.4, count_share=0.1))]"

NAMES = ("flat", "normalised", "automatic", "psac", "global_", "adaptive")  # those that take a clip norm

# Every method of the registry has to be here: a new one fails `test_every_method_is_tested` until it is.
SETTINGS: dict[str, tuple[str, ...]] = {
    "flat": ("flat", "flat(0.1)", "flat(30.0)", "flat(1e-6)"),
    "normalised": ("normalised", "normalised(0.1)", "normalised(30.0)"),
    "automatic": ("automatic", "automatic(0.5, gamma=0.1)", "automatic(2.0, gamma=1e-6)", "automatic(1.0, gamma=5.0)"),
    "psac": ("psac", "psac(0.1, r=0.1)", "psac(2.0, r=1e-5)", "psac(3.0, r=1.0)", "psac(3.0, r=2.5)"),
    "global_": ("global_", "global_(0.1)", "global_(30.0)"),
    "layerwise": (
        "layerwise",
        *(f"layerwise({base})" for base in BASES),
        "layerwise(flat(2.0), noise='proportional')",
        "layerwise({'first': psac(0.3), '': flat(1.5)})",
        "layerwise({'first': normalised(0.3), 'last': global_(1.5)}, noise='proportional')",
    ),
    "adaptive": (
        "adaptive",
        "adaptive(0.3, quantile=0.9, rate=0.5, count_share=0.2)",
        "adaptive(5.0, count_share=0.9)",
    ),
    "schedule": ("schedule", *(f"schedule({PHASES}, step={step})" for step in (0, 3, 6, 7))),
    # where gradients are taken changes nothing of what is promised about them
    "inner_momentum": ("inner_momentum", "inner_momentum(adaptive(0.3), horizon=1, decay=0.1)"),
    "momentum_per_sample": ("momentum_per_sample", "momentum_per_sample(psac(0.3), rate=0.5)"),
    "self_augmentation": ("self_augmentation", "self_augmentation(layerwise(flat(0.3)), views=2, augment='flip')"),
    "bam": ("bam", "bam(automatic(0.3), radius=0.1, form='exact', alpha=0.5)"),
    "dp_sat": ("dp_sat", "dp_sat(global_(0.3), radius=0.5)"),
    "p_average": ("p_average", "p_average(psac(0.3), size=2)", "p_average(adaptive(0.3), size=3)"),
    "batch_clipping": ("batch_clipping", "batch_clipping(normalised(0.3), companions=2)"),
    "dice": ("dice", "dice(psac(0.3), 0.1, memory='none')", "dice(normalised(1.0), 1.0, automatic=True)"),
    "disk": ("disk", "disk(flat(0.3), gain=0.5, ahead=1.0)"),
}
EVERY = [text for texts in SETTINGS.values() for text in texts]
every_method = pytest.mark.parametrize("text", EVERY)


def test_every_method_is_tested() -> None:
    assert set(SETTINGS) == set(METHODS)
    assert all(parse(text).name == name for name, texts in SETTINGS.items() for text in texts)


# Explicit gradients

LIKE = {"first.weight": torch.zeros(3, 4), "first.bias": torch.zeros(3), "last.weight": torch.zeros(2, 3)}
SIZES = {name: value.numel() for name, value in LIKE.items()}


def explicit(rows: Tensor) -> SampleGradients:
    """Samples whose gradients are the rows, [sample, 21]."""
    pieces = rows.split(list(SIZES.values()), 1)
    return from_dense({n: p.reshape(-1, *LIKE[n].shape) for n, p in zip(LIKE, pieces, strict=True)}, LIKE)


def directions(samples: int, seed: int = 0) -> Tensor:
    """Unit vectors, some of them with a block that is all zero."""
    rows = torch.randn(samples, sum(SIZES.values()), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows[::3, : SIZES["first.weight"] + SIZES["first.bias"]] = 0
    return rows / rows.norm(dim=1, keepdim=True)


def summed(method: cw.Method, *chunks: SampleGradients, like: Mapping[str, Tensor] = LIKE) -> PrivateSum:
    return private_sum(method, like, chunks)[0]


def lengths(private: PrivateSum) -> list[float]:
    """Each part's length, in float64."""
    return [math.sqrt(sum(float(v.double().square().sum()) for v in part.value.values())) for part in private.parts]


def values(private: PrivateSum) -> Tensor:
    return torch.cat([v.double().flatten() for part in private.parts for v in part.value.values()])


def around(bound: float) -> list[float]:
    """Norms at and beside a threshold, as float32 sees them."""
    near = torch.tensor(bound)
    return [
        float(near),
        float(torch.nextafter(near, near * 2)),
        float(torch.nextafter(near, near / 2)),
        bound * (1 + 1e-6),
        bound * (1 - 1e-6),
    ]


NORMS = (0.0, 1e-45, 1e-38, 1e-30, 4.5e-23, 1e-22, 1e-19, 1e-8, 1e-3, 1.0, 1e3, 1e15, 1e18, 1e25, 1e30)


@every_method
def test_a_weighted_term_never_exceeds_its_bound_at_any_norm(text: str) -> None:
    method = parse(text)
    blocks = method.blocks(tuple(LIKE))
    norms = [*NORMS, *(n for block in blocks for n in around(block.bound)), *around(method.bound)]
    rows = (directions(len(norms)) * torch.tensor(norms, dtype=torch.float64)[:, None]).float()
    gradients = explicit(rows)
    finite = gradients.norms([b.names for b in blocks]).isfinite().all(1)
    weights = weigh(blocks, gradients.norms([b.names for b in blocks])).double()
    everything = gradients.materialise()
    for r, block in enumerate(blocks):
        own = torch.cat([everything[name].flatten(1) for name in block.names], 1).double()
        terms = weights[:, r] * own.norm(dim=1)
        assert (terms[finite] <= block.bound).all(), dict(zip(norms, terms.tolist(), strict=True))


@every_method
def test_what_is_really_added_for_one_sample_keeps_the_bound(text: str) -> None:
    method = parse(text)
    bounds = [block.bound for block in method.blocks(tuple(LIKE))]
    norms = [*NORMS, *(n for bound in bounds for n in around(bound))]
    rows = (directions(len(norms), seed=1) * torch.tensor(norms, dtype=torch.float64)[:, None]).float()
    for norm, row in zip(norms, rows, strict=True):
        private = summed(method, explicit(row[None]))
        for length, part in zip(lengths(private), private.parts, strict=True):
            assert length <= part.bound, f"a gradient of norm {norm} added {length} to a part of bound {part.bound}"


@given(
    text=st.sampled_from(EVERY),
    powers=st.lists(st.floats(-45, 38), min_size=1, max_size=6),
    seed=st.integers(0, 2**31),
    sparse=st.booleans(),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_the_bound_holds_whatever_the_norms(text: str, powers: list[float], seed: int, sparse: bool) -> None:
    method = parse(text)
    rows = directions(len(powers), seed)
    if sparse:
        rows = rows * (torch.rand(rows.shape, generator=torch.Generator().manual_seed(seed)) < 0.2)
    rows = (rows * 10.0 ** torch.tensor(powers, dtype=torch.float64)[:, None]).float()
    for row in rows:
        private = summed(method, explicit(row[None]))
        assert all(length <= part.bound for length, part in zip(lengths(private), private.parts, strict=True))


def test_the_bound_holds_where_squares_are_too_small_for_float32() -> None:
    # each square but the first rounds to zero: the norm that float32 sees is 700 times too short
    row = torch.full((1, 1_000_000), 2.6e-23)
    row[0, 0] = 4e-23
    like = {"first.weight": row[0]}
    private = summed(cw.normalised(1.0), from_dense({"first.weight": row}, like), like=like)
    assert lengths(private)[0] <= 1.0


def test_the_bound_holds_for_a_parameter_of_many_million_entries() -> None:
    # float32 accumulators lose what is small beside them
    row = torch.full((1, 1 << 24), 1 / 3)
    like = {"first.weight": row[0]}
    private = summed(cw.flat(1.0), from_dense({"first.weight": row}, like), like=like)
    assert lengths(private)[0] <= 1.0


def loss_of(private: PrivateSum, other: PrivateSum) -> float:
    """‖(s − s′)/(noise at σ = 1)‖: at most 1 is what one Gaussian mechanism with multiplier σ means."""
    total = 0.0
    for part, twin in zip(private.parts, other.parts, strict=True):
        moved = sum(float((part.value[n].double() - twin.value[n].double()).square().sum()) for n in part.value)
        total += moved / (part.bound / math.sqrt(part.share)) ** 2
    return math.sqrt(total)


@every_method
@pytest.mark.parametrize("scale", [1e-12, 0.1, 1.0, 1e6])
def test_removing_one_sample_moves_the_sum_by_at_most_the_sensitivity(text: str, scale: float) -> None:
    method = parse(text)
    rows = (directions(9, seed=2) * scale * torch.logspace(-2, 2, 9, dtype=torch.float64)[:, None]).float()
    whole = summed(method, explicit(rows))
    for left_out in range(9):
        rest = summed(method, explicit(torch.cat([rows[:left_out], rows[left_out + 1 :]])))
        gradient = [part for part in whole.parts if not part.is_count]
        moved = math.hypot(
            *(
                float(torch.linalg.vector_norm(part.value[n].double() - twin.value[n].double()))
                for part, twin in zip(gradient, rest.parts, strict=False)
                for n in part.value
            )
        )
        assert moved <= method.sensitivity(tuple(LIKE))
        for part, twin in zip(whole.parts, rest.parts, strict=True):
            if part.is_count:
                assert abs(float(part.value["count"] - twin.value["count"])) <= part.bound == 0.5 * method.moves
        assert loss_of(whole, rest) <= 1.0


@every_method
def test_replacing_one_sample_moves_the_sum_by_at_most_twice_as_much(text: str) -> None:
    method = parse(text)
    rows = (directions(3, seed=3) * 10).float()
    other = rows.clone()
    other[0] = -rows[0]
    assert loss_of(summed(method, explicit(rows)), summed(method, explicit(other))) <= 2.0


@every_method
def test_the_sensitivity_is_reached_so_no_bound_is_looser_than_stated(text: str) -> None:
    method = parse(text)
    blocks = method.blocks(tuple(LIKE))
    reached = 0.0
    for factor in (1e-3, 0.5, 0.999, 1e3, 1e9):  # every block at this many times its bound
        values = {name: torch.zeros(1, *value.shape) for name, value in LIKE.items()}
        for block in blocks:
            values[block.names[0]].view(-1)[0] = factor * block.bound
        private = summed(method, from_dense(values, LIKE))
        gradient = [n for n, part in zip(lengths(private), private.parts, strict=True) if not part.is_count]
        reached = max(reached, method.moves * math.hypot(*gradient))
    assert 0.9 * method.sensitivity(tuple(LIKE)) <= reached <= method.sensitivity(tuple(LIKE))


def test_rounding_while_adding_does_not_multiply_what_one_sample_moves() -> None:
    # In float32 the short terms vanish beside a sum above 2^16 and are rounded up below it, and one sample decides
    # on which side the sum is: what the short ones add would then depend on it.
    like = {"w": torch.zeros(1)}
    long = from_dense({"w": torch.ones(1 << 16, 1)}, like)
    longer = from_dense({"w": torch.ones((1 << 16) + 1, 1)}, like)
    short = [from_dense({"w": torch.full((1, 1), -0.003)}, like)] * 1000
    one, other = (summed(cw.flat(1.0), first, *short, like=like) for first in (long, longer))
    assert loss_of(one, other) <= 1.0 + 1e-3


@every_method
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 14, 20])
def test_a_non_finite_sample_contributes_exactly_zero_and_is_counted(text: str, bad: float, place: int) -> None:
    method = parse(text)
    rows = (directions(4, seed=4) * 2).float()
    broken = rows.clone()
    broken[1, place] = bad
    alone, seen = private_sum(method, LIKE, [explicit(broken[1:2])])
    assert (values(alone) == 0).all() and (seen.samples, seen.non_finite) == (1, 1)
    among, seen = private_sum(method, LIKE, [explicit(broken)])
    assert seen.non_finite == 1
    torch.testing.assert_close(values(among), values(summed(method, explicit(rows[[0, 2, 3]]))), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "method",
    [
        cw.psac(1.0, r=1e-18),
        cw.automatic(1.0, gamma=1e-18),
        cw.flat(1e-18),
        # methods of a user's own, with numbers that float32 does not have
        replace(cw.psac(), weigh=lambda n: 1.0 / (n + 1e-50 / (n + 1e-50))),
        replace(cw.automatic(), weigh=lambda n: n / (n + 1e-50)),
    ],
)
def test_a_setting_too_small_for_float32_cannot_poison_the_sum(method: cw.Method) -> None:
    # 0/0 for a gradient of zero would make the whole sum NaN: one sample would decide about everything
    rows = torch.zeros(2, sum(SIZES.values()))
    rows[1] = 1.0
    assert values(summed(method, explicit(rows))).isfinite().all()


@every_method
def test_an_empty_batch_gives_zeros_and_still_releases_noise(text: str) -> None:
    method = parse(text)
    for chunks in ([], [explicit(torch.zeros(0, sum(SIZES.values())))]):
        private, seen = private_sum(method, LIKE, chunks)
        assert (values(private) == 0).all() and seen.samples == 0
        released = release(private, PoissonGaussian(1.0, 0.1), SeededStream(1))
        assert all((value != 0).all() for value in (*released.gradient.values(), *released.counts.values()))
        assert set(released.gradient) == set(LIKE)


@every_method
def test_the_order_of_samples_leaves_the_sum(text: str) -> None:
    method = parse(text)
    rows = (directions(12, seed=5) * torch.logspace(-2, 2, 12, dtype=torch.float64)[:, None]).float()
    shuffled = rows[torch.randperm(12, generator=torch.Generator().manual_seed(6))]
    first, second = (summed(method, explicit(r)) for r in (rows, shuffled))
    torch.testing.assert_close(values(first), values(second), rtol=1e-5, atol=1e-6 * method.bound)


@every_method
@pytest.mark.parametrize("most", [1, 5, 11])
def test_chunks_leave_the_sum_and_the_noise(text: str, most: int) -> None:
    method = parse(text)
    rows = (directions(12, seed=7) * torch.logspace(-2, 2, 12, dtype=torch.float64)[:, None]).float()
    one, seen = private_sum(method, LIKE, [explicit(rows)])
    many, seen_too = private_sum(method, LIKE, [explicit(piece) for piece in rows.split(most)])
    torch.testing.assert_close(values(one), values(many), rtol=1e-5, atol=1e-6 * method.bound)
    assert (seen.samples, seen.non_finite) == (seen_too.samples, seen_too.non_finite)
    event = PoissonGaussian(2.0, 0.1)
    first, second = (release(private, event, SeededStream(8)).gradient for private in (one, many))
    for name in LIKE:
        torch.testing.assert_close(first[name], second[name], rtol=1e-4, atol=1e-5 * method.bound)


@every_method
def test_shares_are_positive_and_add_up_to_at_most_one(text: str) -> None:
    method = parse(text)
    for names in (tuple(LIKE), ("first.weight", "last.weight"), (*(f"first.{i}.weight" for i in range(9)), "last.w")):
        blocks = method.blocks(names)
        shares = [block.share for block in blocks] + ([method.count.share] if method.count else [])
        assert min(shares) > 0 and sum(shares) <= 1 + 1e-12
        assert sum(shares) == pytest.approx(1), "noise is wasted"
        assert sorted(name for block in blocks for name in block.names) == sorted(names), "blocks partition the names"
        joint = math.hypot(*(block.bound for block in blocks))
        assert method.sensitivity(names) == pytest.approx(joint * (1 if method.unit == 1 else 2))


def test_a_sensitivity_without_names_is_never_smaller_than_the_bound() -> None:
    for text in EVERY:
        method = parse(text)
        assert method.sensitivity() >= method.bound * (1 - 1e-12), text


@every_method
def test_an_expression_gives_the_same_method_again(text: str) -> None:
    method = parse(text)
    again = parse(str(method))
    assert str(again) == str(method) and again.bound == method.bound and again.name == method.name
    norms = torch.logspace(-6, 6, 50)
    event = PoissonGaussian(1.0, 0.1)
    for step in range(10):  # through every phase of a schedule, and ten updates of a quantile
        for first, second in zip(method.blocks(tuple(LIKE)), again.blocks(tuple(LIKE)), strict=True):
            assert (first.names, first.bound, first.share) == (second.names, second.bound, second.share)
            assert torch.equal(first.weigh(norms), second.weigh(norms))
        private = summed(method, explicit(directions(4, seed=step).float()))
        released = release(private, event, SeededStream(step))
        method, again = method.next(released, 4.0), parse(str(again.next(released, 4.0)))
        assert str(method) == str(again)


@every_method
def test_rules_of_one_method_are_equal_whenever_they_are_asked_for(text: str) -> None:
    method = parse(text)  # what was recorded for one rule would else never serve for the next step's
    assert Rule(method.blocks(tuple(LIKE))) == Rule(method.blocks(tuple(LIKE)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [0, 0.0, -1.0, math.nan, math.inf, -math.inf, True, None, "1", [1.0], 1j])
def test_a_clip_norm_that_is_no_positive_number_is_an_input_error(name: str, bad: Any) -> None:
    with pytest.raises(InputError, match="clip_norm"):
        METHODS[name](bad)


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        *((f"{name}({value})", "clip_norm") for name in NAMES for value in (1e300, 1.1e18, 9e-19, 1e-300)),
        ("layerwise({'': flat(1.0), 'last': flat(1e300)})", "clip_norm"),
        *((f"automatic(1.0, gamma={value})", "gamma") for value in (1e300, 1e-50)),
        *((f"psac(1.0, r={value})", "r") for value in (1e300, 1e-50)),
        ("dice(flat(1.0), feedback_norm=1e19)", "feedback_norm"),
        ("bam(flat(1.0), radius=1e300)", "radius"),
        ("dp_sat(flat(1.0), radius=1e300)", "radius"),
        ("disk(flat(1.0), ahead=1e300)", "ahead"),
        ("disk(flat(1.0), ahead=1e-300)", "ahead"),
        ("disk(flat(1.0), gain=1e-300)", "gain"),
    ],
)
def test_a_length_whose_square_float32_cannot_hold_is_an_input_error(text: str, setting: str) -> None:
    with pytest.raises(
        InputError, match=rf"^{setting} must be from .* to 1e\+18, .* got .*: write a number nearer to 1$"
    ):
        parse(text)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("norm", [1e-18, 1e18])
def test_the_shortest_and_the_longest_clip_norm_give_finite_sums_and_noise(name: str, norm: float) -> None:
    method = METHODS[name](norm)
    rows = (directions(5, seed=9) * torch.tensor([0.0, 1e-18, 1.0, 1e9, 1e18], dtype=torch.float64)[:, None]).float()
    private = summed(method, explicit(rows))
    assert values(private).isfinite().all()
    released = release(private, PoissonGaussian(1.0, 0.1), SeededStream(1), 4.0, torch.float32)
    assert all(value.isfinite().all() and (value != 0).all() for value in released.gradient.values())
    assert all(value.square().sum().isfinite() for value in released.gradient.values())


@pytest.mark.parametrize(
    "text",
    [
        "automatic(1.0, gamma=0)",
        "automatic(1.0, gamma=-0.1)",
        "psac(1.0, r=0)",
        "psac(1.0, r=-1)",
        "adaptive(1.0, quantile=0)",
        "adaptive(1.0, quantile=1)",
        "adaptive(1.0, rate=0)",
        "adaptive(1.0, count_share=0)",
        "adaptive(1.0, count_share=1)",
        "adaptive(1.0, count_share=True)",
        "layerwise(1.0)",
        "layerwise({})",
        "layerwise({'a': 1.0})",
        "layerwise(flat(1.0), noise='half')",
        "layerwise(layerwise(flat(1.0)))",
        "layerwise(adaptive(1.0))",
        "layerwise(schedule([(0, flat(1.0))]))",
        "layerwise({'': adaptive(1.0)})",
        "schedule([])",
        "schedule([(1, flat(1.0))])",
        "schedule([(0, flat(1.0)), (0, psac(1.0))])",
        "schedule([(0, flat(1.0)), (5, psac(1.0)), (3, psac(1.0))])",
        "schedule([(0, 1.0)])",
        "schedule([(0.0, flat(1.0))])",
        "schedule([(0, flat(1.0))], step=-1)",
        "schedule(5)",
        "schedule([5])",
        "inner_momentum(1.0)",
        "inner_momentum(flat(1.0), horizon=-1)",
        "inner_momentum(flat(1.0), decay=0)",
        "bam(flat(1.0), radius=-1)",
        "bam(flat(1.0), form='approximate')",
        "bam(flat(1.0), alpha=0)",
        "self_augmentation(flat(1.0), views=0)",
        "p_average(dice(flat(1.0)))",
        "p_average(p_average(flat(1.0)))",
        "p_average(flat(1.0), 0)",
        "momentum_per_sample(dice(flat(1.0)))",
        "dice(layerwise(flat(1.0)))",
        "dice(adaptive(1.0))",
        "dice(flat(1.0), memory='some')",
        "dice(flat(1.0), blocks=0)",
        "dice(flat(1.0), -0.1)",
        "schedule([(0, dice(flat(1.0)))])",
        "layerwise(bam(flat(1.0)))",
        "disk(flat(1.0), gain=0)",
        "flat(1.0, 2.0)",
        "flat(clip_norm=1.0, **{'a': 1})",
        "flat(flat(1.0))",
        "",
        "flat(",
        "1.0",
        "flat.weigh",
        "flat(1.0)(2.0)",
        "__import__('os')",
        "flat(clip_norm=open)",
    ],
)
def test_wrong_settings_are_input_errors(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("bad", [1.0, "flat(1.0)", cw.flat, [cw.flat()]])
@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.__name__)
def test_a_wrapper_takes_a_method_and_nothing_else(wrapper: Callable[..., cw.Method], bad: Any) -> None:
    assert str(wrapper(None)) == str(wrapper())
    with pytest.raises(InputError, match=rf"{wrapper.__name__} takes a method such as flat\(1\.0\), got "):
        wrapper(bad)


@pytest.mark.parametrize("text", ["layerwise({})", "schedule(5)", "schedule([5])"])
def test_wrong_settings_are_input_errors_without_parsing_too(text: str) -> None:
    with pytest.raises(InputError):
        eval(text, {"layerwise": cw.layerwise, "schedule": cw.schedule})


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("psca(1.0)", "'psac'"),
        ("globl_", "'global_'"),
        ("flat(clipnorm=1.0)", "'clip_norm'"),
        ("adaptive(quantil=0.5)", "'quantile'"),
        ("automatic(gama=0.1)", "'gamma'"),
        ("layerwise(flat(1.0), noise='proportionl')", "'proportional'"),
    ],
)
def test_an_unknown_name_is_an_error_that_names_the_nearest(text: str, near: str) -> None:
    with pytest.raises(InputError, match=f"did you mean {near}"):
        parse(text)


def test_factories_of_every_kind_can_be_named_in_an_expression(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(*, clip_norm: float = 1.0) -> cw.Method:
        return cw.flat(clip_norm)

    monkeypatch.setitem(METHODS, "half", partial(cw.psac, r=0.5))
    monkeypatch.setitem(METHODS, "named", named)
    assert str(parse("half(2.0)")) == str(parse("half(clip_norm=2.0)")) == str(cw.psac(2.0, r=0.5))
    assert str(parse("half(r=0.25)")) == str(cw.psac(r=0.25))
    assert str(parse("bam(named(clip_norm=3.0))")) == str(cw.bam(cw.flat(3.0)))
    for text in ("half(clipnorm=1.0)", "named(clipnorm=1.0)"):
        with pytest.raises(InputError, match="did you mean 'clip_norm'"):
            parse(text)
    with pytest.raises(InputError, match="named"):
        parse("named(3.0)")


def test_a_block_that_misses_a_parameter_is_an_error_that_names_it() -> None:
    with pytest.raises(InputError, match=r"last\.weight"):
        cw.layerwise({"first": cw.flat(1.0)}).blocks(tuple(LIKE))


def test_a_block_that_no_parameter_falls_in_is_an_error_that_names_it() -> None:
    with pytest.raises(InputError, match="hed"):
        cw.layerwise({"": cw.flat(1.0), "hed": cw.flat(0.1)}).blocks(tuple(LIKE))


def test_blocks_without_their_joint_sensitivity_are_refused() -> None:
    # paper 2 writes σ C_r in block r: shares of 1 each, which is σ/√L jointly
    sound = cw.layerwise(cw.flat(1.0))
    unsound = replace(sound, split=lambda names: tuple(replace(b, share=1.0) for b in sound.blocks(names)))
    with pytest.raises(Refused, match="joint"):
        summed(unsound, explicit(directions(2).float()))


def test_a_method_whose_weights_break_their_promise_is_held_to_its_bound() -> None:
    rows = (directions(1) * 50).float()
    for method in (replace(cw.flat(100.0), bound=0.01), replace(cw.flat(1.0), weigh=lambda n: -torch.ones_like(n))):
        try:
            private = summed(method, explicit(rows))
        except InputError:
            continue
        assert lengths(private)[0] <= method.bound


# Models


class Case(NamedTuple):
    model: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], Tensor]


class Words(nn.Module):
    """An embedding, a tied output layer, and a bias: what is used twice is bounded once."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Embedding(11, 4, padding_idx=0)
        self.last = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(
            torch.tanh(self.first(ids)).mean(1) + (self.first(ids) @ self.first.weight.T).mean((1, 2))[:, None]
        )


def named(first: nn.Module, *rest: nn.Module) -> nn.Module:
    *between, last = rest
    return nn.Sequential(
        OrderedDict([("first", first), *((f"between{i}", m) for i, m in enumerate(between)), ("last", last)])
    )


CASES = {
    "mlp": Case(
        lambda: named(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3)),
        lambda n, g: torch.randn(n, 6, generator=g, dtype=torch.float64),
    ),
    "cnn": Case(
        lambda: named(
            nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.GroupNorm(2, 4, affine=False), nn.Flatten(), nn.Linear(36, 3)
        ),
        lambda n, g: torch.randn(n, 2, 5, 5, generator=g, dtype=torch.float64),
    ),
    "embedding": Case(Words, lambda n, g: torch.randint(0, 11, (n, 5), generator=g)),
}
# the methods' first two settings each, and the rest on explicit gradients only: a model changes norms, not weights
SOME = [
    text
    for name, texts in SETTINGS.items()
    if name not in {wrapper.__name__ for wrapper in WRAPPERS}
    for text in (texts if name in ("layerwise", "schedule") else texts[:2])
]
some_methods = pytest.mark.parametrize("text", SOME)
every_case = pytest.mark.parametrize("case", CASES)


def scaled_loss(model: nn.Module, batch: Any) -> Tensor:
    """Each sample's loss times a factor of its own: a handle on its gradient's norm."""
    inputs, labels, factors = batch
    return nn.functional.cross_entropy(model(inputs), labels, reduction="none") * factors


@cache  # no method changes them, and all are asked about the same
def gradients_of(
    case: str, factors: tuple[float, ...], keep: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> SampleGradients:
    """Those of the samples ``keep`` of as many as there are factors."""
    torch.manual_seed(0)
    model = CASES[case].model().to(torch.float64).to(dtype)
    generator = torch.Generator().manual_seed(1)
    inputs = CASES[case].inputs(len(factors), generator)
    labels = torch.randint(0, 3, (len(factors),), generator=generator)
    inputs = inputs.to(dtype) if inputs.is_floating_point() else inputs
    batch = (inputs, labels, torch.tensor(factors, dtype=dtype))
    return cw.per_sample(model, scaled_loss, tuple(t[list(keep)] for t in batch))


def model_sum(
    method: cw.Method,
    case: str,
    factors: tuple[float, ...],
    *chunks: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
) -> PrivateSum:
    found = [gradients_of(case, factors, keep, dtype) for keep in chunks or [tuple(range(len(factors)))]]
    return summed(method, *found, like=found[0].like)


FACTORS = (0.0, 1e-30, 1e-22, 1e-6, 0.1, 1.0, 7.0, 1e4, 1e15, 1e30)


@every_case
@some_methods
def test_a_model_s_samples_keep_bound_and_sensitivity(case: str, text: str) -> None:
    method, everyone = parse(text), range(len(FACTORS))
    whole = model_sum(method, case, FACTORS)
    for i in everyone:
        alone = model_sum(method, case, FACTORS, (i,))
        assert all(length <= part.bound for length, part in zip(lengths(alone), alone.parts, strict=True))
        others = model_sum(method, case, FACTORS, tuple(j for j in everyone if j != i))
        assert loss_of(whole, others) <= 1.0 + 1e-6


@every_case
@some_methods
def test_a_model_s_non_finite_sample_adds_nothing(case: str, text: str) -> None:
    method, factors = parse(text), (1.0, math.nan, 2.0, math.inf)
    gradients = gradients_of(case, factors, (0, 1, 2, 3))
    private, seen = private_sum(method, gradients.like, [gradients])
    rest = model_sum(method, case, factors, (0, 2))
    assert seen.non_finite == 2
    torch.testing.assert_close(values(private), values(rest), rtol=1e-5, atol=1e-6 * method.bound)


@every_case
@some_methods
def test_a_model_s_sum_does_not_depend_on_order_or_chunks(case: str, text: str) -> None:
    method, factors = parse(text), (0.1, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
    whole = values(model_sum(method, case, factors))
    pieces = values(model_sum(method, case, factors, (6,), (), (5, 0, 3), (4, 1), (2,)))
    torch.testing.assert_close(pieces, whole, rtol=1e-4, atol=1e-5 * method.bound)


@every_case
@some_methods
def test_float32_is_close_to_float64(case: str, text: str) -> None:
    method, factors = parse(text), (0.01, 0.3, 1.0, 5.0, 40.0)
    single, double = (values(model_sum(method, case, factors, dtype=dtype)) for dtype in (torch.float32, torch.float64))
    torch.testing.assert_close(single, double, rtol=1e-3, atol=1e-4 * method.bound)


@every_case
@pytest.mark.parametrize("text", ["flat(0.5)", "normalised(0.5)", "psac(0.5)", "layerwise(flat(0.5))"])
def test_a_model_in_bfloat16_keeps_the_bound_for_what_is_summed(case: str, text: str) -> None:
    method, factors = parse(text), (0.0, 1e-3, 1.0, 3.0, 1e4)
    for i in range(5):
        private = model_sum(method, case, factors, (i,), dtype=torch.bfloat16)
        assert all(v.dtype != torch.bfloat16 for part in private.parts for v in part.value.values())
        assert all(length <= part.bound for length, part in zip(lengths(private), private.parts, strict=True))
