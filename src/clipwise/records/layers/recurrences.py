"""The recurrent part of LSTM and GRU; the input's part is an ordinary product.

Receives: a Meeting and the arguments of recurrent.lstm or recurrent.gru.
Gives: all states, with a tap at the gates of every step; STEPPED: the same functions for a dual pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from clipwise.records import forms, recurrent
from clipwise.records.displacement import cut
from clipwise.records.kinds import Dense, Outer, Record, wide
from clipwise.records.layers.fallback import by_vmap
from clipwise.records.layers.meeting import Meeting
from clipwise.records.tape import Source, Tape
from clipwise.records.trees import mapped
from clipwise.types import Refused


def recurrence(m: Meeting, ahead: Tensor, h: Tensor, *rest: Any) -> Any:
    """recurrent.lstm and gru: with b the gradient at W_hh h + b_hh of every step, v_i = Σ_t b_it h_i,t−1ᵀ."""
    (*cell, weight, bias) = rest
    source, n = m.source(weight), m.samples
    if m.out.dim == 0:
        raise Refused(
            f"the {m.call.label} steps from sample to sample, since it gets the samples in its first dimension, where "
            "it looks for a sequence's steps: write batch_first=True for [sample, step, feature]"
        )
    if m.out.dim != 1 or m.out.factor != 1 or any(m.source(t) is not None for t in (ahead, h, *cell)):
        return by_vmap(m)
    seen = ahead.dtype
    if m.own(weight) is not None or m.own(bias) is not None:
        ahead, h, cell = wide(ahead), wide(h), [wide(c) for c in cell]
    tap = ahead.new_zeros(()).expand_as(ahead).requires_grad_()
    run: Any = STEPPED[m.call.function] if m.tape.dual else recurrent.lstm_tapped if cell else recurrent.gru_tapped
    offset = m.value(bias) if m.own(bias) is None else m.each(bias)
    result = run(ahead, h, *cell, m.value(weight), offset, tap, *_own_recurrence(m, ahead, weight))
    result = mapped(result, lambda t: t.to(seen))
    states = cut(result[0] if cell else result)
    start = cut(h)[None].expand(1, n, -1)

    def weights(b: Tensor) -> Outer:
        a = torch.cat([start, states[:-1]]).transpose(0, 1)[:, None]
        return Outer(a, b.transpose(0, 1)[:, None], weight.shape)

    if source is not None:
        m.tape.leaf(tap, source, lambda b: _or_written(m.tape, weights(b), source))
        m.tape.site([source], m.call.label, forms.choose(len(ahead), h.shape[-1], ahead.shape[-1]))
    added = m.source(bias)
    if added is not None:
        m.tape.leaf(tap, added, lambda b: Dense(wide(b).sum(0)))
    return result


# Frozen or not, in a dual pass a recurrence runs by ordinary operations.
STEPPED: dict[Callable[..., Any], Callable[..., Any]] = {
    recurrent.lstm: recurrent.lstm_stepped,
    recurrent.gru: recurrent.gru_stepped,
}


def _own_recurrence(m: Meeting, ahead: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """Each unit's recurrent weight, as the recurrence takes it: values, or pairs beside the shared weight."""
    own = m.own(weight)
    if own is None:
        return ()
    found = own.pairs() if own.factored else (cut(own.value),)
    return tuple(t.to(ahead.dtype) for t in found)


def _or_written(tape: Tape, record: Outer, source: Source) -> Record:
    if not tape.writes(record.form, source):
        return record
    return Dense(record.written() if source.name is not None else record.dense())  # a Jacobian wants all digits
