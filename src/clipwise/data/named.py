"""What a function uses beside its arguments: a tensor that a loss names, or a flag that it looks at.

Receives: a function in Python, a method, a partial, or an object that can be called.
Gives: named, each name with its value now, also of the functions of the same file that it calls.
"""

from __future__ import annotations

import dis
import functools
import inspect
from collections.abc import Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

WITHIN = 3  # settings.training.mixup
# these hold nothing to look at, or it is looked at elsewhere
LEAVES = (Tensor, nn.Module, FunctionType, MethodType, BuiltinFunctionType, bool, int, float, str, list, tuple)


def named(function: Any) -> Iterator[tuple[str, Any]]:
    """The values that a function may look at, by name; nothing of what is not written in Python."""
    return _named(function, set())


def _named(function: Any, seen: set[CodeType]) -> Iterator[tuple[str, Any]]:
    if isinstance(function, functools.partial):
        yield from ((f"argument {place}", value) for place, value in enumerate(function.args, start=1))
        yield from function.keywords.items()
        yield from _named(function.func, seen)
    elif isinstance(function, MethodType) and isinstance(function.__func__, FunctionType):
        own = function.__self__
        yield from _within(type(own).__name__, own, _mentioned(function.__func__.__code__)[1])
        yield from _named(function.__func__, seen)
    elif isinstance(function, FunctionType) and function.__code__ not in seen:
        seen.add(function.__code__)
        names = _mentioned(function.__code__)[1]
        for name, value in _of_code(function):
            yield from _within(name, value, names)
            within = inspect.unwrap(value) if isinstance(value, FunctionType) else None
            if isinstance(within, FunctionType) and within.__globals__ is function.__globals__:
                yield from _named(value, seen)  # a library's would lead to all of it
        if hasattr(function, "__wrapped__"):  # by a library's decorator, such as torch.autocast
            yield from _named(function.__wrapped__, seen)
    elif callable(function) and isinstance(function.__call__, MethodType):
        yield from _named(function.__call__, seen)


def _within(name: str, value: Any, names: frozenset[str], deep: int = WITHIN) -> Iterator[tuple[str, Any]]:
    """The value, and what it holds under these names, as an object, a module of Python's or a dictionary."""
    yield name, value
    if not deep or isinstance(value, LEAVES):
        return
    deep = 1 if isinstance(value, ModuleType) else deep  # whose own modules would lead to all of a library
    for held in (value,) if isinstance(value, dict) else (vars(type(value)), getattr(value, "__dict__", {})):
        for own in names:  # few, of possibly many
            if own in held:
                yield from _within(f"{name}.{own}", held[own], names, deep - 1)


def _of_code(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What it closes over, its defaults, and the globals that it loads."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # nothing is there yet
            continue
    yield from (("a default", value) for value in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()
    known = function.__globals__
    yield from ((name, known[name]) for name in _mentioned(function.__code__)[0] if name in known)


@functools.lru_cache(maxsize=1024)
def _mentioned(code: CodeType) -> tuple[tuple[str, ...], frozenset[str]]:
    """The globals that code loads, and all names and texts in it; with the functions that are written within it."""
    loaded = dict.fromkeys(i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME"))
    names = {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more, others = _mentioned(inner)
            loaded |= dict.fromkeys(more)
            names |= others
    return tuple(loaded), frozenset(names)
