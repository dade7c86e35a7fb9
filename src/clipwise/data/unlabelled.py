"""Rows to predict for: prepared as the rows that a run was trained on, and perhaps without labels.

Receives: the text of a run's data, and a file of the same kind.
Gives: Unlabelled: the inputs, what the run's outputs mean, and the file's columns by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clipwise.data import images, npz, tables
from clipwise.data.columns import Range, Values, meaning
from clipwise.data.load import asks_features
from clipwise.data.scattering import narrow
from clipwise.data.source import Source, parsed
from clipwise.data.text import sizes
from clipwise.types import InputError


@dataclass(frozen=True)
class Unlabelled:
    """Inputs that a run's model takes, and how to read its outputs."""

    x: Tensor
    label: Range | Values  # the classes, or the range of a regression's numbers
    vocabulary: int | None = None  # of tokens, where it is known
    columns: Mapping[str, Sequence[Any]] | None = None  # of a table, as they stand in the file


def unlabelled(text: str, file: str) -> Unlabelled:
    """The rows of ``file``, prepared as ``text``, a run's data, says; the label's column is not needed, nor read."""
    source = parsed(text)
    if source.name not in ("csv", "jsonl", "npz"):
        raise InputError(
            f"new rows are read for runs on a csv, jsonl or npz file, got one on {source.name}: build its model in "
            "Python and load its model.pt"
        )
    if "?" in file:
        raise InputError(f"expected a file, got {file!r} with options: leave them out, they are those of the run")
    path = Path(file.removeprefix(f"{source.name}:")).expanduser()
    return _of_arrays(source, path) if source.name == "npz" else _of_table(source, path)


def _of_table(source: Source, path: Path) -> Unlabelled:
    label = meaning(source.options["label"])[0]
    try:
        table = tables.read(source, path, label)
    except InputError as error:  # what it says to write is for a run that has not been made yet
        got, *_ = re.split(", or write |: write names=", str(error))
        raise InputError(got) from error
    named = "columns" in source.options or "text" in source.options
    said = tables.said_of(source, table if named else _trained_on(source))
    for column in said.text or said.columns:
        if column not in table and (found := tables.other_separator(table)):
            raise InputError(
                f"{path} must have its columns separated as those of {source.path}, which the run was trained on, got "
                f"{found}: save it as that file was"
            )
        if column not in table and tables.headless(source, table):  # what is in its first line may be private
            raise InputError(
                f"{path} must begin with a line of names, as the file of the run did, got one that seems to hold "
                f"values: put a line above it with {', '.join(said.text or said.columns)}, in the file's order"
            )
        if column not in table:
            raise InputError(
                f"{path} must have every column that the run was trained on, got no {column!r} among "
                f"{', '.join(table)}: add it, or give it this name"
            )
    vocabulary = sizes(source)[0] if said.text else None
    try:
        x = tables.inputs(source, said, table)
    except InputError as error:  # what it says to write is for a run that has not been made yet
        got = str(error).partition(": write")[0]
        raise InputError(f"{got}: mend the cell, or write it as the run's own file writes what is missing") from error
    return Unlabelled(x, said.label, vocabulary, table)


def _trained_on(source: Source) -> tables.Table:
    """The table of the run itself: where nobody named the columns, their order is known from it alone."""
    if not source.path.is_file():
        raise InputError(
            f"the run took all columns of {source.path}, which is not there, so that nobody knows which: put it back, "
            "or train with columns=…"
        )
    return tables.read(source, source.path)


def _of_arrays(source: Source, path: Path) -> Unlabelled:
    arrays = npz.read(path)
    if "x" not in arrays:
        raise InputError(f"{path} must hold x, got {', '.join(arrays) or 'no arrays'}: write numpy.savez(path, x=x)")
    x, trained_on = (npz.inputs("x", of["x"]) for of in (arrays, npz.read(source.path)))
    if (x.dtype, x.shape[1:]) != (trained_on.dtype, trained_on.shape[1:]):
        raise InputError(
            f"x must be of {trained_on.dtype} with rows of shape {list(trained_on.shape[1:])}, as the run was trained "
            f"on, got {x.dtype} with {list(x.shape[1:])}"
        )
    if x.dtype == torch.uint8:
        x, _ = images.pixels(source)((x, None))
    if asks_features(source):
        x = narrow(x).float()
    known = npz.splits(source)  # how many classes there are is known from it alone
    numbers = known.task == "regression"
    return Unlabelled(x, Range(-1, 1) if numbers else Values(tuple(map(str, range(known.classes)))))
