"""From noise to ε and back, before a run.

Receives: δ, the sampling rate, the number of steps, and either a noise multiplier or a target ε.
Gives: epsilon, and calibrate: the least noise multiplier that keeps the target; least_noise for any other releases;
steps_in, from epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from clipwise.accounting.events import spent
from clipwise.types import Event, InputError, PoissonGaussian, fraction, positive, whole

# calibrate ends when the noise multiplier is known this well, relative to the least that would do
TOLERANCE = 5e-4
MOST_NOISE = 1e6
# how much coarser the grid is on which calibrate looks first
ROUGH = 10


def steps_in(epochs: float, sampling_rate: float) -> int:
    """How many steps make so many epochs, each with this share of the samples: at least one."""
    return max(1, round(positive("epochs", epochs) / sampling_rate))


def epsilon(
    *,
    noise_multiplier: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    accountant: str = "pld",
    rows_per_person: int = 1,
) -> float:
    """An upper bound on the ε of ``steps`` Poisson-sampled Gaussian releases, under adding or removing one sample.

    Or one person with at most ``rows_per_person`` of them.
    """
    event = PoissonGaussian(positive("noise_multiplier", noise_multiplier), fraction("sampling_rate", sampling_rate))
    return spent([(event, whole("steps", steps))], delta, accountant, rows_per_person=rows_per_person)


def calibrate(
    *,
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    accountant: str = "pld",
    rows_per_person: int = 1,
) -> float:
    """The least noise multiplier, to within 1e-3 of itself, at which ``steps`` releases cost at most ``epsilon``.

    *Guarantees*: ``epsilon(noise_multiplier=result, ...) <= epsilon``, evaluated and not extrapolated; the result has
    at most six digits, so that what is printed is what was proved.
    *Edge cases*: a target that no noise multiplier up to a million reaches is an InputError.
    """
    fraction("sampling_rate", sampling_rate)
    whole("steps", steps)
    return least_noise(
        lambda noise: [(PoissonGaussian(noise, sampling_rate), steps)], epsilon, delta, accountant, rows_per_person
    )


def least_noise(
    entries: Callable[[float], Iterable[tuple[Event, int]]],
    epsilon: float,
    delta: float,
    accountant: str,
    rows_per_person: int,
) -> float:
    """The least noise multiplier at which ``entries(noise multiplier)`` cost at most ``epsilon``, as in calibrate."""
    target = positive("epsilon", epsilon)
    fraction("delta", delta, open_end=True)

    def cost(noise: float, coarser: int = 1) -> float:
        return spent(entries(noise), delta, accountant, rows_per_person=rows_per_person, coarser=coarser)

    def rough(target: float, start: float, step: float) -> float:
        return _least(lambda noise: cost(noise, ROUGH), target, start, step, TOLERANCE / 50)

    if accountant != "pld" or target < 1:
        return _least(cost, target, 1.0, 1.0, TOLERANCE)
    # A coarser grid is as much faster and says a little more. How much more it says where it meets the target tells
    # what to look for on it; two evaluations on the fine grid then confirm.
    near = rough(target, 1.0, 1.0)
    start = rough(2 * target - cost(near), near, 0.01) * (1 + TOLERANCE / 10)  # on the safe side, if only just
    return _least(cost, target, start, TOLERANCE, TOLERANCE)


def _least(cost: Callable[[float], float], target: float, start: float, step: float, tolerance: float) -> float:
    """The least noise that was tried and costs at most the target, with one that costs more just below it.

    ``step`` is the first step away from ``start`` in log noise, ``tolerance`` the final width of the bracket there.
    """
    from scipy.optimize import brentq

    tried: dict[float, float] = {}

    def excess(log_noise: float) -> float:
        noise = float(f"{math.exp(log_noise):.6g}")
        if noise not in tried:
            tried[noise] = cost(noise)
        value = min(tried[noise], 1e3 * target)  # infinity has no slope that a root finder could use
        return (value - target) / (value + target)

    low = high = math.log(start)
    while excess(high) > 0:
        if high >= math.log(MOST_NOISE):
            raise InputError(
                f"epsilon={target:g} cannot be reached: even noise_multiplier={MOST_NOISE:g} costs "
                f"{tried[MOST_NOISE]:.3g}; write a larger epsilon or delta, fewer steps or a smaller sampling_rate"
            )
        low, high, step = high, min(high + step, math.log(MOST_NOISE)), 2 * step
    while excess(low) <= 0:
        high, low, step = low, low - step, 2 * step
    brentq(excess, low, high, xtol=tolerance)
    return min(noise for noise, value in tried.items() if value <= target)
