"""Several processes that make one step together: each computes the gradients of its share of the batch.

Receives: torch.distributed's processes, where there are several; without them everything here changes nothing.
Gives: count, first, told; refuse_apart and check_method; begin, which gives all of them one model and one stream of
secret numbers; share, the samples that are a process's own; added, a private sum over all of them.

All processes draw the same batch and, after their sums were added, the same noise: it is drawn once, whatever their
number, and every process goes on from the same release. What one sample adds is computed by one process alone.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clipwise.methods import Method
from clipwise.randomness import SecureStream, SharedStream, Stream
from clipwise.types import Gradient, InputError, PrivateSum, Refused

T = TypeVar("T")
SAME = 1e-12  # of numbers in [0, 1): nothing but the order of additions
DRIFT = 1e-4  # of the weights' norm: processors may round an update in different ways


def count() -> int:
    """How many processes make the steps of a run."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def first() -> bool:
    """Whether this is the process that writes files: the first, or the only one."""
    return count() == 1 or dist.get_rank() == 0


def told(find: Callable[[], T]) -> T:
    """What the first process finds, for all of them: the others do not look."""
    if count() == 1:
        return find()
    found = [find() if first() else None]
    dist.broadcast_object_list(found, 0)
    return cast(T, found[0])


def check_method(method: Method) -> None:
    """Refuse a method that looks at several samples together, or remembers each: no process has all of them."""
    for part in (part for phase in method.phases for part in phase.parts()):
        if count() > 1 and (part.unit > 1 or part.recall is not None):
            raise InputError(f"{part.name} needs the whole batch in one process, got {count()}: use another method")


def refuse_apart() -> None:
    """Refuse processes that were started together and do not know of each other: each would make a run of its own."""
    started = os.environ.get("WORLD_SIZE", "1")
    if started.isdecimal() and int(started) > 1 and not (dist.is_available() and dist.is_initialized()):
        raise Refused(
            f"this is one of {started} processes that torchrun started, and each would make a run of its own, of whose "
            "releases no ledger counts the others': write torch.distributed.init_process_group() before, or start one"
        )


def begin(model: nn.Module, stream: Stream, plan: Mapping[str, Any]) -> Stream:
    """One stream for all processes, whose models become the first one's; ``plan`` is what must be the same in all."""
    plans: list[Mapping[str, Any]] = [{}] * count()
    dist.all_gather_object(plans, dict(plan))
    for name, value in plan.items():
        if others := [other[name] for other in plans if other[name] != value]:
            raise InputError(
                f"all processes make the steps of one run: expected the same {name} in each, got {value} and "
                f"{others[0]}; give every process the same data, all of it, and the same settings"
            )
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, 0)
    if not isinstance(stream, SecureStream):
        return stream  # of one seed
    return SharedStream(told(lambda: os.urandom(32)), dist.get_rank())


def share(samples: Tensor) -> Tensor:
    """Those of the drawn samples whose gradients this process computes."""
    return samples if count() == 1 else samples[dist.get_rank() :: count()]


def added(private: PrivateSum, stream: Stream, parameters: Iterable[Tensor]) -> PrivateSum:
    """The sum over all processes, in float64. It keeps its bounds: what a sample adds, one process has computed.

    Refuses processes that are not at the same step, or that train different models. ``stream``: this step's.
    """
    if count() == 1:
        return private
    norm = torch.stack([p.detach().double().norm() for p in parameters]).norm()
    drawn = stream.uniform(1).to(norm)  # the same for whoever is at this step
    own = torch.stack([drawn[0], norm])
    held = [part.value for part in private.parts] + ([] if private.residual is None else [private.residual])
    every = torch.cat([own, *(value.to(norm).flatten() for gradient in held for value in gradient.values())])
    dist.all_reduce(every)
    _refuse_others(own, every[:2] / count())
    sums = list(_split(every[2:], held))
    parts = tuple(replace(part, value=sums.pop(0)) for part in private.parts)
    return PrivateSum(parts, private.memory, sums.pop() if sums else None)


def _split(flat: Tensor, like: Sequence[Gradient]) -> Iterator[Gradient]:
    """Gradients of these shapes and devices, one number after the other."""
    pieces = iter(flat.split([value.numel() for gradient in like for value in gradient.values()]))
    for gradient in like:
        yield {name: next(pieces).view(value.shape).to(value.device) for name, value in gradient.items()}


def _refuse_others(own: Tensor, mean: Tensor) -> None:
    """Refuse a mean over all processes that is not this one's own: of what it has drawn, and of its weights' norm."""
    drawn, moved = (mean - own).abs().tolist()
    if not drawn <= SAME:
        raise Refused(
            "the processes of this run are not at the same step, and each would add other noise to the same sum: let "
            "every process make all steps, private.step(batch) for each batch of private.batches()"
        )
    norm = float(own[1])
    if math.isfinite(norm) and not moved <= DRIFT * norm:
        raise InputError(
            "the processes of this run train different models: give all of them the same optimizer, settings and "
            "schedule, and change no weights in one of them alone"
        )
