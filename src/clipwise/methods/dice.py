"""DiceSGD: what clipping cut off is fed back, clipped, into later steps (paper 1).

Receives: a base method (C1), the feedback's threshold C2, and what is remembered.
Gives: a Method with private state. The paper's privacy theorem is false: the noise follows the bounds of
``clipwise.accounting.dice`` instead, which are proved (docs/dicesgd.md).
"""

from __future__ import annotations

from typing import get_args

from clipwise.methods.citations import ZHANG_2024_DICE
from clipwise.methods.flat import flat
from clipwise.methods.method import Feedback, Method, base_of, length, wrapped
from clipwise.types import InputError, Memory, Refused, one_of, whole


def dice(
    base: Method | None = None,
    feedback_norm: float = 0.01,
    memory: Memory = "full",
    blocks: int = 10,
    automatic: bool = False,
) -> Method:
    """V = Σ w_i g_i + clip(E, B·C2) is released; then E ← E − clip(E, B·C2) + Σ (1 − w_i) g_i.

    ``memory``: "full" is the paper's; "none" keeps the last step's residual only; "blocks" forgets every ``blocks``
    steps; "bounded" keeps E within B·C2 before the residual is added. In these two, each of ``blocks`` steps draws from
    a group of its own, so that a sample takes part once in so many steps.
    With an Adam optimizer this is Algorithm 3; ``automatic`` with ``normalised`` is Algorithm 4.
    """
    inner = base_of(dice, base, flat)
    feedback_norm = length("feedback_norm", feedback_norm, least=0.0)
    one_of("memory", memory, get_args(Memory))
    blocks = whole("blocks", blocks)
    if inner.split or inner.count or inner.after or inner.recall or inner.unit > 1 or inner.feedback:
        raise InputError(f"dice takes a method with one fixed bound and no memory such as flat(1.0), got {inner}")
    if automatic and memory == "bounded":
        raise Refused(
            "memory='bounded' has a privacy proof for clipped feedback only: normalised feedback can change sign in "
            "every step, and what one sample moves has no bound; write automatic=False, or memory='full'"
        )
    feedback = Feedback(feedback_norm, memory, blocks, automatic) if feedback_norm else None  # C2 = 0: the base
    settings = {"feedback_norm": feedback_norm, "memory": memory, "blocks": blocks, "automatic": automatic}
    return wrapped(inner, dice, settings, citation=ZHANG_2024_DICE, feedback=feedback)
