"""The path of a gradient, on one page: per-sample gradients → weights → one bounded sum → noise → a public gradient.

Receives: a method, and per-sample gradients chunk by chunk.
Gives: the private sum; ``noise.release`` makes it public, over the expected batch. What methods with private state
carry from step to step: fed_back, and Momenta.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from clipwise.methods import Block, Count, Feedback, Method
from clipwise.records import SampleGradients, from_dense
from clipwise.types import Gradient, InputError, Part, PrivateSum

# A norm may come out a little short and a weighted term a little long: both are sums of rounded products. Weights are
# shrunk by this much, so that the term that is really added keeps the bound after rounding.
MARGIN = 64 * torch.finfo(torch.float32).eps
# On a GPU products may round their operands to TF32, which keeps 10 bits.
GPU_MARGIN = 2.0**-9
# And by this much for each sample that a chunk may hold: it is summed in float32, and one sample more or less changes
# how all of the sum is rounded: by up to 2.7 eps for each where their terms nearly cancel (docs/decisions/0004).
EACH = 4 * torch.finfo(torch.float32).eps
# Squares below float32's smallest normal number are lost: of 1e10 entries, this much of a norm.
LOST = 1e5 * torch.finfo(torch.float32).tiny ** 0.5


@dataclass(frozen=True)
class Observed:
    """What the data's owner may see of a step, of one process's share. Not private: in no release, file or report."""

    samples: int
    lost: tuple[Callable[[], int], ...] = field(repr=False)  # in each chunk; to ask a GPU is to wait for it

    @cached_property
    def non_finite(self) -> int:
        """Samples whose gradient was not finite: they contributed zero."""
        return sum(ask() for ask in self.lost)


def private_sum(
    method: Method,
    parameters: Mapping[str, Tensor],
    chunks: Iterable[SampleGradients],
    *,
    most: int = 0,
    alone: bool = False,
) -> tuple[PrivateSum, Observed]:
    """Σ_i w_i v_i over all chunks of one batch.

    Guarantees: adding or removing a sample moves block r by at most its bound, after rounding; a sample whose gradient
    is not finite contributes exactly zero. Edge cases: an empty batch gives zeros, which are released like any other.
    ``most``: how many samples a chunk may hold, a public constant, which the margin for rounding follows (``weigh``).
    ``alone``: there is at most one chunk, whose sums are given as they are, without a copy in float64.
    """
    blocks = method.blocks(tuple(parameters))
    groups, rule = [block.names for block in blocks], Rule(tuple(blocks), most)
    total: Gradient = {}
    residual: Gradient | None = None if method.feedback is None else {}
    count, samples = 0.0, 0
    lost: list[Callable[[], int]] = []
    for gradients in chunks:
        if not gradients.samples:
            continue
        norms, weights, infinite, holds = gradients.weighed(rule, groups)  # [sample, block], twice
        sums = gradients.weighted_sum(weights, groups)  # before it is known whether it holds: a GPU need not wait
        if not holds():
            gradients = gradients.masked(norms.isfinite().all(1))
            sums = gradients.weighted_sum(weights, groups)
        if alone and total:
            raise InputError("expected one chunk, got another: write alone=False")
        total = sums if alone and residual is None else _added(sums, total)
        if residual is not None:
            rest = gradients.weighted_sum(1 - weights, groups)  # what is not finite is zero by now, whatever its weight
            residual = rest if alone else _added(rest, residual)
        if method.count is not None:
            count += _counted(method.count, norms)
        samples += gradients.samples
        lost.append(infinite)
    for added in (total, residual):
        if added is not None and not added:
            added.update(zeros(parameters))
    moves = method.moves
    parts = [Part({name: total[name] for name in block.names}, moves * block.bound, block.share) for block in blocks]
    if method.count is not None:
        of = {"count": torch.tensor(count, dtype=torch.float64, device="cpu")}
        parts.append(Part(of, moves * 0.5, method.count.share, is_count=True))
    return PrivateSum(tuple(parts), residual=residual), Observed(samples, tuple(lost))


def _counted(count: Count, norms: Tensor) -> float:
    """What a chunk with these norms [sample, block] adds to the count: nothing for a sample that is not finite."""
    finite = norms.isfinite().all(1)
    values = count.of(torch.where(finite[:, None], norms, 0.0).square().sum(1).sqrt())
    values = values.clamp(-0.5, 0.5)  # whatever the method says
    return float(torch.where(finite & values.isfinite(), values, 0.0).sum())


def _added(chunk: Gradient, to: Gradient) -> Gradient:
    """A chunk's sums, added in float64; the first chunk's are only copied."""
    # all parameters by one call: on a GPU a launch for each would cost more than the additions
    if to:
        torch._foreach_add_([to[name] for name in chunk], list(chunk.values()))
        return to
    copies = {name: torch.empty_like(part, dtype=torch.float64) for name, part in chunk.items()}
    torch._foreach_copy_(list(copies.values()), list(chunk.values()))
    return copies


def zeros(parameters: Mapping[str, Tensor]) -> Gradient:
    """An empty sum. Float64: in float32 the rounding of a long sum can depend on one sample by more than the bound."""
    return {name: torch.zeros(p.shape, dtype=torch.float64, device=p.device) for name, p in parameters.items()}


def fed_back(
    feedback: Feedback, total: Gradient, error: Gradient, residual: Gradient, expected_batch: float, last: bool
) -> tuple[Gradient, Gradient | None]:
    """The sum with the error fed back, and the error that the next step will feed back (paper 1, Algorithm 2).

    Everything is on the sum's scale: c2 = B·C2. Guarantees: what is added has a norm of at most c2. The error is
    private; it is not released, and what its use costs is the event's matter (``accounting.dice``). The ``last`` step
    of a block leaves nothing.
    """
    c2 = expected_batch * feedback.clip_norm
    names, errors = list(error), list(error.values())
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(errors)))
    share = _share(norm, c2, normalise=feedback.normalised)

    def with_errors(gradient: Gradient, factor: Tensor) -> Gradient:
        sums = torch._foreach_addcmul([gradient[name] for name in names], errors, [factor] * len(errors))
        return dict(zip(names, sums, strict=True))

    fed = with_errors(total, share)  # Σ w_i v_i + clip(E_t, c2)
    if feedback.memory == "blocks" and last:
        return fed, None
    if feedback.memory == "none":
        return fed, {name: residual[name].to(torch.float64, copy=True) for name in names}
    kept = 1 - share
    if feedback.memory == "bounded":
        kept = kept * _share((kept * norm).abs(), c2)
    return fed, with_errors(residual, kept)  # E_{t+1} = E_t − clip(E_t, c2) + Σ (1 − w_i) v_i


def _share(norm: Tensor, bound: float, *, normalise: bool = False) -> Tensor:
    """What clipping keeps of a vector of this norm."""
    share = bound / ((1 + MARGIN) * norm.clamp(min=torch.finfo(torch.float64).tiny))
    return torch.where(norm > 0, share if normalise else share.clamp(max=1.0), 0.0)


@dataclass
class Momenta:
    """One momentum for each sample, m_i ← γ g_i + (1 − γ) m_i (paper 0, Algorithm 1, line 7), over one full batch."""

    rate: float  # γ
    before: Gradient | None  # m_i after the step before, [sample, …]; None before the first
    _now: list[tuple[Tensor, Gradient]] = field(default_factory=list)  # samples and their m_i, chunk by chunk

    def averaged(self, gradients: SampleGradients, samples: Tensor) -> SampleGradients:
        """A chunk's m_i in the place of its g_i."""
        now, rate, before = gradients.materialise(), self.rate, self.before
        if before is not None:
            now = {name: rate * g + (1 - rate) * before[name][samples.to(g.device)] for name, g in now.items()}
        # a sample that is not finite begins again: it must not carry that on
        self._now.append((samples, {name: torch.nan_to_num(g, 0.0, 0.0, 0.0) for name, g in now.items()}))
        return from_dense(now, gradients.like)

    def following(self) -> Gradient | None:
        """What the next step begins with, when all chunks are through: in the order of the samples' numbers."""
        if not self._now:
            return self.before
        order = torch.cat([samples for samples, _ in self._now]).argsort()
        return {name: torch.cat([part[name] for _, part in self._now])[order] for name in self._now[0][1]}


@dataclass(frozen=True)
class Rule:
    """Norms [sample, block] → weights, zero for a sample that is not finite, and which samples are.

    A value: two rules of the same blocks are equal, so that what was recorded of one serves for the other.
    """

    blocks: tuple[Block, ...]
    most: int = 0  # samples in a chunk: a public constant

    def __call__(self, norms: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        """Only the ``real`` samples, [sample], have a weight."""
        finite = norms.isfinite().all(1)
        kept = (finite & real)[:, None]
        weights = torch.where(kept, weigh(self.blocks, torch.where(kept, norms, 0.0), self.most), 0.0)
        return weights, finite


def weigh(blocks: Sequence[Block], norms: Tensor, most: int = 0) -> Tensor:
    """ω(‖v_i‖) in each block, at most bound/‖v_i‖ whatever ω says, less the margin for rounding. [sample, block].

    ``most``: how many samples a chunk may hold, not how many it does: every weight would depend on each sample.
    """
    columns = []
    for block, norm in zip(blocks, norms.unbind(1), strict=True):
        limit, weight = block.bound / (norm + LOST), block.weigh(norm)
        weight = weight.clamp(-limit, limit)
        # a number too small for a normal one is rounded by any part of itself, upwards too
        exact = weight.isfinite() & (weight.abs() >= 2 * torch.finfo(weight.dtype).tiny)
        columns.append(torch.where((norm > 0) & exact, weight, 0.0))
    return torch.stack(columns, 1) / (1 + (GPU_MARGIN if norms.is_cuda else MARGIN) + EACH * most)
