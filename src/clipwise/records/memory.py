"""How many rows go through a model at a time: as many as fit.

Receives: a capture, some rows, and the room in bytes.
Gives: free_bytes of a device; largest_chunk, from the memory of two small passes, since what a pass needs grows by
the same for every row.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from clipwise.records.capture import repeated
from clipwise.records.gradients import SampleGradients
from clipwise.records.trees import tensors
from clipwise.types import Batch, whole

SPARE = 0.9  # of the room: allocators round up, and other work on the device needs some
FEW = 8


def largest_chunk(
    capture: Callable[[Batch], SampleGradients],
    rows: Batch,
    *,
    most: int,
    room: int | None = None,
    peak: Callable[[Callable[[], object], torch.device], int] | None = None,
) -> int:
    """The largest number of rows, at most ``most``, whose per-sample gradients and weighted sum fit in ``room`` bytes.

    ``room`` is nine tenths of the device's free memory unless given; ``peak`` measures the bytes that a call takes.
    Guarantees: at least 1. Edge cases: on a CPU, whose memory is shared with everything else and cannot be measured
    this way, the answer is ``most``; fewer given rows than needed are repeated.
    """
    whole("most", most)
    device = next(tensors(rows)).device
    if peak is None and device.type != "cuda":
        return most
    room = free_bytes(device) if room is None else room
    measure = peak or device_peak
    few, more = (min(n, most) for n in (FEW, 4 * FEW))
    if few == more:
        return most

    def taken(count: int) -> int:
        return measure(lambda: _pass(capture, repeated(rows, count)), device)

    least = taken(few)
    each = (taken(more) - least) / (more - few)
    if each <= 0:
        return most
    return max(1, min(most, math.floor((room - least) / each + few)))


def free_bytes(device: torch.device) -> int:
    """Bytes of a CUDA device that a pass may take."""
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # the allocator's own
    return int(SPARE * (free + unused))


def _pass(capture: Callable[[Batch], SampleGradients], rows: Batch) -> object:
    gradients = capture(rows)
    norms = gradients.norms()
    return gradients.weighted_sum(torch.ones_like(norms))


def device_peak(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that a call takes of a CUDA device, above what was taken before it."""
    call()  # what is loaded or tuned by the first call is not the pass's own
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before
