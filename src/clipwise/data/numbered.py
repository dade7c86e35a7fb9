"""Words and classes that a data set numbers as it first reads them: one sample less gives all that follow others.

Receives: data that are read sample by sample.
Gives: refuse_numbered.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import FunctionType, MethodType, ModuleType
from typing import Any

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

    Where reading adds to a dictionary, a list or a set, that is taken back, and the same samples are read once more in
    other orders. What a cache keeps is the same then; ``seeded`` is called before each, so that draws repeat. Call it
    before other samples are read. *Edge case.* What sample 0 got, which is read to see that the data can be, stays.
    """
    if not isinstance(data, Samples):
        return

    def read(place: int) -> list[Tensor]:
        seeded(0)
        return [each.clone() for each in tensors_of(data.rows(torch.tensor([place], device="cpu")))]

    places = torch.linspace(0, len(data) - 1, min(READ, len(data)), dtype=torch.float64, device="cpu").long().tolist()
    before = [(each, each.copy()) for each in _containers(data.dataset, data.collate)]
    found = {place: read(place) for place in places}
    grown = [(each, copy) for each, copy in before if len(each) > len(copy)]
    sizes = ", ".join(f"a {type(each).__name__} from {len(copy)} to {len(each)}" for each, copy in grown)
    half = len(places) // 2
    for order in (places[::-1], places[half:] + places[:half], places[1::2] + places[::2]) if grown else ():
        for each, copy in grown:
            each.clear()
            (each.extend if isinstance(each, list) else each.update)(copy)
        if not all(_same(found[place], read(place)) for place in order):
            raise Refused(
                "a sample comes out differently when other samples were read before it, and reading them has made "
                f"{sizes} entries long: the data set or collate numbers words or classes as it meets them, so that "
                "one sample less gives all that follow other numbers; list them before the run, from public data, "
                "and only look them up, with one number for all that are not there"
            )


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def _containers(*roots: Any) -> Iterator[Any]:
    """The dictionaries, lists and sets that these objects hold or functions use."""
    level, seen = list(roots), set[int]()
    for _ in range(DEEP):
        following: list[Any] = []
        for value in level:
            if id(value) in seen or isinstance(value, (Tensor, nn.Module, ModuleType, type, str, int, float)):
                continue
            seen.add(id(value))
            if isinstance(value, (dict, list, set)) and len(value) <= MANY:
                yield value
            if isinstance(value, (FunctionType, MethodType, functools.partial)):
                following += (each for _, each in named(value))
            elif isinstance(value, (dict, list, tuple)):
                following += (list(value.values()) if isinstance(value, dict) else list(value))[:FEW]
            following += getattr(value, "__dict__", {}).values()
        level = following
