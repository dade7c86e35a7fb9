"""How samples are read for the self-test: together, and in pieces, each as if it were the whole.

Receives: what goes through the model, and the samples to look at.
Gives: Reader, whose read gives them both ways; an error where a data set or collate draws so that samples meet; shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from clipwise.data import Samples
from clipwise.passes import Passes, stacked
from clipwise.records.chance import generators, reseeds, seeded, watched
from clipwise.records.checks import OWN_SEED
from clipwise.records.trees import picked, tensors
from clipwise.types import Batch, Refused

READ = 64  # samples on which it is seen whether reading draws at random
SEEDS = 8  # for a collate function that draws at random


@dataclass(frozen=True)
class Reader:
    """Reads samples together and in pieces; ``way`` is what chance allows."""

    passes: Passes
    way: Literal["again", "collated", "cut"]  # each piece read again, collated again from one reading, or cut out

    @classmethod
    def of(cls, passes: Passes, samples: Tensor) -> Reader:
        """How samples can be read in pieces; what reads several at once and draws at random is tested here."""
        data = passes.data
        if isinstance(data, Samples):
            _refuse_own_generators(lambda: passes.rows(samples[:READ]))
        if not isinstance(data, Samples) or hasattr(data.dataset, "__getitems__"):
            same, drew = _twice(lambda: passes.rows(samples))
            if same and not drew:
                return cls(passes, "again")
        if isinstance(data, Samples):  # its samples may be drawn at random
            items = _items(data, samples)
            if hasattr(data.dataset, "__getitems__"):  # which sees several, as Hugging Face's transforms do

                def together(numbers: list[int]) -> Batch:
                    return passes.rows(torch.tensor(numbers, device="cpu"))

                _refuse_mixing("the data set", together, samples.tolist(), items)
            same, drew = _twice(lambda: _collated(passes, items))
            if same and not drew:
                return cls(passes, "collated")
            _refuse_mixing("collate", lambda of: _collated(passes, of), items, items)
        return cls(passes, "cut")

    def read(self, places: Tensor, pieces: Sequence[Tensor]) -> tuple[Batch, list[Batch]]:
        """The samples together and in pieces."""
        passes = self.passes
        if self.way == "collated" and isinstance(passes.data, Samples):
            items = _items(passes.data, places)
            parts = [_collated(passes, [items[i] for i in piece.tolist()]) for piece in pieces]
            return _collated(passes, items), parts
        whole = passes.rows(places)
        if self.way == "again":
            return whole, [passes.rows(places[piece]) for piece in pieces]
        return whole, [picked(whole, piece) for piece in pieces]

    def shorter_first(self, places: Tensor, order: Tensor) -> Tensor:
        """The order with one of the first samples in front that is read in another shape alone: where collate pads."""
        if not isinstance(self.passes.data, Samples) or self.way == "cut":
            return order
        shape = shapes(self.read(places, [])[0])
        for i, one in enumerate(order[:READ].split(1)):
            if shapes(self.read(places[one], [])[0]) != shape:
                return torch.cat([one, order[:i], order[i + 1 :]])
        return order


def shapes(rows: Batch) -> tuple[torch.Size, ...]:
    """What one row of each tensor looks like."""
    return tuple(t.shape[1:] for t in tensors(rows))


def _refuse_own_generators(read: Callable[[], Batch]) -> None:
    if not _twice(read)[0]:
        raise Refused(
            "the same samples came out differently when they were read again, with every generator at the same seed: "
            "the data set or collate draws from a generator of its own, so that one sample less moves all that is "
            "drawn for the others, or it changes what it reads; draw from torch's, NumPy's or Python's own generators, "
            "which every step seeds in secret"
        )
    if reseeds(read):
        raise Refused(
            "the data set or collate seeds a generator (torch.manual_seed, random.seed): whatever is drawn afterwards "
            "in a step, such as dropout's masks, can be foreseen, and one sample more moves what is drawn for every "
            f"row behind it; {OWN_SEED}"
        )


def _items(data: Samples, samples: Tensor) -> list[Any]:
    return [data.dataset[index] for index in samples.tolist()]


def _collated(passes: Passes, items: list[Any]) -> Batch:
    """One batch of copies of these samples, since a collate function may take them apart."""
    assert isinstance(passes.data, Samples)
    with stacked():
        rows = passes.data.collate(copy.deepcopy(items))
    return passes.placed(rows, len(items))


def _twice(read: Callable[[], Batch]) -> tuple[bool, bool]:
    """Whether what is read is the same at the same seed, and whether it was drawn at random."""
    seeded(0)
    one, drew = watched(read)
    seeded(0)
    return _same(one, read()), drew


def _refuse_mixing(who: str, collated: Callable[[list[Any]], Batch], items: list[Any], like: Sequence[Any]) -> None:
    """Refuse what draws at random if, with the same draws, exchanging half of the samples changes another's row.

    ``like``: the samples themselves, where the items are their numbers.
    """
    alike = dict[Any, list[int]]()
    for place, item in enumerate(like):  # a sample of another length may shift all that is drawn
        alike.setdefault(_form(item), []).append(place)
    for seed in range(SEEDS):
        some, others = torch.randperm(len(items), device="cpu").tensor_split(2)
        changed, exchanged = list(items), set(some.tolist())
        for group in alike.values():  # one sample in all their places: merely permuted, they would have the same mean
            for place in exchanged.intersection(group):
                changed[place] = items[group[seed % len(group)]]
        seeded(seed)
        before, drawn = collated(items), generators()
        seeded(seed)
        after, drawn_then = collated(changed), generators()
        if drawn != drawn_then or shapes(before) != shapes(after):  # longest by what is drawn: nothing to compare
            continue
        if not _same(picked(before, others), picked(after, others)):
            raise Refused(
                f"{who} mixes the samples of a batch: other samples beside it changed a sample's row; make each row "
                "of one sample alone, without mixup or statistics of the batch"
            )


def _form(item: Any) -> Any:
    """What two samples have in common that are read alike: types, shapes and lengths."""
    if hasattr(item, "shape"):
        return type(item), tuple(item.shape)
    if isinstance(item, dict):
        return tuple((key, _form(value)) for key, value in item.items())
    if isinstance(item, (list, tuple)):
        return type(item), tuple(map(_form, item))
    return type(item), len(item) if hasattr(item, "__len__") else None


def _same(one: Batch, other: Batch) -> bool:
    pairs = zip(tensors(one), tensors(other), strict=True)
    return all(a.shape == b.shape and torch.allclose(a.double(), b.double(), 1e-6, equal_nan=True) for a, b in pairs)
