"""p-averaged clipping: groups of private samples are averaged, and the averages weighed (paper 0 §3.3).

Receives: a base method and the group's expected size p.
Gives: a Method of twice the base's sensitivity: one sample can turn its whole group's term around.
"""

from __future__ import annotations

from clipwise.methods.citations import XIAO_2023
from clipwise.methods.flat import flat
from clipwise.methods.method import Method, base_of, wrapped
from clipwise.types import InputError, whole


def p_average(base: Method | None = None, size: int = 4) -> Method:
    """Σ_groups w(‖u‖) u with u = (1/p) Σ_{i in group} ∇f(θ; x_i).

    Each sample draws its group among B/p by itself, so that adding a sample moves nobody else. A diagnostic: sampling
    noise falls as 1/p, but under privacy the doubled sensitivity and the p times fewer terms cost more than that.
    """
    inner = base_of(p_average, base, flat)
    size = whole("size", size)
    if inner.feedback or inner.recall or inner.unit > 1:
        raise InputError(f"p_average takes a method that weighs samples one by one such as flat(1.0), got {inner}")
    return wrapped(inner, p_average, {"size": size}, citation=XIAO_2023, unit=size)
