"""Products with a weight matrix: linear, matmul, addmm.

Receives: a Meeting and the arguments of the call.
Gives: the output, tapped so that the weight's record is the pair (a, b) or, where that is cheaper, written out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipwise.records.displacement import Own, cut
from clipwise.records.kernels import positions_total
from clipwise.records.kernels.gram import EVEN, HALF
from clipwise.records.kinds import Dense, Outer, full_precision, outer_form, wide, written_format
from clipwise.records.kinds.outer import by_kernel, rounded
from clipwise.records.layers.fallback import by_vmap
from clipwise.records.layers.meeting import Meeting, added_to, identity, mixing, seen_format
from clipwise.records.tape import Rows, Want, by_sample, by_unit, from_units
from clipwise.types import Refused


def linear(m: Meeting, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear."""
    if m.source(input) is not None or weight.dim() != 2 or _spread(bias, weight.shape[0]):
        return by_vmap(m)
    x = m.cast(input, seen_format(input))
    output = _product(m, x, weight, bias, lambda offset: F.linear(x, m.value(weight), offset), flip=False)
    return _linear(m, x, weight, bias, flip=False, output=output)


def matmul(m: Meeting, input: Tensor, other: Tensor, *, out: None = None) -> Tensor:
    """X @ W with a two-dimensional W."""
    if m.source(input) is not None or other.dim() != 2 or input.dim() < 2 or m.source(other) is None:
        return by_vmap(m)
    x = m.cast(input, seen_format(input))
    output = _product(m, x, other, None, lambda _: x @ m.value(other), flip=True)
    return _linear(m, x, other, None, flip=True, output=output)


def mm(m: Meeting, input: Tensor, mat2: Tensor, *, out: None = None) -> Tensor:
    """The same under torch.mm's names."""
    return matmul(m, input, mat2)


def addmm(m: Meeting, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Bias + X @ W, under torch.addmm's names: the Conv1D of GPT-2."""
    bias, x = input, mat1
    if m.source(x) is not None or (beta, alpha) != (1, 1) or _spread(bias, mat2.shape[1]):
        return by_vmap(m)
    x = m.cast(x, seen_format(x))
    output = _product(
        m,
        x,
        mat2,
        bias,
        lambda offset: x @ m.value(mat2) if offset is None else torch.addmm(offset, x, m.value(mat2)),
        flip=True,
    )
    return _linear(m, x, mat2, bias, flip=True, output=output)


def _spread(bias: Tensor | None, features: int) -> bool:
    """Whether one number of the bias is added to several features."""
    return bias is not None and bias.shape != (features,)


def _linear(m: Meeting, x: Tensor, weight: Tensor, bias: Tensor | None, *, flip: bool, output: Tensor) -> Tensor:
    """y = x Wᵀ + bias with W [q, p]: v_i = Σ_s b_is a_isᵀ. ``flip``: the tensor given is Wᵀ."""
    rows, n = m.rows(x), m.samples
    source, wants = m.factor(weight), list[Want | None]()
    features, saved = output.shape[-1], list[Tensor]()
    if source is not None:
        if rows is None:
            raise Refused(mixing(m.call.label))
        a = by_sample(cut(x), rows, n).reshape(n, 1, -1, x.shape[-1])
        positions, q = a.shape[2], features
        swap = flip != source.flipped  # the parameter is [p, q]: its gradient is Σ a bᵀ
        # what goes on through a Jacobian is always written: there is nothing to measure
        form = outer_form(a, q, output.dtype, swap=swap, measure=source.name is not None)
        shape = source.tensor.t().shape if source.flipped else source.tensor.shape
        out = m.out

        def record(a: Tensor, b: Tensor) -> Outer:
            b = by_sample(b, out, n).reshape(n, 1, positions, b.shape[-1])
            spare = b.shape[-1] - q
            return Outer(b, a, shape, (spare, 0), turned=True) if swap else Outer(a, b, shape, (0, spare))

        # logits, say: rows that a kernel can read, also once they are rounded
        spare = -q % EVEN if (by_kernel(a, output.dtype) or rounded(a, output)) and not m.tape.dual else 0
        if m.tape.writes(form, source):
            kept = source.name is not None  # what goes on through a Jacobian keeps its digits
            write = Outer.written if kept else Outer.dense
            dtype = written_format(torch.promote_types(a.dtype, output.dtype), cuda=a.is_cuda and kept)
            wants.append(Want(source, (n, *shape), dtype, lambda b, a: write(record(a, b)), Dense, spare))
            saved = [a]
        else:
            size = (*output.shape[:-1], q + spare)
            wants.append(Want(source, size, output.dtype, identity, functools.partial(record, a), spare))
        m.tape.site([source], m.call.label, form)
    out_rows, dual = m.out, m.tape.dual  # not m: kept until the backward pass, it would keep the call's arguments

    def keep(b: Tensor) -> Tensor:
        rows = by_sample(b, out_rows, n).reshape(n, -1, features)
        # a kernel passes no forward-mode derivative on
        return positions_total(rows) if _added_by_kernel(rows) and not dual else wide(rows).sum(1)

    return m.tap(output, saved, [*wants, added_to(m.source(bias), output, out_rows, keep)])


def _added_by_kernel(rows: Tensor) -> bool:
    """Whether a kernel adds up a bias's gradients [sample, position, feature]."""
    return rows.is_cuda and rows.dtype in HALF and rows.shape[1] > 1


def _product(
    m: Meeting, x: Tensor, weight: Tensor, bias: Tensor | None, plain: Callable[[Tensor | None], Tensor], *, flip: bool
) -> Tensor:
    """``plain(bias)``; in a displaced pass with each unit's own weight and bias."""
    source, offset, rows = m.factor(weight), m.own(bias), m.rows(x)
    own = source.own if source is not None else None
    if (own is None and offset is None) or rows is None:
        return plain(m.value(bias))
    units = m.samples // (own or offset).views  # type: ignore[union-attr]
    turned = source is not None and flip != source.flipped  # the parameter is [p, q]
    added = None if offset is None else cut(offset.value)[:, None]
    if own is not None and own.factored and not m.tape.dual:
        call = lambda: plain(m.value(bias) if offset is None else None)
        matrix = m.value(weight).mT if flip else m.value(weight)
        y: Tensor = _Factored.apply(x, call, matrix, own, added, rows, units, turned)  # type: ignore[no-untyped-call]
        return y
    inputs = wide(by_unit(x, rows, units))
    if own is None or own.factored:
        base = plain(m.value(bias) if offset is None else None)
        with full_precision(x):
            y = wide(by_unit(base, rows, units))
            y = y if own is None else own.product(y, inputs, turned=turned)
            y = y if added is None else y + added
        return from_units(y, rows, x.shape).to(base.dtype)
    with full_precision(x):
        values = own.lent if turned else own.lent.mT
        if added is None and bias is not None:
            added = wide(m.value(bias))
        y = inputs @ values if added is None else torch.baddbmm(added, inputs, values)
    return from_units(y, rows, x.shape).to(seen_format(x))


class _Factored(torch.autograd.Function):
    """x Wᵀ + x (c v)ᵀ: in the backward pass, too, the second is added to the first where it lies."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        plain: Callable[[], Tensor],
        matrix: Tensor,
        own: Own,
        added: Tensor | None,
        rows: Rows,
        units: int,
        turned: bool,
    ) -> Tensor:
        ctx.matrix, ctx.own, ctx.rows, ctx.units, ctx.turned, ctx.dtype = matrix, own, rows, units, turned, x.dtype
        base = plain()
        with full_precision(x):
            inputs = wide(by_unit(x, rows, units))
            y = own.product(wide(by_unit(base, rows, units)), inputs, turned=turned, free=True)
            y = y if added is None else y.add_(added)
        return from_units(y, rows, x.shape).to(base.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[0]:
            return (None,) * 8
        (b,) = gradients
        with full_precision(b):
            base = wide(by_unit(b @ ctx.matrix.to(b.dtype), ctx.rows, ctx.units))
            x = ctx.own.product(base, wide(by_unit(b, ctx.rows, ctx.units)), turned=not ctx.turned, free=True)
        return (from_units(x, ctx.rows, b.shape).to(ctx.dtype), *(None,) * 7)
