"""Poisson draws: the distribution of their sizes and members, and chunks."""

from __future__ import annotations

import math
import time

import pytest
import torch
from scipy import stats

from clipwise.randomness import SecureStream, SeededStream
from clipwise.sampling import chunks, poisson, units
from clipwise.types import InputError

SIZE, RATE, DRAWS = 500, 0.07, 2000


@pytest.fixture(scope="module")
def membership() -> torch.Tensor:
    """[draw, sample]: who was in."""
    stream = SeededStream(11)
    members = torch.zeros(DRAWS, SIZE, dtype=torch.float64)
    for step in range(DRAWS):
        members[step, poisson(SIZE, RATE, stream.at(step))] = 1
    return members


def test_the_size_of_a_draw_is_binomial(membership: torch.Tensor) -> None:
    sizes = membership.sum(1)
    binomial = stats.binom(SIZE, RATE)
    mean, variance, kurtosis = (float(value) for value in binomial.stats(moments="mvk"))
    assert mean == pytest.approx(RATE * SIZE) and variance == pytest.approx(SIZE * RATE * (1 - RATE))
    assert abs(float(sizes.mean()) - mean) < 5 * math.sqrt(variance / DRAWS)
    # the variance of a sample variance is about σ⁴ (kurtosis excess + 2) / draws
    assert abs(float(sizes.var()) - variance) < 5 * variance * math.sqrt((kurtosis + 2) / DRAWS)
    assert stats.binomtest(int(sizes.sum()), DRAWS * SIZE, RATE).pvalue > 1e-6
    edges = binomial.ppf([0, 0.1, 0.3, 0.5, 0.7, 0.9, 1])
    observed = torch.histogram(sizes, torch.tensor(edges + 0.5)).hist.numpy()
    expected = DRAWS * (binomial.cdf(edges[1:]) - binomial.cdf(edges[:-1]))
    assert stats.chisquare(observed, expected).pvalue > 1e-6


def test_every_sample_is_drawn_at_the_same_rate(membership: torch.Tensor) -> None:
    deviations = (membership.sum(0) - DRAWS * RATE) / math.sqrt(DRAWS * RATE * (1 - RATE))
    assert float(deviations.abs().max()) < 6
    assert stats.chi2(SIZE).sf(float((deviations**2).sum())) > 1e-6
    assert stats.chi2(SIZE).cdf(float((deviations**2).sum())) > 1e-6  # nor more even than chance


def test_draws_are_independent_across_steps_and_across_samples(membership: torch.Tensor) -> None:
    centred = (membership - RATE) / math.sqrt(RATE * (1 - RATE))
    for first, second in ((centred[:-1], centred[1:]), (centred[:, :-1], centred[:, 1:])):
        assert abs(float((first * second).mean())) < 5 / math.sqrt(first.numel())
    # all pairs of samples at once: their correlations are those of noise
    correlations = (centred.T @ centred / DRAWS).fill_diagonal_(0)
    assert float(correlations.abs().max()) < 7 / math.sqrt(DRAWS)


@pytest.mark.parametrize("rate", [2.0**-60, 0.07, 0.3, 1 - 2.0**-53, 1.0])
def test_nobody_is_drawn_more_often_than_the_rate_says(rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the 2⁵³ uniforms that there are, no more than their share draw a sample: here the last that does."""
    stream, share = SeededStream(0), math.floor(rate * 2**53)
    places = torch.tensor([share - 1, min(share, 2**53 - 1)], dtype=torch.float64).clamp(min=0)
    monkeypatch.setattr(stream, "uniform", lambda count: places * 2.0**-53)
    assert poisson(2, rate, stream).tolist() == ([] if not share else [0, 1] if share == 2**53 else [0])


def test_a_small_rate_gives_empty_draws_as_often_as_it_should() -> None:
    stream = SecureStream()
    empty = sum(not len(poisson(10, 0.05, stream)) for _ in range(2000))
    assert stats.binomtest(empty, 2000, 0.95**10).pvalue > 1e-9  # drawn afresh in each run
    assert poisson(3, 1e-300, stream).dtype == torch.long


def test_rate_one_draws_everyone() -> None:
    assert torch.equal(poisson(1000, 1.0, SecureStream()), torch.arange(1000))
    assert torch.equal(poisson(7, 1, SecureStream()), torch.arange(7))


def test_indices_are_ascending_distinct_and_in_range_across_blocks() -> None:
    size = (1 << 20) + 1000
    indices = poisson(size, 0.5, SeededStream(2))
    assert indices.dtype == torch.long and bool((indices.diff() > 0).all())
    assert int(indices[0]) >= 0 and 1 << 20 < int(indices[-1]) < size
    assert stats.binomtest(int((indices >= 1 << 20).sum()), 1000, 0.5).pvalue > 1e-6


def test_ten_million_samples_are_drawn_in_seconds() -> None:
    started = time.process_time()  # of this process alone: the machine may be busy with other things
    indices = poisson(10_000_000, 1e-4, SecureStream())
    assert time.process_time() - started < 5  # a tenth of a second; a loop over samples takes longer
    assert stats.binomtest(len(indices), 10_000_000, 1e-4).pvalue > 1e-9  # drawn afresh in each run


@pytest.mark.parametrize("rate", [0, -0.1, math.nan, math.inf, "0.1", True])
def test_a_rate_that_is_no_rate_is_an_error(rate: float) -> None:
    with pytest.raises(InputError, match="sampling_rate must be a number above 0"):
        poisson(10, rate, SecureStream())


def test_a_rate_above_one_says_that_the_batch_exceeds_the_data() -> None:
    with pytest.raises(InputError, match=r"at most 1, got 1\.5: the expected batch must not exceed the 10 samples"):
        poisson(10, 1.5, SecureStream())
    with pytest.raises(InputError, match="size"):
        poisson(0, 0.5, SecureStream())


@pytest.mark.parametrize("count", [1, 5, 6, 7, 12, 13])
@pytest.mark.parametrize("most", [1, 6, 100])
def test_chunks_cover_every_index_once_and_in_order(count: int, most: int) -> None:
    indices = torch.arange(count) * 3
    pieces = list(chunks(indices, most))
    assert torch.equal(torch.cat(pieces), indices)
    assert len(pieces) == math.ceil(count / most) and all(1 <= len(piece) <= most for piece in pieces)


def test_an_empty_draw_gives_one_empty_chunk() -> None:
    (piece,) = chunks(torch.empty(0, dtype=torch.long), 8)
    assert piece.shape == (0,) and piece.dtype == torch.long


@pytest.mark.parametrize("most", [0, -1, 2.5, True])
def test_a_chunk_that_is_no_size_is_an_error_at_once(most: int) -> None:
    with pytest.raises(InputError, match="chunk must be a whole number"):
        chunks(torch.arange(3), most)


class Given:
    """A stream of numbers that the test chose."""

    name = "given"

    def __init__(self, numbers: torch.Tensor) -> None:
        self.numbers = numbers

    def uniform(self, count: int) -> torch.Tensor:
        assert count == len(self.numbers)
        return self.numbers


def units_by_definition(indices: torch.Tensor, tags: list[int], most: int) -> list[tuple[list[list[int]], list[int]]]:
    """Pieces of units, one comparison at a time: ([unit][place], how many places of each unit are taken)."""
    groups = [[int(i) for i, own in zip(indices, tags, strict=True) if own == tag] for tag in sorted(set(tags))]
    groups.sort(key=lambda group: -len(group))
    pieces: list[list[list[int]]] = [[]]
    for group in groups:
        if pieces[-1] and (len(pieces[-1]) + 1) * len(pieces[-1][0]) > most:
            pieces.append([])
        pieces[-1].append(group)
    return [
        ([group + [group[0]] * (len(piece[0]) - len(group)) for group in piece], [len(group) for group in piece])
        for piece in pieces
    ]


@pytest.mark.parametrize("count", [1, 3, 40, 1000])
@pytest.mark.parametrize("most", [1, 16, 10_000])
def test_units_are_those_of_the_definition_in_the_same_order(count: int, most: int) -> None:
    generator = torch.Generator().manual_seed(5)
    for samples in (1, 2, 37, 120):
        indices = torch.randperm(500, generator=generator)[:samples]
        numbers = torch.rand(samples, generator=generator, dtype=torch.float64)
        found = [
            (piece.tolist(), keep.sum(1).tolist(), keep) for piece, keep in units(indices, count, most, Given(numbers))
        ]
        expected = units_by_definition(indices, [int(number * count) for number in numbers], most)
        assert [(rows, taken) for rows, taken, _ in found] == expected
        for _, taken, keep in found:  # the places that were taken are the first ones
            assert keep.tolist() == [[place < own for place in range(keep.shape[1])] for own in taken]


def test_units_of_a_large_batch_are_made_in_seconds() -> None:
    start = time.perf_counter()
    pieces = list(units(torch.arange(80_000), 20_000, 4096, SeededStream(3)))
    assert time.perf_counter() - start < 3  # comparing every sample with every unit takes seven
    everyone = torch.cat([samples[keep] for samples, keep in pieces])
    assert torch.equal(everyone.sort().values, torch.arange(80_000))
