"""Parameters used directly: in arithmetic, as an attention's bias, repeated for every sample.

Receives: a Meeting; for attention, the arguments of the call.
Gives: the output, made of one leaf per sample; ELEMENTWISE and REPEATING: the labels of the calls meant here.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipwise.records.displacement import Own, cut
from clipwise.records.kinds import Dense, Record, wide
from clipwise.records.layers.fallback import by_vmap
from clipwise.records.layers.meeting import Meeting, sources
from clipwise.records.tape import Source
from clipwise.records.trees import mapped, vmapped

_ARITHMETIC = "add sub mul div true_divide pow maximum minimum where lerp floor_divide subtract multiply divide".split()
ELEMENTWISE = frozenset(
    {n for name in _ARITHMETIC for n in (name, f"{name}_", f"__{name}__", f"__r{name}__", f"__i{name}__")}
    | {"__truediv__", "__rtruediv__", "__itruediv__", "rsub"}
)
REPEATING = frozenset({"expand", "expand_as", "broadcast_to", "repeat", "tile"})


def elementwise(m: Meeting) -> Tensor:
    """Arithmetic with broadcasting (x + position table, x * scale): the parameter enters once per sample."""
    shape = torch.broadcast_shapes(*(t.shape for t in m.given))
    spread = functools.partial(_spread, m, dimensions=len(shape))
    m.tape.site(sources(m), m.call.label, None)
    result: Tensor = m.call.function(*mapped(m.args, spread), **mapped(m.kwargs, spread))
    return m.narrowed(result)


def _spread(m: Meeting, argument: Tensor, *, dimensions: int) -> Tensor:
    """A parameter, broadcast to so many dimensions, with a leaf for each sample; other tensors as they are."""
    source = m.source(argument)
    if source is None:
        return argument
    leaf = cut(m.each(argument)).requires_grad_()
    return m.placed(m.tape.leaf(leaf, source, lambda g: Dense(wide(g))), dimensions)


def biased_attention(
    m: Meeting, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *rest: Any, **options: Any
) -> Tensor:
    """F.scaled_dot_product_attention with a trained bias [head, query, key] as its mask."""
    if attn_mask is None or any(m.source(t) is not None for t in (query, key, value)):
        return by_vmap(m)
    m.tape.site(sources(m), m.call.label, None)
    bias = _spread(m, attn_mask, dimensions=query.dim()).to(query.dtype)
    return F.scaled_dot_product_attention(query, key, value, bias, *rest, **options)


def repeated(m: Meeting) -> Tensor:
    """A parameter given a sample dimension (a class token's expand): from here on it is data with a leaf per sample."""
    out = m.out
    (source, *_) = sources(m)
    made: Tensor = m.call.function(*m.args, **m.kwargs)
    first = made.narrow(out.dim, 0, out.factor)  # every sample's part is the same function of the parameter
    part = Source(first, source.names)
    n = m.samples

    def record(gradient: Tensor) -> Record:
        each = gradient.movedim(out.dim, 0).reshape(n, out.factor, *gradient.movedim(out.dim, 0).shape[1:])
        return Dense(wide(each.movedim(1, out.dim + 1)))

    m.tape.site([source], m.call.label, None)
    if source.own is not None:
        own = source.own

        def one(*args: Any, **kwargs: Any) -> Tensor:
            repeats: Tensor = m.call.function(*args, **kwargs)
            return repeats.narrow(out.dim, 0, out.factor)

        values = vmapped(one, m.args, m.kwargs, lambda t: (own.value, 0) if m.source(t) else (t, None), "same")
        part = replace(part, own=Own(own.views, lambda: values))  # [unit, ..., factor, ...]
        made = part.own.each.movedim(0, out.dim).flatten(out.dim, out.dim + 1).to(made.dtype)  # type: ignore[union-attr]
    return m.tape.leaf(cut(made).requires_grad_(), part, record)
