"""Rows that are there twice: among the data, among public inputs or in the model; and rows that are elsewhere.

Receives: data sets of tensors, all of whose rows are compared; of others, which have to be read, a few.
Gives: warn_of_copies, warn_of_numbers, warn_of_named, warn_of_measured, refuse_shared, refuse_private, refuse_kept;
telling, tensors_of.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clipwise.data.datasets import Arrays, RowDataset, Samples, labelled
from clipwise.data.named import named
from clipwise.data.unsampled import SHARED
from clipwise.types import Refused, warn

MOST = 100_000  # rows in which copies are looked for
TELLING = 8  # different fractions in a row: two people do not have them all in common by chance
AT_ONCE = 256
TIMES = range(2, 11)  # a data set that repeats all samples so often has sample 0 again at 1/2, 1/3, … of its length


def warn_of_copies(data: RowDataset, rows_per_person: int = 1) -> None:
    """Warn of rows that are others, number for number or mirrored or turned, where that is no chance.

    ``rows_per_person`` of a kind may be there: ε then holds for all of them.
    """
    known, sums, times = set[int](), set[int](), Counter[int]()
    copies = turns = 0
    for _, rows, labels in _inputs(data, MOST):
        if not _tells(rows):
            return
        own = _rows(rows if rows.is_floating_point() else rows / 256)
        # whichever way a picture is turned, its bits have one sum: only where that is known, the turns are looked at
        sums_of_bits = own.view(np.uint32).sum(1, dtype=np.uint64).tolist()
        for row, label, bits in zip(own, labels, sums_of_bits, strict=True):
            key = hash(label + row.tobytes())
            if bits in sums and telling(row):
                copy, turns_of_it = key in known, _turned(row.reshape(rows.shape[1:]))
                turned = not copy and any(hash(label + each.tobytes()) in known for each in turns_of_it)
                copies, turns = copies + copy, turns + turned
                times[bits] += copy or turned
            known.add(key)
            sums.add(bits)
    if max(times.values(), default=0) < rows_per_person:
        return
    if copies:
        warn(
            f"{copies} rows of the data are copies of others, number for number: if one person's are repeated, to "
            "balance classes say, that person moves the sum by all of them, and ε is for one; in the place of copies, "
            "write a factor in the loss"
        )
    if turns:
        warn(
            f"{turns} rows of the data are others mirrored or turned, number for number: if they were added to have "
            "more samples, a person moves the sum by all that were made of theirs, and ε is for one; give each picture "
            'once and write method="self_augmentation(…)", whose views are clipped together, or rows_per_person=how '
            "many were made of one"
        )


def _is_turned(one: Tensor, other: Tensor) -> bool:
    return any(np.array_equal(each, other.float().numpy(force=True)) for each in _turned(one.float().numpy(force=True)))


def _turned(picture: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """A picture with its channels first or last, or none: its mirror images, and all of them turned by right angles."""
    for places in ((-2, -1), (0, 1)) if picture.ndim > 2 else ((0, 1),) if picture.ndim == 2 else ():
        for turn in range(4):
            turned = np.rot90(picture, turn, places)
            yield from (turned, np.flip(turned, places[0]))


def refuse_shared(data: RowDataset, seeded: Callable[[int], object]) -> None:
    """Refuse a data set whose samples share memory, or may be anyone's; warn where sample 0 comes again.

    Only data sets that are read sample by sample; ``seeded`` is called before each reading, so that draws repeat.
    Sample 0 is looked for where it would be in a data set that repeats all samples in turn, or each one at once.
    """
    if not isinstance(data, Samples) or len(data) < 2:
        return

    def read(index: int, seed: int = 0) -> list[Tensor]:
        seeded(seed)
        return list(tensors_of(data.dataset[index]))

    first, following = read(0), read(1)
    if first and _same(first, following) and _same(first, read(len(data) - 1)) and not _same(first, read(0, seed=1)):
        raise Refused(
            "sample 0 of this data set is whatever its generator draws, and so is every other: one person's data may "
            "then be in a step several times, or at another rate than ε is stated for; let dataset[i] read person i's "
            "data alone, and draw only what is done to them (a part of a text, a crop)"
        )
    if any(_overlap(one, other) for one, other in zip(first, following, strict=False)):
        raise Refused(f"samples of this data set {SHARED}")
    # the inputs alone: one person's may come with several labels
    own = first[0].detach().float().flatten().cpu().numpy() if first and first[0].is_floating_point() else np.zeros(0)
    for place in sorted({1, *(len(data) // times for times in TIMES)} - {0}) if telling(own) else ():
        again = following if place == 1 else read(place)
        if again and (torch.equal(first[0], again[0]) or _is_turned(first[0], again[0])):
            warn(
                f"sample {place} of the data is sample 0 again, number for number, as it is or mirrored or turned: "
                "if the data set repeats its samples, each moves the sum by all of its copies, and ε is for one; in "
                "the place of repeats, train for more epochs, and draw what is done to a sample whenever it is read"
            )
            return


def _same(one: list[Tensor], other: list[Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


def warn_of_numbers(data: RowDataset) -> None:
    """Warn of samples that are their own numbers: what these stand for is read where no test can change it."""
    places = {0, 1, len(data) // 2, len(data) - 1}
    if len(places) < 3 or not all(_is_number(data, place) for place in sorted(places)):
        return
    warn(
        f"the samples are only their own numbers, 0 to {len(data) - 1}: what the model or the loss looks up by them is "
        "not seen by the self-test, and ε holds only if sample i's loss is made of row i alone; a graph's node, say, "
        "reads its neighbours' rows too; write the rows themselves, data=(x, y)"
    )


def _is_number(data: RowDataset, index: int) -> bool:
    """Whether a sample is its own number, alone or with one number more, such as a label."""
    item = data.dataset[index] if isinstance(data, Samples) else data.rows(torch.tensor([index], device="cpu"))
    columns = [column for _, column in labelled(item)]
    if len(columns) not in (1, 2) or not all(map(_is_single, columns)):
        return False
    first = columns[0]
    if isinstance(first, Tensor):
        first = first.item()
    return isinstance(first, (int, np.integer)) and bool(first == index)


def _is_single(column: Any) -> bool:
    return column.numel() == 1 if isinstance(column, Tensor) else isinstance(column, (int, float, np.generic))


def telling(row: np.ndarray[Any, Any]) -> bool:
    """Whether a row has so many fractions that no other has them by chance."""
    return len(np.unique(row[np.modf(row)[0] != 0])) >= TELLING


def tensors_of(item: Any) -> Iterator[Tensor]:
    """The tensors and arrays of a sample, not copied; sparse ones have no memory that could be compared."""
    if isinstance(item, np.ndarray):
        # it may be read-only, and is not written to; what torch cannot hold without a copy is not compared
        with warnings.catch_warnings(action="ignore"), suppress(TypeError, ValueError):
            item = torch.from_numpy(item)
    if isinstance(item, Tensor):
        yield from [item] if item.layout is torch.strided else []
    elif isinstance(item, (Mapping, list, tuple)):
        for value in item.values() if isinstance(item, Mapping) else item:
            yield from tensors_of(value)


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors without gaps share a part of their memory; what they share as a whole may be a constant."""
    if not (one.numel() and other.numel() and one.is_contiguous() and other.is_contiguous()):
        return False
    start, begins = one.data_ptr(), other.data_ptr()
    return 0 < begins - start < one.nbytes or 0 < start - begins < other.nbytes


def refuse_private(public: Tensor, data: RowDataset) -> None:
    """Refuse public inputs that are private ones: they go beside every other sample, and into the model's file."""
    # one of a single number, such as a blank picture, is nobody's
    known = {row.tobytes() for row in public.detach().cpu().double().flatten(1).numpy() if (row != row[:1]).any()}
    for start, rows, _ in _inputs(data, len(data)):
        own = rows.to("cpu", public.dtype).double().flatten(1).numpy()  # NumPy knows no bfloat16
        found = next((i for i, row in enumerate(own, start) if row.tobytes() in known), None)
        if found is not None:
            raise Refused(
                f"public inputs must be public, got the private sample {found} among them: it would be normalised with "
                "other samples, and is kept with the model; give inputs of other data"
            )


def refuse_kept(model: nn.Module, data: RowDataset) -> None:
    """Refuse a model that holds private samples before its first step, as centres or a bank: they leave with it.

    Those in a plain attribute may stay, but every other sample's gradient is made of them.
    """
    found = _sample_in([*model.named_parameters(), *model.named_buffers(), *_attributes(model)], data)
    if found is not None:
        name, sample = found
        raise Refused(
            f"{name} of the model holds the private sample {sample}, number for number, which its weights, or every "
            "other sample's gradient, would give away whatever ε is: take centres, prototypes or a bank from public "
            "data, or begin at random"
        )


def warn_of_named(who: str, function: Callable[..., Any], data: RowDataset) -> None:
    """Warn of a loss, or of views, that use private samples from outside the batch: every gradient depends on them."""
    found = _sample_named(function, data)
    if found is not None:
        name, sample = found
        warn(
            f"{who} names {name}, which holds the private sample {sample}: if it computes anything from it, each "
            "sample's loss is made of others too, without noise, which no self-test can see; use the batch alone, and "
            f"for the number of samples write it down as a number, n = len({name}), before"
        )


def warn_of_measured(function: Callable[..., Any], data: RowDataset) -> None:
    """Warn of numbers for a report that are measured on private samples."""
    found = _sample_named(function, data)
    if found is not None:
        name, sample = found
        warn(
            f"evaluate names {name}, which holds the private sample {sample}: what it measures there is told without "
            "noise, in the report and the run's folder, and no ε covers it; measure on rows that are not trained on"
        )


def _sample_named(function: Callable[..., Any], data: RowDataset) -> tuple[str, int] | None:
    """The first sample that is held by something that a function names, with its name."""
    held = ((name, [*v.parameters(), *v.buffers()] if isinstance(v, nn.Module) else v) for name, v in named(function))
    return _sample_in([(name, tensor) for name, value in held for tensor in tensors_of(value)], data)


def _sample_in(values: Iterable[tuple[str, Tensor]], data: RowDataset) -> tuple[str, int] | None:
    """The first sample that one of these tensors has as a row, with the tensor's name."""
    _, first, _ = next(_inputs(data, 1), (0, torch.zeros(1, 0), []))
    size = first[0].numel() if first.is_floating_point() else 0
    dense = [(name, v) for name, v in values if v.is_floating_point() and v.layout == torch.strided and v.dim() > 1]
    like = [(name, v[:MOST]) for name, v in dense if math.prod(v.shape[1:]) == size >= TELLING]
    known = {hash(row.tobytes()): name for name, value in like for row in _rows(value)}
    for start, rows, _ in _inputs(data, MOST) if known else ():
        for i, row in enumerate(_rows(rows), start):
            name = known.get(hash(row.tobytes()))
            if name is not None and telling(row):
                return name, i
    return None


def _attributes(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Tensors that modules hold beside parameters and buffers."""
    every = vars(nn.Module()).keys()
    for place, module in model.named_modules():
        for name, value in vars(module).items():
            yield from ((f"{place}.{name}".lstrip("."), t) for t in (() if name in every else tensors_of(value)))


def _rows(values: Tensor) -> np.ndarray[Any, Any]:
    rows = values.detach().float().cpu().numpy()
    return rows.reshape(len(rows), math.prod(rows.shape[1:]))


def _inputs(data: RowDataset, most: int) -> Iterator[tuple[int, Tensor, list[bytes]]]:
    """A data set's inputs, a few rows at a time, with the number of the first and what stands before each (a label)."""
    for some in torch.arange(min(most, len(data)), device="cpu").split(AT_ONCE) if isinstance(data, Arrays) else ():
        columns = [column for _, column in labelled(data.rows(some))]
        place = next((i for i, column in enumerate(columns) if _tells(column)), 0)
        before = [b"".join(row.tobytes() for row in rows) for rows in zip(*map(_rows, columns[:place]), strict=True)]
        yield int(some[0]), columns[place], before or [b""] * len(some)


def _tells(rows: Tensor) -> bool:
    """Whether these may be inputs of which two are alike by no chance: fractions, or pictures in bytes."""
    return rows[0].numel() >= TELLING and (rows.is_floating_point() or (rows.dtype == torch.uint8 and rows.dim() > 2))
