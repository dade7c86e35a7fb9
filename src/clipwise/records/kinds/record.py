"""What every kind of record can do, and what they all compute with.

Receives: tensors whose first dimension is the samples.
Gives: Record, the algebra that each kind has; tensors_of, what one is made of; wide, shaped, masked, flat and units,
the small steps that kinds share.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from clipwise.records.kernels.gram import HALF


class Record(Protocol):
    """v_1 … v_B for one parameter."""

    @property
    def samples(self) -> int:
        """How many units there are."""
        ...

    def scaled(self, factors: Tensor) -> Record:
        """c_i v_i."""
        ...

    def merged(self, size: int) -> Record:
        """Each ``size`` consecutive samples become one unit, whose gradient is their sum."""
        ...

    def masked(self, keep: Tensor) -> Record:
        """v_i where ``keep``, exact zeros elsewhere, even where v_i is not finite."""
        ...

    def sq_norm(self) -> Tensor:
        """‖v_i‖², never under-estimated by more than the format's rounding. [sample]."""
        ...

    def inner(self, direction: Tensor) -> Tensor:
        """⟨v_i, u⟩. [sample]."""
        ...

    def total(self, weights: Tensor) -> Tensor:
        """Σ_i w_i v_i, of the parameter's shape."""
        ...

    def dense(self) -> Tensor:
        """v_i written out. [sample, *shape]."""
        ...


def tensors_of(record: Record) -> dict[str, Tensor]:
    """A record's tensors, by the names of its fields."""
    return {name: value for name, value in vars(record).items() if isinstance(value, Tensor)}


def wide(tensor: Tensor) -> Tensor:
    """The tensor in float32 or better: sums and norms are never taken in half precision."""
    return tensor.float() if tensor.dtype in HALF else tensor


def wide_format(dtype: torch.dtype) -> torch.dtype:
    """The format that ``wide`` gives."""
    return torch.float32 if dtype in HALF else dtype


def full_precision(like: Tensor) -> torch.autocast:
    """Without autocast: for norms and sums, and for a displacement, which is small beside what it moves."""
    return torch.autocast(like.device.type, enabled=False)


def written_format(factors: torch.dtype, *, cuda: bool) -> torch.dtype:
    """The format of a gradient that is written out to be kept, as its norm and its sum read it.

    On a GPU bfloat16 where the factors are, as an ordinary step's weight gradients are: norm and sum are of what was
    written, so that the bound does not depend on how it was rounded. float16 has too small a range.
    """
    return factors if cuda and factors == torch.bfloat16 else wide_format(factors)


def shaped(tensor: Tensor, factors: Tensor) -> Tensor:
    """[sample] factors, shaped to multiply [sample, …]."""
    return factors.to(tensor.dtype).reshape(-1, *(1,) * (tensor.dim() - 1))


def masked(tensor: Tensor, keep: Tensor) -> Tensor:
    """The tensor where ``keep`` [sample], exact zeros elsewhere."""
    # where, not a product: 0 · inf is not 0
    return torch.where(keep.reshape(-1, *(1,) * (tensor.dim() - 1)), tensor, 0.0)


def flat(tensor: Tensor) -> Tensor:
    """[sample, everything else], also for a scalar parameter and for no samples."""
    return tensor.reshape(tensor.shape[0], tensor.shape[1:].numel())


def units(tensor: Tensor, size: int) -> Tensor:
    """[sample, position, …] → [unit, size · position, …]."""
    return tensor.reshape(tensor.shape[0] // size, size * tensor.shape[1], *tensor.shape[2:])


def raised(sq_norm: Tensor, a: Tensor, b: Tensor, times: int = 1) -> Tensor:
    """‖Σ_s b_s a_sᵀ‖² with what rounding may move, where the sum is computed once more, in another order. [sample].

    Where positions cancel, it moves v by a few eps of Σ_s ‖a_s‖‖b_s‖, which is at most √times ‖a‖‖b‖.
    """
    one, other = (torch.linalg.vector_norm(flat(wide(t)), dim=1) for t in (a, b))
    return (sq_norm.sqrt() + 8 * torch.finfo(one.dtype).eps * times**0.5 * one * other).square()
