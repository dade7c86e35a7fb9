"""Operations taken apart for a compiler, where the library's own kernel or decomposition would cost a step more.

Receives: nothing.
Gives: taken_apart: for normalisations and for short attention, the same in operations that a compiler fuses.

The per-sample gradients of a group normalisation's scale and shift are Σ b x̂ and Σ b over each channel's positions. Its
input's gradient can be made of the same two sums, but the library's own decomposition makes it of others: a compiler
would read b and x once more. Written as here, the two are the same nodes of the graph as those that
``layers.normalisations.group_norm`` asks for.

Attention in float32 has one fused kernel, made for long sequences. Over a few hundred places two products and a softmax
between them are faster where products may be in TF32: by a tenth of ViT-small's step. With a mask they gain little, and
the matrix of scores is kept for the backward pass: in GPT-2 3 % of time for 11 % of memory, so that the kernel stays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from clipwise.records.kinds import wide
from clipwise.records.tf32 import allowed

aten = torch.ops.aten
PLACES = 256  # beyond these the matrix of scores is larger than all else that a layer keeps


def taken_apart() -> Mapping[Any, Callable[..., Any]]:
    """Decompositions for tracing; layer normalisations as the library takes them apart."""
    from torch._decomp import get_decompositions

    found: dict[Any, Any] = dict(get_decompositions((aten.native_layer_norm, aten.native_layer_norm_backward)))
    found[aten.native_group_norm.default] = group_norm
    found[aten.native_group_norm_backward.default] = group_norm_backward
    found[aten._scaled_dot_product_efficient_attention.default] = attention
    found[aten._scaled_dot_product_efficient_attention_backward.default] = attention_backward
    return found


def group_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    samples: int,
    channels: int,
    positions: int,
    groups: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """x̂ ⊙ w + bias, and the mean and 1/deviation of each group, [sample, group]."""
    x = wide(input)
    grouped = x.reshape(samples, groups, channels // groups, positions)
    variance, mean = torch.var_mean(grouped, (2, 3), correction=0, keepdim=True)
    rate = torch.rsqrt(variance + eps)
    if weight is None and bias is None:
        out = _normal(x, mean, rate, channels)
    else:  # x p + s with numbers p and s of each channel, [sample, channel]
        scale = _each(rate, x, channels)
        scale = scale if weight is None else scale * _over(wide(weight), x)
        shift = -_each(mean, x, channels) * scale
        out = x * scale + (shift if bias is None else shift + _over(wide(bias), x))
    return out.to(input.dtype), mean.squeeze((2, 3)), rate.squeeze((2, 3))


def group_norm_backward(
    gradient: Tensor,
    input: Tensor,
    mean: Tensor,
    rate: Tensor,
    weight: Tensor | None,
    samples: int,
    channels: int,
    positions: int,
    groups: int,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """∂x = r (w b − mean(w b) − x̂ mean(w b x̂)), the means over a group; and the gradients of scale and shift."""
    b, x = wide(gradient), wide(input)
    mean, rate = (t.reshape(samples, groups, 1, 1) for t in (mean, rate))
    along, total = (  # as ``normalisations._channels`` adds up what a channel has: [sample, channel]
        t.reshape(samples, 1, channels, positions).sum((1, 3)) for t in (b * _normal(x, mean, rate, channels), b)
    )
    found: Tensor | None = None
    if wanted[0]:
        scale = b.new_ones(channels) if weight is None else wide(weight)
        size = channels // groups * positions
        back, away = (
            (t * scale).reshape(samples, groups, channels // groups, 1).sum(2, keepdim=True) / size
            for t in (along, total)
        )
        # the same as b p + x q + s with numbers p, q and s of each channel: shapes stay as they lie in memory
        p = _each(rate, x, channels) * _over(scale, x)
        q, s = -rate * rate * back, (mean * rate * back - away) * rate
        found = (b * p + x * _each(q, x, channels) + _each(s, x, channels)).to(input.dtype)
    return found, along.sum(0) if wanted[1] else None, total.sum(0) if wanted[2] else None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    compute_log_sumexp: bool,
    dropout: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """P value with P = exp(S − log Σ exp S), S = scale · query keyᵀ; and that logarithm."""
    if bias is not None or is_causal or not _short(query, key, dropout):
        return NotImplemented
    scores = _scale(query, scale) * (query @ key.mT)
    lengths = torch.logsumexp(scores, -1)
    unused = query.new_zeros((), dtype=torch.long)  # the seed of a dropout
    return torch.exp(scores - lengths[..., None]) @ value, lengths, unused, unused


def attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lengths: Tensor,
    seed: Tensor,
    offset: Tensor,
    dropout: float,
    wanted: Sequence[bool],
    is_causal: bool = False,
    *,
    scale: float | None = None,
) -> Any:
    """∂S = P ⊙ (∂out valueᵀ − ⟨∂out, out⟩), and with it the gradients of query, key and value."""
    if bias is not None or is_causal or not _short(query, key, dropout):
        return NotImplemented
    factor = _scale(query, scale)
    p = torch.exp(factor * (query @ key.mT) - lengths[..., None])  # the same scores: computed once
    s = factor * p * (gradient @ value.mT - (gradient * out).sum(-1, keepdim=True))
    return s @ key, s.mT @ query, p.mT @ gradient, None


def _short(query: Tensor, key: Tensor, dropout: float) -> bool:
    tf32 = query.dtype == torch.float32 and allowed(convolution=False)
    return tf32 and dropout == 0.0 and max(query.shape[2], key.shape[2]) <= PLACES


def _scale(query: Tensor, scale: float | None) -> float:
    return float(query.shape[-1] ** -0.5) if scale is None else scale


def _normal(x: Tensor, mean: Tensor, rate: Tensor, channels: int) -> Tensor:
    return (x - _each(mean, x, channels)) * _each(rate, x, channels)


def _each(of_groups: Tensor, like: Tensor, channels: int) -> Tensor:
    """What each group has, [sample, group, 1, 1], for each of its channels: [sample, channel, 1, …]."""
    samples, groups = of_groups.shape[:2]
    spread = of_groups.reshape(samples, groups, 1).expand(samples, groups, channels // groups)
    return spread.reshape(samples, channels, *(1,) * (like.dim() - 2))


def _over(of_channels: Tensor, like: Tensor) -> Tensor:
    return of_channels.reshape(1, -1, *(1,) * (like.dim() - 2))
