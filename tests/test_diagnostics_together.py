"""Several weightings read together, against one weighted sum after the other, for every kind of record.

Receives: records in float64 and in float32, alone and several to a parameter.
Gives: the same products whatever is written out; nothing more is written out than is allowed, and only where it pays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest
import torch
from torch import Tensor

from clipwise.diagnostics import together
from clipwise.diagnostics.together import _writes, products
from clipwise.records import SampleGradients, forms
from clipwise.records.kinds import Convolution, Dense, Geometry, Indexed, Outer, Record

SAMPLES = 6
TABLE = torch.Size([9, 4])
RECORDS: dict[str, Callable[[], tuple[Record, ...]]] = {
    "written": lambda: (Dense(draw(SAMPLES, 3, 4)),),
    "a scalar": lambda: (Dense(draw(SAMPLES)),),
    "one position": lambda: (outer(1),),
    "many positions": lambda: (outer(11),),
    "blocks": lambda: (outer(5, blocks=3),),
    "units": lambda: (outer(5, samples=2 * SAMPLES).merged(2),),
    "convolution": lambda: (convolution(SAMPLES),),
    "grouped convolution": lambda: (convolution(SAMPLES, groups=2),),
    "convolution of units": lambda: (convolution(2 * SAMPLES).merged(2),),
    "table": lambda: (table(),),
    "table tied to a layer": lambda: (table(), Outer(draw(SAMPLES, 1, 3, 4), draw(SAMPLES, 1, 3, 9), TABLE)),
    "used twice": lambda: (outer(7), outer(2)),
    "unused": lambda: (),
}


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def outer(positions: int, blocks: int = 1, samples: int = SAMPLES) -> Outer:
    a, b = draw(samples, blocks, positions, 4), draw(samples, blocks, positions, 3)
    return Outer(a, b, torch.Size([3 * blocks, 4]))


def convolution(images: int, groups: int = 1) -> Convolution:
    geometry = Geometry(torch.Size([4, 6 // groups, 3, 2]), (2, 1), (1, 0), (1, 1), groups)
    return Convolution(draw(images, 6, 7, 5), draw(images, 4, 4, 4), geometry)


def table() -> Indexed:
    ids = torch.randint(0, 5, (SAMPLES, 8))  # some rows several times, others by nobody
    return Indexed(ids, draw(SAMPLES, 8, 4), TABLE)


def of(records: tuple[Record, ...]) -> SampleGradients:
    """Two parameters, so that what is summed over them is seen to be."""
    beside = Dense(draw(SAMPLES, 2))
    shape = records[0].dense().shape[1:] if records else torch.Size([2])
    like = {"own": torch.zeros(shape, dtype=torch.float64), "beside": torch.zeros(2, dtype=torch.float64)}
    return SampleGradients({"own": records, "beside": (beside,)} if records else {"beside": (beside,)}, like, SAMPLES)


@pytest.mark.parametrize("weightings", [0, 1, 4])
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("kind", RECORDS)
def test_all_sums_together_are_each_as_by_itself(
    kind: str, writes: bool, weightings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(together, "_writes", lambda *_: writes)
    monkeypatch.setattr(forms, "STREAM_FLOATS", 30)  # a sample or two at a time
    gradients = of(RECORDS[kind]())
    direction = {name: torch.randn_like(like) for name, like in gradients.like.items()}
    weights = {name: torch.rand(weightings, SAMPLES, dtype=torch.float64) for name in direction}
    found = products(gradients, weights, direction)
    torch.testing.assert_close(found.inner, gradients.inner(direction))
    assert list(found.sums) == list(direction)
    for name, u in direction.items():
        assert len(found.sums[name]) == weightings
        for weight, (square, along) in zip(weights[name], found.sums[name], strict=True):
            alone = gradients.weighted_sum(weight)[name]
            assert square == pytest.approx(float(alone.square().sum()), rel=1e-12)
            assert along == pytest.approx(float((alone * u).sum()), rel=1e-10, abs=1e-12)
            assert (square > 0) == (name == "beside" or kind != "unused")


def test_what_was_summed_in_float32_is_compared_in_float64() -> None:
    """‖g̃ − ĝ‖² is a difference of products: rounded to float32 it would be nothing but rounding."""
    torch.manual_seed(0)
    gradients = SampleGradients({"own": (Dense(torch.randn(SAMPLES, 5000)),)}, {"own": torch.zeros(5000)}, SAMPLES)
    even = torch.full((SAMPLES,), 1 / SAMPLES, dtype=torch.float64)
    mean = {name: value.double() for name, value in gradients.weighted_sum(even).items()}
    length = float(mean["own"].square().sum())
    ((square, along),) = products(gradients, {"own": (1 - 1e-4) * even[None]}, mean).sums["own"]
    assert square - 2 * along + length == pytest.approx(1e-8 * length, rel=0.01)


def test_no_more_is_written_out_than_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "STREAM_FLOATS", 30)
    monkeypatch.setattr(forms, "TRAFFIC", 0)
    written: list[int] = []
    dense = Outer.dense
    monkeypatch.setattr(Outer, "dense", lambda self: (written.append(self.samples * 12), dense(self))[1])
    gradients = of((outer(11),))
    written.clear()
    weights = dict.fromkeys(gradients.names, draw(3, SAMPLES))
    products(gradients, weights, {name: like + 1 for name, like in gradients.like.items()})
    assert len(written) == 3 and max(written) <= 30


def test_gradients_are_written_out_where_that_takes_less_than_a_product_for_each_sum() -> None:
    def pays(record: Record, weightings: int) -> bool:
        return _writes(cast("Outer | Convolution", record), weightings)

    assert not pays(outer(1), 50)  # a product for each sum is as short as what would be read
    assert pays(outer(64), 1) and pays(outer(64), 5)
    geometry = Geometry(torch.Size([4, 6, 3, 3]), (1, 1), (1, 1), (1, 1), 1)
    images = Convolution(draw(2, 6, 8, 8), draw(2, 4, 8, 8), geometry)
    assert not pays(images, 1) and pays(images, 5)  # written out, a convolution takes twice as long
