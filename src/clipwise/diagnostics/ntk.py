"""The tangent kernel under clipping (paper 2): H, H C and Σ_r H_r C_r, and what they promise about the loss.

Receives: per-sample gradients of a model's outputs and of its losses, and a method.
Gives: Tangent, the matrices with their eigenvalues, symmetry and positivity; Flow, descent without noise; not private.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from clipwise.diagnostics.bias import NOT_PRIVATE
from clipwise.methods import Block, Method, as_method
from clipwise.records import Capture, Groups, Loss, SampleGradients
from clipwise.types import Batch, Gradient, InputError, positive, whole


@dataclass(frozen=True)
class Kernel:
    """A matrix A of [row, row], a row being one output of one sample, and its positivity (paper 2, Definition 4.3)."""

    matrix: Tensor = field(repr=False)
    eigenvalues: tuple[complex, ...] = field(repr=False)  # by their real part, smallest first
    asymmetry: float  # ‖A − Aᵀ‖/‖A‖
    least_form: float  # the least xᵀ A x over ‖x‖ = 1
    tolerance: float  # what rounding may have changed, in units of A

    @property
    def symmetric(self) -> bool:
        """A = Aᵀ."""
        return self.asymmetry * float(torch.linalg.matrix_norm(self.matrix)) <= self.tolerance

    @property
    def positive_in_form(self) -> bool:
        """xᵀ A x ≥ 0 for every x."""
        return self.least_form >= -self.tolerance

    @property
    def positive_in_eigenvalues(self) -> bool:
        """All eigenvalues have a real part of at least 0."""
        return self.eigenvalues[0].real >= -self.tolerance

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the matrix; eigenvalues as pairs of real and imaginary part."""
        return {
            "symmetric": self.symmetric,
            "positive_in_form": self.positive_in_form,
            "positive_in_eigenvalues": self.positive_in_eigenvalues,
            "asymmetry": self.asymmetry,
            "least_form": self.least_form,
            "eigenvalues": [[value.real, value.imag] for value in self.eigenvalues],
        }


@dataclass(frozen=True)
class Tangent:
    """The tangent kernel of a batch without clipping and with it, and how the loss moves. Not private."""

    method: str
    plain: Kernel  # H
    clipped: Kernel  # H C, or Σ_r H_r C_r where a method has several blocks
    slope: float  # dL/dt of gradient flow under the method: −(∂L/∂f) H C (∂L/∂f)ᵀ (paper 2, eqs. 4.3 and 4.4)
    note: str = NOT_PRIVATE
    not_private: Literal[True] = True

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON, without the matrices."""
        plain, clipped = self.plain.as_dict(), self.clipped.as_dict()
        known = {"method": self.method, "slope": self.slope, "note": self.note, "not_private": True}
        return {**known, "plain": plain, "clipped": clipped}

    def text(self) -> str:
        """The row of paper 2's Table 1 that this batch shows."""
        lines = [f"tangent kernel under {self.method}; {self.note}"]
        for name, kernel in (("without clipping", self.plain), ("with clipping", self.clipped)):
            facts = {
                "symmetric": kernel.symmetric,
                "positive in quadratic form": kernel.positive_in_form,
                "positive in eigenvalues": kernel.positive_in_eigenvalues,
            }
            lines.append(
                f"  {name:16}  " + ", ".join(word if holds else f"not {word}" for word, holds in facts.items())
            )
        lines.append(f"  the loss {'falls' if self.slope <= 0 else 'RISES'} along the flow: dL/dt = {self.slope:.3g}")
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Flow:
    """Full-batch descent by the clipped mean, without noise. Not private."""

    losses: tuple[float, ...]  # before each step and after the last
    slopes: tuple[float, ...]  # dL/dt before each step
    note: str = NOT_PRIVATE
    not_private: Literal[True] = True

    @property
    def rises(self) -> tuple[int, ...]:
        """The steps at which the loss went up; none where it fell monotonically."""
        pairs = zip(self.losses, self.losses[1:], strict=False)
        return tuple(step for step, (before, after) in enumerate(pairs) if after > before)


def ntk(outputs: SampleGradients, losses: SampleGradients, method: Method | str) -> Tangent:
    """H and its clipped form on a batch.

    ``outputs`` are the gradients of the predictions f_i, one scalar per row; with K outputs per sample, K consecutive
    rows belong to it (``logit_rows``). ``losses`` are the same samples' loss gradients, whose norms are clipped.

    Guarantees: through inner products alone; a row is written out at a time. ω is the method's own, without the margin
    for rounding that a training step adds.
    """
    if not losses.samples or outputs.samples % losses.samples or outputs.names != losses.names:
        raise InputError(
            f"expected the outputs of the same samples and parameters, K rows for each of {losses.samples} samples, "
            f"got {outputs.samples} rows"
        )
    method = as_method(method)
    blocks, weights = _weights(losses, method)  # [sample, block]
    each = weights.repeat_interleave(outputs.samples // losses.samples, 0)  # [row, block]
    parts = gram(outputs, [block.names for block in blocks])  # H_r, [block, row, row]
    plain = parts.sum(0)
    clipped = (parts * each.T[:, None, :]).sum(0)  # (H C)_ij = H_ij C_j
    eps = torch.finfo(next(iter(outputs.like.values())).dtype).eps
    tolerance = len(plain) * eps * float(torch.linalg.matrix_norm(plain, 2))
    slope = _slope(_mean(losses), _moved(losses, blocks, weights))
    most = max(1.0, float(each.max()))
    return Tangent(str(method), kernel(plain, tolerance), kernel(clipped, tolerance * most), slope)


def gram(rows: SampleGradients, groups: Groups | None = None) -> Tensor:
    """⟨v_i, v_j⟩ within each group of parameters, in float64. [group, row, row], exactly symmetric."""
    chosen = [rows.names] if groups is None else [tuple(group) for group in groups]
    parts = []
    for names in chosen:
        own = {name: rows.records.get(name, ()) for name in names}
        part = SampleGradients(own, {name: rows.like[name] for name in names}, rows.samples)
        device = next(iter(part.like.values())).device
        ones = torch.eye(rows.samples, dtype=torch.float64, device=device)
        columns = [part.inner(part.weighted_sum(one)).double() for one in ones]  # ⟨v_i, v_j⟩ for all i
        matrix = torch.stack(columns, 1)
        parts.append((matrix + matrix.T) / 2)
    return torch.stack(parts)


def kernel(matrix: Tensor, tolerance: float = 0.0) -> Kernel:
    """A matrix with its eigenvalues, symmetry and positivity."""
    eigenvalues = sorted(torch.linalg.eigvals(matrix).tolist(), key=lambda value: value.real)
    size = float(torch.linalg.matrix_norm(matrix))
    return Kernel(
        matrix=matrix,
        eigenvalues=tuple(eigenvalues),
        asymmetry=float(torch.linalg.matrix_norm(matrix - matrix.T)) / size if size else 0.0,
        # xᵀ A x = xᵀ (A + Aᵀ)/2 x
        least_form=float(torch.linalg.eigvalsh((matrix + matrix.T) / 2)[0]),
        tolerance=tolerance,
    )


def logit_rows(inputs: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Rows for ``logit``: every sample once for each class, a sample's rows together."""
    which = torch.arange(whole("classes", classes), device=inputs.device).repeat(len(inputs))
    return inputs.repeat_interleave(classes, 0), which


def logit(model: nn.Module, rows: Batch) -> Tensor:
    """One logit per row, in the place of a loss: f_ik for rows of ``logit_rows``."""
    inputs, which = rows
    chosen: Tensor = model(inputs).gather(1, which[:, None])
    return chosen.squeeze(1)


def flow(model: nn.Module, loss: Loss, batch: Batch, method: Method | str, *, rate: float, steps: int) -> Flow:
    """Does the loss fall monotonically? θ ← θ − η (1/n) Σ C_i ∇ℓ_i on a copy of the model (paper 2, eq. 4.2).

    A small ``rate`` follows the flow; no noise, since it has no part in the flow (paper 2, Fact 4.1).
    """
    positive("rate", rate)
    method = as_method(method)
    own = copy.deepcopy(model)
    capture = Capture(own, loss)
    parameters = dict(own.named_parameters())
    losses, slopes = [], []
    for _ in range(whole("steps", steps)):
        gradients = capture(batch)
        assert gradients.losses is not None  # a capture always has them
        losses.append(float(gradients.losses.double().mean()))
        moved = _moved(gradients, *_weights(gradients, method))
        slopes.append(_slope(_mean(gradients), moved))
        with torch.no_grad():
            for name, direction in moved.items():
                parameters[name].sub_(direction.to(parameters[name].dtype), alpha=rate)
    with torch.no_grad():
        losses.append(float(loss(own, batch).double().mean()))
    return Flow(tuple(losses), tuple(slopes))


def _weights(losses: SampleGradients, method: Method) -> tuple[Sequence[Block], Tensor]:
    """C_ir of every sample in every block. [sample, block], float64."""
    if method.probe is not None or method.unit > 1 or method.recall is not None or method.feedback is not None:
        raise InputError(f"the tangent kernel is that of a weight function such as flat(1.0), got {method}")
    blocks = method.blocks(losses.names)
    norms = losses.norms([block.names for block in blocks]).double()
    return blocks, torch.stack([block.weigh(n) for block, n in zip(blocks, norms.unbind(1), strict=True)], 1)


def _mean(losses: SampleGradients) -> Gradient:
    device = next(iter(losses.like.values())).device
    return losses.weighted_sum(torch.full((losses.samples,), 1 / losses.samples, dtype=torch.float64, device=device))


def _moved(losses: SampleGradients, blocks: Sequence[Block], weights: Tensor) -> Gradient:
    return losses.weighted_sum(weights / losses.samples, [block.names for block in blocks])


def _slope(true: Gradient, moved: Gradient) -> float:
    """dL/dt = ⟨∇L, dθ/dt⟩ with dθ/dt = −(1/n) Σ C_i ∇ℓ_i."""
    return -sum(float((part.double() * moved[name].double()).sum()) for name, part in true.items())
