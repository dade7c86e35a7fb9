"""Recurrent layers over a whole sequence: one function each, with its gradient written by hand.

Receives: the input's share of the gates for all steps, the first state, and the recurrent weight: of all samples, or
``own`` of each.
Gives: all states; in the backward pass, the gradient at the gates of every step, which is all that records need.

Autograd over an unrolled loop keeps a dozen nodes per step; here a step is one product and a few fused passes, and
what does not depend on the recurrence is computed for all steps at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# (∂y, y) → ∂y y (1 − y) and ∂y (1 − y²), each in one pass
sigmoid_backward, tanh_backward = torch.ops.aten.sigmoid_backward, torch.ops.aten.tanh_backward


def lstm(ahead: Tensor, h: Tensor, c: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """All hidden states [step, sample, hidden] and the last cell, for gates ``ahead`` [step, sample, 4 hidden]."""
    return lstm_tapped(ahead, h, c, weight, bias, ahead.new_zeros(()).expand_as(ahead))


def gru(ahead: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """All hidden states [step, sample, hidden], for gates ``ahead`` [step, sample, 3 hidden]."""
    return gru_tapped(ahead, h, weight, bias, ahead.new_zeros(()).expand_as(ahead))


def lstm_tapped(
    ahead: Tensor, h: Tensor, c: Tensor, weight: Tensor, bias: Tensor | None, tap: Tensor, *own: Tensor
) -> tuple[Tensor, Tensor]:
    """The same; the tap's gradient is the gradient at W_hh h + b_hh.

    ``own``: each unit's weight [unit, 4 hidden, hidden] in the place of ``weight``; or pairs (a, b), [unit, s, …], with
    Σ_s b_s a_sᵀ beside it. The bias may be [4 hidden], or [sample, 4 hidden].
    """
    states: tuple[Tensor, Tensor] = _Lstm.apply(ahead, h, c, weight, bias, tap, *own)  # type: ignore[no-untyped-call]
    return states


def gru_tapped(ahead: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, tap: Tensor, *own: Tensor) -> Tensor:
    """The same; the tap's gradient is the gradient at W_hh h + b_hh. ``own`` as for the LSTM."""
    states: Tensor = _Gru.apply(ahead, h, weight, bias, tap, *own)  # type: ignore[no-untyped-call]
    return states


def lstm_step(x: Tensor, u: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """One step, by ordinary operations: h and c for the input's share x and the state's share u of the gates."""
    i, f, g, o = (x + u).chunk(4, -1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c.tanh(), c


def gru_step(x: Tensor, u: Tensor, h: Tensor) -> Tensor:
    """One step, by ordinary operations."""
    (xr, xz, xn), (ur, uz, un) = x.chunk(3, -1), u.chunk(3, -1)
    n, z = (xn + (xr + ur).sigmoid() * un).tanh(), (xz + uz).sigmoid()
    return (1 - z) * n + z * h


def lstm_stepped(
    ahead: Tensor, h: Tensor, c: Tensor, weight: Tensor, bias: Tensor | None, tap: Tensor | None = None, *own: Tensor
) -> tuple[Tensor, Tensor]:
    """``lstm_tapped`` by ordinary operations, for passes that carry forward-mode derivatives."""
    hs, zeros = [], torch.zeros_like(ahead[0])
    for t, x in enumerate(ahead.unbind(0)):
        u = plus_times(zeros if tap is None else tap[t], h, weight.t(), own)
        h, c = lstm_step(x, u if bias is None else u + bias, h, c)
        hs.append(h)
    return torch.stack(hs), c


def gru_stepped(
    ahead: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, tap: Tensor | None = None, *own: Tensor
) -> Tensor:
    """``gru_tapped`` by ordinary operations."""
    hs, zeros = [], torch.zeros_like(ahead[0])
    for t, x in enumerate(ahead.unbind(0)):
        u = plus_times(zeros if tap is None else tap[t], h, weight.t(), own)
        h = gru_step(x, u if bias is None else u + bias, h)
        hs.append(h)
    return torch.stack(hs)


def plus_times(y: Tensor, h: Tensor, turned: Tensor, own: Sequence[Tensor]) -> Tensor:
    """The sum y + W_i h for states [sample, hidden], with the shared weight transposed and ``own`` as for the LSTM."""
    if not own:
        return torch.addmm(y, h, turned)
    states = h.unflatten(0, (own[0].shape[0], -1))  # [unit, view, hidden]
    if len(own) == 1:
        return y + torch.bmm(states, own[0].mT).flatten(0, 1)
    a, b = own
    shared = torch.addmm(y, h, turned).view(*states.shape[:2], -1)
    return torch.baddbmm(shared, torch.bmm(states, a.mT), b).flatten(0, 1)


def _back(y: Tensor, g: Tensor, weight: Tensor, own: Sequence[Tensor]) -> Tensor:
    """The sum y + W_iᵀ g."""
    return plus_times(y, g, weight, (own[0].mT,) if len(own) == 1 else own[::-1])


class _Lstm(torch.autograd.Function):
    """c = f c + i g, h = o tanh c, with i, f, o = σ(·) and g = tanh(·) of ahead + W h."""

    @staticmethod
    def forward(
        ctx: Any, ahead: Tensor, h: Tensor, c: Tensor, weight: Tensor, bias: Tensor | None, tap: Tensor, *own: Tensor
    ) -> tuple[Tensor, Tensor]:
        size = h.shape[-1]
        # under autocast the product that made ahead is narrow
        h, c, weight = (t.to(ahead.dtype) for t in (h, c, weight))
        hs, cs, tanhs = [], [c], []
        turned = weight.t()
        gates = ahead.clone() if bias is None else (ahead + bias).to(ahead.dtype)
        for z in gates.unbind(0):  # each in its place: to put them together would be another copy
            if own:
                z.copy_(plus_times(z, h, turned, own))
            else:
                z.addmm_(h, turned)
            z[:, : 2 * size].sigmoid_()
            z[:, 2 * size : 3 * size].tanh_()
            z[:, 3 * size :].sigmoid_()
            i, f, g, o = z.split(size, 1)
            c = torch.addcmul(f * c, i, g)
            squashed = c.tanh()
            h = o * squashed
            hs.append(h)
            cs.append(c)
            tanhs.append(squashed)
        ctx.save_for_backward(gates, torch.stack(cs[:-1]), torch.stack(tanhs), weight, *own)
        return torch.stack(hs), c

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gates, before, squashed, weight, *own = ctx.saved_tensors
        d_hs, dc = gradients
        i, f, g, o = gates.chunk(4, 2)
        through = tanh_backward(o, squashed)  # ∂h/∂c = o (1 − tanh² c)
        # ∂c/∂(i, f, g) and ∂h/∂o before their squashing, for all steps at once: [step, sample, 4, hidden]
        at_i, at_f, at_o = sigmoid_backward(g, i), sigmoid_backward(before, f), sigmoid_backward(squashed, o)
        local = torch.stack([at_i, at_f, tanh_backward(i, g), at_o], 2)
        dh = zeros = torch.zeros_like(d_hs[0])
        for t in range(len(gates) - 1, -1, -1):
            dh = dh + d_hs[t]
            dc = torch.addcmul(dc, dh, through[t])
            # in place: to put the gates together would be a copy, and a wait for threads, at every step
            local[t, :, :3] *= dc[:, None]
            local[t, :, 3] *= dh
            step = local[t].flatten(1)
            dc = dc * f[t]
            dh = _back(zeros, step, weight, own) if own else step @ weight
        out = local.flatten(2)
        return out, dh, dc, None, None, out, *(None,) * len(own)


class _Gru(torch.autograd.Function):
    """h = (1 − z) n + z h, with r, z = σ(·) and n = tanh(ahead_n + r (W h + b)_n)."""

    @staticmethod
    def forward(
        ctx: Any, ahead: Tensor, h: Tensor, weight: Tensor, bias: Tensor | None, tap: Tensor, *own: Tensor
    ) -> Tensor:
        size = h.shape[-1]
        first, weight = h.to(ahead.dtype), weight.to(ahead.dtype)
        h, bias = first, None if bias is None else bias.to(ahead.dtype)
        zeros = ahead.new_zeros(()).expand_as(ahead[0])
        hs, zs, ns, inner = [], [], [], []
        turned = weight.t()
        for x in ahead.unbind(0):
            if own:
                u = plus_times(zeros if bias is None else zeros + bias, h, turned, own)
            else:
                u = h @ turned if bias is None else torch.addmm(bias, h, turned)
            rz = (x[:, : 2 * size] + u[:, : 2 * size]).sigmoid_()
            n = torch.addcmul(x[:, 2 * size :], rz[:, :size], u[:, 2 * size :]).tanh_()
            h = torch.lerp(n, h, rz[:, size:])
            hs.append(h)
            zs.append(rz)
            ns.append(n)
            inner.append(u[:, 2 * size :])
        states = torch.stack(hs)
        ctx.save_for_backward(torch.stack(zs), torch.stack(ns), torch.stack(inner), states, first, weight, *own)
        return states

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (d_hs,) = gradients
        rz, n, inner, states, first, weight, *own = ctx.saved_tensors
        r, z = rz.chunk(2, 2)
        before = torch.cat([first[None], states[:-1]])
        at_n = tanh_backward(1 - z, n)  # ∂h/∂n before its squashing
        local = torch.stack([sigmoid_backward(at_n * inner, r), sigmoid_backward(before - n, z), at_n], 2)
        parts = []
        dh = torch.zeros_like(d_hs[0])
        for t in range(len(z) - 1, -1, -1):
            dh = dh + d_hs[t]
            step = local[t]  # [sample, 3, hidden]
            step *= dh[:, None]  # in place: another would have to be copied into its row
            part = step.clone()
            part[:, 2] *= r[t]
            parts.append(part.flatten(1))
            dh = _back(dh * z[t], parts[-1], weight, own)
        out, recurrent = local.flatten(2), torch.stack(parts[::-1])
        return out, dh, None, None, recurrent, *(None,) * len(own)
