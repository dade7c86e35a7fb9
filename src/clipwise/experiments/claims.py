"""Claims about measurements, as expressions: ``accuracy['psac'] > accuracy['flat']``.

Receives: an expression, and the measured values of every run.
Gives: whether it holds, or None where a run or quantity that it names was not measured; evaluated, by another look-up.
"""

from __future__ import annotations

import ast
import fnmatch
import math
import operator
from collections.abc import Callable, Mapping
from functools import partial

from clipwise.types import InputError

_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda left, right: left / right if right else math.nan,  # which no comparison holds of
}
_ORDER: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_CALLS: dict[str, Callable[[list[float]], float]] = {
    "min": min,
    "max": max,
    "abs": lambda values: abs(values[0]),
    "spread": lambda values: max(values) - min(values),
}
Values = Mapping[str, Mapping[str, float]]  # run → quantity → number
Find = Callable[[str, str], list[float]]  # (quantity, run or pattern of runs) → its numbers


class _Missing(Exception):
    pass


def holds(check: str, values: Values) -> bool | None:
    """Whether the claim holds: quantities subscripted by runs, numbers, + − * /, comparisons, ``and``, and functions.

    ``min``, ``max`` and ``spread`` take quantities, or one of several runs: ``min(accuracy['flat*'])`` is over all runs
    whose names fit the pattern.
    """
    try:
        return evaluated(check, partial(_measured, values))
    except _Missing:
        return None


def evaluated(check: str, find: Find) -> bool:
    """The same, where ``find`` says what was measured; a text that is no claim is an error."""
    try:
        tree = ast.parse(check, mode="eval").body
    except SyntaxError:
        raise _wrong(check) from None
    return _truth(tree, check, find)


def fits(run: str, pattern: str) -> bool:
    """Whether this is the run's name, or a pattern of it."""
    return run == pattern or fnmatch.fnmatchcase(run, pattern)


def _measured(values: Values, quantity: str, pattern: str) -> list[float]:
    runs = [run for run in values if fits(run, pattern)]
    found = [float(values[run][quantity]) for run in runs if quantity in values[run]]
    if not found or len(found) < len(runs):
        raise _Missing
    return found


def _wrong(check: str) -> InputError:
    return InputError(f"expected a claim such as accuracy['psac'] > accuracy['flat'], got {check!r}")


def _truth(node: ast.expr, check: str, find: Find) -> bool:
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        parts = [_truth(part, check, find) for part in node.values]  # each, so that what is missing is seen
        return all(parts)
    if not isinstance(node, ast.Compare):
        raise _wrong(check)
    sides = [_number(side, check, find) for side in (node.left, *node.comparators)]
    pairs = zip(node.ops, sides, sides[1:], strict=False)
    if any(type(op) not in _ORDER for op in node.ops):
        raise _wrong(check)
    return all(_ORDER[type(op)](left, right) for op, left, right in pairs)


def _number(node: ast.expr, check: str, find: Find) -> float:
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand, check, find)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _ARITHMETIC[type(node.op)](_number(node.left, check, find), _number(node.right, check, find))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CALLS and node.args:
        return _CALLS[node.func.id]([value for arg in node.args for value in _all(arg, check, find)])
    found = _all(node, check, find) if isinstance(node, ast.Subscript) else []
    if len(found) != 1:
        raise _wrong(check)
    return found[0]


def _all(node: ast.expr, check: str, find: Find) -> list[float]:
    """The values of ``quantity['run']``, of several runs where it is a pattern; or one number."""
    if not isinstance(node, ast.Subscript):
        return [_number(node, check, find)]
    if not (isinstance(node.value, ast.Name) and isinstance(node.slice, ast.Constant)):
        raise _wrong(check)
    return find(node.value.id, str(node.slice.value))
