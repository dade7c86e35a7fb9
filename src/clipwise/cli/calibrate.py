"""``clipwise calibrate``: from ε to noise and back, without torch unless a method is named.

Receives: CalibrateConfig.
Gives: the noise multiplier, or the ε, as text or JSON; for a method with feedback, by the bounds that are proved of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from clipwise.accounting.calibration import least_noise, steps_in
from clipwise.accounting.dice import DicePlan, planned
from clipwise.accounting.events import relation, spent
from clipwise.config import CalibrateConfig, flag, one_given
from clipwise.plain import as_json, no_less, rounded_up
from clipwise.types import InputError, fraction, whole


class _Over(NamedTuple):
    """A method, and what a noise multiplier is over."""

    method: str
    sensitivity: float | None  # None: the model or earlier releases decide it
    plan: DicePlan | None  # of a method with feedback


def run(config: CalibrateConfig) -> str:
    """What the noise costs, or which noise it takes."""
    one_given(config, "epsilon", "noise_multiplier", "--epsilon 4")
    one_given(config, "epochs", "steps", "--epochs 20")
    rate = _rate(config)
    steps = whole("steps", config.steps or 0) if config.epochs is None else steps_in(config.epochs, rate)
    over = None if config.method is None else _over(config, config.method, rate)
    recorded = partial(planned, None if over is None else over.plan, sampling_rate=rate, steps=steps)
    delta, accountant, rows = config.delta, config.accountant, config.rows_per_person
    neighbours = relation(rows)
    if config.noise_multiplier is None:
        epsilon = config.epsilon or 0.0
        noise = least_noise(recorded, epsilon, delta, accountant, rows)
        answer = f"noise multiplier {noise:g} keeps ε ≤ {no_less(epsilon)}"
    else:
        noise = config.noise_multiplier
        epsilon = spent(recorded(noise), delta, accountant, rows_per_person=rows)
        answer = f"ε = {rounded_up(epsilon)} with noise multiplier {noise:g}"
    if config.json:
        values: dict[str, Any] = {"noise_multiplier": noise, "epsilon": epsilon, "delta": delta, "steps": steps}
        values |= {"accountant": accountant, "rows_per_person": rows, "sampling_rate": rate}
        values |= {name: getattr(config, name) for name in ("samples", "batch", "epochs")} | {"relation": neighbours}
        values |= {} if over is None else {"method": over.method, "sensitivity": over.sensitivity}
        return as_json(values, indent=None)
    return (
        f"{answer} at δ = {no_less(delta)}\n"
        f"  {steps} Poisson-sampled steps at rate {rate:g}; neighbours: {neighbours}; {accountant}\n"
        + ("" if over is None else f"  {_told(over)}\n")
    )


def _rate(config: CalibrateConfig) -> float:
    """The sampling rate, as it is given or as the share of the samples that a batch is."""
    names = ("sampling_rate", "samples", "batch")
    given = tuple(name for name in names if getattr(config, name) is not None)
    if given == names[:1]:
        return fraction("sampling_rate", config.sampling_rate or 0.0)
    if given != names[1:]:
        raise InputError(
            f"expected either --sampling-rate, or --samples and --batch, got {', '.join(map(flag, given)) or 'none'}: "
            "write for instance --samples 60000 --batch 256"
        )
    samples, batch = whole("samples", config.samples or 0), whole("batch", config.batch or 0)
    if batch > samples:
        raise InputError(
            f"batch must be at most the {samples} samples, got {batch}: write --batch {max(1, samples // 2)}"
        )
    return batch / samples


def _over(config: CalibrateConfig, text: str, rate: float) -> _Over:
    from clipwise import methods  # and torch with them: who names no method need not wait for that

    method = methods.parse(text)
    if method.recall is not None and rate < 1:
        raise InputError(
            f"{method.name} is for full batches, since every sample remembers every step: expected a rate of 1, got "
            f"{rate:g}; write --sampling-rate 1, or use inner_momentum"
        )
    if method.feedback is None:
        fixed = method.split is None and method.count is None and method.after is None
        return _Over(str(method), method.sensitivity() if fixed else None, None)
    if config.samples is None or config.batch is None:
        raise InputError(
            f"what {method.name} feeds back is clipped on the scale of a batch: expected --samples and --batch, got "
            "--sampling-rate; write for instance --samples 60000 --batch 256"
        )
    plan = DicePlan.of(method, float(config.batch), config.samples)
    assert plan is not None  # it has feedback
    return _Over(str(method), plan.sensitivity, plan)


def _told(over: _Over) -> str:
    """What the multiplier is over, and whether it is this method's alone."""
    known = "" if over.sensitivity is None else f" {over.sensitivity:g}"
    said = f"the multiplier is over the sensitivity{known} of {over.method}"
    if over.plan is None:
        return f"{said}; it is the same for all methods without feedback"
    groups = "" if over.plan.groups == 1 else f", each step from one of {over.plan.groups} groups of samples"
    return f"{said}, by the bound proved of it{groups}"
