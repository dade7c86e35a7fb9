"""Membership inference: how well an attacker tells training samples from others by the model's outputs.

Receives: a trained model with samples that were trained on and samples that were not; or a way to train shadows.
Gives: a Roc, with its area and a confidence interval. Not private: it compares the training data with others.

An attack that fails proves nothing; the bounds of the other audits are what ε is compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clipwise.audit.bounds import Array
from clipwise.diagnostics import outputs
from clipwise.types import InputError, fraction, whole

POINTS = 201  # of a curve that is written down


@dataclass(frozen=True)
class Roc:
    """How well scores tell members from others: each point is a threshold. Area ½ is guessing."""

    fpr: Array
    tpr: Array
    area: float
    low: float
    high: float

    def tpr_at(self, fpr: float) -> float:
        """The largest share of members found while at most this share of the others is taken for members."""
        return float(self.tpr[np.searchsorted(self.fpr, fpr, side="right") - 1])

    def as_dict(self) -> dict[str, Any]:
        """Plain values; of a long curve, evenly spaced points."""
        kept = np.unique(np.linspace(0, len(self.fpr) - 1, POINTS).round().astype(int))
        curve = {"fpr": self.fpr[kept].tolist(), "tpr": self.tpr[kept].tolist()}
        return {"area": self.area, "low": self.low, "high": self.high, "tpr_at_1%": self.tpr_at(0.01), **curve}


def roc(members: Array, others: Array, confidence: float = 0.95) -> Roc:
    """The curve of scores, high for members; the area's interval is DeLong's (1988)."""
    from scipy.stats import norm, rankdata

    m, n = len(members), len(others)
    if min(m, n) < 2:
        raise InputError(f"expected at least 2 members and 2 others, got {m} and {n}")
    if not (np.isfinite(members).all() and np.isfinite(others).all()):
        raise InputError("expected finite scores, got NaN or infinity: the model's outputs are not numbers")
    every = rankdata(np.concatenate([members, others]))
    # placements: the share of the others below each member, and of the members above each other; ties count ½
    below = (every[:m] - rankdata(members)) / n
    above = 1 - (every[m:] - rankdata(others)) / m
    area = float(below.mean())
    deviation = math.sqrt(float(below.var(ddof=1)) / m + float(above.var(ddof=1)) / n)
    width = float(norm.isf((1 - fraction("confidence", confidence, open_end=True)) / 2)) * deviation
    thresholds = np.unique(np.concatenate([members, others]))[::-1]
    tpr = np.concatenate([[0.0], 1 - np.searchsorted(np.sort(members), thresholds, side="left") / m])
    fpr = np.concatenate([[0.0], 1 - np.searchsorted(np.sort(others), thresholds, side="left") / n])
    return Roc(fpr, tpr, area, max(0.0, area - width), min(1.0, area + width))


def logistic_attack(
    model: nn.Module, members: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor], confidence: float = 0.95
) -> Roc:
    """Logistic regression on logits and label (paper 2, Fig. 5): fitted on every second sample, judged on the rest.

    Its features are the logits, the label, and the label's own loss, which a linear function of the first two lacks.
    """
    parts = [_features(outputs(model, inputs).double(), labels.cpu()) for inputs, labels in (members, others)]
    x = torch.cat(parts)
    x = (x - x.mean(0)) / x.std(0).clamp(min=1e-12)
    member = torch.arange(len(parts[0]) + len(parts[1]), device="cpu").lt(len(parts[0])).double()
    fitted = torch.cat([torch.arange(len(part), device="cpu") % 2 == 0 for part in parts])
    score = (x @ _fit(x[fitted], member[fitted])).numpy()
    return roc(score[(~fitted & (member == 1)).numpy()], score[(~fitted & (member == 0)).numpy()], confidence)


def _features(out: Tensor, labels: Tensor) -> Tensor:
    if labels.is_floating_point():  # a regression
        return torch.cat([out, labels.double()[:, None], (out - labels[:, None]).square()], 1)
    loss = nn.functional.cross_entropy(out, labels, reduction="none")
    return torch.cat([out, nn.functional.one_hot(labels, out.shape[1]).double(), loss[:, None]], 1)


def _fit(x: Tensor, y: Tensor) -> Tensor:
    """Weights of a logistic regression by Newton's method, both classes alike, with a small ridge; no intercept."""
    x = torch.cat([x, x.new_ones(len(x), 1)], 1)
    share = y.mean()
    weight = torch.where(y == 1, 0.5 / share, 0.5 / (1 - share))
    ridge = 1e-2 * len(x) * torch.eye(x.shape[1], dtype=x.dtype, device=x.device)
    theta = x.new_zeros(x.shape[1])
    for _ in range(25):
        p = torch.sigmoid(x @ theta)
        gradient = x.T @ (weight * (p - y)) + ridge @ theta
        hessian = (x * (weight * p * (1 - p))[:, None]).T @ x + ridge
        move = torch.linalg.solve(hessian, gradient)
        theta = theta - move
        if float(move.abs().max()) < 1e-9:
            break
    return theta[:-1]  # a curve does not depend on the intercept


def statistic(model: nn.Module, data: tuple[Tensor, Tensor]) -> Array:
    """ln(p_y/(1 − p_y)) of each sample's own label: nearly normal over models, as the likelihood ratio assumes.

    Of a regression it is ln p_y of a normal around the output, less what does not depend on the model.
    """
    inputs, labels = data
    out, which = outputs(model, inputs).double(), labels.cpu()[:, None]
    if which.is_floating_point():
        return (-(out - which).square().squeeze(1)).numpy()
    own = out.gather(1, which).squeeze(1)
    rest = out.scatter(1, which, -torch.inf).logsumexp(1)
    return (own - rest).numpy()


def likelihood_ratio(target: Array, shadows: Array, included: np.ndarray) -> Array:
    """ln of the likelihood ratio member : other for each sample (LiRA; Carlini et al. 2022, Algorithm 1).

    ``target`` [sample], ``shadows`` and ``included`` [shadow, sample]: the same statistic of shadow models, and whether
    that one was trained on the sample. Deviations are pooled over samples, as the paper does for few shadows.
    """
    from scipy.stats import norm

    known = np.asarray(included, dtype=bool)
    if not ((known.sum(0) > 0) & ((~known).sum(0) > 0)).all():
        raise InputError("expected each sample in some shadow and out of another: train more shadows, or choose halves")
    score = np.zeros(len(target))
    for sign, kept in ((1, known), (-1, ~known)):
        mean = np.where(kept, shadows, 0).sum(0) / kept.sum(0)
        squares = (np.where(kept, shadows - mean, 0) ** 2).sum()
        deviation = math.sqrt(squares / max(1, kept.sum() - kept.shape[1])) + 1e-12
        score += sign * norm.logpdf(target, mean, deviation)
    return score


def shadow_attack(
    model: nn.Module,
    train: Callable[[Tensor], nn.Module],
    members: tuple[Tensor, Tensor],
    others: tuple[Tensor, Tensor],
    *,
    shadows: int = 8,
    seed: int = 0,
    confidence: float = 0.95,
) -> Roc:
    """LiRA with so many shadows: ``train(indices)`` trains one on these rows, counted over members and then others.

    Each is trained on a random half of all rows, in pairs of a half and its complement, so that every row is in half of
    them.
    """
    data = (torch.cat([members[0], others[0]]), torch.cat([members[1], others[1]]))
    rows = len(data[0])
    generator = torch.Generator().manual_seed(seed)
    halves = [
        torch.rand(rows, generator=generator, device="cpu").argsort() < rows // 2
        for _ in range(whole("shadows", shadows, least=2) // 2)
    ]
    included = torch.stack([part for half in halves for part in (half, ~half)])
    seen = np.stack([statistic(train(part.nonzero().view(-1)), data) for part in included])
    score = likelihood_ratio(statistic(model, data), seen, included.numpy())
    return roc(score[: len(members[0])], score[len(members[0]) :], confidence)
