"""Tables of rows that are looked up: embeddings and embedding bags.

Receives: a Meeting and the arguments of the call; for a bag, whoever follows the model.
Gives: the rows, tapped so that the table's record is which rows a sample used, and b; or a refusal with its reason.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from clipwise.records.displacement import Own, cut
from clipwise.records.kinds import Dense, Indexed, Record, wide
from clipwise.records.layers.fallback import by_vmap
from clipwise.records.layers.meeting import Meeting, identity
from clipwise.records.tape import Want, by_sample, by_unit, from_units
from clipwise.types import Refused


def refuse_embedding(names: str, max_norm: float | None, scale_grad_by_freq: bool) -> None:
    """Refuse tables that a look-up changes, or whose gradient depends on other samples; called before any look-up."""
    if max_norm is not None:
        raise Refused(
            f"the embedding {names} has max_norm={max_norm}: it rewrites the rows that this batch looked up, without "
            "noise; write max_norm=None"
        )
    if scale_grad_by_freq:
        raise Refused(
            f"the embedding {names} has scale_grad_by_freq=True: a sample's gradient then depends on how often the "
            "other samples use a row; write scale_grad_by_freq=False"
        )


def embedding(
    m: Meeting,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """F.embedding: row ids_is of the table receives b_is."""
    source, rows, n = m.source(weight), m.rows(input), m.samples
    if source is None or rows is None:
        return by_vmap(m)
    ids = by_sample(input, rows, n).reshape(n, -1)
    output = _looked_up(m, ids, F.embedding(input, m.value(weight)), source.own)
    table, out = weight.shape, m.out

    def record(b: Tensor) -> Record:
        b = by_sample(b, out, n).reshape(n, -1, table[1])
        if padding_idx is not None:
            b = b * (ids != padding_idx % table[0])[:, :, None]
        indexed = Indexed(ids, b, table)
        return indexed if source.name is not None or m.tape.dual else Dense(indexed.dense())

    m.tape.site([source], "embedding", None)
    return m.tap(output, [], [Want(source, output.shape, output.dtype, identity, record)])


def _looked_up(m: Meeting, ids: Tensor, rows: Tensor, own: Own | None) -> Tensor:
    """Rows of the table; in a displaced pass of each unit's own."""
    if own is None:
        return rows
    units = m.samples // own.views
    ids = ids.reshape(units, -1)
    if own.factored:
        return from_units(wide(by_unit(rows, m.out, units)) + own.rows(ids), m.out, rows.shape).to(rows.dtype)
    found = cut(own.value).gather(1, ids[:, :, None].expand(-1, -1, rows.shape[-1]))
    return from_units(found, m.out, rows.shape).to(rows.dtype)


def embedding_bag(follow: Any, *args: Any, **kwargs: Any) -> Tensor:
    """F.embedding_bag as a look-up and a reduction, so that the table's records are those of an embedding.

    Bags of unequal length (a flat input with offsets) are padded to the longest; the padding adds nothing.
    """
    given = {**dict(zip(inspect.signature(F.embedding_bag).parameters, args, strict=False)), **kwargs}
    ids, weight, offsets = given["input"], given["weight"], given.get("offsets")
    mode, scale, padding_idx = given.get("mode", "mean"), given.get("per_sample_weights"), given.get("padding_idx")
    if offsets is not None:
        if not given.get("include_last_offset"):
            offsets = torch.cat([offsets, offsets.new_tensor([ids.shape[0]])])
        lengths = offsets.diff()
        place = torch.arange(int(lengths.max()) if len(lengths) else 0, device=ids.device)
        real = place < lengths[:, None]  # [bag, place]
        flat = (offsets[:-1, None] + place).clamp(max=max(ids.shape[0] - 1, 0))
        ids = ids[flat]
        scale = None if scale is None else scale[flat]
    else:
        real = torch.ones_like(ids, dtype=torch.bool)
    if padding_idx is not None:
        real = real & (ids != padding_idx % weight.shape[0])
    options = {key: given[key] for key in ("max_norm", "scale_grad_by_freq") if given.get(key)}
    rows = follow.call(F.embedding, (ids, weight), options)  # [bag, place, feature]
    if mode == "max":
        largest = rows.masked_fill(~real[:, :, None], -math.inf).amax(1)
        return torch.where(real.any(1)[:, None], largest, torch.zeros_like(largest))
    if scale is not None:
        rows = rows * scale[:, :, None]
    total = torch.where(real[:, :, None], rows, torch.zeros_like(rows)).sum(1)
    return total if mode == "sum" else total / real.sum(1).clamp(min=1)[:, None]
