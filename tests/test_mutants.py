"""Planted bugs: each of those that peers have shipped is planted here, and an audit or a check must find it.

Receives: the library with one thing broken by monkeypatching.
Gives: the failing rows of an audit, or the refusal of a self-test; and nothing of either where nothing is planted.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clipwise as cw
from clipwise import private as loop
from clipwise import step
from clipwise.accounting import dice
from clipwise.audit import AuditPlan, audit
from clipwise.methods import Method, parse
from clipwise.randomness import SecureStream, SeededStream, Stream
from clipwise.records import SampleGradients, gradients
from clipwise.types import Gradient, PrivateSum, Refused, Released

# One full-batch step is claimed; noise and sampling are looked at in other, sampled ones.
PLAN = AuditPlan(sampling_rate=1.0, steps=1, trials=6400, canaries=60, runs=20, run_steps=3, noise=11)
CERTAIN = replace(PLAN, runs=60, run_steps=4, run_epsilon=1.0)  # few runs can refute so small a claim
IN_BLOCKS = "dice(flat(1.0), feedback_norm=1.0, memory='blocks', blocks=4)"
LONELY = replace(PLAN, noise_multiplier=0.6, trials=9600)  # a canary that must be alone is looked at less often
Patch = pytest.MonkeyPatch


def failing(text: str, plan: AuditPlan = PLAN) -> list[str]:
    """The audits of this method that fail."""
    return [row.audit for row in audit([parse(text)], plan) if not row.passed]


class Tied(nn.Module):
    """An embedding whose weight is the output layer's, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(5, 3)
        self.output = nn.Linear(3, 5, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.output(self.embedding(tokens).sum(1))


def self_test_of_tied_weights() -> list[str]:
    """The refusal of a run with tied weights, if it is refused."""
    model = Tied()
    data = (torch.arange(20).reshape(10, 2) % 5, torch.arange(10) % 5)
    try:
        cw.make_private(
            model, torch.optim.SGD(model.parameters(), lr=0.1), data, noise_multiplier=1.0, steps=1, batch=5, delta=1e-3
        )
    except Refused as refusal:
        return [str(refusal)]
    return []


# What is planted


def nothing(patch: Patch) -> None:
    """The library as it is."""


def noise_halved(patch: Patch) -> None:
    original = loop.release

    def release(private: PrivateSum, event: Any, stream: Stream, *rest: Any) -> Released:
        half = replace(event, noise_multiplier=event.noise_multiplier / 2)
        return replace(original(private, half, stream, *rest), event=event)

    patch.setattr(loop, "release", release)


def divisor_realised(patch: Patch) -> None:
    original = loop.Private.step

    def one(self: loop.Private, batch: loop.PoissonBatch) -> None:
        expected = self.expected_batch
        vars(self)["expected_batch"] = float(max(1, len(batch)))  # past the refusal
        original(self, batch)
        vars(self)["expected_batch"] = expected

    patch.setattr(loop.Private, "step", one)


def clip_missing_in_one_layer(patch: Patch) -> None:
    original = step.weigh

    def weigh(blocks: Any, norms: Tensor, most: int = 0) -> Tensor:
        weights = original(blocks, norms, most)
        return torch.cat([weights[:, :-1], torch.ones_like(weights[:, -1:])], 1)

    patch.setattr(step, "weigh", weigh)


def norm_misses_one_layer(patch: Patch) -> None:
    original = SampleGradients.norms

    def norms(self: SampleGradients, groups: Any = None) -> Tensor:
        kept = None if groups is None else [[n for n in g if not n.startswith("second")] or g for g in groups]
        return original(self, kept)

    patch.setattr(SampleGradients, "norms", norms)


def tied_weight_counted_once(patch: Patch) -> None:
    patch.setattr(gradients, "cross", lambda u, v: torch.zeros(u.samples))


def noise_once_per_chunk(patch: Patch) -> None:
    original = loop.private_sum

    def private_sum(method: Method, parameters: Any, chunks: Iterable[SampleGradients], *rest: Any, **more: Any) -> Any:
        pieces = list(chunks)
        private, observed = original(method, parameters, iter(pieces), *rest, **more)
        (part,) = private.parts
        extra = PLAN.noise_multiplier * part.bound * math.sqrt(len(pieces) - 1)  # beside the release's own
        noisy: Gradient = {name: v + extra * SecureStream().normal(v.shape) for name, v in part.value.items()}
        return replace(private, parts=(replace(part, value=noisy),)), observed

    patch.setattr(loop, "private_sum", private_sum)


def seed_reused(patch: Patch) -> None:
    patch.setattr(SeededStream, "at", lambda self, step: SeededStream(self._seed, 0))


def secure_key_reused(patch: Patch) -> None:
    patch.setattr(SecureStream, "_next", lambda self, use: (bytes(32), bytes([use]) * 12))


def shuffled_batches(patch: Patch) -> None:
    order: list[int] = []

    def shuffled(size: int, rate: float, stream: Stream) -> Tensor:
        if len(order) < round(rate * size):
            order.extend(stream.uniform(size).argsort().tolist())
        return torch.tensor(sorted(order.pop() for _ in range(round(rate * size))), dtype=torch.long)

    patch.setattr(loop, "poisson", shuffled)


def rate_doubled(patch: Patch) -> None:
    original = loop.poisson
    patch.setattr(loop, "poisson", lambda size, rate, stream: original(size, min(1.0, 2 * rate), stream))


def empty_batches_without_noise(patch: Patch) -> None:
    original = loop.release

    def release(private: PrivateSum, event: Any, stream: Stream, *rest: Any) -> Released:
        found = original(private, event, stream, *rest)
        empty = all(not value.any() for part in private.parts for value in part.value.values())
        return replace(found, gradient={n: 0 * v for n, v in found.gradient.items()}) if empty else found

    patch.setattr(loop, "release", release)


def layers_noised_by_their_own_bounds(patch: Patch) -> None:
    """Paper 2's σ R_r in block r: √L too little jointly."""
    original = loop.release

    def release(private: PrivateSum, event: Any, stream: Stream, *rest: Any) -> Released:
        smaller = replace(event, noise_multiplier=event.noise_multiplier / math.sqrt(len(private.parts)))
        return replace(original(private, smaller, stream, *rest), event=event)

    patch.setattr(loop, "release", release)


def unit_counted_with_one_bound(patch: Patch) -> None:
    patch.setattr(Method, "moves", property(lambda self: 1))


def memory_in_blocks_not_counted(patch: Patch) -> None:
    patch.setattr(dice, "sensitivity", lambda memory, clip_norm, feedback_norm, groups: clip_norm)


def count_without_noise(patch: Patch) -> None:
    original = loop.release

    def release(private: PrivateSum, event: Any, stream: Stream, *rest: Any) -> Released:
        exact = {name: value for part in private.parts if part.is_count for name, value in part.value.items()}
        return replace(original(private, event, stream, *rest), counts=exact)

    patch.setattr(loop, "release", release)


@dataclass(frozen=True)
class Mutant:
    plant: Callable[[Patch], None]
    found_by: Callable[[], list[str]]
    where: str  # words of what must find it


MUTANTS = [
    Mutant(noise_halved, lambda: failing("flat"), "step"),
    Mutant(noise_halved, lambda: failing("flat"), "noise and sampling"),
    Mutant(divisor_realised, lambda: failing("flat"), "noise and sampling"),
    Mutant(clip_missing_in_one_layer, lambda: failing("layerwise"), "step"),
    Mutant(norm_misses_one_layer, lambda: failing("psac"), "step"),
    Mutant(tied_weight_counted_once, self_test_of_tied_weights, "self-test"),
    Mutant(noise_once_per_chunk, lambda: failing("flat"), "noise and sampling"),
    Mutant(seed_reused, lambda: failing("flat"), "noise and sampling"),
    Mutant(secure_key_reused, lambda: failing("flat", replace(PLAN, noise="secure")), "noise and sampling"),
    Mutant(shuffled_batches, lambda: failing("flat"), "noise and sampling"),
    Mutant(rate_doubled, lambda: failing("flat"), "sampled step"),
    Mutant(empty_batches_without_noise, lambda: failing("flat"), "noise and sampling"),
    Mutant(layers_noised_by_their_own_bounds, lambda: failing("layerwise"), "step"),
    Mutant(unit_counted_with_one_bound, lambda: failing("p_average", LONELY), "step"),
    Mutant(memory_in_blocks_not_counted, lambda: failing(IN_BLOCKS, CERTAIN), "whole runs, drawn"),
    Mutant(count_without_noise, lambda: failing("adaptive(count_share=0.5)"), "noise and sampling"),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.plant.__name__}-{m.where}".replace(" ", "-"))
def test_a_planted_bug_is_found(mutant: Mutant, monkeypatch: Patch) -> None:
    mutant.plant(monkeypatch)
    found = mutant.found_by()
    assert any(mutant.where in one for one in found), f"found by {found}"


def test_where_nothing_is_planted_nothing_is_found() -> None:
    for text in ("flat", "layerwise", "adaptive(count_share=0.5)"):
        assert failing(text) == []
    assert failing("p_average", LONELY) == []
    assert failing(IN_BLOCKS, CERTAIN) == []
    assert self_test_of_tied_weights() == []
