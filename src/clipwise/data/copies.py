"""Rows that are there twice: among the data, or among public inputs.

Receives: data sets of tensors; others cannot be compared without reading all of them.
Gives: warn_of_copies, refuse_private.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from clipwise.data.datasets import Arrays, RowDataset, labelled
from clipwise.types import Refused

MOST = 100_000  # rows in which copies are looked for
TELLING = 8  # different fractions in a row: two people do not have them all in common by chance
AT_ONCE = 256


def warn_of_copies(data: RowDataset) -> None:
    """Warn of rows that are others number for number, where that is no chance: samplers are refused, copies are not."""
    known, copies = set[int](), 0
    for _, rows in _inputs(data, MOST):
        if not rows.is_floating_point() or rows[0].numel() < TELLING:
            return
        for row in rows.detach().float().flatten(1).cpu().numpy():
            key = hash(row.tobytes())
            copies += key in known and len({number for number in row.tolist() if number % 1}) >= TELLING
            known.add(key)
    if copies:
        warnings.warn(
            f"{copies} rows of the data are copies of others, number for number: if one person's are repeated, to "
            "balance classes say, that person moves the sum by all of them, and ε is for one; in the place of copies, "
            "write a factor in the loss",
            stacklevel=4,
        )


def refuse_private(public: Tensor, data: RowDataset) -> None:
    """Refuse public inputs that are private ones: they go beside every other sample, and into the model's file."""
    # one of a single number, such as a blank picture, is nobody's
    known = {row.tobytes() for row in public.detach().cpu().flatten(1).numpy() if (row != row[:1]).any()}
    for start, rows in _inputs(data, len(data)):
        own = rows.to("cpu", public.dtype).flatten(1).numpy()
        found = next((i for i, row in enumerate(own, start) if row.tobytes() in known), None)
        if found is not None:
            raise Refused(
                f"public inputs must be public, got the private sample {found} among them: it would be normalised with "
                "other samples, and is kept with the model; give inputs of other data"
            )


def _inputs(data: RowDataset, most: int) -> Iterator[tuple[int, Tensor]]:
    """The first tensor of a data set's rows, a few at a time, with the number of the first."""
    for some in torch.arange(min(most, len(data))).split(AT_ONCE) if isinstance(data, Arrays) else ():
        _, first = next(iter(labelled(data.rows(some))))
        yield int(some[0]), first
