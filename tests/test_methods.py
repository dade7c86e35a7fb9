"""Each clipping method against its naive transcription, and the limits that its paper states.

Receives: tests/naive.py, written without looking at the methods.
Gives: agreement in float64, limits, the adaptive quantile, schedules, and the noise of layerwise clipping.
"""

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import clipwise as cw
import naive
from clipwise import methods, models, postprocess
from clipwise.methods import METHODS, Method, papers, parse
from clipwise.noise import release
from clipwise.randomness import SeededStream
from clipwise.records import SampleGradients, from_dense
from clipwise.step import MARGIN, private_sum
from clipwise.types import Citation, InputError, Part, PoissonGaussian, PrivateSum, Released
from streams import Ones

BLOCKS = {"a.weight": 5, "a.bias": 2, "b.weight": 4}
LAYERS = ((0, 7), (7, 11))  # columns of the layers a and b
LIKE = {name: torch.zeros(size, dtype=torch.float64) for name, size in BLOCKS.items()}


def gradients(g: np.ndarray) -> SampleGradients:
    pieces = torch.from_numpy(np.array(g, dtype=np.float64)).split(list(BLOCKS.values()), 1)
    return from_dense(dict(zip(BLOCKS, pieces, strict=True)), LIKE)


def batch(seed: int = 0, samples: int = 40) -> np.ndarray:
    """Gradients of norms from about 1e-3 to 1e3, none at a threshold, and one that is zero."""
    g = np.random.default_rng(seed).normal(size=(samples, sum(BLOCKS.values())))
    g *= np.logspace(-3.03, 3.01, samples)[:, None] / np.linalg.norm(g, axis=1, keepdims=True)
    g[samples // 2] = 0
    return g


def summed(method: Method, g: np.ndarray) -> tuple[np.ndarray, float | None]:
    """The method's un-noised sum, without the margin for rounding, and its count."""
    private, _ = private_sum(method, LIKE, [gradients(g)])
    values = {name: v for part in private.parts if not part.is_count for name, v in part.value.items()}
    counts = [float(part.value["count"]) for part in private.parts if part.is_count]
    flat = torch.cat([values[name].flatten() for name in BLOCKS]).double().numpy() * (1 + MARGIN)
    return flat, counts[0] if counts else None


CLAIMS: list[tuple[str, Callable[[np.ndarray], np.ndarray]]] = [
    *((f"flat({c})", lambda g, c=c: naive.flat(g, c)) for c in (0.1, 1.0, 20.0)),
    *((f"normalised({c})", lambda g, c=c: naive.normalised(g, c)) for c in (0.1, 1.0, 20.0)),
    *(
        (f"automatic({c}, gamma={y})", lambda g, c=c, y=y: naive.automatic(g, c, y))
        for c, y in ((1.0, 0.01), (0.3, 0.1), (5.0, 2.0))
    ),
    *((f"psac({c}, r={r})", lambda g, c=c, r=r: naive.psac(g, c, r)) for c, r in ((1.0, 0.1), (0.1, 1e-3), (4.0, 2.0))),
    *((f"global_({c})", lambda g, c=c: naive.global_(g, c)) for c in (0.1, 1.0, 20.0)),
    *((f"adaptive({c})", lambda g, c=c: naive.flat(g, c)) for c in (0.1, 1.0, 20.0)),
]


@pytest.mark.parametrize(("text", "claim"), CLAIMS, ids=[text for text, _ in CLAIMS])
def test_a_method_s_sum_is_the_paper_s(text: str, claim: Callable[[np.ndarray], np.ndarray]) -> None:
    for seed in range(3):
        g = batch(seed)
        np.testing.assert_allclose(summed(parse(text), g)[0], claim(g), rtol=1e-10, atol=1e-12)
    assert (summed(parse(text), g[:0])[0] == claim(g[:0])).all()


@pytest.mark.parametrize(
    ("base", "weigh"),
    [
        ("flat", naive.flat),
        ("normalised", naive.normalised),
        ("automatic", lambda g, c: naive.automatic(g, c, 0.01)),
        ("psac", lambda g, c: naive.psac(g, c, 0.1)),
        ("global_", naive.global_),
    ],
)
def test_layerwise_clips_each_layer_by_its_own_norm(base: str, weigh: naive.Weigh) -> None:
    g = batch(5)
    blocks = [g[:, start:stop] for start, stop in LAYERS]
    each = 2.0 / math.sqrt(2)  # so that the joint sensitivity is the base's
    expected = np.concatenate(naive.layerwise(blocks, [each, each], weigh))
    np.testing.assert_allclose(summed(parse(f"layerwise({base}(2.0))"), g)[0], expected, rtol=1e-10, atol=1e-12)
    assert cw.layerwise(METHODS[base](2.0)).sensitivity(tuple(BLOCKS)) == pytest.approx(2.0)


def test_layerwise_rescales_a_method_of_the_user_s_own_once_its_factory_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def half(clip_norm: float) -> Method:
        return Method("half", cw.flat().citation, {"clip_norm": clip_norm}, lambda n: clip_norm / (2 * n), clip_norm)

    method = cw.layerwise(half(2.0))
    with pytest.raises(InputError, match=r"write clipwise\.METHODS\['half'\] = its factory, or a method for"):
        method.blocks(tuple(BLOCKS))
    monkeypatch.setitem(METHODS, "half", half)
    assert method.sensitivity(tuple(BLOCKS)) == pytest.approx(2.0)


def test_layerwise_with_a_mapping_gives_each_block_its_own_method_and_bound() -> None:
    g = batch(6)
    method = cw.layerwise({"a.": cw.psac(0.3), "b": cw.global_(4.0)})
    expected = np.concatenate([naive.psac(g[:, :7], 0.3, 0.1), naive.global_(g[:, 7:], 4.0)])
    np.testing.assert_allclose(summed(method, g)[0], expected, rtol=1e-10, atol=1e-12)
    assert method.sensitivity(tuple(BLOCKS)) == pytest.approx(naive.bound("layerwise", [0.3, 4.0]))


def test_the_longest_prefix_decides_about_a_parameter() -> None:
    method = cw.layerwise({"": cw.flat(1.0), "a": cw.flat(2.0), "a.bias": cw.flat(3.0)})
    assert {block.bound: block.names for block in method.blocks(tuple(BLOCKS))} == {
        1.0: ("b.weight",),
        2.0: ("a.weight",),
        3.0: ("a.bias",),
    }


def test_a_block_is_a_module_s_and_not_that_of_every_name_that_begins_alike() -> None:
    names = ("layer1.weight", "layer10.weight", "layer1x", "head")
    method = cw.layerwise({"layer1": cw.flat(1.0), "layer10.": cw.flat(2.0), "head": cw.flat(3.0), "": cw.flat(4.0)})
    assert {block.bound: block.names for block in method.blocks(names)} == {
        1.0: ("layer1.weight",),
        2.0: ("layer10.weight",),
        3.0: ("head",),
        4.0: ("layer1x",),
    }


@pytest.mark.parametrize("base", ["flat", "normalised", "automatic", "psac", "global_"])
def test_the_stated_bound_is_the_paper_s(base: str) -> None:
    for c in (0.1, 3.0):
        assert METHODS[base](c).bound == naive.bound(base, c)


# Limits


def weight(method: Method, norm: float) -> float:
    return float(method.weigh(torch.tensor([norm], dtype=torch.float64)))


@pytest.mark.parametrize(("c", "r"), [(1.0, 0.1), (0.1, 0.5), (3.0, 1e-4), (2.0, 1.0), (2.0, 3.0)])
def test_psac_s_largest_weight_is_where_the_paper_says(c: float, r: float) -> None:
    method = cw.psac(c, r)
    largest, where = naive.psac_largest_weight(c, r), naive.psac_norm_of_largest_weight(r)
    assert weight(method, where) == pytest.approx(largest, rel=1e-12)
    norms = torch.logspace(-8, 4, 4001, dtype=torch.float64)
    assert float(method.weigh(norms).max()) <= largest * (1 + 1e-12)
    if r <= 1:
        assert largest == pytest.approx(c / (2 * math.sqrt(r) - r))


@pytest.mark.parametrize("r", [1e-3, 0.1, 1.0])
def test_psac_s_weight_tends_to_the_clip_norm_for_small_gradients(r: float) -> None:
    assert weight(cw.psac(0.4, r), 1e-12) == pytest.approx(naive.psac_weight_at_zero(0.4), rel=1e-6)
    assert weight(cw.psac(0.4, r), 1e9) * 1e9 == pytest.approx(0.4, rel=1e-6)


def test_automatic_s_weight_tends_to_clip_norm_over_gamma() -> None:
    assert weight(cw.automatic(0.5, 0.02), 1e-14) == pytest.approx(naive.automatic_largest_weight(0.5, 0.02))


def test_normalised_is_zero_at_zero_and_of_full_length_elsewhere() -> None:
    assert weight(cw.normalised(2.0), 0.0) == 0.0
    for norm in (1e-9, 1.0, 1e9):
        assert weight(cw.normalised(2.0), norm) * norm == pytest.approx(2.0)


def test_flat_leaves_what_is_short_and_shortens_what_is_long() -> None:
    assert weight(cw.flat(2.0), 1.9) == weight(cw.flat(2.0), 2.0) == 1.0
    assert weight(cw.flat(2.0), 8.0) == 0.25
    assert weight(cw.flat(2.0), 0.0) == 1.0


def test_global_keeps_a_gradient_exactly_at_its_threshold_and_nothing_beyond() -> None:
    for dtype in (torch.float32, torch.float64):
        at = torch.tensor([0.5, 1.5, 64.0], dtype=dtype)
        for value in at:
            method = cw.global_(float(value))
            beside = torch.stack([torch.nextafter(value, value - 1), value, torch.nextafter(value, value + 1)])
            assert method.weigh(beside).tolist() == [1.0, 1.0, 0.0]


# Adaptive


def moved(method: Method, sigma: float, g: np.ndarray | None = None) -> tuple[PrivateSum, Released]:
    private, _ = private_sum(method, LIKE, [gradients(batch() if g is None else g)])
    return private, release(private, PoissonGaussian(sigma, 0.1), Ones(0))


def scale(before: Part, after: dict[str, Tensor]) -> float:
    """The standard deviation that release used for a part."""
    found = torch.cat([(after[n].double() - v.double()).flatten() for n, v in before.value.items()])
    assert float(found.max() - found.min()) <= 1e-5 * float(found.mean()), "one scale within a part"
    return float(found.mean())


@pytest.mark.parametrize("share", [1e-4, 0.01, 0.5, 0.9])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 7.0])
def test_adaptive_s_realised_noise_fulfils_the_joint_identity(share: float, sigma: float) -> None:
    c = 0.3
    private, released = moved(cw.adaptive(c, count_share=share), sigma)
    sum_part, count_part = private.parts
    s_g, s_b = scale(sum_part, released.gradient) / c, scale(count_part, released.counts)
    assert 1 / s_g**2 + 1 / (2 * s_b) ** 2 == pytest.approx(1 / sigma**2, rel=1e-5)
    assert s_g == pytest.approx(naive.adaptive_gradient_noise(sigma, s_b), rel=1e-5)
    assert released.event == PoissonGaussian(sigma, 0.1)


def test_adaptive_counts_and_updates_as_the_table_says() -> None:
    g, c = batch(7), 0.8
    method = cw.adaptive(c, quantile=0.7, rate=0.3)
    _, count = summed(method, g)
    assert count == naive.adaptive_count(g, c)
    _, released = moved(method, 1.0, g)
    noisy = float(released.counts["count"])
    following = method.next(released, 25.0)
    assert following.bound == pytest.approx(naive.adaptive_update(c, noisy, 25.0, 0.7, 0.3), rel=1e-6)
    assert following.settings | {"clip_norm": c} == method.settings


def test_adaptive_divides_by_the_expected_batch_and_not_by_the_realised_one() -> None:
    _, released = moved(cw.adaptive(1.0), 1.0)
    first, second = (cw.adaptive(1.0).next(released, expected).bound for expected in (40.0, 80.0))
    count = float(released.counts["count"])
    assert math.log(first / second) == pytest.approx(-0.2 * (count / 40 - count / 80), rel=1e-5)


@pytest.mark.parametrize("count", [1e30, -1e30])
def test_one_wild_draw_cannot_take_adaptive_out_of_the_range_of_floats(count: float) -> None:
    method = cw.adaptive(1.0)
    for _ in range(100):
        method = method.next(Released({}, {"count": torch.tensor(count)}, PoissonGaussian(1.0, 0.1), {}), 1.0)
        assert 0 < method.bound < math.inf


@pytest.mark.parametrize("quantile", [0.2, 0.5, 0.8])
def test_adaptive_converges_to_the_quantile_of_a_stationary_distribution(quantile: float) -> None:
    rng = np.random.default_rng(11)
    norms = np.exp(rng.normal(1.0, 0.8, size=4000))
    target = float(np.quantile(norms, quantile))
    method, like, rate = cw.adaptive(0.05, quantile=quantile, rate=0.3, count_share=0.1), {"w": torch.zeros(1)}, 0.05
    stream, late = SeededStream(12), []
    for step in range(160):
        drawn = norms[rng.random(len(norms)) < rate]
        chunk = from_dense({"w": torch.from_numpy(drawn).float()[:, None]}, like)
        private, _ = private_sum(method, like, [chunk])
        assert private.parts[0].bound == method.bound
        released = release(private, PoissonGaussian(1.0, rate), stream.at(step))
        method = method.next(released, rate * len(norms))
        late += [method.bound] if step >= 80 else []
    assert np.exp(np.mean(np.log(late))) == pytest.approx(target, rel=0.1)


# Schedule

PHASES = [(0, cw.flat(1.0)), (3, cw.global_(20.0)), (5, cw.layerwise(cw.psac(0.5)))]


def test_a_schedule_switches_at_its_steps_and_its_noise_follows_the_active_bound() -> None:
    method, g = cw.schedule(PHASES), batch(8)
    for step in range(8):
        active = naive.schedule(step, PHASES)
        private, released = moved(method, 2.0, g)
        expected, _ = private_sum(active, LIKE, [gradients(g)])
        assert [(p.bound, p.share) for p in private.parts] == [(p.bound, p.share) for p in expected.parts]
        for part, twin in zip(private.parts, expected.parts, strict=True):
            assert all(torch.equal(part.value[n], twin.value[n]) for n in part.value)
            assert scale(part, released.gradient) == pytest.approx(2.0 * active.sensitivity(tuple(BLOCKS)), rel=1e-4)
        method = method.next(released, 10.0)


def test_a_phase_keeps_its_own_state_while_it_is_active() -> None:
    method = cw.schedule([(0, cw.adaptive(1.0)), (2, cw.flat(9.0))])
    alone = cw.adaptive(1.0)
    for step in range(4):
        if step < 2:
            assert method.bound == alone.bound and method.count is not None
        else:
            assert method.bound == 9.0 and method.count is None
        _, released = moved(method, 1.0)
        if step < 2:
            alone = alone.next(released, 40.0)
        method = method.next(released, 40.0)


def test_a_schedule_resumes_from_its_expression_at_the_same_step() -> None:
    method = cw.schedule(PHASES)
    for _ in range(4):
        method = parse(str(method.next(Released({}, {}, PoissonGaussian(1.0, 0.1), {}), 10.0)))
    assert method.settings["step"] == 4 and method.bound == 20.0


def test_the_phases_of_a_schedule_are_known_before_it_begins() -> None:
    inner = cw.schedule([(0, cw.flat(2.0)), (4, cw.flat(3.0))])
    method = cw.schedule([(0, cw.flat(1.0)), (2, inner), (9, cw.flat(4.0))])
    assert [phase.bound for phase in method.phases] == [1.0, 2.0, 3.0, 4.0]
    assert [phase.bound for phase in cw.schedule(PHASES, 3).phases] == [20.0, 0.5]
    around = cw.p_average(cw.inner_momentum(method), size=3)
    assert [(phase.name, phase.unit, phase.bound) for phase in around.phases] == [
        ("p_average", 3, bound) for bound in (1.0, 2.0, 3.0, 4.0)
    ]
    assert [phase.bound for phase in cw.flat(7.0).phases] == [7.0]


# Layerwise noise


@pytest.mark.parametrize("sigma", [0.7, 3.0])
@pytest.mark.parametrize("bounds", [(1.0, 1.0), (0.1, 5.0)])
@pytest.mark.parametrize("noise", ["equal", "proportional"])
def test_layerwise_noise_is_one_gaussian_with_the_stated_multiplier(
    noise: str, bounds: tuple[float, float], sigma: float
) -> None:
    method = parse(f"layerwise({{'a': flat({bounds[0]}), 'b': flat({bounds[1]})}}, noise={noise!r})")
    private, released = moved(method, sigma)
    scales = [scale(part, released.gradient) for part in private.parts]
    assert naive.layerwise_joint_multiplier(bounds, scales) == pytest.approx(sigma, rel=1e-5)
    if noise == "equal":
        assert scales == pytest.approx([naive.layerwise_noise_scale(bounds, sigma)] * 2, rel=1e-5)
    else:
        assert scales == pytest.approx([sigma * c * math.sqrt(2) for c in bounds], rel=1e-5)


def test_paper_2_s_layerwise_noise_would_be_too_small_by_the_root_of_the_blocks() -> None:
    bounds, sigma = [0.5, 0.5, 0.5, 0.5], 2.0
    assert naive.layerwise_joint_multiplier(bounds, [sigma * c for c in bounds]) == pytest.approx(sigma / 2)
    with pytest.raises(InputError):
        PrivateSum(tuple(Part({f"w{i}": torch.zeros(1)}, c, 1.0) for i, c in enumerate(bounds)))


def test_a_layer_s_weight_and_bias_are_clipped_together() -> None:
    assert [block.names for block in cw.layerwise().blocks(tuple(BLOCKS))] == [("a.weight", "a.bias"), ("b.weight",)]


def test_methods_are_frozen_and_cite_their_paper() -> None:
    for name, factory in METHODS.items():
        method = factory()
        with pytest.raises(AttributeError):
            method.bound = 2.0  # type: ignore[misc]
        assert method.name == name and method.citation.title in method.citation.bibtex()


CITATIONS = [
    paper
    for module in (methods.citations, models.citations)
    for paper in vars(module).values()
    if type(paper) is Citation
]
# the fields that BibTeX requires of a kind; of a misc it requires none, but where to find it should be there
REQUIRED = {
    "inproceedings": {"author", "title", "booktitle", "year"},
    "article": {"author", "title", "journal", "year"},
    "misc": {"author", "title", "howpublished", "year"},
}


@pytest.mark.parametrize("paper", CITATIONS, ids=lambda paper: paper.key)
def test_a_citation_is_of_the_kind_of_its_venue_and_has_what_that_requires(paper: Citation) -> None:
    head, *lines, last = paper.bibtex().split("\n")
    entry = re.fullmatch(r"@(\w+)\{(\w+),", head)
    fields = [re.fullmatch(r"  (\w+) = \{([^{}]+)\},", line) for line in lines]
    assert entry and all(fields) and last == "}"
    found = {field[1]: field[2] for field in fields if field}
    assert (entry[1], entry[2]) == (paper.kind, paper.key) and str(paper.year) in paper.key
    assert found.keys() == REQUIRED[paper.kind] and {paper.authors, paper.title, paper.venue} <= set(found.values())
    meeting = any(word in paper.venue for word in ("Conference", "Symposium", "Workshop", "Advances in"))
    assert (paper.kind == "inproceedings") == meeting
    assert not paper.venue.startswith("arXiv") or paper.kind in ("misc", "article")


def test_no_two_papers_share_a_key() -> None:
    assert len({paper.key for paper in CITATIONS}) == len(CITATIONS) > 20


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("flat(1.0)", lambda s: s.update(clip_norm=0.001)),
        ("flat(1.0)", lambda s: s.__setitem__("clip_norm", 0.001)),
        ("layerwise({'a': flat(1.0), 'b': flat(1.0)})", lambda s: s["base"].__setitem__("a", cw.flat(0.001))),
        ("schedule([(0, flat(1.0))])", lambda s: s["phases"].append((3, cw.flat(0.001)))),
        ("schedule([(0, flat(1.0))])", lambda s: s["phases"][0].__setitem__(1, cw.flat(0.001))),
    ],
)
def test_what_a_method_says_of_itself_cannot_be_changed(text: str, change: Callable[[Any], None]) -> None:
    method = parse(text)
    said = str(method)
    with pytest.raises((TypeError, AttributeError)):
        change(method.settings)
    assert str(method) == said
    assert str(copy.deepcopy(method)) == said and str(parse(said)) == said


def test_what_to_cite_are_the_papers_of_all_parts_each_once() -> None:
    nested = "inner_momentum(schedule([(0, psac()), (5, p_average(layerwise({'a': flat(), 'b': psac()})))]))"
    found = papers([parse(nested), cw.flat()])
    assert {paper.key: names for paper, names in found.items()} == {
        "xiao2023theory": ["inner_momentum", "p_average"],
        "bu2023convergence": ["schedule"],
        "xia2023differentially": ["psac"],
        "mcmahan2018general": ["layerwise"],
        "abadi2016deep": ["flat"],
    }


def test_post_processing_is_cited_too_and_together_with_methods() -> None:
    cited = [cw.inner_momentum(), postprocess.parse("heavy_ball(0.9) | average(0.5) | low_pass | adam_bc"), cw.psac()]
    assert {paper.key: names for paper, names in papers(cited).items()} == {
        "xiao2023theory": ["inner_momentum", "heavy_ball"],
        "abadi2016deep": ["flat"],
        "zhang2024doppler": ["low_pass"],
        "tang2024dp": ["adam_bc"],
        "xia2023differentially": ["psac"],
    }
    assert papers([postprocess.identity(), postprocess.average()]) == {}
    within = postprocess.chain(postprocess.identity(), postprocess.parse("outer_momentum | low_pass"))
    assert list(papers([within]).values()) == [["outer_momentum"], ["low_pass"]]
