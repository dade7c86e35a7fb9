"""Momentum and filters of released gradients.

Receives: their settings.
Gives: Post values. Each begins with nothing remembered, and equals ``identity`` at its neutral setting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from clipwise.methods.citations import TANG_2024, XIAO_2023, ZHANG_2024_DOPPLER
from clipwise.postprocess.post import Post, State
from clipwise.types import Gradient, InputError, at_least_zero, fraction, positive

_STEPS = 10_000  # for which a filter's gain is looked at before it is used


def heavy_ball(beta: float = 0.9) -> Post:
    """M_t = β M_{t−1} + G̃_t: outer momentum as the authors of paper 0 run it (their 0.9)."""
    beta = at_least_zero("beta", beta)
    if beta >= 1:
        raise InputError(f"beta must be below 1, got {beta!r}: write for instance heavy_ball(0.9)")
    return Post(
        f"heavy_ball(beta={beta!r})",
        lambda state, gradient, noise: _recursive(state, gradient, beta, 1.0),
        XIAO_2023,
    )


def outer_momentum(rate: float = 0.6) -> Post:
    """M_t = (1 − γ1) M_{t−1} + G̃_t: paper 0, equation 14, as printed."""
    rate = fraction("rate", rate)
    return Post(
        f"outer_momentum(rate={rate!r})",
        lambda state, gradient, noise: _recursive(state, gradient, 1 - rate, 1.0),
        XIAO_2023,
    )


def average(gain: float = 0.1) -> Post:
    """m_t = (1 − κ) m_{t−1} + κ G̃_t, beginning with m_1 = G̃_1: an exponential average, and DiSK's filter.

    By itself it has no paper: DiSK's is cited for the method ``disk``, which it goes with.
    """
    gain = fraction("gain", gain)

    def apply(state: State, gradient: Gradient, noise: Mapping[str, float]) -> tuple[State, Gradient]:
        return (gradient, gradient) if state is None else _recursive(state, gradient, 1 - gain, gain)

    return Post(f"average(gain={gain!r})", apply)


def low_pass(inputs: Sequence[float] = (0.1, 0.1), outputs: Sequence[float] = (-0.8,)) -> Post:
    """DOPPLER's filter (Zhang et al. 2024): m_t = −Σ_j a_j m_{t−j} + Σ_k b_k G̃_{t−k}, divided by its own gain so far.

    ``inputs`` is b_0, b_1, …, ``outputs`` a_1, a_2, …; b = (1,) and a = () is the gradient itself. The division by
    the response to a constant of one, which is known in advance, undoes the bias of starting from zero.
    """
    b, a = _numbers("inputs", inputs), _numbers("outputs", outputs)
    if not b or _reach(a) >= 1:
        raise InputError(
            f"expected a stable filter such as low_pass((0.1, 0.1), (-0.8,)), got {tuple(b)!r} and {tuple(a)!r}"
        )
    if sum(b) * (1 + sum(a)) <= 0:
        raise InputError(
            f"the filter must let a constant pass, got a gain of {sum(b) / (1 + sum(a)):g}: write inputs "
            "with a positive sum, such as (0.1, 0.1)"
        )
    _refuse_vanishing(b, a)

    def apply(state: State, gradient: Gradient, noise: Mapping[str, float]) -> tuple[State, Gradient]:
        given, made = state if state is not None else ([], [])
        # the last entry of each is the response to a constant gradient of one
        given = [{**gradient, "": torch.ones((), dtype=torch.float64, device="cpu")}, *given][: len(b)]
        now = {
            name: sum((c * g[name] for c, g in zip(b, given, strict=False)), torch.zeros_like(value))
            - sum((c * m[name] for c, m in zip(a, made, strict=False)), torch.zeros_like(value))
            for name, value in given[0].items()
        }
        gain = float(now[""])
        update = {name: now[name] / gain for name in gradient}
        return [given, [now, *made][: len(a)]], update

    return Post(f"low_pass(inputs={list(b)!r}, outputs={list(a)!r})", apply, ZHANG_2024_DOPPLER)


def adam_bc(beta1: float = 0.9, beta2: float = 0.999, floor: float = 1e-8) -> Post:
    """DP-AdamBC (Tang et al. 2024): Adam's direction, with the noise's known variance taken out of the second moment.

    m̂/√max(v̂ − (σC/B)², floor), to be used with plain SGD as the optimizer; ``floor`` is γ' of the paper.
    """
    beta1, beta2 = at_least_zero("beta1", beta1), at_least_zero("beta2", beta2)
    if not 1e-36 <= positive("floor", floor) <= 1e36:  # what float32 holds, with some room
        raise InputError(f"floor must be from 1e-36 to 1e+36, got {floor!r}: write for instance adam_bc(floor=1e-8)")
    if beta1 >= 1 or beta2 >= 1:
        raise InputError(f"beta1 and beta2 must be below 1, got {beta1!r} and {beta2!r}")

    def apply(state: State, gradient: Gradient, noise: Mapping[str, float]) -> tuple[State, Gradient]:
        blank = {name: torch.zeros_like(g) for name, g in gradient.items()}
        step, m, v = (0, blank, blank) if state is None else state
        step += 1
        m = {name: beta1 * m[name] + (1 - beta1) * g for name, g in gradient.items()}
        v = {name: beta2 * v[name] + (1 - beta2) * g.square() for name, g in gradient.items()}
        first, second = 1 - beta1**step, 1 - beta2**step
        update = {name: (m[name] / first) / (v[name] / second - noise[name] ** 2).clamp(min=floor).sqrt() for name in m}
        return (step, m, v), update

    return Post(f"adam_bc(beta1={beta1!r}, beta2={beta2!r}, floor={floor!r})", apply, TANG_2024)


def _recursive(state: State, gradient: Gradient, keep: float, add: float) -> tuple[State, Gradient]:
    before = state if state is not None else {name: torch.zeros_like(g) for name, g in gradient.items()}
    now = {name: keep * before[name] + add * g for name, g in gradient.items()}
    return now, now


def _numbers(name: str, values: Any) -> list[float]:
    if not isinstance(values, Sequence) or not all(
        isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) for v in values
    ):
        raise InputError(f"{name} must be numbers such as (0.1, 0.1), got {values!r}")
    return [float(v) for v in values]


def _refuse_vanishing(b: Sequence[float], a: Sequence[float]) -> None:
    """Refuse a filter that some step would divide by nothing: its gain so far, which no data enter, is simulated."""
    impulse: list[float] = []  # the response to a single one
    gain = length = 0.0
    for step in range(_STEPS):
        now = b[step] if step < len(b) else 0.0
        now -= sum(c * before for c, before in zip(a, reversed(impulse), strict=False))
        impulse = [*impulse, now][-max(len(a), 1) :]
        gain, length = gain + now, length + abs(now)
        # beside this much that cancels, or beyond these powers of ten, float32 gradients keep no digits
        if not max(1e-6 * length, 1e-18) < abs(gain) < 1e18:
            raise InputError(
                f"the filter's gain must not vanish or overflow at any step, got {gain:g} at step {step + 1} of inputs "
                f"{tuple(b)!r} and outputs {tuple(a)!r}: write a positive input first, such as (0.1, 0.1) and (-0.8,)"
            )


def _reach(a: Sequence[float]) -> float:
    """The largest pole of the filter: below one, what it remembers fades."""
    if not a:
        return 0.0
    companion = torch.zeros(len(a), len(a), dtype=torch.float64, device="cpu")
    companion[0] = -companion.new_tensor(a)
    companion.diagonal(-1).fill_(1)
    poles: Tensor = torch.linalg.eigvals(companion)
    return float(poles.abs().max())
