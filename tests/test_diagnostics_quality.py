"""Outputs and quality of a model against their definitions; its mode is left as it was, whatever happens.

Receives: small models, one of which raises.
Gives: the same numbers in pieces as at once, and the flags of every module after it.
"""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from clipwise.audit import mia
from clipwise.cli.runs import measured
from clipwise.data import Arrays, Splits
from clipwise.diagnostics import outputs, predicted, quality
from clipwise.diagnostics.quality import roc_auc
from clipwise.experiments import measures

ROWS = 2500  # more than go through a model at a time
X = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(ROWS) % 4


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ZeroDivisionError


def network(*last: nn.Module) -> nn.Sequential:
    """In training mode, with one part that is not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.BatchNorm1d(4), *last)
    model[2].eval()
    return model


@pytest.mark.parametrize(
    "look",
    [
        lambda model: outputs(model, X),
        lambda model: quality(model, Arrays((X, Y))),
        lambda model: mia.statistic(model, (X, Y)),
        lambda model: measures.calibrated(model, Arrays((X, Y))),
    ],
    ids=["outputs", "quality", "membership", "calibrated"],
)
@pytest.mark.parametrize("broken", [False, True])
def test_a_model_keeps_its_modes_also_where_it_raises(look: Callable[[nn.Module], object], broken: bool) -> None:
    model = network(*([Broken()] if broken else []))
    before = [module.training for module in model.modules()]
    if broken:
        with pytest.raises(ZeroDivisionError):
            look(model)
    else:
        look(model)
    assert [module.training for module in model.modules()] == before
    assert True in before and False in before


def test_outputs_in_pieces_are_those_of_the_model_in_evaluation_mode() -> None:
    found, wanted = predicted(model := network(), Arrays((X, Y)))
    assert torch.equal(found, outputs(model, X)) and torch.equal(wanted, Y)
    assert not found.requires_grad
    torch.testing.assert_close(found, model.eval()(X))
    assert mia.statistic(model, (X, Y)).dtype == np.float64


def test_quality_is_accuracy_and_mean_loss_or_the_mean_square() -> None:
    model = network().eval()
    logits = model(X).detach().double().numpy()
    found = quality(model, Arrays((X, Y)))
    right = sum(int(row.argmax() == label) for row, label in zip(logits, Y.tolist(), strict=True))
    losses = [np.log(np.exp(row).sum()) - row[label] for row, label in zip(logits, Y.tolist(), strict=True)]
    assert found == {"accuracy": right / ROWS, "loss": pytest.approx(np.mean(losses), rel=1e-5)}

    line = nn.Linear(3, 1)
    target = X[:, 0].clamp(-1, 1)
    square = float(((line(X).squeeze(1) - target) ** 2).double().mean().detach())
    assert quality(line, Arrays((X, target))) == {"loss": pytest.approx(square, rel=1e-5)}
    part = Arrays((X, target))
    splits = Splits("numbers", part, part, 1, (3,), task="regression", unit=5.0)
    spread = 5 * float(target.double().numpy().std())
    expected = {"error": 5 * square**0.5, "loss": square, "baseline": spread}
    assert measured(splits, line) == pytest.approx(expected, rel=1e-5)
    most = max(Y.tolist().count(label) for label in set(Y.tolist())) / ROWS
    assert measured(Splits("classes", Arrays((X, Y)), Arrays((X, Y)), 4, (3,)), model)["baseline"] == most


def test_the_area_under_the_curve_is_the_share_of_pairs_in_order_and_none_where_there_are_no_pairs() -> None:
    found, wanted = (torch.randn(30, 2) * 2).round(), torch.arange(30) % 5 == 0
    ahead = (found[:, 1] - found[:, 0]).tolist()
    ones, others = ([a for a, one in zip(ahead, wanted, strict=True) if one == own] for own in (True, False))
    pairs = itertools.product(ones, others)
    assert roc_auc(found, wanted.long()) == pytest.approx(np.mean([float(a > b) + (a == b) / 2 for a, b in pairs]))
    assert roc_auc(found, torch.zeros(30).long()) is None and roc_auc(found, torch.ones(30).long()) is None
    assert roc_auc(torch.randn(30, 3), wanted.long()) is None and roc_auc(found * torch.nan, wanted.long()) is None
    assert roc_auc(torch.randn(30, 1), wanted.float()) is None
