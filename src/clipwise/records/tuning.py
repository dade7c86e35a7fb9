"""Which form is fastest, measured: every form that is worth it, once for each shape of a layer's records on a device.

Receives: the form that counting takes, and what makes random records of the layer's shape.
Gives: tuned: the fastest form, remembered for the process, with the milliseconds of each.

A form is timed for all that it costs a step: norms and weighted sum, and of a written gradient also the writing. The
choice does not depend on the size of a batch: how many rows fit is computed from two small passes (``memory``), which
must choose as the large one will, and a graph must choose as the eager pass before it did.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from clipwise.records.forms import CUDA_STREAM_FLOATS, Form, Name
from clipwise.records.kernels.tiles import like_random, milliseconds
from clipwise.records.kinds.dense import Dense
from clipwise.records.kinds.halved import Halved
from clipwise.records.kinds.record import Record

DEVICES = ("cuda",)  # a CPU keeps to counting, which takes no time and is the same in every process
# Samples of a pass that may be tuned in. Scouting has 2 or 3 and the self-test 4, which need no speed; the smaller of
# the two passes that measure memory has 8, and must not keep other records than the larger one.
LEAST = 8
MOST = 256  # samples of a trial
TURNS = 2  # of all forms: what else uses the device for a while must not decide
BETTER = 0.95  # of the counted form's time: what is not clearly faster is left, so that noise changes nothing

_times: dict[Any, tuple[dict[Name, float], int]] = {}  # milliseconds of each form, for so many samples


class Pair(Record, Protocol):
    """An Outer or a Convolution."""

    def norm_by(self, name: Name) -> Tensor:
        """‖v_i‖² by one form, of factors as they are."""
        ...

    def written(self) -> Tensor:
        """v_i written out in the format in which it is kept."""
        ...


def tuned(
    counted: Form,
    shape: Any,
    like: Tensor,
    random: Callable[[int], Pair | Halved],
    clock: Callable[[Any, Name, Tensor], float] | None = None,
) -> Form:
    """The fastest form for records of this shape, or the counted one where nothing was or can be measured.

    ``shape``: all that the time of a sample depends on, formats included; ``like``: a tensor of the pass, [sample, …],
    which may be fake; ``random(n)``: a record of n samples as a compiled step keeps it; ``clock``: ``took``, unless a
    record has one of its own.
    """
    if like.device.type not in DEVICES or len(counted.worth) < 2:
        return counted
    key = (shape, like.device)
    if key not in _times and _measurable(like):
        # Forms treat samples one by one: once a device is full, which so many numbers do, time only grows with them.
        samples = max(LEAST, min(MOST, CUDA_STREAM_FLOATS // (counted.record_floats + counted.written_floats + 1)))
        with _apart(like.device):
            weights = torch.ones(samples, device=like.device)
            _times[key] = _trial(counted.worth, lambda: random(samples), weights, clock or took), samples
    times, samples = _times.get(key, ({}, 0))
    if not times:
        return counted
    best = min(times, key=lambda name: times[name])
    if counted.name in times and times[best] > BETTER * times[counted.name]:
        best = counted.name
    return replace(counted, name=best, milliseconds=times, trial=samples)


def numbers(like: Tensor, dtype: torch.dtype, *sizes: int) -> Tensor:
    """Random numbers of this size and format, on the device of a tensor that may be part of a model."""
    return like_random(torch.empty((), dtype=dtype, device=like.device).expand(sizes))


def _measurable(like: Tensor) -> bool:
    """Whether this is a real pass: not a trace, whose tensors are fake, nor the recording of a CUDA graph."""
    if like.shape[0] < LEAST or _get_current_dispatch_mode_stack():
        return False
    return not (like.is_cuda and torch.cuda.is_current_stream_capturing())


@contextmanager
def _apart(device: torch.device) -> Iterator[None]:
    """Outside of the pass under way: not followed as a part of the model, nor by autograd, nor in autocast's format."""
    here = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with torch._C.DisableTorchFunction(), torch.no_grad(), torch.autocast(device.type, enabled=False), here:
        yield


def _trial(
    names: tuple[Name, ...],
    random: Callable[[], Pair | Halved],
    weights: Tensor,
    clock: Callable[[Any, Name, Tensor], float],
) -> dict[Name, float]:
    times = dict[Name, float]()
    for name in names * TURNS:
        try:
            times[name] = min(times.get(name, math.inf), clock(random(), name, weights))
        except Exception:  # no memory, no kernel, a compiler's mistake: what a device cannot do is no candidate
            times[name] = math.inf
    return {name: time for name, time in times.items() if time < math.inf}


def took(record: Pair | Halved, name: Name, weights: Tensor) -> float:
    """Milliseconds of a step by one form, on the device: a step is to be one of a graph's, without Python's part."""
    # One at a time: while the device sleeps for a millisecond, Python gets done with one step, but not with ten.
    return milliseconds(lambda: step(record, name, weights), repeats=1, rounds=20)


def step(record: Pair | Halved, name: Name, weights: Tensor) -> tuple[Tensor, Tensor]:
    """What a step does with a record: its norms by one form, and its weighted sum."""
    if name == "written":
        written = Dense(record.written())
        return written.sq_norm(), written.total(weights)
    pair = cast(Pair, record.record) if isinstance(record, Halved) else record
    return pair.norm_by(name), record.total(weights)
