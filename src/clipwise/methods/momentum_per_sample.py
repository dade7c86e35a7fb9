"""One momentum per sample (paper 0, Algorithm 1): every sample takes part in every step and remembers its own average.

Receives: a base method and the rate γ.
Gives: a Method for full batches of small problems: it keeps a gradient for each sample, which is private state.
"""

from __future__ import annotations

from clipwise.methods.citations import XIAO_2023
from clipwise.methods.method import Method, base_of, wrapped
from clipwise.methods.normalised import normalised
from clipwise.types import InputError, fraction


def momentum_per_sample(base: Method | None = None, rate: float = 0.1) -> Method:
    """m_i ← γ ∇f(θ; x_i) + (1 − γ) m_i, beginning with m_i = ∇f(θ_0; x_i); then weigh m_i.

    A term depends on its own sample and on released values, so the bound is the base's; without sampling, the steps
    are plain Gaussian mechanisms and are accounted as such (``batch`` must be all samples).
    """
    inner = base_of(momentum_per_sample, base, normalised)
    rate = fraction("rate", rate)
    if inner.feedback or inner.recall or inner.unit > 1:
        raise InputError(f"momentum_per_sample takes a method without private state such as flat(1.0), got {inner}")
    recall = None if rate == 1 else rate  # γ = 1 remembers nothing
    return wrapped(inner, momentum_per_sample, {"rate": rate}, citation=XIAO_2023, recall=recall)
