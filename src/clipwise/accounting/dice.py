"""DiceSGD's privacy: bounds that are proved (docs/dicesgd.md), in the place of the paper's theorem, which is false.

Receives: both clip norms, what is remembered, the sampling rate, δ, and either a noise multiplier or a target ε.
Gives: DicePlan: which samples a step draws from, the event that it records, epsilon and calibrate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, get_args

from clipwise.accounting.calibration import least_noise
from clipwise.accounting.events import spent
from clipwise.types import (
    BlockGaussian,
    Event,
    InputError,
    Memory,
    MemoryGaussian,
    PoissonGaussian,
    Refused,
    fraction,
    one_of,
    positive,
    whole,
)

if TYPE_CHECKING:
    from clipwise.methods import Method


@dataclass(frozen=True)
class DicePlan:
    """How a run of DiceSGD samples and what it costs.

    C1 = ``clip_norm`` bounds a sample's term, c2 = ``feedback_norm`` the feedback, both on the scale of the sum: c2 is
    the expected batch times the paper's C2. Noise of standard deviation σ = noise multiplier · ``sensitivity`` is added
    to V = Σ clip(g_i, C1) + clip(E, c2). ``sampling_rate`` q is the expected batch over the number of samples.

    ``memory``: "full" is the paper's algorithm (S1), and "none" keeps only the last step's residual (S2); both draw
    from all samples at rate q. "blocks" (S3) begins every ``groups`` steps with E = 0, and "bounded" (S4) clips what is
    left of E to c2; both draw, in the t-th step of a block, from the t-th group alone, at rate ``groups`` · q. A
    sample's group is its own number modulo ``groups``, whoever else is there.
    """

    memory: str
    clip_norm: float
    feedback_norm: float
    sampling_rate: float
    groups: int = 1

    def __post_init__(self) -> None:
        """Refuse what the proofs do not cover."""
        one_of("memory", self.memory, get_args(Memory))
        positive("clip_norm", self.clip_norm)
        positive("feedback_norm", self.feedback_norm)
        fraction("sampling_rate", self.sampling_rate)
        if self.memory in ("full", "none") and self.groups != 1:
            raise InputError(f"memory {self.memory!r} draws from all samples: expected groups=1, got {self.groups!r}")
        if whole("groups", self.groups) * self.sampling_rate > 1 + 1e-9:
            raise InputError(
                f"groups={self.groups} would draw at a rate of {self.groups * self.sampling_rate:.4g}, above 1: write "
                f"groups={math.floor(1 / self.sampling_rate + 1e-9)} at most (the blocks of dice), or a smaller batch"
            )

    @classmethod
    def of(cls, method: Method, expected_batch: float, samples: int) -> DicePlan | None:
        """How a method with feedback samples and what its steps cost; None for every other method."""
        feedback = method.feedback
        if feedback is None:
            return None
        others = method.split or method.count or method.after or method.recall or method.unit > 1
        if others or (feedback.normalised and feedback.memory == "bounded"):
            raise Refused(
                f"there is no privacy proof for such a feedback, got {method}: write what clipwise.dice accepts"
            )
        rate = expected_batch / samples
        return cls(feedback.memory, method.bound, expected_batch * feedback.clip_norm, rate, feedback.groups)

    @property
    def sensitivity(self) -> float:
        """What noise multipliers are over: how far one draw of one sample moves all that its event pays for."""
        return sensitivity(self.memory, self.clip_norm, self.feedback_norm, self.groups)

    @property
    def step_rate(self) -> float:
        """The rate at which a step draws from its group."""
        return min(1.0, self.groups * self.sampling_rate)

    def event(self, noise_multiplier: float, place: int = 0) -> Event:
        """What a step records that is the ``place``-th of its block; 0 begins a block."""
        if self.memory == "full":
            return MemoryGaussian(noise_multiplier, self.sampling_rate, 2 * self.feedback_norm / self.clip_norm)
        if self.memory == "none":
            return PoissonGaussian(noise_multiplier, self.sampling_rate)
        rate = self.step_rate if self.memory == "blocks" else 1.0  # S4 has no amplification
        return BlockGaussian(noise_multiplier, rate, whole("place", place, least=0) % self.groups == 0)

    def entries(self, noise_multiplier: float, steps: int) -> list[tuple[Event, int]]:
        """What a run of so many steps records."""
        begun = math.ceil(whole("steps", steps) / self.groups)
        found = [(self.event(noise_multiplier), begun), (self.event(noise_multiplier, 1), steps - begun)]
        return [entry for entry in found if entry[1]]

    def epsilon(
        self,
        *,
        noise_multiplier: float,
        delta: float,
        steps: int,
        accountant: str = "pld",
        rows_per_person: int = 1,
    ) -> float:
        """An upper bound on the ε of so many steps, under adding or removing one sample, or one person's."""
        return spent(self.entries(noise_multiplier, steps), delta, accountant, rows_per_person=rows_per_person)

    def calibrate(
        self, *, epsilon: float, delta: float, steps: int, accountant: str = "pld", rows_per_person: int = 1
    ) -> float:
        """The least noise multiplier, to within 1e-3 of itself, at which so many steps cost at most ``epsilon``."""
        whole("steps", steps)
        return least_noise(lambda noise: self.entries(noise, steps), epsilon, delta, accountant, rows_per_person)


def planned(
    plan: DicePlan | None, noise_multiplier: float, sampling_rate: float, steps: int
) -> list[tuple[Event, int]]:
    """What so many steps record, of a method with feedback or of any other."""
    if not steps:
        return []
    if plan is not None:
        return plan.entries(noise_multiplier, steps)
    return [(PoissonGaussian(noise_multiplier, sampling_rate), steps)]


def sensitivity(memory: str, clip_norm: float, feedback_norm: float, groups: int) -> float:
    """``DicePlan.sensitivity``: it does not depend on how samples are drawn."""
    c1, c2 = clip_norm, feedback_norm
    if memory == "full":
        return c1  # the memory stands in the event
    if memory == "none":
        return c1 + 2 * c2
    if memory == "blocks":
        return math.sqrt(c1**2 + 4 * (groups - 1) * c2**2)
    return math.sqrt(c1**2 + 4 * c1 * c2 + 8 * c2**2)


def claimed_epsilon_unsound(
    *, sigma: float, delta: float, sampling_rate: float, steps: int, clip_norm: float, feedback_norm: float
) -> float:
    """The ε that Theorem 3.8 of the paper claims. It is FALSE: an attack shows several times as much.

    σ₁² = 32 T (C1² + 2 C²) ln(1/δ)/(N² ε²), with C = B·C2 and σ = B·σ₁, solved for ε. It is here to be compared with;
    nothing in this package uses it. ``sigma`` is the standard deviation of the sum's noise.
    """
    squares = positive("clip_norm", clip_norm) ** 2 + 2 * positive("feedback_norm", feedback_norm) ** 2
    log = math.log(1 / fraction("delta", delta, open_end=True))
    rate = fraction("sampling_rate", sampling_rate)
    return rate * math.sqrt(32 * whole("steps", steps) * squares * log) / positive("sigma", sigma)
