"""make_private: what is wrong is said at once, and what is accepted with a warning is warned of."""

from __future__ import annotations

import inspect
import json
import re
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset

import clipwise as cw
from clipwise import refusals, start
from clipwise.data import as_dataset
from clipwise.diagnostics.quality import quality
from clipwise.types import InputError, Refused

X = torch.randn(40, 1, 4, 4, generator=torch.Generator().manual_seed(1))
Y = torch.arange(40) % 3


def net(*, norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    middle: nn.Module = nn.BatchNorm2d(2) if norm else nn.Tanh()
    return nn.Sequential(nn.Conv2d(1, 2, 3), middle, nn.Flatten(), nn.Dropout(0.1), nn.Linear(8, 3))


def begun(model: nn.Module | None = None, data: Any = (X, Y), others: tuple[Tensor, ...] = (), **changed: Any) -> Any:
    model = net() if model is None else model
    settings = {"noise_multiplier": 1.0, "steps": 2, "batch": 8, "noise": 1, "delta": 1e-3, **changed}
    optimizer = torch.optim.SGD([*model.parameters(), *others], lr=0.1)
    return cw.make_private(model, optimizer, data, **settings)


def mean(model: nn.Module, batch: Any) -> Tensor:
    return cw.cross_entropy(model, batch).mean()


UNREAD = object()  # no data: refused as such as soon as it is looked at


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"data": UNREAD, "model": net(norm=True)}, "normalises with the batch's own statistics"),
        ({"data": UNREAD, "model": nn.DataParallel(net())}, "write model.module"),
        ({"data": UNREAD, "model": net().requires_grad_(False)}, "no trainable parameter"),
        ({"data": UNREAD, "epsilon": -1}, "epsilon must be a number above 0, got -1"),
        ({"data": UNREAD, "epsilon": 0}, "epsilon must be a number above 0, got 0"),
        ({"data": UNREAD, "epsilon": None}, "say how private by one of epsilon or noise_multiplier"),
        ({"data": UNREAD, "epsilon": None, "noise_multiplier": 0}, "noise_multiplier must be a number above 0, got 0"),
        ({"data": UNREAD, "delta": 1.0}, "delta must be above 0 and below 1"),
        ({"data": UNREAD, "accountant": "pdl"}, "did you mean 'pld'?"),
        ({"data": UNREAD, "method": "pasc"}, "did you mean 'psac'?"),
        ({"data": UNREAD, "noise": "secret"}, "noise must be 'secure' or a seed"),
        ({"data": UNREAD, "post": "heavy_bal(0.9)"}, "heavy_ball"),
        ({"data": UNREAD, "post": lambda gradient: gradient}, "expected a post-processing such as"),
        ({"data": UNREAD, "method": "schedule([(0, flat()), (2, layerwise({'nope': flat(), '': flat()}))])"}, "'nope'"),
        (
            {"data": UNREAD, "method": "p_average(schedule([(0, flat()), (2, p_average())]))"},
            "p_average takes a method that weighs samples one by one",
        ),
        ({"method": "schedule([(0, flat()), (2, batch_clipping())])"}, "batch_clipping needs public inputs, got none"),
        ({"method": "inner_momentum(momentum_per_sample(schedule()))"}, "is for full batches"),
        ({"data": UNREAD}, "data must be a tensor"),
        ({"chunk": 0}, "chunk must be a whole number"),
        ({"loss": mean}, "for 2 samples expected shape [2], got shape []"),
        ({"data": (X.double(), Y)}, "the model is float32, the data float64: write x.to(torch.float32)"),
        ({"data": (X.long(), Y)}, "the model is float32, the data int64: write x.to(torch.float32)"),
        ({"data": (X.half(), Y), "model": net().double()}, "the model is float64, the data float16: write x.to"),
    ],
)
def test_mistakes_are_said_before_the_noise_is_calibrated(
    monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], message: str
) -> None:
    def calibrated(*_: Any) -> float:
        raise AssertionError("calibrated before the mistake was said")

    monkeypatch.setattr(start, "_calibrated", calibrated)
    with pytest.raises((InputError, Refused), match=re.escape(message)) as caught:
        begun(**{"noise_multiplier": None, "epsilon": 3.0, **changed})
    assert "\n" not in str(caught.value)


def test_a_later_phase_that_does_not_go_with_the_model_is_an_error_before_anything_is_released() -> None:
    method = "schedule([(0, flat()), (2, self_augmentation(augment='own'))])"
    with pytest.raises(InputError, match="augment='own' needs your function of views"):
        begun(method=method)
    seen = []

    def views(rows: Any, count: int, generator: torch.Generator) -> Any:
        seen.append(count)
        return tuple(t.repeat_interleave(count, 0) for t in rows)

    begun(method=method, views=views)
    assert seen and set(seen) == {8}


def test_phases_that_look_at_the_same_rows_are_self_tested_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tested: list[Any] = []
    monkeypatch.setattr("clipwise.self_test.check_samples", lambda *given: tested.append(given))
    begun(method="schedule([(0, flat()), (1, psac()), (2, global_()), (3, bam())])")
    assert len(tested) == 2


def test_numbers_of_numpy_are_numbers() -> None:
    given = {"batch": np.int64(8), "steps": np.int32(2), "noise_multiplier": np.float32(1), "chunk": np.int64(4)}
    private = begun(**given, delta=np.float64(1e-3), noise=np.int64(1), method=cw.p_average(size=np.int16(2)))
    plain = begun(batch=8, steps=2, noise_multiplier=1.0, chunk=4, method=cw.p_average(size=2))
    assert private.statement() == plain.statement() and str(private.method) == str(plain.method)
    assert type(private.steps) is int and type(private.noise_multiplier) is type(private.delta) is float
    json.dumps(private.statement().as_dict())
    for wrong in (np.float64(2.0), np.bool_(True), np.int64(0)):
        with pytest.raises(InputError, match="batch must be a whole number"):
            begun(batch=wrong)


def test_the_look_at_the_loss_leaves_the_model_and_the_generator_as_they_were() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Any:
            self.calls += 1
            return self.inner(x)

    model, before = Counting(), torch.get_rng_state()
    refusals.try_loss(model, cw.cross_entropy, as_dataset((X, Y)))
    assert float(model.calls) == 0 and torch.equal(torch.get_rng_state(), before)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):  # what is not about formats stays as it is
        refusals.try_loss(model, cw.cross_entropy, as_dataset((X[..., :3], Y)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_warned_of_and_stated(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    with pytest.warns(UserWarning, match=f"the weights are {name}, in which small updates round away: .*autocast") as w:
        private = begun(net().to(dtype), (X.to(dtype), Y), self_test=False)
    assert len(w) == 1 and w[0].filename == __file__
    assert private.statement().weights == name and f"\n  weights      {name}: small" in private.statement().text()
    with pytest.warns(UserWarning, match="round away"), pytest.raises(InputError, match="write model.to.torch.float32"):
        begun(net().to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_wide_weights_are_not_warned_of(dtype: torch.dtype) -> None:
    with warnings.catch_warnings(action="error"):
        stated = begun(net().to(dtype), (X.to(dtype), Y)).statement()
    assert stated.weights == str(dtype).removeprefix("torch.") and "weights " not in stated.text()


def test_parameters_that_are_not_the_models_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="the optimizer holds 2 parameters that are not the model's") as seen:
        begun(others=tuple(nn.Linear(2, 2).parameters()))
    assert len(seen) == 1 and seen[0].filename == __file__
    frozen = net()
    next(frozen.parameters()).requires_grad_(False)
    with warnings.catch_warnings(action="error"):
        begun(frozen)  # a frozen parameter is still the model's


def test_train_hands_on_every_option_of_make_private_by_the_same_type() -> None:
    own = {"model", "optimizer", "data", "loss", "ledger"}
    taken = {n: p.annotation for n, p in inspect.signature(cw.make_private).parameters.items() if n not in own}
    assert {name: kind.__forward_arg__ for name, kind in start.Privacy.__annotations__.items()} == taken


@pytest.mark.parametrize(
    "method", ["flat", "adaptive", "p_average", "bam", "self_augmentation(augment='flip')", "dice"]
)
@pytest.mark.parametrize("tensors", [True, False], ids=["tensors", "samples"])
def test_a_default_device_may_be_another_than_the_model_s(method: str, tensors: bool) -> None:
    """As with torch.set_default_device("cuda"): what the library counts and draws for itself is on the processor."""
    model = net()
    data: Any = (X, Y) if tensors else Subset(list(zip(X, Y, strict=True)), range(40))  # type: ignore[arg-type]
    with torch.device("meta"):  # whatever is computed with one of its tensors is an error
        private = begun(model, data, method=method, post="low_pass")
        for batch in private.batches():
            private.step(batch)
        if tensors:
            assert torch.equal(private.data[3][0], X[3]) and quality(model, private.data)["loss"] > 0
    assert private.steps_taken == 2 and all(bool(p.isfinite().all()) for p in model.parameters())
