"""Calibration of predictions against slow definitions, and against torchmetrics where that is installed.

Receives: random logits and labels.
Gives: NLL, ECE, MCE, the reliability diagram's bins, the same per class, and the temperature of least NLL.
"""

import json
import math

import pytest
import torch
from torch import Tensor

from clipwise.diagnostics import Calibration, calibration, temperature
from clipwise.types import InputError


def predictions(seed: int = 0, samples: int = 300, classes: int = 4, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(samples, classes, generator=generator, dtype=torch.float64)
    labels = torch.where(
        torch.rand(samples, generator=generator) < 0.5,
        logits.argmax(1),
        torch.randint(0, classes, (samples,), generator=generator),
    )
    return logits, labels


def softmax(row: list[float]) -> list[float]:
    powers = [math.exp(x - max(row)) for x in row]
    return [p / sum(powers) for p in powers]


def gaps(pairs: list[tuple[float, bool]], bins: int) -> list[tuple[int, float, float]]:
    """For each bin: how many, their mean confidence, the share that was right."""
    found = []
    for k in range(bins):
        own = [(p, hit) for p, hit in pairs if k / bins <= p < (k + 1) / bins or (k == bins - 1 and p >= 1)]
        n = len(own)
        found.append((n, sum(p for p, _ in own) / n if n else 0.0, sum(hit for _, hit in own) / n if n else 0.0))
    return found


@pytest.mark.parametrize("bins", [1, 10, 15])
def test_nll_ece_and_mce_are_their_definitions(bins: int) -> None:
    logits, labels = predictions()
    rows = [softmax(row) for row in logits.tolist()]
    pairs = [(max(p), p.index(max(p)) == y) for p, y in zip(rows, labels.tolist(), strict=True)]
    found = calibration(logits, labels, bins=bins)
    assert found.nll == pytest.approx(sum(-math.log(p[y]) for p, y in zip(rows, labels.tolist(), strict=True)) / 300)
    assert found.accuracy == pytest.approx(sum(hit for _, hit in pairs) / 300)
    assert found.confidence == pytest.approx(sum(p for p, _ in pairs) / 300)
    expected = gaps(pairs, bins)
    assert [(b.samples, b.confidence, b.accuracy) for b in found.bins] == [pytest.approx(e) for e in expected]
    assert found.ece == pytest.approx(sum(n * abs(a - c) for n, c, a in expected) / 300)
    assert found.mce == pytest.approx(max(abs(a - c) for n, c, a in expected if n))
    assert [(b.low, b.high) for b in found.bins] == [(k / bins, (k + 1) / bins) for k in range(bins)]


def test_each_class_is_one_against_the_rest() -> None:
    logits, labels = predictions(1)
    rows = [softmax(row) for row in logits.tolist()]
    for each in calibration(logits, labels, bins=10).classes:
        own = [(p, y) for p, y in zip(rows, labels.tolist(), strict=True) if y == each.label]
        assert each.samples == len(own)
        assert each.nll == pytest.approx(sum(-math.log(p[y]) for p, y in own) / len(own))
        assert each.accuracy == pytest.approx(sum(p.index(max(p)) == y for p, y in own) / len(own))
        expected = gaps([(p[each.label], y == each.label) for p, y in zip(rows, labels.tolist(), strict=True)], 10)
        assert each.ece == pytest.approx(sum(n * abs(a - c) for n, c, a in expected) / 300)
        assert each.mce == pytest.approx(max(abs(a - c) for n, c, a in expected if n))
        assert [b.samples for b in each.bins] == [n for n, _, _ in expected]


@pytest.mark.parametrize("seed", range(4))
def test_torchmetrics_finds_the_same_ece_and_mce(seed: int) -> None:
    classification = pytest.importorskip("torchmetrics.functional.classification")
    logits, labels = predictions(seed, samples=500)
    found = calibration(logits, labels, bins=15)
    for norm, value in (("l1", found.ece), ("max", found.mce)):
        theirs = classification.multiclass_calibration_error(logits, labels, num_classes=4, n_bins=15, norm=norm)
        assert float(theirs) == pytest.approx(value, abs=1e-6)


def test_an_honest_classifier_is_calibrated_and_a_bragging_one_is_not() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40_000, 3, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    honest, bragging = calibration(logits, labels), calibration(4 * logits, labels)
    assert honest.ece < 0.01 and all(each.ece < 0.01 for each in honest.classes)
    assert bragging.ece > 0.15 and bragging.confidence > bragging.accuracy + 0.15
    assert bragging.accuracy == honest.accuracy and bragging.nll > honest.nll


def test_certainty_falls_in_the_last_bin_and_chance_in_its_own() -> None:
    logits = torch.tensor([[0.0, 0.0], [800.0, 0.0], [0.0, 800.0]])
    found = calibration(logits, torch.tensor([0, 0, 0]), bins=4)
    assert [b.samples for b in found.bins] == [0, 0, 1, 2]
    assert found.mce == pytest.approx(0.5) and found.nll == pytest.approx((math.log(2) + 800) / 3)


def test_a_class_without_samples_still_has_its_diagram() -> None:
    found = calibration(torch.zeros(5, 3), torch.zeros(5, dtype=torch.long))
    assert [each.samples for each in found.classes] == [5, 0, 0]
    assert found.classes[1].nll == 0 and found.classes[1].ece == pytest.approx(1 / 3)


def test_the_temperature_is_that_of_the_least_nll() -> None:
    for seed, scale in ((0, 0.3), (1, 2.0), (2, 6.0)):
        logits, labels = predictions(seed, scale=scale)
        best = temperature(logits, labels)
        nll = calibration(logits / best, labels).nll
        for factor in (0.25, 0.9, 0.999, 1.001, 1.1, 4.0):
            assert nll <= calibration(logits / (best * factor), labels).nll
        assert calibration(logits / best, labels).accuracy == calibration(logits, labels).accuracy


def test_the_temperature_undoes_a_known_scale() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(40_000, 5, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator).squeeze(1)
    assert temperature(2.5 * logits, labels) == pytest.approx(2.5, rel=0.03)
    assert calibration(2.5 * logits / temperature(2.5 * logits, labels), labels).ece < 0.01


def test_where_the_nll_falls_without_end_the_temperature_is_the_end_of_its_range() -> None:
    logits, _ = predictions()
    assert temperature(logits, logits.argmax(1)) == pytest.approx(1e-3)  # always right: as sure as possible
    assert temperature(logits, logits.argmin(1)) == pytest.approx(1e3)  # always wrong: as unsure as possible
    assert temperature(torch.ones(4, 3), torch.tensor([0, 1, 2, 0])) == 1


def test_calibration_is_marked_not_private() -> None:
    found = calibration(*predictions())
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))["not_private"] is True
    assert "not private" in found.text() and isinstance(found, Calibration)
    assert f"ECE {found.ece:.1%}" in found.text()


@pytest.mark.parametrize(
    ("logits", "labels", "words"),
    [
        (torch.zeros(4), torch.zeros(4, dtype=torch.long), "expected logits"),
        (torch.zeros(4, 3), torch.zeros(3, dtype=torch.long), "one label per sample"),
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), "expected logits"),
        (torch.zeros(2, 3), torch.tensor([0, 3]), "labels from 0 to 2"),
        (torch.zeros(2, 3), torch.tensor([0.0, 1.0]), "whole labels"),
        (torch.full((2, 3), torch.nan), torch.tensor([0, 1]), "finite logits"),
    ],
)
def test_what_cannot_be_judged_is_an_error(logits: Tensor, labels: Tensor, words: str) -> None:
    for judge in (calibration, temperature):
        with pytest.raises(InputError, match=words):
            judge(logits, labels)
