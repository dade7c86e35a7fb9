"""Each operation that a parameter can take part in → taps and records. The only place that knows conv2d from linear.

Receives: a call, with where its tensors hold samples, and the tape to write on.
Gives: the call's output, tapped; LAYERS maps functions to handlers, and what is not in it goes through vmap.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipwise.records import recurrent
from clipwise.records.layers.convolutions import convolution, transposed_convolution
from clipwise.records.layers.direct import ELEMENTWISE, REPEATING, biased_attention, elementwise, repeated
from clipwise.records.layers.fallback import by_vmap
from clipwise.records.layers.meeting import Meeting, mixing, sources
from clipwise.records.layers.normalisations import (
    batch_norm,
    group_norm,
    instance_norm,
    layer_norm,
    rms_norm,
    torch_batch_norm,
)
from clipwise.records.layers.products import addmm, linear, matmul, mm
from clipwise.records.layers.recurrences import STEPPED, recurrence
from clipwise.records.layers.tables import embedding, embedding_bag, refuse_embedding

__all__ = ["LAYERS", "STEPPED", "Meeting", "embedding_bag", "meet", "mixing", "refuse_embedding"]

LAYERS: dict[Callable[..., Any], Callable[..., Any]] = {
    F.linear: linear,
    torch.addmm: addmm,
    **dict.fromkeys([torch.matmul, Tensor.matmul, Tensor.__matmul__], matmul),
    **dict.fromkeys([torch.mm, Tensor.mm], mm),
    **dict.fromkeys([torch.conv1d, torch.conv2d, torch.conv3d], convolution),
    **dict.fromkeys([torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d], transposed_convolution),
    F.embedding: embedding,
    **dict.fromkeys([F.layer_norm, torch.layer_norm], layer_norm),
    **dict.fromkeys([F.rms_norm, torch.rms_norm], rms_norm),
    **dict.fromkeys([F.group_norm, torch.group_norm], group_norm),
    F.instance_norm: instance_norm,
    F.batch_norm: batch_norm,
    torch.batch_norm: torch_batch_norm,
    F.scaled_dot_product_attention: biased_attention,
    recurrent.lstm: recurrence,
    recurrent.gru: recurrence,
}


def meet(m: Meeting) -> Any:
    """Send a call to its handler."""
    handler = LAYERS.get(m.call.function)
    if handler is not None:
        return handler(m, *m.args, **m.kwargs)
    if m.call.label in ELEMENTWISE:
        return elementwise(m)
    if m.call.label in REPEATING and len(sources(m)) == 1:
        return repeated(m)
    return by_vmap(m)
