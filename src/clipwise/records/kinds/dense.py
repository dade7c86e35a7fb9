"""Per-sample gradients written out.

Receives: gradients [sample, *shape]; or a record that can be written out, a few samples at a time.
Gives: Dense; streamed_sq_norm, the norm of what would not fit written out at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from clipwise.records import forms
from clipwise.records.kernels import rows_total
from clipwise.records.kernels.gram import HALF
from clipwise.records.kinds.record import Record, flat, masked, shaped, wide, wide_format

PIECE = 1 << 12  # numbers whose squares one accumulator adds up


@dataclass(frozen=True)
class Dense:
    """Written out: ``value`` is [sample, *shape]."""

    value: Tensor

    @property
    def samples(self) -> int:
        """How many units there are."""
        return self.value.shape[0]

    def scaled(self, factors: Tensor) -> Dense:
        """c_i v_i."""
        value = wide(self.value)
        return Dense(value * shaped(value, factors))

    def merged(self, size: int) -> Dense:
        """Sums of ``size`` consecutive samples."""
        return Dense(wide(self.value).reshape(-1, size, *self.value.shape[1:]).sum(1))

    def masked(self, keep: Tensor) -> Dense:
        """Zeros where not ``keep``."""
        return Dense(masked(self.value, keep))

    def sq_norm(self) -> Tensor:
        """Σ v²."""
        # No copy of squares, nor a wide one. In pieces: a float32 accumulator loses small terms after some hundred
        # thousand of them.
        value = flat(self.value.permute(0, *_order(self.value)))
        even = value.shape[1] // PIECE * PIECE
        norm = functools.partial(torch.linalg.vector_norm, dim=-1, dtype=wide_format(value.dtype))
        norms = norm(value[:, None, even:])
        if even:
            norms = torch.cat([norms, norm(value[:, :even].unflatten(1, (even // PIECE, PIECE)))], 1)
        return norms.flatten(1).square().sum(1)  # of one number, a traced norm may keep its dimension (torch 2.11)

    def inner(self, direction: Tensor) -> Tensor:
        """⟨v_i, u⟩."""
        return flat(wide(self.value)) @ direction.to(wide_format(self.value.dtype)).flatten()

    def total(self, weights: Tensor) -> Tensor:
        """Σ w_i v_i."""
        order = _order(self.value)
        value = self.value.permute(0, *order)
        if value.is_cuda and value.dtype in HALF:
            total = rows_total(flat(value), weights)
        else:
            total = weights.to(wide_format(value.dtype)) @ flat(wide(value))
        return total.reshape(value.shape[1:]).permute([order.index(d) for d in range(1, value.dim())])

    def dense(self) -> Tensor:
        """The value itself."""
        return wide(self.value)


def streamed_sq_norm(record: Record, rows: Callable[[int, int], Record], floats: int, *, cuda: bool) -> Tensor:
    """‖v_i‖² of a record of ``floats`` numbers per sample, written out a few samples at a time: ``rows`` gives them."""
    step = max(1, forms.stream_floats(cuda=cuda) // max(1, floats))
    if step >= record.samples:
        return Dense(record.dense()).sq_norm()
    starts = range(0, record.samples, step)
    return torch.cat([Dense(rows(s, s + step).dense()).sq_norm() for s in starts])


def _order(tensor: Tensor) -> list[int]:
    """The dimensions after the samples' as they lie in memory: a channels-last weight is flattened without a copy."""
    strides = tensor.stride()
    return sorted(range(1, tensor.dim()), key=lambda d: -strides[d])
