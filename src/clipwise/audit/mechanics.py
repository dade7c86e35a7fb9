"""Audits of the two things that every proof takes for granted: the noise and the sampling.

Receives: a method, its noise multiplier, and the generator.
Gives: Checks: the noise is Gaussian of the stated deviation whatever was drawn and in how many chunks, and never the
same twice; every sample is drawn independently of all others and of earlier steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from clipwise.audit.bounds import Array
from clipwise.audit.canaries import World, groups, rows, saturating
from clipwise.audit.white_box import noisy_count, private_for
from clipwise.methods import Method
from clipwise.private import Private
from clipwise.types import Gradient, whole

ROWS, RATE, CHUNK = 12, 1 / 6, 2  # a step in nine draws nobody; many of the others take several chunks
COORDINATES = 64


@dataclass(frozen=True)
class Check:
    """Something that holds or does not: ``deviations`` is how far off it was, in standard deviations."""

    name: str
    measured: float
    expected: float
    deviations: float
    passed: bool

    def __str__(self) -> str:
        """One line."""
        return f"{self.name}: {self.measured:.4g}, expected {self.expected:.4g} ({self.deviations:+.1f} deviations)"


def mechanics(
    method: Method, *, noise_multiplier: float, steps: int, confidence: float, noise: str | int
) -> tuple[Check, ...]:
    """Run the method on samples without any gradient, and look at what it draws."""
    from scipy.stats import norm

    world = saturating(method, 1, COORDINATES)
    full = world.rate == 1
    turns = groups(method)
    size, rate = (ROWS, 1.0 if full else RATE) if turns == 1 else (4 * turns, 0.5 / turns)
    data = rows(method, torch.zeros(size, len(world.layers), COORDINATES))
    world = World("nobody", method, world.layers, data, 0, COORDINATES, rate, chunk=CHUNK)
    private = private_for(world, noise_multiplier, whole("steps", steps, least=20), noise)
    noises, counts, drawn = [], [], []
    for batch in private.batches():
        private.method = method
        private.step(batch)
        noises.append(_standardised(private, method))
        if method.count is not None and private.observed is not None:
            # a norm of 0 is below every clip norm: each unit that somebody joined adds ½
            noisy = noisy_count(method, private.method, private.expected_batch / method.unit)
            away = noisy - 0.5 * private.observed.samples
            counts.append(away * math.sqrt(method.count.share) / (0.5 * method.moves * noise_multiplier))
        drawn.append(torch.zeros(size, dtype=torch.bool).index_fill(0, batch.indices, True))
    z, there = torch.stack(noises).numpy(), torch.stack(drawn).numpy()
    found = [
        *noise_checks(z, there.sum(1)),
        *_deviation("noise of the count", np.array(counts)),
        *sampling_checks(there, _rates(private, steps), turns),
    ]
    limit = float(norm.isf((1 - confidence) / len(found) / 2))  # on either side, and all checks share what is left
    return tuple(Check(name, m, e, d, abs(d) <= limit) for name, m, e, d in found)


Found = tuple[str, float, float, float]  # name, measured, expected, deviations


def noise_checks(z: Array, sizes: NDArray[np.int64]) -> list[Found]:
    """Of noise in units of its stated deviation, [step, entry], and the size of each step's batch."""
    from scipy.stats import kstest, norm

    found: list[Found] = []
    for name, kept in (("noise of empty batches", sizes == 0), ("noise of other batches", sizes > 0)):
        found += _deviation(name, z[kept])
    distance = kstest(z.ravel() / max(z.std(), 1e-300), "norm")
    unlike = max(0.0, float(norm.isf(max(distance.pvalue, 1e-300))))
    found.append(("distance of the noise from a normal", float(distance.statistic), 0.0, unlike))
    # two steps with the same noise, in the same or the opposite sign, have a correlation of one
    unit = z / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-300)
    closest = float(np.abs(np.triu(unit @ unit.T, 1)).max())
    pairs = len(z) * (len(z) - 1) / 2
    likely = norm.isf(0.5 / pairs) / math.sqrt(z.shape[1])  # the largest of so many correlations, about
    found.append(("closest noise of two steps", closest, likely, (closest - likely) * math.sqrt(z.shape[1])))
    return found


def sampling_checks(drawn: NDArray[np.bool_], rates: Array, turns: int = 1) -> list[Found]:
    """Of who was drawn, [step, sample], and the stated probability of each; ``turns`` steps from one to the next."""
    away = drawn - rates
    spread = rates * (1 - rates)
    total = float(spread.sum())
    if total == 0:  # everybody, always
        missing = float(np.abs(away).sum())
        return [("samples that a full batch lacks", missing, 0.0, math.inf if missing else 0.0)]
    found: list[Found] = [
        ("samples drawn", float(drawn.sum()), float(rates.sum()), float(away.sum()) / math.sqrt(total))
    ]
    # Var |S_t| = Σ q(1−q); its square's variance from the fourth moment of independent draws
    squares, expected = away.sum(1) ** 2, spread.sum(1)
    fourth = 3 * expected**2 + (spread * (1 - 6 * spread)).sum(1) - expected**2
    found.append(
        (
            "variance of the batch's size",
            float(squares.mean()),
            float(expected.mean()),
            _gamma_deviations(float(squares.sum()), float(expected.sum()), float(fourth.sum())),
        )
    )
    products = away[turns:] * away[:-turns]
    likely = math.sqrt(float((spread[turns:] * spread[:-turns]).sum()))
    found.append(("drawn twice in a row", float(products.sum()) / likely, 0.0, float(products.sum()) / likely))
    return found


def _gamma_deviations(measured: float, mean: float, variance: float) -> float:
    """How far off a sum of squares is, in deviations of a normal number that is as rarely as far off.

    Such a sum leans to the right: nearly a gamma variable of its mean and variance, and not nearly a normal one.
    """
    from scipy.stats import gamma, norm

    if variance == 0:  # a fair coin's square is always the same
        return 0.0 if measured == mean else math.inf
    shape, scale = mean**2 / variance, variance / mean
    above, below = gamma.sf(measured, shape, scale=scale), gamma.cdf(measured, shape, scale=scale)
    return float(norm.isf(max(above, 1e-300)) if above < below else -norm.isf(max(below, 1e-300)))


def _deviation(name: str, z: Array) -> list[Found]:
    """Whether these have a deviation of 1; nothing is known of none."""
    if not z.size:
        return []
    variance = float(np.mean(z**2))
    return [(name, math.sqrt(variance), 1.0, (variance - 1) / math.sqrt(2 / z.size))]  # Var z² = 2


def _standardised(private: Private, method: Method) -> torch.Tensor:
    """The last release over the deviation that each block's noise is stated to have: σ · moves · C_r/√p_r."""
    released: Gradient | None = private.state.released
    assert released is not None
    units, parts = private.expected_batch / method.unit, []
    for block in method.blocks(tuple(released)):
        bound = method.moves * block.bound if private.dice is None else private.dice.sensitivity
        scale = private.noise_multiplier * bound / math.sqrt(block.share)
        parts += [released[name].double().flatten() * units / scale for name in block.names]
    return torch.cat(parts)


def _rates(private: Private, steps: int) -> Array:
    """The probability with which each sample is stated to be drawn, [step, sample]."""
    size = len(private.data)
    rates = np.full((steps, size), private.sampling_rate)
    plan = private.dice
    if plan is not None and plan.groups > 1:  # group t mod b, at b times the rate
        for step in range(steps):
            own = np.arange(size) % plan.groups == step % plan.groups
            rates[step] = np.where(own, plan.step_rate, 0.0)
    return rates
