"""Data sets that can be read at any set of rows.

Receives: tensors or arrays (alone, or in a tuple, list or dict), or a map-style torch Dataset.
Gives: Arrays or Samples, with ``len`` and ``rows(indices) -> batch``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
    TensorDataset,
    default_collate,
)

from clipwise.data.unsampled import (
    refuse_iterable,
    refuse_loader,
    refuse_overlaps,
    refuse_repeats,
    refuse_sampler,
    refuse_samples,
)
from clipwise.plain import reason
from clipwise.types import Batch, InputError, Refused

Collate = Callable[[list[Any]], Batch]
Prepare = Callable[[Batch], Batch]  # a batch as it is stored → as it is used, each row by itself

LARGE = 2**32  # bytes of what may lie in a file, and is not read through
_ACCEPTED = "a tensor, a tuple, list or dict of tensors, or a map-style torch Dataset"


class RowDataset(Protocol):
    """A data set that gives the batch of any rows, also of none."""

    def __len__(self) -> int:
        """How many samples there are."""
        ...

    def rows(self, indices: Tensor) -> Batch:
        """The batch of these rows, in this order."""
        ...


class Arrays(Dataset[Any]):
    """Tensors that share their first dimension; a batch has the structure that the data came in.

    *Guarantees.* Not empty, equal lengths, only finite values; checked once, here.
    *Edge cases.* No indices give a batch with zero rows and the same dtypes.
    """

    def __init__(self, data: Any, prepare: Prepare | None = None) -> None:
        """Keep the tensors (not copied) and check them; ``prepare`` is done to each batch that is read.

        So bytes can stay bytes until they are used. ``prepare`` must treat every row by itself, and the same way.
        """
        refuse_overlaps(labelled(data))
        columns = {f"data{label}": _tensor(f"data{label}", column) for label, column in labelled(data)}
        if not columns:
            raise InputError(
                f"data must hold at least one tensor, got an empty {type(data).__name__}: write data=(x, y)"
            )
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            listed = ", ".join(f"{length} in {name}" for name, length in lengths.items())
            raise InputError(
                f"data must hold tensors with equally many rows, got {listed}: the first dimension is the sample"
            )
        if not all(lengths.values()):
            raise InputError("data must have at least one row, got an empty data set")
        for name, column in columns.items():
            check_finite(name, column)
        self._stored: Batch = _rebuilt(data, list(columns.values()))
        self._prepare = prepare
        self._length = len(next(iter(columns.values())))

    @property
    def data(self) -> Batch:
        """All rows as one batch."""
        return self._stored if self._prepare is None else self._prepare(self._stored)

    def __len__(self) -> int:
        """How many samples there are."""
        return self._length

    def __getitem__(self, index: int) -> Any:
        """One sample, without the batch dimension."""
        return self.rows(torch.tensor(index, device="cpu"))

    def rows(self, indices: Tensor) -> Batch:
        """The batch of these rows, in this order, on the device that the tensors are on."""
        batch = self._each(lambda column: column[indices.to(column.device)])
        return batch if self._prepare is None else self._prepare(batch)

    def take(self, indices: Tensor) -> Arrays:
        """The data set of these rows alone."""
        return Arrays(self._each(lambda column: column[indices.to(column.device)]), self._prepare)

    def to(self, device: torch.device | str) -> Arrays:
        """The data set with its tensors on that device, so that no batch is moved there."""
        return Arrays(self._each(lambda column: column.to(device)), self._prepare)

    def _each(self, change: Callable[[Tensor], Tensor]) -> Batch:
        return _rebuilt(self._stored, [change(column) for _, column in labelled(self._stored)])


def held(data: RowDataset) -> RowDataset:
    """The tensors of all rows that a data set of the user's own holds, to be looked at; others are as they are."""
    own = {}
    for name, value in getattr(data.dataset, "__dict__", {}).items() if isinstance(data, Samples) else ():
        rows = isinstance(value, (Tensor, np.ndarray)) and value.ndim and len(value) == len(data)
        if rows and value.nbytes <= LARGE:
            with suppress(InputError):  # texts; or not finite, where that is not used
                Arrays(value)
                own[name] = value
    return Arrays(own) if own else data


class Samples:
    """A map-style data set read sample by sample and collated.

    *Edge cases.* No indices give the collated first sample cut to zero rows, so that ``collate`` never sees an empty
    list.
    """

    def __init__(self, dataset: Any, collate: Collate | None = None) -> None:
        """Keep the data set, and read its first sample to see that it can be read."""
        self.dataset = dataset
        self.collate = collate or default_collate
        try:
            self._length = len(dataset)
        except TypeError as error:
            raise InputError(f"data must have a length, got {type(dataset).__name__}: give it a __len__") from error
        if not self._length:
            raise InputError("data must have at least one row, got an empty data set")
        try:
            sample = dataset[0]
            first = self.collate([sample])
        except Exception as error:
            raise InputError(
                f"data must be {_ACCEPTED}; reading and collating the first sample of this {type(dataset).__name__} "
                f"gave {reason(error)}; write data=(x, y), or pass a collate function"
            ) from error
        if collate is None:
            _refuse_lists(sample)
        self._none = _no_rows(first)

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse another data set or collate function: a run's self-test has seen these."""
        if name in ("dataset", "collate") and name in vars(self):
            raise Refused(
                f"{name} is fixed when the data are given, since a run tests it once, before its first step; make a "
                "new run with the other one, and spent=private.ledger"
            )
        super().__setattr__(name, value)

    def __len__(self) -> int:
        """How many samples there are."""
        return self._length

    def rows(self, indices: Tensor) -> Batch:
        """The batch of these rows, in this order."""
        wanted: list[int] = indices.tolist()
        if not wanted:
            return _no_rows(self._none)  # containers of its own: a caller may change them
        # the protocol of torch's DataLoader for data sets that can read several samples at once
        together = getattr(self.dataset, "__getitems__", None)
        return self.collate(together(wanted) if together else [self.dataset[index] for index in wanted])


def _refuse_lists(sample: Any) -> None:
    """torch collates lists of numbers, such as a tokeniser's, into a tensor for each place and none for each sample."""
    parts = sample.values() if isinstance(sample, Mapping) else sample if isinstance(sample, tuple) else ()
    for part in parts:
        if isinstance(part, list) and part and all(isinstance(each, (int, float)) for each in part):
            raise InputError(
                f"a sample must hold tensors, arrays or single numbers, got a list of {len(part)} numbers: give it as "
                'torch.tensor(list) (Hugging Face: dataset.set_format("torch")), or pass a collate function that does'
            )


def as_dataset(data: Any, collate: Collate | None = None) -> RowDataset:
    """The data as something Poisson draws can index; ``collate`` makes a batch of a list of samples."""
    if isinstance(data, (Arrays, Samples)) and collate is None:
        return data
    if isinstance(data, DataLoader):
        refuse_loader(data)
    if isinstance(data, Sampler):
        refuse_sampler(data)
    if isinstance(data, IterableDataset):
        refuse_iterable(data)
    if isinstance(data, (Subset, ConcatDataset)):
        refuse_repeats(data)
    if collate is None and type(data) is TensorDataset:  # a subclass may read its samples in another way
        _refuse_layouts(data.tensors)
        refuse_samples(data.tensors)
        return Arrays(data.tensors)
    listed = collate is not None and isinstance(data, list) and data and not isinstance(data[0], (Tensor, np.ndarray))
    if isinstance(data, (Tensor, np.ndarray, tuple, list, Mapping)) and not listed:
        if collate is not None:
            raise InputError("collate must be left out where data are tensors: their rows are read directly")
        _refuse_layouts(data)
        refuse_samples(data)
        return Arrays(data)
    if isinstance(data, (str, bytes)) or not hasattr(data, "__getitem__"):
        raise InputError(f"data must be {_ACCEPTED}, got {type(data).__name__}: write data=(x, y)")
    return Samples(data, collate)


def _refuse_layouts(data: Any) -> None:
    """Refuse sparse and nested tensors, whose rows cannot be picked by their numbers."""
    for label, column in labelled(data):
        if isinstance(column, Tensor) and (column.layout != torch.strided or column.is_nested):
            kind, write = ("nested", "to_padded_tensor(0.0)") if column.is_nested else ("sparse", "to_dense()")
            raise InputError(
                f"data{label} must be a dense tensor, got a {kind} one: write x.{write}, or give a Dataset that "
                "makes one row of it dense at a time"
            )


def check_finite(name: str, values: Tensor) -> None:
    """Refuse NaN and infinities; the message counts them and says where the first one is."""
    if not (values.is_floating_point() or values.is_complex()):
        return
    width = math.prod(values.shape[1:])
    # in pieces, so that a large data set needs no second copy of itself
    bad = torch.cat([(~piece.isfinite()).reshape(len(piece), width).sum(1) for piece in torch.split(values, 4096)])
    if bad.any():
        raise InputError(
            f"{name} must hold finite numbers, got {int(bad.sum())} NaN or infinite, "
            f"the first in row {int(bad.nonzero()[0])}: remove or fill these rows"
        )


def labelled(data: Any) -> list[tuple[str, Any]]:
    """The columns of the data, each with the index that a message names it by."""
    if isinstance(data, Mapping):
        return [(f"[{key!r}]", column) for key, column in data.items()]
    if isinstance(data, (tuple, list)):
        return [(f"[{position}]", column) for position, column in enumerate(data)]
    return [("", data)]


def _rebuilt(data: Any, columns: list[Any]) -> Batch:
    """The columns in the structure of ``data``."""
    if isinstance(data, Mapping):
        return dict(zip(data, columns, strict=True))
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*columns)
    return columns[0] if isinstance(data, (Tensor, np.ndarray)) else type(data)(columns)


def _tensor(name: str, column: Any) -> Tensor:
    """One column as a tensor with rows."""
    if isinstance(column, np.ndarray):
        try:
            native = column.dtype.newbyteorder("=")
            column = torch.from_numpy(np.require(column, dtype=native, requirements=["C", "W"]))
        except TypeError as error:
            raise InputError(f"{name} must hold numbers, got an array of dtype {column.dtype}") from error
    if not isinstance(column, Tensor):
        raise InputError(
            f"{name} must be a tensor with one row per sample, got {type(column).__name__}: "
            "stack the samples into tensors, or pass a list of samples with collate=a function that makes one batch"
        )
    if column.dim() == 0:
        raise InputError(f"{name} must have one row per sample, got a single number")
    return column.detach()


def _no_rows(batch: Batch) -> Batch:
    """A collated batch, cut to zero rows."""
    if isinstance(batch, Tensor):
        return batch[:0] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {key: _no_rows(value) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        if not any(isinstance(value, (Tensor, Mapping, tuple, list)) for value in batch):  # one column, as of texts
            return type(batch)()
        return _rebuilt(batch, [_no_rows(value) for value in batch])
    raise InputError(f"collate must give tensors in tuples, lists or dicts, got {type(batch).__name__}")
