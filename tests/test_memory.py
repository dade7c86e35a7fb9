"""The largest chunk that fits, from two small measurements."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clipwise.losses import cross_entropy as loss
from clipwise.records import Capture
from clipwise.records.memory import largest_chunk, repeated
from clipwise.types import InputError


def rows(count: int = 3) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 4), torch.zeros(count, dtype=torch.long)


@pytest.fixture
def capture() -> Callable[[Any], Any]:
    return Capture(nn.Linear(4, 2), loss)


def linear(fixed: int, each: int, seen: list[int]) -> Callable[[Callable[[], object], torch.device], int]:
    """A device on which a pass of n rows takes fixed + each · n bytes; the rows are counted by the pass itself."""

    def measure(call: Callable[[], object], _: torch.device) -> int:
        before = len(seen)
        call()
        return fixed + each * seen[before]

    return measure


def counted(capture: Callable[[Any], Any], seen: list[int]) -> Callable[[Any], Any]:
    def run(batch: Any) -> Any:
        seen.append(len(batch[0]))
        return capture(batch)

    return run


@pytest.mark.parametrize(
    ("room", "most", "expected"),
    [
        (1000 + 50 * 100, 10_000, 100),
        (1000 + 50 * 100 + 49, 10_000, 100),
        (1000 + 50 * 100, 60, 60),
        (10, 10_000, 1),
        (1000 + 50 * 9, 10_000, 9),
    ],
)
def test_the_chunk_is_the_largest_that_fits(capture: Any, room: int, most: int, expected: int) -> None:
    seen: list[int] = []
    found = largest_chunk(counted(capture, seen), rows(), most=most, room=room, peak=linear(1000, 50, seen))
    assert found == expected and len(seen) == 2 and max(seen) <= 32


def test_where_few_rows_are_all_there_are_nothing_is_measured(capture: Any) -> None:
    assert largest_chunk(capture, rows(), most=5, room=1, peak=lambda *_: 1 / 0) == 5


def test_on_a_cpu_the_chunk_is_the_most_that_was_asked_for(capture: Any) -> None:
    assert largest_chunk(capture, rows(), most=321) == 321


def test_rows_are_repeated_in_order_and_none_are_an_error() -> None:
    inputs, labels = repeated((torch.arange(3), torch.tensor([5, 6, 7])), 7)
    assert inputs.tolist() == [0, 1, 2, 0, 1, 2, 0] and labels.tolist() == [5, 6, 7, 5, 6, 7, 5]
    with pytest.raises(InputError, match="at least one row"):
        repeated(rows(0), 3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_cuda_a_chunk_of_the_found_size_fits_and_twice_as_many_rows_do_not() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(64 * 256, 2)).cuda()
    data = torch.randn(4, 3, 16, 16, device="cuda"), torch.zeros(4, dtype=torch.long, device="cuda")
    capture, room = Capture(model, loss), 400 << 20
    chunk = largest_chunk(capture, data, most=1 << 20, room=room)

    def taken(count: int) -> int:
        from clipwise.records.memory import _pass, device_peak

        return device_peak(lambda: _pass(capture, repeated(data, count)), torch.device("cuda"))

    assert taken(chunk) <= 1.1 * room < 1.5 * taken(2 * chunk)


def test_auto_chunks_hold_as_many_rows_as_fit_and_a_processor_keeps_to_small_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from clipwise import make_private, sampling

    def made(**how: Any) -> Any:
        model = nn.Linear(4, 2)
        data = (torch.randn(400, 4), torch.zeros(400, dtype=torch.long))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return make_private(
            model, optimizer, data, noise_multiplier=1.0, delta=1e-4, steps=1, batch=300, noise=0, **how
        )

    assert made(chunk="auto")._passes.chunk == made()._passes.chunk == sampling.CHUNK
    assert made(chunk=7)._passes.chunk == 7
    with pytest.raises(InputError, match="whole number or 'auto'"):
        made(chunk="all")
    with pytest.raises(InputError, match="as a number with compile=True"):
        made(chunk="auto", compile=True)
