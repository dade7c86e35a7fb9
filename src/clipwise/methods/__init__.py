"""The clipping methods, one file each; METHODS maps names to factories.

Receives: a method's expression, such as ``psac(clip_norm=0.1)`` or ``layerwise(flat(1.0))``.
Gives: parse, the Method of it, whose ``str`` is the expression again; as_method, for what may be either.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from clipwise.methods.adaptive import adaptive
from clipwise.methods.automatic import automatic
from clipwise.methods.bam import bam
from clipwise.methods.batch_clipping import batch_clipping
from clipwise.methods.dice import dice
from clipwise.methods.disk import disk
from clipwise.methods.dp_sat import dp_sat
from clipwise.methods.flat import flat
from clipwise.methods.global_ import global_
from clipwise.methods.inner_momentum import inner_momentum
from clipwise.methods.layerwise import layerwise
from clipwise.methods.method import Block, Count, Engine, Feedback, Method, Steady, papers
from clipwise.methods.momentum_per_sample import momentum_per_sample
from clipwise.methods.normalised import normalised
from clipwise.methods.p_average import p_average
from clipwise.methods.psac import psac
from clipwise.methods.schedule import schedule
from clipwise.methods.self_augmentation import self_augmentation
from clipwise.types import InputError, one_of

# how much of a gradient is kept
WEIGHTS = (flat, normalised, automatic, psac, global_, layerwise, adaptive, schedule)
# where it is taken, and what is done with the rest: each wraps any of the others
WRAPPERS = (inner_momentum, momentum_per_sample, self_augmentation, bam, dp_sat, p_average, batch_clipping, dice, disk)
METHODS: dict[str, Callable[..., Method]] = {factory.__name__: factory for factory in (*WEIGHTS, *WRAPPERS)}


def parse(text: str) -> Method:
    """The method that an expression names: a name alone, or a call with literals and other methods as arguments."""
    made = called(text, METHODS, "method", "psac or psac(clip_norm=0.1)")
    assert isinstance(made, Method)
    return made


def as_method(given: Method | str) -> Method:
    """The method itself, or the one that an expression names."""
    if not isinstance(given, Method | str):
        raise InputError(f"expected a method or its expression, got {given!r}: write clipwise.flat() or 'flat'")
    return parse(given) if isinstance(given, str) else given


def called(text: str, known: Mapping[str, Callable[..., Any]], kind: str, example: str) -> object:
    """What an expression of known names, calls and literals makes; nothing else is evaluated."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        tree = None
    if not isinstance(tree, (ast.Name, ast.Call)):
        raise InputError(f"expected a {kind} such as {example}, got {text!r}")
    return _made(tree, text, known, kind)


def _made(node: ast.expr, text: str, names: Mapping[str, Callable[..., Any]], kind: str) -> Any:
    sign = node.operand if isinstance(node, ast.UnaryOp) else node
    if isinstance(sign, ast.Name) and sign.id.lower() in ("inf", "infinity", "nan"):
        raise InputError(f"in the {kind} {text!r}: a number must be finite, got {ast.unparse(node)}")
    if isinstance(node, ast.Name):
        return names[one_of(kind, node.id, names)]()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        factory = names[one_of(kind, node.func.id, names)]
        args = [_made(a, text, names, kind) for a in node.args]
        kwargs = {str(k.arg): _made(k.value, text, names, kind) for k in node.keywords}  # ** has no name: unknown
        options = inspect.signature(factory).parameters.values()
        known = [o.name for o in options if o.kind in (o.POSITIONAL_OR_KEYWORD, o.KEYWORD_ONLY)]
        for key in kwargs:
            one_of(f"option of {node.func.id}", key, known)
        try:
            return factory(*args, **kwargs)
        except TypeError as error:
            raise InputError(f"in the {kind} {text!r}: {error}") from None
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_made(item, text, names, kind) for item in node.elts]
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        pairs = [(k, v) for k, v in zip(node.keys, node.values, strict=True) if k is not None]
        return {_made(k, text, names, kind): _made(v, text, names, kind) for k, v in pairs}
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise InputError(f"in the {kind} {text!r}: expected numbers and names, got {ast.unparse(node)}") from None


__all__ = [
    "METHODS",
    "Block",
    "Count",
    "Engine",
    "Feedback",
    "Method",
    "Steady",
    "adaptive",
    "as_method",
    "automatic",
    "bam",
    "batch_clipping",
    "called",
    "dice",
    "disk",
    "dp_sat",
    "flat",
    "global_",
    "inner_momentum",
    "layerwise",
    "momentum_per_sample",
    "normalised",
    "p_average",
    "papers",
    "parse",
    "psac",
    "schedule",
    "self_augmentation",
]
