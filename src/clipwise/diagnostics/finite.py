"""One batch's per-sample gradients, gone over once: what every diagnostic of them begins with.

Receives: per-sample gradients.
Gives: FiniteGradients, with squared norms by parameter, of the samples that have one; Mean, the true mean of them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clipwise.methods.layerwise import by_layer
from clipwise.records import SampleGradients
from clipwise.types import Gradient, InputError


@dataclass(frozen=True)
class Mean:
    """ĝ = (1/n) Σ v_i, in float64, and its squared length in each parameter."""

    value: Gradient
    squares: Mapping[str, float]

    def sq_norm(self, names: Sequence[str]) -> float:
        """‖ĝ‖² over these parameters."""
        return sum(self.squares[name] for name in names)


@dataclass(frozen=True)
class FiniteGradients:
    """The gradients v_i with their squared norms. Secret: everything computed from it is not private."""

    gradients: SampleGradients  # exact zeros where not finite
    squares: Tensor  # ‖v_i‖² of each parameter, in float64 [sample, parameter]
    finite: Tensor  # [sample]

    @property
    def count(self) -> int:
        """The number of samples with a finite gradient; 1 where there is none, so that means are zero."""
        return max(1, int(self.finite.sum()))

    def sq_norms(self, groups: Sequence[Sequence[str]]) -> Tensor:
        """‖v_i‖² over each group's parameters. [sample, group]."""
        return self.squares @ within(self.gradients.names, groups).to(self.squares)

    def mean(self) -> Mean:
        """ĝ = (1/n) Σ v_i over the finite ones."""
        total = self.gradients.weighted_sum(self.finite.double() / self.count)
        value = {name: total[name].double() for name in self.gradients.names}
        flat = [part.flatten() for part in value.values()]
        squares = torch.stack([part @ part for part in flat]).tolist()  # one transfer from the device for all
        return Mean(value, dict(zip(value, squares, strict=True)))

    def kept(self, values: Tensor) -> Tensor:
        """The rows that belong to finite samples; all of them, which are zeros, where there is none."""
        return values[self.finite] if bool(self.finite.any()) else values


def finite_part(gradients: SampleGradients) -> FiniteGradients:
    """Norms of every parameter's gradients in one pass: any group's norm is the root of a sum of these squares."""
    if not gradients.samples:
        raise InputError("expected the gradients of at least one sample, got none; give a batch with rows")
    squares = gradients.norms([[name] for name in gradients.names]).double().square()
    kept = squares.isfinite().all(1)
    if not bool(kept.all()):
        gradients, squares = gradients.masked(kept), torch.where(kept[:, None], squares, 0.0)
    return FiniteGradients(gradients, squares, kept)


def layers_of(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Layer → its parameters, as ``layerwise`` has them: what shares a module, weight and bias together."""
    return {layer or "(model)": own for layer, own in by_layer(names).items()}


def within(names: Sequence[Hashable], groups: Sequence[Sequence[Hashable]]) -> Tensor:
    """1 where a name belongs to a group, 0 elsewhere. [name, group]."""
    place = {name: i for i, name in enumerate(names)}
    table = torch.zeros(len(names), len(groups), dtype=torch.float64, device="cpu")
    for column, group in enumerate(groups):
        table[[place[name] for name in group], column] = 1
    return table
