"""An Outer or a Convolution as its norm and its sum are computed where products may be rounded to TF32.

Receives: both factors in float16 and a scale per sample (``tf32``), and what makes a record of two factors.
Gives: Halved, whose norms and sums are of the same rounded gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from clipwise.records.kinds.record import Record, shaped


@dataclass(frozen=True)
class Halved:
    """scale_i times the gradients of an Outer or a Convolution with factors in float16 (``tf32``).

    Norms and sums are of these very gradients: what is summed is what was measured, however much of it cancels.
    """

    one: Tensor
    other: Tensor
    scale: Tensor  # [sample]
    like: Callable[[Tensor, Tensor], Record]  # two factors → an Outer or a Convolution (which import this)

    @property
    def record(self) -> Record:
        """Without the scale."""
        return self.like(self.one, self.other)

    @property
    def samples(self) -> int:
        """How many units there are."""
        return self.one.shape[0]

    def widened(self) -> Record:
        """The same gradients exactly, with factors in float32."""
        one, other = self.one.float(), self.other.float()
        return replace(self, one=one, other=other * shaped(other, self.scale)).record

    def scaled(self, factors: Tensor) -> Record:
        """c_i v_i."""
        return self.widened().scaled(factors)

    def merged(self, size: int) -> Record:
        """Sums of ``size`` consecutive samples."""
        return self.widened().merged(size)

    def masked(self, keep: Tensor) -> Record:
        """Zeros where not ``keep``."""
        return self.widened().masked(keep)

    def sq_norm(self) -> Tensor:
        """scale² ‖v‖², in an order that neither overflows nor vanishes unless the result does."""
        return self.record.sq_norm() * self.scale * self.scale

    def inner(self, direction: Tensor) -> Tensor:
        """⟨v_i, u⟩."""
        return self.record.inner(direction) * self.scale

    def total(self, weights: Tensor) -> Tensor:
        """Σ w_i v_i."""
        return self.record.total(weights * self.scale)

    def dense(self) -> Tensor:
        """Written out."""
        v = self.record.dense()
        return v * shaped(v, self.scale)

    def written(self) -> Tensor:
        """The same."""
        return self.dense()
