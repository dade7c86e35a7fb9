"""What a data set makes of the samples that it has read: words that it numbers, numbers that follow what it reads.

Receives: data that are read sample by sample.
Gives: refuse_numbered.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clipwise.data.copies import tensors_of
from clipwise.data.datasets import RowDataset, Samples
from clipwise.data.named import named
from clipwise.types import Refused

READ = 32  # samples, far apart: most have words or classes that none had before
DEEP, FEW = 5, 64  # how far a container is looked for, and in how many entries of each
MANY = 100_000  # entries of one that is copied


def refuse_numbered(data: RowDataset, seeded: Callable[[int], object]) -> None:
    """Refuse a data set, or a collate function, whose samples come out by the order in which they are first read.

    Where reading adds to a dictionary, a list or a set, or changes a fraction that an object or a dictionary keeps (a
    running mean), that is taken back, and the same samples are read once more in other orders. What a cache keeps is
    the same then; ``seeded`` is called before each, so that draws repeat. Call it before other samples are read. *Edge
    case.* What sample 0 got, which is read to see that the data can be, stays.
    """
    if not isinstance(data, Samples):
        return

    def read(place: int) -> list[Tensor]:
        seeded(0)
        return [each.clone() for each in tensors_of(data.rows(torch.tensor([place], device="cpu")))]

    places = torch.linspace(0, len(data) - 1, min(READ, len(data)), dtype=torch.float64, device="cpu").long().tolist()
    objects = list(_objects(data.dataset, data.collate))
    before = [(each, each.copy()) for each in objects if isinstance(each, (dict, list, set)) and len(each) <= MANY]
    holders = [each if isinstance(each, dict) else getattr(each, "__dict__", {}) for each in objects]
    kept = [(each, _fractions(each)) for each in holders]
    found = {place: read(place) for place in places}
    grown = [(each, was) for each, was in before if len(each) > len(was)]
    moved = [(each, name, was) for each, held in kept for name, was in held.items() if _differs(each.get(name), was)]
    sizes = ", ".join(f"a {type(each).__name__} from {len(was)} to {len(each)}" for each, was in grown)
    half = len(places) // 2
    for order in (places[::-1], places[half:] + places[:half], places[1::2] + places[::2]) if grown or moved else ():
        for each, was in grown:
            each.clear()
            (each.extend if isinstance(each, list) else each.update)(was)
        for each, name, was in moved:
            each[name] = copy.deepcopy(was)
        if all(_same(found[place], read(place)) for place in order):
            continue
        who = "a sample comes out differently when other samples were read before it, and reading them has "
        if grown:
            raise Refused(
                f"{who}made {sizes} entries long: the data set or collate numbers words or classes as it meets them, "
                "so that one sample less gives all that follow other numbers; list them before the run, from public "
                "data, and only look them up, with one number for all that are not there"
            )
        raise Refused(
            f"{who}changed {', '.join(str(name) for _, name, _ in moved)}: the data set or collate follows what it "
            "reads, as a running mean or a largest value does, so that one sample less changes all that follow; "
            "compute it before the run, from public data, or of each sample alone"
        )


def _fractions(held: dict[Any, Any]) -> dict[Any, Any]:
    """Copies of the fractions in a small dictionary: whole numbers count, or are places in a file."""
    own = held if len(held) <= FEW else {}
    return {name: copy.deepcopy(value) for name, value in own.items() if _is_fraction(value)}


def _is_fraction(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point() and value.layout == torch.strided and value.numel() <= MANY
    if isinstance(value, np.ndarray):
        return value.dtype.kind == "f" and value.size <= MANY
    return isinstance(value, (float, np.floating))


def _differs(now: Any, before: Any) -> bool:
    if type(now) is not type(before) or np.shape(now) != np.shape(before):
        return True
    one, other = (torch.as_tensor(each).double() for each in (now, before))
    return not torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _objects(*roots: Any) -> Iterator[Any]:
    """These objects, and those that they hold or, as functions, use."""
    level, seen = list(roots), set[int]()
    for _ in range(DEEP):
        following: list[Any] = []
        for value in level:
            if id(value) in seen or isinstance(value, (Tensor, nn.Module, ModuleType, type, str, int, float)):
                continue
            seen.add(id(value))
            yield value
            if isinstance(value, (FunctionType, MethodType, functools.partial)):
                following += (each for _, each in named(value))
            elif isinstance(value, (dict, list, tuple)):
                following += (list(value.values()) if isinstance(value, dict) else list(value))[:FEW]
            following += getattr(value, "__dict__", {}).values()
        level = following
