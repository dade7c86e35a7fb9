"""Several weightings of one batch's per-sample gradients, read once for all of them.

Receives: per-sample gradients, weights for each parameter [weighting, sample], and a direction u.
Gives: Products: ⟨s, s⟩ and ⟨s, u⟩ of each weighting's sum s = Σ_i w_i v_i, by parameter, and ⟨v_i, u⟩ of each sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clipwise.records import SampleGradients, forms
from clipwise.records.kinds import Convolution, Dense, Indexed, Outer, Record
from clipwise.types import Gradient


@dataclass(frozen=True)
class Products:
    """What every bias is computed from. Secret, like the gradients."""

    sums: Mapping[str, list[list[float]]]  # parameter → ⟨s, s⟩ and ⟨s, u⟩ of each weighting
    inner: Tensor  # ⟨v_i, u⟩ over all parameters, in float64 [sample]


def products(gradients: SampleGradients, weights: Mapping[str, Tensor], direction: Gradient) -> Products:
    """The products of all weightings' sums, which are never there for more than one parameter at a time.

    Guarantees: what is written out of a record is at most ``forms.STREAM_FLOATS`` at a time. Sums of one record are
    taken in its own format, everything after that in float64.
    """
    found = {}
    inner = torch.zeros(gradients.samples, dtype=torch.float64, device=next(iter(direction.values())).device)
    for name, whole in direction.items():
        records, u = _met(gradients.records.get(name, ()), whole)
        sums = u.new_zeros(len(weights[name]), u.numel(), dtype=torch.float64)
        for record in records:
            inner += _add(record, weights[name], u, sums)
        lengths = torch.linalg.vector_norm(sums, dim=1)
        found[name] = torch.stack([lengths.square(), sums @ u.double().flatten()], 1)
    values = torch.stack(list(found.values())).tolist()  # one transfer from the device for all
    return Products(dict(zip(found, values, strict=True)), inner)


def _met(records: Sequence[Record], u: Tensor) -> tuple[Sequence[Record], Tensor]:
    """Of a table only the rows that some sample met, and u's: the others are zero in every sum."""
    match records:
        case [Indexed() as record]:
            rows, places = record.ids.unique(return_inverse=True)
            return [Indexed(places, record.b, u[rows].shape)], u[rows]
    return records, u


def _add(record: Record, weights: Tensor, u: Tensor, sums: Tensor) -> Tensor:
    """Add Σ_i w_i v_i of each weighting to ``sums`` [weighting, number]; gives ⟨v_i, u⟩ [sample]."""
    if isinstance(record, Dense):
        return _add_written(record.dense(), weights, u, sums)
    if isinstance(record, (Outer, Convolution)) and _writes(record, len(weights)):
        step = max(1, forms.stream_floats(cuda=False) // max(1, record.form.written_floats))
        parts = []
        for start in range(0, record.samples, step):
            own = slice(start, start + step)
            parts.append(_add_written(record.rows(start, start + step).dense(), weights[:, own], u, sums))
        return torch.cat(parts)
    for total, weight in zip(sums, weights, strict=True):
        total += record.total(weight).flatten()
    return record.inner(u).double()


def _add_written(value: Tensor, weights: Tensor, u: Tensor, sums: Tensor) -> Tensor:
    rows = value.reshape(len(value), u.numel())
    sums += weights.to(rows.dtype) @ rows
    return (rows @ u.to(rows.dtype).flatten()).double()


def _writes(record: Outer | Convolution, weightings: int) -> bool:
    """Whether writing the gradients out, a few samples at a time, costs less than a product for each weighting and u.

    A convolution with a group for each sample takes about twice as long as one over the batch. On a GPU products are
    cheap beside memory, and kernels take them in half precision.
    """
    if (record.a if isinstance(record, Outer) else record.x).is_cuda:
        return False
    form, slow, reads = record.form, 2 if isinstance(record, Convolution) else 1, weightings + 1
    return slow * form.written_cost + (forms.TRAFFIC + reads) * form.written_floats < reads * form.written_cost
