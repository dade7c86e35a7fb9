"""Functions that hide several layers in one call, taken apart: attention and recurrent networks.

Receives: the call's arguments and ``follow``, through which every product with a parameter goes.
Gives: the same result, made of calls that ``layers`` knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from clipwise.records import recurrent as sequences
from clipwise.records.layers import embedding_bag
from clipwise.types import InputError


class Follow(Protocol):
    """Whoever follows parameters through the forward pass."""

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any = None) -> Any:
        """Make one call, noting what it does with parameters."""
        ...


def attention(
    follow: Follow,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """F.multi_head_attention_forward: sequence first, [position, sample, feature]."""
    if query.dim() != 3 or static_k is not None or static_v is not None:
        raise InputError(
            "attention needs batched inputs of three dimensions and no static keys, got a query of shape "
            f"{list(query.shape)}"
        )

    def linear(x: Tensor, w: Tensor | None, b: Tensor | None) -> Tensor:
        return follow.call(F.linear, (x, w, b))

    if use_separate_proj_weight or query is not key or key is not value:
        weights = (
            (q_proj_weight, k_proj_weight, v_proj_weight)
            if use_separate_proj_weight
            else follow.call(torch.chunk, (in_proj_weight, 3))
        )
        biases = (None,) * 3 if in_proj_bias is None else follow.call(torch.chunk, (in_proj_bias, 3))
        q, k, v = (linear(x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True))
    else:
        q, k, v = linear(query, in_proj_weight, in_proj_bias).chunk(3, -1)
    samples, width = query.shape[1], q.shape[2]
    extra = 0
    if bias_k is not None and bias_v is not None:
        k = torch.cat([k, follow.call(Tensor.repeat, (bias_k, 1, samples, 1))])
        v = torch.cat([v, follow.call(Tensor.repeat, (bias_v, 1, samples, 1))])
        extra += 1
    if add_zero_attn:
        k = torch.cat([k, torch.zeros_like(k[:1])])
        v = torch.cat([v, torch.zeros_like(v[:1])])
        extra += 1
    q, k, v = (t.unflatten(2, (num_heads, -1)).permute(1, 2, 0, 3) for t in (q, k, v))  # [sample, head, position, …]
    mask = _mask(q, k, attn_mask, key_padding_mask, is_causal, extra)
    dropout = dropout_p if training else 0.0
    if need_weights:
        scores = q @ k.transpose(2, 3) / math.sqrt(q.shape[3])
        weights = (scores if mask is None else scores + mask).softmax(-1)
        weights = F.dropout(weights, dropout)
        mixed = weights @ v
    else:
        weights, mixed = None, F.scaled_dot_product_attention(q, k, v, mask, dropout)
    output = linear(mixed.permute(2, 0, 1, 3).reshape(query.shape[0], samples, width), out_proj_weight, out_proj_bias)
    if weights is not None and average_attn_weights:
        weights = weights.mean(1)
    return output, weights


def _mask(
    q: Tensor, k: Tensor, attention: Tensor | None, padding: Tensor | None, causal: bool, extra: int
) -> Tensor | None:
    """One additive mask [sample, head, query, key] of the two that the caller may give; ``extra`` keys are open."""
    if causal and attention is None:
        attention = torch.ones(q.shape[2], k.shape[2] - extra, dtype=torch.bool, device=q.device).triu(1)
    given = []
    if attention is not None:  # [query, key] or [sample · head, query, key]
        given.append(attention if attention.dim() == 2 else attention.unflatten(0, (q.shape[0], -1)))
    if padding is not None:  # [sample, key]
        given.append(padding[:, None, None, :])
    masks = [
        torch.zeros(m.shape, dtype=q.dtype, device=q.device).masked_fill(m, -math.inf) if m.dtype == torch.bool else m
        for m in given
    ]
    padded = [F.pad(m, (0, extra)) for m in masks]
    return sum(padded[1:], padded[0]) if padded else None


def recurrent(
    cell: Callable[..., tuple[Tensor, list[Tensor]]], states: int
) -> Callable[..., tuple[Tensor, ...] | tuple[Tensor, Tensor]]:
    """torch.lstm, gru, rnn_tanh and rnn_relu, layer by layer and direction by direction."""

    def run(
        follow: Follow,
        input: Tensor,
        hx: Any,
        weights: list[Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool | None = None,
    ) -> tuple[Tensor, ...]:
        if batch_first is None or isinstance(weights, bool) or input.dim() != 3:
            raise InputError(
                "recurrent layers need padded, batched input of three dimensions, got a packed or unbatched sequence; "
                "write model(padded, …) and mask the loss beyond each sample's length"
            )
        x = input.transpose(0, 1) if batch_first else input  # [step, sample, feature]
        first = list(hx) if states == 2 else [hx]
        directions = 2 if bidirectional else 1
        each = len(weights) // (num_layers * directions)
        last: list[list[Tensor]] = []
        for layer in range(num_layers):
            outputs = []
            for direction in range(directions):
                index = layer * directions + direction
                own = weights[index * each : (index + 1) * each]
                start = [state[index] for state in first]
                seen = x.flip(0) if direction else x
                out, final = cell(follow, seen, start, *_named(own, has_biases))
                outputs.append(out.flip(0) if direction else out)
                last.append(final)
            x = torch.cat(outputs, -1) if bidirectional else outputs[0]
            if dropout and train and layer < num_layers - 1:
                x = F.dropout(x, dropout)
        finals = tuple(torch.stack(parts) for parts in zip(*last, strict=True))
        return (x.transpose(0, 1) if batch_first else x, *finals)

    return run


def _named(own: list[Tensor], has_biases: bool) -> tuple[Tensor | None, ...]:
    """(W_ih, W_hh, b_ih, b_hh, W_hr) with None for what the layer does without."""
    w_ih, w_hh, *rest = own
    b_ih, b_hh = (rest.pop(0), rest.pop(0)) if has_biases else (None, None)
    return w_ih, w_hh, b_ih, b_hh, rest[0] if rest else None


def _lstm(
    follow: Follow, x: Tensor, state: list[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Any, b_hh: Any, w_hr: Any
) -> tuple[Tensor, list[Tensor]]:
    """The input's share of the gates for all steps at once, then the recurrence; with W_hr, step by step."""
    h, c = state
    ahead = follow.call(F.linear, (x, w_ih, b_ih))
    if w_hr is None:
        hs, c = follow.call(sequences.lstm, (ahead, h, c, w_hh, b_hh))
        return hs, [hs[-1], c]
    outputs = []
    for gates in ahead.unbind(0):
        h, c = sequences.lstm_step(gates, follow.call(F.linear, (h, w_hh, b_hh)), h, c)
        h = follow.call(F.linear, (h, w_hr, None))
        outputs.append(h)
    return torch.stack(outputs), [h, c]


def _gru(
    follow: Follow, x: Tensor, state: list[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Any, b_hh: Any, _: Any
) -> tuple[Tensor, list[Tensor]]:
    (h,) = state
    ahead = follow.call(F.linear, (x, w_ih, b_ih))
    hs = follow.call(sequences.gru, (ahead, h, w_hh, b_hh))
    return hs, [hs[-1]]


def _simple(activation: Callable[[Tensor], Tensor]) -> Callable[..., tuple[Tensor, list[Tensor]]]:
    """h = act(W_ih x + W_hh h)."""

    def run(
        follow: Follow, x: Tensor, state: list[Tensor], w_ih: Tensor, w_hh: Tensor, b_ih: Any, b_hh: Any, _: Any
    ) -> tuple[Tensor, list[Tensor]]:
        (h,) = state
        outputs = []
        for step in follow.call(F.linear, (x, w_ih, b_ih)).unbind(0):
            h = activation(step + follow.call(F.linear, (h, w_hh, b_hh)))
            outputs.append(h)
        return torch.stack(outputs), [h]

    return run


def _cell(states: int, step: Callable[..., Any]) -> Callable[..., Any]:
    """torch.lstm_cell, gru_cell, rnn_tanh_cell and rnn_relu_cell: one step, as two products."""

    def run(follow: Follow, x: Tensor, hx: Any, w_ih: Tensor, w_hh: Tensor, b_ih: Any = None, b_hh: Any = None) -> Any:
        state = tuple(hx) if states == 2 else (hx,)
        return step(follow.call(F.linear, (x, w_ih, b_ih)), follow.call(F.linear, (state[0], w_hh, b_hh)), *state)

    return run


def _weight_norm(follow: Follow, v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """w = g v/‖v‖, by operations that have every derivative; the fused one has none in forward mode."""
    norm = follow.call(torch.norm_except_dim, (v, 2, dim))
    weight: Tensor = follow.call(torch.mul, (v, follow.call(torch.div, (g, norm))))
    return weight


COMPOSITES: dict[Callable[..., Any], Callable[..., Any]] = {
    F.multi_head_attention_forward: attention,
    F.embedding_bag: embedding_bag,
    torch._weight_norm: _weight_norm,
    torch.lstm: recurrent(_lstm, 2),
    torch.gru: recurrent(_gru, 1),
    torch.rnn_tanh: recurrent(_simple(torch.tanh), 1),
    torch.rnn_relu: recurrent(_simple(torch.relu), 1),
    torch.lstm_cell: _cell(2, sequences.lstm_step),
    torch.gru_cell: _cell(1, sequences.gru_step),
    torch.rnn_tanh_cell: _cell(1, lambda x, u, h: (x + u).tanh()),
    torch.rnn_relu_cell: _cell(1, lambda x, u, h: (x + u).relu()),
}
