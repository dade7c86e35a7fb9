"""What a method's step and a look at the gradients may cost beside flat clipping's step.

Receives: a method.
Gives: the most that its time and its memory should be, as multiples of flat's; None where nothing was promised; the
same for a look every EVERY steps.
"""

from __future__ import annotations

from clipwise.methods import Method

EVERY = 50  # steps from one look to the next
LOOK_SHARE = 0.03  # the most of those steps' time that a look should take


def targets(method: Method) -> tuple[float | None, float | None]:
    """(time, memory) of one wrapper around a method that only weighs; combinations have no target of their own."""
    base, settings = method.settings.get("base"), method.settings
    if not isinstance(base, Method) or base.probe is not None or base.feedback is not None or base.unit > 1:
        return None, None
    match method.name:
        case "bam" if settings["form"] == "ascent":
            return 2.5, 2.0
        case "inner_momentum":
            return (method.past + 1) * 1.1, None  # a pass at θ and at each of K0 earlier iterates
        case "self_augmentation":
            return method.rows * 1.05, None
        case "dice":
            return 1.2, None
    return None, None
