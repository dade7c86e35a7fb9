"""Clipping bias against its definition, and marked for what it is.

Receives: explicit gradients in float64, and a model's.
Gives: magnitude, direction, share of clipped samples and median norm, all not private.
"""

from dataclasses import fields

import numpy as np
import pytest
import torch
from torch import nn

import clipwise as cw
import naive
from clipwise.diagnostics import ClippingBias, clipping_bias
from clipwise.methods import parse
from clipwise.records import SampleGradients, from_dense

LIKE = {"a.weight": torch.zeros(2, 3, dtype=torch.float64), "b.weight": torch.zeros(4, dtype=torch.float64)}


def rows(seed: int = 0, samples: int = 30) -> np.ndarray:
    """Skewed gradients of very different lengths: clipping turns their mean."""
    rng = np.random.default_rng(seed)
    return (rng.normal(size=(samples, 10)) + rng.normal(size=10)) * np.exp(rng.normal(0, 1.5, size=(samples, 1)))


def gradients(g: np.ndarray) -> SampleGradients:
    values = torch.from_numpy(g)
    return from_dense({"a.weight": values[:, :6].reshape(-1, 2, 3), "b.weight": values[:, 6:]}, LIKE)


@pytest.mark.parametrize(
    ("text", "weigh"),
    [
        ("flat(1.5)", lambda g: naive.flat(g, 1.5)),
        ("normalised(1.0)", lambda g: naive.normalised(g, 1.0)),
        ("automatic(1.0, gamma=0.1)", lambda g: naive.automatic(g, 1.0, 0.1)),
        ("psac(0.7, r=0.2)", lambda g: naive.psac(g, 0.7, 0.2)),
        ("global_(4.0)", lambda g: naive.global_(g, 4.0)),
        (
            "layerwise({'a': flat(0.5), 'b': flat(2.0)})",
            lambda g: np.concatenate(naive.layerwise([g[:, :6], g[:, 6:]], [0.5, 2.0])),
        ),
    ],
)
def test_the_bias_is_its_definition(text: str, weigh: naive.Weigh) -> None:
    for seed in range(3):
        g = rows(seed)
        true, clipped = g.mean(0), weigh(g) / len(g)
        bias = clipping_bias(gradients(g), parse(text))
        cosine = clipped @ true / np.linalg.norm(clipped) / np.linalg.norm(true)
        along = (clipped @ true) / (true @ true) * true
        # the margin for rounding shortens the clipped mean by 8e-6
        assert bias.magnitude == pytest.approx(float(np.linalg.norm(clipped - true)), rel=1e-4)
        assert bias.cosine == pytest.approx(cosine, abs=1e-5)
        assert bias.direction_error == pytest.approx(
            np.linalg.norm(clipped - along) / np.linalg.norm(clipped), abs=1e-4
        )
        # g̃ = a ĝ + c
        assert bias.along == pytest.approx((clipped @ true) / (true @ true), rel=1e-4)
        assert bias.across == pytest.approx(float(np.linalg.norm(clipped - along)), abs=1e-4)
        assert bias.length == pytest.approx(float(np.linalg.norm(clipped)), rel=1e-4)
        assert bias.magnitude**2 == pytest.approx((1 - bias.along) ** 2 * (true @ true) + bias.across**2)
        norms = np.sort(np.linalg.norm(g, axis=1))
        assert norms[14] * (1 - 1e-9) <= bias.median_norm <= norms[15] * (1 + 1e-9)


def test_what_is_not_clipped_has_no_bias() -> None:
    bias = clipping_bias(gradients(rows()), cw.flat(1e9))
    assert bias.magnitude == pytest.approx(0, abs=1e-4)
    assert bias.cosine == pytest.approx(1) and bias.direction_error == pytest.approx(0, abs=1e-4)
    assert bias.clipped == 0


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9, 1.0])
def test_the_share_of_clipped_samples_is_counted(share: float) -> None:
    g = rows(1, samples=20)
    g *= np.where(np.arange(20) < 20 * share, 5.0, 0.2)[:, None] / np.linalg.norm(g, axis=1, keepdims=True)
    g[-1] *= share == 1.0 or 0.0  # a gradient of zero is not shortened
    assert clipping_bias(gradients(g), cw.flat(1.0)).clipped == pytest.approx(share)


def test_a_gradient_shortened_by_the_margin_for_rounding_alone_is_not_clipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipwise.step.MARGIN", 2.0**-9)  # what a GPU's products need
    assert clipping_bias(gradients(rows()), cw.flat(1e9)).clipped == 0


def test_a_smaller_clip_norm_has_a_larger_bias() -> None:
    magnitudes = [clipping_bias(gradients(rows()), cw.flat(c)).magnitude for c in (0.01, 0.1, 1.0, 10.0, 1e4)]
    assert magnitudes == sorted(magnitudes, reverse=True)


def test_normalising_gradients_of_one_direction_changes_length_and_not_direction() -> None:
    g = np.outer(np.logspace(-2, 2, 9), np.ones(10))
    bias = clipping_bias(gradients(g), cw.normalised(1.0))
    assert bias.direction_error == pytest.approx(0, abs=1e-4) and bias.magnitude > 1


def test_a_model_s_bias_is_that_of_its_written_out_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    batch = (torch.randn(12, 5, dtype=torch.float64) * 4, torch.randint(0, 3, (12,)))
    for method in (cw.flat(0.3), cw.psac(0.3), cw.layerwise(cw.flat(0.3))):
        fast, slow = (
            clipping_bias(f(model, cw.cross_entropy, batch), method) for f in (cw.per_sample, cw.oracle.per_sample)
        )
        for field in fields(ClippingBias):
            assert getattr(fast, field.name) == pytest.approx(getattr(slow, field.name)), field.name
    assert all(p.grad is None for p in model.parameters())


def test_every_result_says_that_it_is_not_private() -> None:
    bias = clipping_bias(gradients(rows()), cw.flat(1.0))
    assert "not private" in bias.note and "not private" in repr(bias)


def test_a_diagnostic_never_reaches_the_ledger_or_the_statement() -> None:
    model = nn.Linear(3, 2)
    data = (torch.randn(20, 3), torch.randint(0, 2, (20,)))
    private = cw.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data, noise_multiplier=1.0, steps=1, batch=5, delta=1e-3
    )
    clipping_bias(cw.per_sample(model, cw.cross_entropy, data), private.method)
    assert private.ledger.releases == 0 and private.epsilon() == 0
    assert "bias" not in private.statement().text()


def test_a_method_that_leaves_nothing_is_not_unbiased() -> None:
    found = clipping_bias(
        from_dense({"w": torch.tensor([[3.0, 0.0], [0.0, 4.0]])}, {"w": torch.zeros(2)}), cw.global_(1.0)
    )
    assert found.length == 0 and found.direction_error == 1.0
    nothing = clipping_bias(from_dense({"w": torch.zeros(2, 2)}, {"w": torch.zeros(2)}), cw.global_(1.0))
    assert nothing.direction_error == 0.0
