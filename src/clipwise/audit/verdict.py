"""The verdict: for each method what is claimed, what the audits show, and the most that they could have shown.

Receives: methods and an AuditPlan: the privacy to audit and how much work to spend.
Gives: Rows; a row fails where a lower bound is above the claim, or where noise or sampling are not as stated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import get_args

from clipwise.accounting import epsilon
from clipwise.audit.bounds import Bound
from clipwise.audit.canaries import World, flooding, saturating, worlds
from clipwise.audit.mechanics import mechanics
from clipwise.audit.one_run import one_run
from clipwise.audit.white_box import being_there, composed, observe, private_for, taking_part, trajectories
from clipwise.methods import METHODS, Method, parse
from clipwise.plain import no_less
from clipwise.types import Memory, fraction, positive, whole

COPIES = 64  # canaries that are looked at in one step, where they do not meet
LONE = 4  # times as many steps for a canary that must be alone: fewer looks, at a bearable cost
WHOLE_RUNS = "whole runs"
# In the place of defaults that are tame: one phase only, hardly any feedback, one of four proofs.
HARSHER = {
    "schedule": ("schedule([(0, global_(2.0)), (10, flat(1.0))])",),
    "dice": tuple(f"dice(flat(1.0), feedback_norm=1.0, memory='{memory}', blocks=4)" for memory in get_args(Memory)),
}


@dataclass(frozen=True)
class AuditPlan:
    """The privacy to audit, and how much work to spend on it. ``confidence`` is that of all rows together."""

    noise_multiplier: float = 1.0
    sampling_rate: float = 0.1
    steps: int = 100
    delta: float = 1e-5
    trials: int = 64_000  # looks at canaries, in each world
    canaries: int = 1000  # of the audit from one run
    runs: int = 600  # with a canary, and as many without, for methods with private state
    run_steps: int = 8  # of each of those
    run_epsilon: float = 3.0  # and what they claim; so many runs can refute it at run_delta
    run_delta: float = 0.02
    confidence: float = 0.95
    noise: str | int = "secure"

    def __post_init__(self) -> None:
        """Refuse what no audit can be made of."""
        positive("noise_multiplier", self.noise_multiplier)
        positive("run_epsilon", self.run_epsilon)
        for name in ("sampling_rate", "delta", "run_delta", "confidence"):
            fraction(name, getattr(self, name), open_end=name != "sampling_rate")
        for name, least in (("steps", 1), ("trials", 20 * COPIES), ("canaries", 20), ("runs", 8), ("run_steps", 1)):
            whole(name, getattr(self, name), least=least)


@dataclass(frozen=True)
class Verdict:
    """One audit of one method; ε where it gives one."""

    method: str
    audit: str
    claimed: float | None
    shown: float | None
    ceiling: float | None
    passed: bool
    detail: str


# how many bounds it makes, what it is, and (confidence of each) →
Job = tuple[int, str, Callable[[float], list[Verdict]]]


def registered() -> tuple[Method, ...]:
    """Every method of the registry, some of them with harsher settings than their defaults."""
    return tuple(parse(text) for name in METHODS for text in HARSHER.get(name, (name,)))


def audit(
    methods: Sequence[Method], plan: AuditPlan, progress: Callable[[str], None] = lambda message: None
) -> list[Verdict]:
    """Every audit of every method.

    *Guarantees.* If all claims hold and the noise of different steps is independent, some row fails with a probability
    of at most 1 − ``plan.confidence``.
    """
    jobs = [job for method in methods for job in _jobs(method, plan)]
    each = 1 - (1 - plan.confidence) / sum(bounds for bounds, _, _ in jobs)
    rows = []
    for number, (_, name, run) in enumerate(jobs, start=1):
        progress(f"{number} of {len(jobs)}: {name}")
        rows += run(each)
    return rows


def row(method: Method, audit: str, claimed: float, bound: Bound, detail: str) -> Verdict:
    """The row of a bound on ε."""
    return Verdict(str(method), audit, claimed, bound.value, bound.ceiling, bound.value <= claimed, detail)


def _jobs(method: Method, plan: AuditPlan) -> Iterator[Job]:
    for world in worlds(method, COPIES):
        if world.name.startswith(flooding.__name__):
            yield 1, f"{method.name}, {WHOLE_RUNS}", partial(_whole_runs, method, world, plan)
        else:
            yield 2, f"{method.name}, steps", partial(_steps, method, world, plan)
    if method.recall is not None:  # what a sample's momentum remembers is in every later release
        yield 1, f"{method.name}, {WHOLE_RUNS}", partial(_whole_runs, method, saturating(method, 1), plan)
    yield 1, f"{method.name}, one run", partial(_one_run, method, plan)
    yield 1, f"{method.name}, noise and sampling", partial(_mechanics, method, plan)


def _steps(method: Method, world: World, plan: AuditPlan, confidence: float) -> list[Verdict]:
    """What a step shows of who took part in it, and of who is in the data; composed over all steps."""
    sigma = plan.noise_multiplier
    looks = plan.trials // COPIES
    seen = observe(world, noise_multiplier=sigma, steps=looks if world.canaries > 1 else LONE * looks, noise=plan.noise)
    rate = 1.0 if world.method.recall is not None else plan.sampling_rate
    claimed = _claimed(sigma, rate, plan.steps, plan.delta)
    setting = f"σ {sigma:g}, rate {rate:g}, {plan.steps} steps"

    def made(name: str, mu: Bound) -> Verdict:
        bound = composed(mu, rate, plan.steps, plan.delta)
        # one step's μ says it without the accountant's rounding
        detail = f"μ ≥ {mu.value:.3f}, claimed {1 / sigma:.3f} a step; {setting}"
        return row(method, name + _kind(world), claimed, bound, detail)

    rows = [made("step", taking_part(seen, confidence))]
    if world.rate < 1 and world.mates is None:
        rows.append(made("sampled step", being_there(seen, world.rate, confidence)))
    return rows


def _one_run(method: Method, plan: AuditPlan, confidence: float) -> list[Verdict]:
    fed_back = method.feedback is not None  # which takes so much noise that the plan's would protect nothing
    bound, claimed = one_run(
        method,
        noise_multiplier=None if fed_back else plan.noise_multiplier,
        epsilon=plan.run_epsilon if fed_back else None,
        sampling_rate=plan.sampling_rate,
        steps=plan.steps,
        canaries=plan.canaries,
        delta=plan.delta,
        confidence=confidence,
        noise=plan.noise,
    )
    return [row(method, "one run", claimed, bound, f"{plan.canaries} canaries, {plan.canaries // 5} guesses")]


def _kind(world: World) -> str:
    """What tells this world's audit apart from the method's others."""
    name = world.name.removeprefix(saturating.__name__).removeprefix(flooding.__name__).strip(", ")
    return f", {name}" if name else ""


def _whole_runs(method: Method, world: World, plan: AuditPlan, confidence: float) -> list[Verdict]:
    sigma = private_for(world, None, plan.run_steps, plan.noise, plan.run_delta, plan.run_epsilon).noise_multiplier
    bound, claimed = trajectories(
        world,
        noise_multiplier=sigma,
        steps=plan.run_steps,
        runs=plan.runs,
        delta=plan.run_delta,
        confidence=confidence,
        noise=plan.noise,
    )
    setting = f"{plan.runs} runs with and without; σ {sigma:g}, rate {world.rate:g}"
    detail = f"{setting}, {plan.run_steps} steps, δ {no_less(plan.run_delta)}"
    return [row(method, WHOLE_RUNS + _kind(world), claimed, bound, detail)]


def _mechanics(method: Method, plan: AuditPlan, confidence: float) -> list[Verdict]:
    steps = min(1000, max(60, plan.trials // 320))
    checks = mechanics(
        method, noise_multiplier=plan.noise_multiplier, steps=steps, confidence=confidence, noise=plan.noise
    )
    failed = [str(check) for check in checks if not check.passed]
    detail = "; ".join(failed) or f"{len(checks)} checks over {steps} steps"
    return [Verdict(str(method), "noise and sampling", None, None, None, not failed, detail)]


@lru_cache
def _claimed(noise_multiplier: float, sampling_rate: float, steps: int, delta: float) -> float:
    return epsilon(noise_multiplier=noise_multiplier, delta=delta, sampling_rate=sampling_rate, steps=steps)
