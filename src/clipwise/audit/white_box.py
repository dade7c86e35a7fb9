"""White-box audits: whoever sees every release tests whether a canary was there (Nasr et al. 2023).

Receives: a world of canaries, the noise multiplier, and how long to look.
Gives: what each release holds of each canary, from the same ``Private`` that trains models; and bounds on μ or ε.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipwise.audit import bounds
from clipwise.audit.bounds import Array, Bound
from clipwise.audit.canaries import World, active, loss, rows
from clipwise.methods import Method
from clipwise.private import Private
from clipwise.start import make_private
from clipwise.types import whole


@dataclass(frozen=True)
class Scores:
    """What was seen of a world, in the steps that its mates allow."""

    scores: Array  # [step, coordinate]
    drawn: NDArray[np.bool_]  # [step, coordinate]: that coordinate's canary took part
    member: NDArray[np.bool_]  # [coordinate]: it is in the data


def private_for(
    world: World,
    noise_multiplier: float | None,
    steps: int,
    noise: str | int,
    delta: float = 1e-5,
    epsilon: float | None = None,
) -> Private:
    """The world under private training, with a learning rate of zero: a canary's gradient stays what was written."""
    model = world.model()
    size = len(world.data[0])
    return make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
        world.data,
        loss=loss,
        method=world.method,
        noise_multiplier=noise_multiplier,
        epsilon=epsilon,
        delta=delta,
        steps=steps,
        batch=round(world.rate * size),
        noise=noise,
        chunk=world.chunk,
        public=world.public if any(phase.companions for phase in world.method.phases) else None,
        self_test=False,
    )


def scores(world: World, private: Private, method: Method) -> Tensor:
    """What the last release holds of each canary; ``method`` is the one that it was made by."""
    released = private.state.released
    assert released is not None
    units = private.expected_batch / method.unit  # undone: a public constant
    found = world.scores(method, {name: value * units for name, value in released.items()})
    if world.counts and method.count is not None:
        # the canary's part is −½; the count's share p_c of the likelihood ratio is p_c · count/(−½)
        found[0] -= 2 * method.count.share / method.moves * noisy_count(method, private.method, units)
    return found


def noisy_count(before: Method, after: Method, units: float) -> float:
    """The noisy count that moved an adaptive clip norm: C' = C exp(−η (b/units + ½ − γ)), solved for b."""
    then, now = (next(m for m in active(method) if m.name == "adaptive") for method in (before, after))
    rate, quantile = (float(str(then.settings[key])) for key in ("rate", "quantile"))
    return units * (-math.log(now.bound / then.bound) / rate - 0.5 + quantile)


def observe(world: World, *, noise_multiplier: float, steps: int, noise: str | int) -> Scores:
    """Look at so many steps, each of them a trial of the method as it is given.

    *Guarantees.* What is scored is what ``Private.step`` released. The method does not move on between trials, so that
    they are alike; a method with private state needs ``trajectories`` instead.
    """
    private = private_for(world, noise_multiplier, whole("steps", steps), noise)
    found, drawn = [], []
    for batch in private.batches():
        private.method = world.method
        private.step(batch)
        others = batch.indices[batch.indices >= world.canaries]
        if world.mates is None or others.tolist() == list(world.mates):
            found.append(scores(world, private, world.method))
            drawn.append(torch.zeros(world.coordinates, dtype=torch.bool))
            drawn[-1][batch.indices[batch.indices < world.canaries]] = True
    member = np.arange(world.coordinates) < world.canaries
    seen = Scores(torch.stack(found).numpy(), torch.stack(drawn).numpy(), member)
    if world.mates is None:
        return seen
    # what a mate or a count adds to the canary's coordinate is not in nobody's: those tell nothing about its absence
    return Scores(seen.scores[:, member], seen.drawn[:, member], member[member])


def taking_part(seen: Scores, confidence: float) -> Bound:
    """μ of one step from those that took part and those that did not: a Gaussian mechanism, without its sampling."""
    return bounds.split(seen.scores[~seen.drawn], seen.scores[seen.drawn], bounds.gaussian_mu, confidence)


def being_there(seen: Scores, rate: float, confidence: float) -> Bound:
    """μ of one step from canaries in the data and canaries that are not: a Gaussian mechanism after sampling."""
    without, present = seen.scores[:, ~seen.member].ravel(), seen.scores[:, seen.member].ravel()
    return bounds.split(without, present, partial(bounds.sampled_mu, rate=rate), confidence, missed=1 - rate)


def composed(mu: Bound, sampling_rate: float, steps: int, delta: float) -> Bound:
    """The ε of so many such steps."""
    value, ceiling = (bounds.composed_epsilon(m, sampling_rate, steps, delta) for m in (mu.value, mu.ceiling))
    return Bound(value, max(value, ceiling))


def trajectories(
    world: World, *, noise_multiplier: float, steps: int, runs: int, delta: float, confidence: float, noise: str | int
) -> tuple[Bound, float]:
    """ε of whole runs, and what their ledger claims: ``runs`` of them with the canary in the data and as many without.

    *Guarantees.* Nothing is assumed of the mechanism but its (ε, δ); memory of earlier steps counts. The score is the
    sum over all steps. At most about ln(runs/7.4) can be shown.
    """
    kinds: list[list[float]] = [[], []]
    claimed = 0.0
    for run in range(2 * whole("runs", runs, least=4)):
        present = run % 2 == 1
        own = world if present else _absent(world)
        seed = noise if isinstance(noise, str) else noise * 2 * runs + run
        private = private_for(own, noise_multiplier, steps, seed, delta)
        total = 0.0
        for batch in private.batches():
            method = private.method
            private.step(batch)
            total += float(scores(own, private, method)[0])
        kinds[present].append(total)
        claimed = claimed or private.epsilon()
    without, present_scores = (np.array(kind) for kind in kinds)
    return bounds.split(without, present_scores, partial(bounds.direct_epsilon, delta=delta), confidence), claimed


def _absent(world: World) -> World:
    """The same world with the canary's row replaced by one that adds nothing to any sum."""
    x = world.data[1].clone()
    x[: world.canaries] = 0
    return replace(world, data=rows(world.method, x))
