"""The clipping methods, one file each; METHODS maps names to factories.

Receives: a method's expression, such as ``psac(clip_norm=0.1)`` or ``layerwise(flat(1.0))``.
Gives: the Method; ``str(method)`` is the expression again.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from clipwise.methods.adaptive import adaptive
from clipwise.methods.automatic import automatic
from clipwise.methods.flat import flat
from clipwise.methods.global_ import global_
from clipwise.methods.layerwise import layerwise
from clipwise.methods.method import Block, Count, Method, Relation
from clipwise.methods.normalised import normalised
from clipwise.methods.psac import psac
from clipwise.methods.schedule import schedule
from clipwise.types import InputError, one_of

METHODS: dict[str, Callable[..., Method]] = {
    factory.__name__: factory for factory in (flat, normalised, automatic, psac, global_, layerwise, adaptive, schedule)
}


def parse(text: str) -> Method:
    """The method that an expression names: a name alone, or a call with literals and other methods as arguments."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        raise InputError(f"expected a method such as psac or psac(clip_norm=0.1), got {text!r}") from None
    made = _made(tree, text)
    if not isinstance(made, Method):
        raise InputError(f"expected a method such as psac or psac(clip_norm=0.1), got {text!r}")
    return made


def _made(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Name):
        return METHODS[one_of("method", node.id, METHODS)]()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        factory = METHODS[one_of("method", node.func.id, METHODS)]
        args = [_made(a, text) for a in node.args]
        kwargs = {str(k.arg): _made(k.value, text) for k in node.keywords}  # ** has no name, so it is unknown
        known = factory.__code__.co_varnames[: factory.__code__.co_argcount]
        for key in kwargs:
            one_of(f"option of {node.func.id}", key, known)
        try:
            return factory(*args, **kwargs)
        except TypeError as error:
            raise InputError(f"in the method {text!r}: {error}") from None
    if isinstance(node, (ast.List, ast.Tuple)):
        return [_made(item, text) for item in node.elts]
    if isinstance(node, ast.Dict) and all(key is not None for key in node.keys):
        return {_made(k, text): _made(v, text) for k, v in zip(node.keys, node.values, strict=True) if k is not None}
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise InputError(f"in the method {text!r}: expected numbers and methods, got {ast.unparse(node)}") from None


__all__ = [
    "METHODS",
    "Block",
    "Count",
    "Method",
    "Relation",
    "adaptive",
    "automatic",
    "flat",
    "global_",
    "layerwise",
    "normalised",
    "parse",
    "psac",
    "schedule",
]
