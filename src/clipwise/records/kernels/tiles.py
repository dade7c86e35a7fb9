"""What the kernels share: the choice of a tile by measuring.

Receives: a kernel's launch function and the tiles that it may use.
Gives: the fastest of them on this device, remembered for the process.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from clipwise.jit import triton
from clipwise.types import Refused

T = TypeVar("T")


def power(number: int, least: int, most: int) -> int:
    """The next power of two, within limits that are powers of two."""
    return min(most, max(least, 1 << (number - 1).bit_length()))


def like_random(t: Tensor) -> Tensor:
    """Random numbers of a tensor's size, format and device; the device's own generator is left where it was."""
    generator = torch.Generator(t.device).manual_seed(0)
    return torch.randn(t.shape, generator=generator, device=t.device).to(t.dtype)


_tuned: dict[Any, Any] = {}


def best_tile(
    what: Any,
    x: Tensor,
    tiles: Sequence[T],
    right: Callable[[T], bool],
    run: Callable[..., object],
    *arguments: Any,
) -> T:
    """The fastest tile among those whose result is ``right``, tried and measured when a shape is first met.

    Edge cases: while a CUDA graph is recorded nothing can be tried, and a shape that was not met before is refused; so
    is one for which every tile fails.
    """
    key = (what, x.dtype, x.device, x.shape[0].bit_length())  # few samples may not fill the device: tuned apart
    if key not in _tuned:
        if torch.cuda.is_current_stream_capturing():
            raise Refused(
                "a kernel's first call must not be part of a CUDA graph; run the step once before recording it"
            )
        times = {tile: milliseconds(lambda tile=tile: run(*arguments, tile)) for tile in tiles if _works(right, tile)}  # type: ignore[misc]
        if not times:
            raise Refused(f"no kernel gives the right result for {what} on this device; write compile=False")
        _tuned[key] = min(times, key=lambda tile: times[tile])
    best: T = _tuned[key]
    return best


def _works(right: Callable[[T], bool], tile: T) -> bool:
    try:
        return right(tile)
    except triton.runtime.errors.OutOfResources:  # the device cannot hold it
        return False


def milliseconds(call: Callable[[], object], repeats: int = 10, rounds: int = 3) -> float:
    """Device time of one call."""
    call()
    times = []
    for _ in range(rounds):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(2_000_000)  # a millisecond in which launches queue up: the device is timed, not Python
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / repeats)
    return min(times)
