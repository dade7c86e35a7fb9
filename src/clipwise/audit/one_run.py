"""The audit from one run (Steinke, Nasr & Jagielski 2023): many canaries, each in the data or not by a fair coin.

Receives: a method and its privacy, or a private run of your own and its canaries.
Gives: a lower bound on ε that assumes nothing of the mechanism, and what the run's ledger claims.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipwise.audit import bounds
from clipwise.audit.bounds import Array, Bound
from clipwise.audit.canaries import groups, rows, saturating
from clipwise.audit.white_box import private_for, scores
from clipwise.methods import Method
from clipwise.private import Private
from clipwise.randomness import stream_of
from clipwise.records import SampleGradients, batch_size, trainable
from clipwise.step import private_sum
from clipwise.types import Batch, fraction, whole


def coins(count: int, noise: str | int) -> Tensor:
    """Independent fair coins: who is included. From the operating system's entropy, or from a seed."""
    return stream_of(noise).uniform(whole("canaries", count)) < 0.5


def one_run(
    method: Method,
    *,
    noise_multiplier: float | None,
    sampling_rate: float,
    steps: int,
    canaries: int,
    delta: float,
    confidence: float,
    noise: str | int,
    epsilon: float | None = None,
) -> tuple[Bound, float]:
    """One run of the linear model with saturating canaries: the bound, and the ε that its ledger claims.

    Its noise is given, or calibrated to ``epsilon``.
    """
    world = saturating(method, whole("canaries", canaries, least=10), canaries)
    included = coins(canaries, noise)
    x = world.data[1][included]
    rate = world.rate if world.rate == 1 else min(fraction("sampling_rate", sampling_rate), 1 / groups(method))
    batch = max(1, math.ceil(rate * len(x)))
    nobody = torch.zeros(math.ceil(batch / rate) - len(x), *x.shape[1:])  # so that batch/rows is the rate
    data = rows(method, torch.cat([x, nobody]))
    sampled = replace(world, data=data, rate=batch / len(data[0]))
    private = private_for(sampled, noise_multiplier, steps, noise, delta, epsilon)
    total = torch.zeros(canaries, dtype=torch.float64)
    for drawn in private.batches():
        now = private.method
        private.step(drawn)
        total += scores(world, private, now)
    return bound_of(total.numpy(), included.numpy(), delta=delta, confidence=confidence), private.epsilon()


def watched(private: Private, canaries: Batch, known: int) -> Array:
    """A score for each canary after the whole run: how much of its gradient the releases hold, that of others removed.

    For a run of your own: put the included canaries behind its ``known`` other rows, then give all canaries here. What
    was drawn of the other rows is taken off each release: whether a canary was there is protected from those who know
    everybody else, too. Canaries' gradients are alike, so each release is solved for all of them at once (ridge).
    """
    parameters = trainable(private.model)
    # a canary takes part with probability q/2: noise variance over that of its part is what ridge asks for
    part = private.sampling_rate / 2
    ridge = private.noise_multiplier**2 / (part * (1 - part))
    total = torch.zeros(batch_size(canaries), dtype=torch.float64)
    for batch in private.batches():
        method, blocks = private.method, private.method.blocks(tuple(parameters))
        others = batch.indices[batch.indices < known]
        secret, _ = private_sum(method, parameters, _gradients(private, others, private.rows(others)))
        of_others = {name: value for part in secret.parts for name, value in part.value.items()}
        (gradients,) = _gradients(private, torch.arange(len(total)), canaries)
        own = gradients.materialise()
        private.step(batch)
        released = private.state.released
        assert released is not None
        directions, seen = [], []
        for block in blocks:  # in units in which the noise is σ in every entry
            scale = math.sqrt(block.share) / (method.moves * block.bound)
            along = torch.cat([own[name].flatten(1) for name in block.names], 1)
            along = along / torch.linalg.vector_norm(along, dim=1, keepdim=True).clamp(min=1e-30)
            units = private.expected_batch / method.unit
            rest = [scale * (units * released[name] - of_others[name]).flatten() for name in block.names]
            directions.append(math.sqrt(block.share) * along)
            seen.append(torch.cat(rest).to(along.dtype))
        v = torch.cat(directions, 1)
        gram = (v @ v.T).double() + ridge * torch.eye(len(v), dtype=torch.float64, device=v.device)
        total += torch.linalg.solve(gram, (v @ torch.cat(seen)).double()).cpu()
    return total.numpy()


def _gradients(private: Private, samples: Tensor, rows: Batch) -> list[SampleGradients]:
    """What the method makes of these rows now, if there are any; views are others than the step's own."""
    return [private.method.gradients(private.engine(samples, 0), rows)] if len(samples) else []


def bound_of(total: Array, included: NDArray[np.bool_], *, delta: float, confidence: float) -> Bound:
    """The bound from such scores; a fifth of the canaries is guessed about: fixed in advance, as the bound asks."""
    return bounds.one_run(total, included, max(2, len(total) // 5), delta, confidence)
