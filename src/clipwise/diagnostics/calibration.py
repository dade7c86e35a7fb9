"""Calibration of a classifier: are predictions of confidence 80 % right 80 % of the time (paper 2, Fig. 6–8).

Receives: logits [sample, class] and labels.
Gives: Calibration: NLL, ECE, MCE, reliability diagram and confidence histogram, overall and per class; temperature.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from clipwise.types import InputError, whole

NOTE = "not private: measured on evaluation data, which no ε covers"
MOST = 1e3  # temperatures from 1/MOST to MOST are looked at


@dataclass(frozen=True)
class Bin:
    """Predictions of similar confidence, low ≤ p < high; the last bin holds p = 1 too."""

    low: float
    high: float
    samples: int  # the confidence histogram
    confidence: float  # mean; 0 in an empty bin
    accuracy: float  # share that was right: against confidence, the reliability diagram


@dataclass(frozen=True)
class ClassCalibration:
    """One class against the rest: its predicted probability beside how often it was the label."""

    label: int
    samples: int  # with this label
    accuracy: float  # among these
    nll: float  # among these
    ece: float  # of the class's probability, over all samples
    mce: float
    bins: tuple[Bin, ...]


@dataclass(frozen=True)
class Calibration:
    """How honest a classifier's confidences are. Not private."""

    samples: int
    accuracy: float
    confidence: float  # mean: above the accuracy is over-confident
    nll: float  # mean −log p_y
    ece: float  # Σ_bins (n_b/n) |accuracy_b − confidence_b|
    mce: float  # max_bins |accuracy_b − confidence_b|
    bins: tuple[Bin, ...]
    classes: tuple[ClassCalibration, ...]
    note: str = NOTE
    not_private: Literal[True] = True

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    def text(self) -> str:
        """The numbers and the reliability diagram, for people."""
        lines = [
            f"{self.samples} samples; {self.note}",
            f"  accuracy {self.accuracy:.1%}, mean confidence {self.confidence:.1%}",
            f"  NLL {self.nll:.4f}, ECE {self.ece:.1%}, MCE {self.mce:.1%}",
            "  confidence   samples  right",
        ]
        for each in self.bins:
            if each.samples:
                bar = "█" * round(20 * each.accuracy)
                lines.append(
                    f"  {each.low:4.0%} – {each.high:4.0%}  {each.samples:>7}  {each.accuracy:>5.0%}  {bar}".rstrip()
                )
        return "\n".join(lines) + "\n"


def calibration(logits: Tensor, labels: Tensor, *, bins: int = 15) -> Calibration:
    """NLL, ECE and MCE with the bins behind them.

    Confidence is the largest probability, ties to the first class. Edge cases: a class without samples has accuracy
    and NLL 0; empty bins count for nothing.
    """
    logits, labels = _checked(logits, labels)
    whole("bins", bins)
    logs = logits.log_softmax(1)
    probabilities = logs.exp()
    confidence, predicted = probabilities.max(1)
    right = (predicted == labels).double()
    losses = -logs.gather(1, labels[:, None]).squeeze(1)
    overall = _binned(confidence, right, bins)
    classes = []
    for label in range(logits.shape[1]):
        own = labels == label
        found = _binned(probabilities[:, label], own.double(), bins)
        classes.append(
            ClassCalibration(
                label=label,
                samples=int(own.sum()),
                accuracy=float(right[own].mean()) if bool(own.any()) else 0.0,
                nll=float(losses[own].mean()) if bool(own.any()) else 0.0,
                ece=_ece(found),
                mce=_mce(found),
                bins=found,
            )
        )
    return Calibration(
        samples=len(labels),
        accuracy=float(right.mean()),
        confidence=float(confidence.mean()),
        nll=float(losses.mean()),
        ece=_ece(overall),
        mce=_mce(overall),
        bins=overall,
        classes=tuple(classes),
    )


def temperature(logits: Tensor, labels: Tensor) -> float:
    """Temperature scaling, the usual baseline: the T > 0 whose ``logits / T`` have the least NLL.

    Fit it on data that are public or that some ε covers, and not on what it is then judged by.
    Guarantees: the least NLL, since that is convex in 1/T. Edge cases: where it falls without end (every sample right,
    or worse than chance), the end of the range 0.001 … 1000; logits that say nothing give 1.
    """
    logits, labels = _checked(logits, labels)
    if not bool((logits != logits[:, :1]).any()):
        return 1.0
    chosen = logits.gather(1, labels[:, None]).squeeze(1)
    low, high = 1 / MOST, MOST  # of β = 1/T
    for _ in range(60):  # halves the range of log β each time
        beta = (low * high) ** 0.5
        # d NLL/dβ: the logits' mean under the prediction, less the label's own
        slope = ((logits * beta).softmax(1) * logits).sum(1) - chosen
        if float(slope.mean()) > 0:
            high = beta
        else:
            low = beta
    return 1 / (low * high) ** 0.5


def _checked(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or not len(labels):
        raise InputError(
            f"expected logits [sample, class] and one label per sample, got {list(logits.shape)} and "
            f"{list(labels.shape)}"
        )
    if labels.is_floating_point() or bool(((labels < 0) | (labels >= logits.shape[1])).any()):
        raise InputError(f"expected whole labels from 0 to {logits.shape[1] - 1}, got others")
    if not bool(logits.isfinite().all()):
        raise InputError("expected finite logits, got some that are not")
    return logits.detach().double(), labels.long()


def _binned(confidence: Tensor, right: Tensor, bins: int) -> tuple[Bin, ...]:
    index = (confidence * bins).long().clamp(max=bins - 1)
    zeros = torch.zeros(bins, dtype=torch.float64, device=confidence.device)
    counts, sums, hits = (
        zeros.index_add(0, index, values).tolist() for values in (torch.ones_like(confidence), confidence, right)
    )
    return tuple(
        Bin(k / bins, (k + 1) / bins, int(n), s / n if n else 0.0, h / n if n else 0.0)
        for k, (n, s, h) in enumerate(zip(counts, sums, hits, strict=True))
    )


def _gaps(bins: tuple[Bin, ...]) -> list[float]:
    return [abs(each.accuracy - each.confidence) for each in bins]


def _ece(bins: tuple[Bin, ...]) -> float:
    total = sum(each.samples for each in bins)
    return sum(each.samples * gap for each, gap in zip(bins, _gaps(bins), strict=True)) / total


def _mce(bins: tuple[Bin, ...]) -> float:
    return max(_gaps(bins))  # an empty bin's gap is 0
