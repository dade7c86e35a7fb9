"""What the papers claim and a small problem can show: each claim is a test.

Receives: the examples of the papers' texts (``naive`` has their closed forms), and the embedded digits.
Gives: a stuck normalised descent, a constant clipping bias and its end with error feedback, noise that falls as 1/p,
and a bias that BAM lowers while DP-SAT does not. (The claims about NTK matrices are with their diagnostics.)
"""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import clipwise as cw
import naive
from clipwise import models
from clipwise.data import load
from clipwise.randomness import SeededStream
from clipwise.records import SampleGradients, trainable
from clipwise.sampling import units
from clipwise.step import private_sum


class Place(nn.Module):
    """One number, w."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([start], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.w - x


def squared(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    return model(batch[0]).square().sum(1)


def summed(method: str, model: nn.Module, rows: Tensor) -> float:
    gradients = cw.per_sample(model, squared, (rows,))
    private, _ = private_sum(cw.methods.parse(method), trainable(model), [gradients])
    return float(private.parts[0].value["w"])


def test_normalised_descent_does_not_move_between_two_samples() -> None:
    # paper 0, end of §3.1: F(w) = (w − 1)² + (w + 3)², whose minimum is at −1
    rows = torch.from_numpy(naive.TWO_SAMPLES)
    for start in (-2.5, 0.0, 0.9):
        assert abs(summed("normalised(1.0)", Place(start), rows)) < 1e-9, "stuck anywhere between them"
        assert abs(summed("global_(100.0)", Place(start), rows)) > 0.1, "while the gradient says where to go"


@pytest.mark.parametrize("clip_norm", [0.5, 1.5])
def test_clipped_descent_keeps_a_constant_bias_that_error_feedback_removes(clip_norm: float) -> None:
    # paper 1, example B.1, with noise far too small to see
    slope = naive.clipping_bias_slope(clip_norm)
    rows = torch.from_numpy(np.asarray(naive.clipping_bias_samples(clip_norm), dtype=np.float64)).reshape(-1, 1)

    def loss(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        return huber(model(batch[0]).squeeze(1), slope)

    def huber(t: Tensor, slope: float) -> Tensor:
        return torch.where(t.abs() <= slope, 0.5 * t.square(), slope * (t.abs() - 0.5 * slope))

    # the same gradients as the paper's
    gradient = naive.clipping_bias_gradient(slope)
    place = Place(0.3)
    for row, found in zip(rows, cw.per_sample(place, loss, (rows,)).materialise()["w"], strict=True):
        assert float(found) == pytest.approx(float(gradient(np.array([0.3]), row.numpy())[0]))

    def last(method: cw.Method) -> float:
        model = Place(0.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
        private = cw.make_private(
            model, optimizer, (rows,), loss=loss, method=method, noise_multiplier=1e-11, steps=100, batch=len(rows)
        )
        for batch in private.batches():
            private.step(batch)
        return float(model.w.detach())

    assert last(cw.flat(clip_norm)) == pytest.approx(naive.clipping_bias_fixed_point(clip_norm), abs=1e-4)
    assert abs(naive.clipping_bias_fixed_point(clip_norm)) > 0.1
    assert last(cw.dice(cw.flat(clip_norm), clip_norm)) == pytest.approx(naive.CLIPPING_BIAS_OPTIMUM, abs=1e-4)


def test_the_noise_of_an_average_falls_as_one_over_its_size() -> None:
    # paper 0 §3.3; Definition 2.5: E‖∇F − v‖² over the units of clipping
    torch.manual_seed(0)
    model = nn.Linear(6, 3).double()
    batch = (torch.randn(6000, 6, dtype=torch.float64), torch.randint(0, 3, (6000,)))
    everyone = cw.per_sample(model, cw.cross_entropy, batch)
    whole = everyone.weighted_sum(torch.full((6000,), 1 / 6000, dtype=torch.float64))

    def noise(found: SampleGradients) -> float:
        dense = found.materialise()
        return float(sum((dense[n] - whole[n]).square().sum() for n in dense) / found.samples)

    alone = noise(everyone)
    for p in (2, 5, 20):
        averages = (1 / p) * everyone.merged(p)
        assert noise(averages) == pytest.approx(alone / p, rel=0.15)


def test_bam_lowers_the_bias_while_dp_sat_does_not() -> None:
    # paper 3, Figure 2, on the digits: the bias ‖mean clipped − mean‖ of flat clipping, averaged over a run
    splits = load("digits")
    batch = splits.train.rows(torch.arange(300))

    def bias(text: str) -> float:
        torch.manual_seed(0)
        model = models.build("digits_cnn", splits.shape, splits.classes)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        private = cw.make_private(
            model, optimizer, batch, method=text, noise_multiplier=1e-6, steps=80, batch=64, noise=1, self_test=False
        )
        found = []
        for drawn in private.batches():
            private.step(drawn)
            if private.steps_taken % 10 == 0:
                found.append(cw.clipping_bias(cw.per_sample(model, cw.cross_entropy, batch), cw.flat(0.5)).magnitude)
        return sum(found) / len(found)

    plain = bias("flat(0.5)")
    assert bias("bam(flat(0.5), radius=0.5)") < 0.8 * plain
    assert bias("dp_sat(flat(0.5), radius=0.5)") > 0.9 * plain


def test_groups_hold_p_samples_on_average() -> None:
    sizes = [int(k.sum()) for _, keep in units(torch.arange(4000), 1000, 10**6, SeededStream(0)) for k in keep]
    assert sum(sizes) == 4000 and 4.0 < sum(sizes) / len(sizes) < 4.2  # units that nobody joined are left out
