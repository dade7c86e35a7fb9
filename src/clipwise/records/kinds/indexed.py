"""Per-sample gradients of a table of which a sample meets a few rows (embeddings).

Receives: the rows' numbers [sample, position] and output gradients b [sample, position, feature].
Gives: Indexed, never as large as a table for each sample.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from clipwise.records.kinds.record import masked, shaped, units, wide


@dataclass(frozen=True)
class Indexed:
    """Rows of a table: v_i is zero but for row ids_is, which receives b_is. Never [sample, table, feature]."""

    ids: Tensor  # [sample, position]
    b: Tensor  # [sample, position, feature]
    shape: torch.Size

    @property
    def samples(self) -> int:
        """How many units there are."""
        return self.ids.shape[0]

    def scaled(self, factors: Tensor) -> Indexed:
        """Scaling a sample scales b."""
        return replace(self, b=self.b * shaped(self.b, factors))

    def merged(self, size: int) -> Indexed:
        """Samples become positions."""
        return Indexed(units(self.ids, size), units(self.b, size), self.shape)

    def masked(self, keep: Tensor) -> Indexed:
        """Zeros where not ``keep``."""
        return replace(self, b=masked(self.b, keep))

    def plus(self, *others: Indexed) -> Indexed:
        """Adding concatenates positions."""
        ids, b = (torch.cat(parts, 1) for parts in zip(*((r.ids, r.b) for r in (self, *others)), strict=True))
        return Indexed(ids, b, self.shape)

    def sq_norm(self) -> Tensor:
        """Rows that a sample meets several times are added first: sort each sample's ids, sum the runs, square."""
        if self.ids.shape[1] == 0:
            return wide(self.b).new_zeros(self.samples)
        ids, order = self.ids.sort(dim=1, stable=True)
        b = wide(self.b).gather(1, order[:, :, None].expand_as(self.b))
        changes = torch.nn.functional.pad((ids[:, 1:] != ids[:, :-1]).long(), (1, 0))
        run = changes.cumsum(1)  # which run of equal ids each position belongs to
        rows = torch.zeros_like(b).scatter_add(1, run[:, :, None].expand_as(b), b)
        # where a row's parts cancel, what adding them rounds is relative to their lengths
        lengths = b.new_zeros(b.shape[:2]).scatter_add(1, run, b.norm(dim=2))
        return rows.square().flatten(1).sum(1) + 4 * torch.finfo(b.dtype).eps * lengths.square().sum(1)

    def inner(self, direction: Tensor) -> Tensor:
        """Σ_s ⟨b_s, u[id_s]⟩."""
        b = wide(self.b)
        return (b * direction.to(b.dtype)[self.ids]).flatten(1).sum(1)

    def total(self, weights: Tensor) -> Tensor:
        """Scaled rows, added where they belong."""
        b = wide(self.b)
        rows = (b * shaped(b, weights)).flatten(0, 1)
        return b.new_zeros(self.shape).index_add_(0, self.ids.flatten(), rows)

    def dense(self) -> Tensor:
        """Written out: only for tests and for tables as small as a sample."""
        b = wide(self.b)
        out = b.new_zeros(self.samples, *self.shape)
        return out.scatter_add_(1, self.ids[:, :, None].expand_as(b), b)
