"""What cannot be sampled with a known rate, or holds a sample more than once: each is refused with what to write.

Receives: what the user gives as data.
Gives: refuse_samples, refuse_overlaps, refuse_loader, refuse_sampler, refuse_iterable, refuse_repeats.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from clipwise.types import Refused

COLUMNS = 8  # in a list of more tensors each is more likely a sample
SHARED = (
    "share entries, as windows do that slide over a series: what one person gave stands in several rows, and ε is for "
    "one; cut windows that do not overlap, one person's in one row"
)


def refuse_samples(data: Any) -> None:
    """Refuse a list of samples, which would be read as columns, so that ε would protect a position in all of them."""
    arrays = (Tensor, np.ndarray)
    if type(data) not in (list, tuple) or not all(isinstance(each, arrays) and each.ndim for each in data):
        return  # named columns, or what is refused elsewhere
    rows, columns = min(map(len, data), default=0), len(data)
    # a tuple says more surely that it holds columns
    if rows and columns > (min if isinstance(data, list) else max)(COLUMNS, rows):
        raise Refused(
            f"data must be a few columns with one row per sample, got a {type(data).__name__} of {columns} tensors of "
            f"{rows} rows: if each is a sample, write data=torch.stack(list), or (torch.stack(inputs), labels)"
        )


def refuse_overlaps(columns: list[tuple[str, Any]]) -> None:
    """Refuse rows that share memory: windows that slide over a series, or one row for all."""
    arrays = [(label, column) for label, column in columns if isinstance(column, (Tensor, np.ndarray)) and column.ndim]
    steps = [_strides(column)[0] for _, column in arrays if len(column) > 1]
    if steps and not any(steps):  # one such column may be a constant
        raise Refused(
            "data must hold every sample once, got one row that stands for all (expanded): they are one sample, with "
            "as many times the sensitivity that ε is stated for; give rows of different samples"
        )
    for label, column in arrays:
        if _overlaps(column):
            raise Refused(f"the rows of data{label} {SHARED}")


def _overlaps(column: Tensor | np.ndarray[Any, Any]) -> bool:
    """Whether rows may share memory; entries within a row may, and a single row that is repeated is not looked at."""
    step, *inner = _strides(column)
    if len(column) < 2 or not step or not all(column.shape):
        return False
    within = [(s, size) for s, size in zip(inner, column.shape[1:], strict=True) if s and size > 1]
    near = sum(s * (size - 1) for s, size in within if s < step)
    far = min((s for s, _ in within if s >= step), default=None)
    # a row's entries lie within one step; or, as in a transpose, further apart than all rows together
    return near >= step or (far is not None and far <= step * (len(column) - 1) + near)


def _strides(column: Tensor | np.ndarray[Any, Any]) -> list[int]:
    return [abs(s) for s in (column.stride() if isinstance(column, Tensor) else column.strides)]


def refuse_loader(loader: DataLoader[Any]) -> NoReturn:
    """Say why this loader's batches are not Poisson samples, and what to write."""
    if isinstance(loader.dataset, IterableDataset):
        refuse_iterable(loader.dataset)
    own = loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler
    sampler: object = loader.batch_sampler if own else loader.sampler
    if type(sampler) is RandomSampler and not sampler.replacement and len(sampler) == len(sampler.data_source):
        why = "shuffled batches of a fixed size do not have the privacy amplification of Poisson sampling"
    elif type(sampler) is SequentialSampler:
        why = "batches in a fixed order have no privacy amplification by sampling"
    else:
        why = f"under its {type(sampler).__name__} the sampling rate, and with it ε, would be wrong"
    write = "data=loader.dataset"
    if loader.collate_fn is not default_collate:
        write += ", collate=loader.collate_fn"
    raise Refused(f"data must be a data set, got a DataLoader: {why}; write {write} (clipwise draws Poisson batches)")


def refuse_sampler(sampler: Sampler[Any]) -> NoReturn:
    """Say that clipwise draws its own batches."""
    raise Refused(
        f"data must be a data set, got the sampler {type(sampler).__name__}: clipwise draws its own Poisson batches, "
        "since another sampler's rate would make the stated ε wrong; write data=dataset"
    )


def refuse_iterable(data: object) -> NoReturn:
    """Say that a stream of samples cannot be Poisson sampled."""
    raise Refused(
        f"data must be map-style, with a length and dataset[i], got {type(data).__name__}, an IterableDataset: "
        "a stream cannot be Poisson sampled, so that ε would be wrong; read it into tensors and write data=(x, y)"
    )


def refuse_repeats(data: Dataset[Any]) -> None:
    """A row that stands in the data twice is moved by twice the bound when its owner leaves."""
    origins = _origins(data, [])
    _, kind, counts = torch.unique(origins[:, :2], dim=0, return_inverse=True, return_counts=True)
    repeated = origins[counts[kind] > 1]
    if len(repeated):
        raise Refused(
            f"data must hold every sample once, got a {type(data).__name__} with index {int(repeated[:, 2].min())} "
            "repeated: a sample in two rows has twice the sensitivity that ε is stated for; drop the repeats, and draw "
            "one of several transforms anew whenever a sample is read"
        )


def _origins(data: Any, known: list[Any]) -> Tensor:
    """Where each row comes from, through subsets and concatenations: [row, (data set, place in it, index)].

    ``known`` are the data sets that were met so far.
    """
    if isinstance(data, Subset):
        return _origins(data.dataset, known)[torch.as_tensor(data.indices, dtype=torch.long, device="cpu")]
    if isinstance(data, ConcatDataset):
        return torch.cat([_origins(part, known) for part in data.datasets])
    index = torch.arange(len(data), device="cpu")
    source, place = id(next((other for other in known if _twins(other, data)), data)), index
    known.append(data)
    if type(data) is TensorDataset:  # several may be of the same tensors, or of parts of them
        first = data.tensors[0]
        source, place = first.untyped_storage().data_ptr(), index * first.stride(0) + int(first.storage_offset())
    return torch.stack([torch.full_like(index, source), place, index], 1)


def _twins(one: Any, other: Any) -> bool:
    """Whether two data sets hold the same rows, as where one is made again for another transform.

    All that they hold of each row must be equal (pictures, labels, names of files), and so must texts, such as where
    they were read.
    """
    if type(one) is not type(other) or len(one) != len(other):
        return False
    own, others = (getattr(each, "__dict__", {}) for each in (one, other))
    rows = [name for name, value in own.items() if _has_rows(value, len(one))]
    texts = [name for name, value in own.items() if isinstance(value, (str, PurePath))]
    return bool(rows) and all(name in others and _equal(own[name], others[name]) for name in (*rows, *texts))


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, (Tensor, np.ndarray, list, tuple)) and getattr(value, "ndim", 1) > 0 and len(value) == rows


def _equal(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other):
        return one is other
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # of tensors and arrays in lists there is no one answer
        return len(one) == len(other) and all(map(_equal, one, other))
