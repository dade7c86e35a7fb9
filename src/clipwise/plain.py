"""How values are written: for programs as JSON, which has no NaN and no infinity; for people in few digits.

Receives: numbers, texts, lists and mappings.
Gives: plain, the same with null for what JSON does not have; as_json, its text; with_nan, the way back;
four_digits, a number for people; rounded_up, an ε for people; no_less, a δ; bound, an ε of an audit; reason, an error.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from typing import Any


def plain(value: Any) -> Any:
    """The value without NaN and infinity."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def with_nan(value: Any) -> Any:
    """The value with NaN in the place of null: what is not finite has no other name in JSON."""
    if isinstance(value, dict):
        return {key: with_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_nan(item) for item in value]
    return math.nan if value is None else value


def as_json(value: Any, indent: int | None = 2) -> str:
    """The value as JSON, with a line end; on one line where ``indent`` is None."""
    return json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False) + "\n"


def reason(error: BaseException) -> str:
    """What an error of any kind says, behind its type, on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def four_digits(value: float) -> str:
    """A number for people: four digits, and no exponent where a price or a count has none."""
    text = f"{value:.4g}"
    return f"{float(text):.0f}" if "e+" in text and abs(value) < 1e15 else text


def rounded_up(epsilon: float) -> str:
    """ε for people, never below what was spent: three decimals, or three digits where that would say nothing."""
    if not 0 < epsilon < math.inf:
        return f"{epsilon:g}"
    exact = Decimal(repr(epsilon))  # its shortest text, so that 1e-9 is not a little more than that
    usual = 0.1 <= epsilon < 1e6
    up = exact.quantize(Decimal(1).scaleb(-3 if usual else exact.adjusted() - 2), ROUND_CEILING)
    return f"{up}" if usual else f"{float(up):.3g}"


def no_less(delta: float) -> str:
    """δ for people, six digits at most and never below itself: of a smaller one ε would be too small."""
    if not 0 < delta < math.inf:
        return f"{delta:g}"
    exact = Decimal(repr(delta))
    return f"{float(exact.quantize(Decimal(1).scaleb(exact.adjusted() - 5), ROUND_CEILING)):g}"


def bound(epsilon: Any, *, up: bool = False) -> str:
    """An ε of an audit: what is claimed rounded ``up``, what was shown down, so that neither says more than is so."""
    if not isinstance(epsilon, (int, float)) or epsilon >= 1e4:
        return "∞" if isinstance(epsilon, (int, float)) else "–"
    step = Decimal(1 if epsilon >= 100 else "0.01")
    return f"{Decimal(repr(epsilon)).quantize(step, ROUND_CEILING if up else ROUND_FLOOR)}"
