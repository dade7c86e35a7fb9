"""Data that were scaled by their own statistics: one row more or less then moves all of them.

Receives: data sets of tensors, all of whose rows are read.
Gives: warn_of_fitted.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from clipwise.data.datasets import Arrays, RowDataset, labelled
from clipwise.types import warn

MOST = 10**9  # numbers that are read, in a few seconds
LEAST = 10  # rows: the mean of few may be 0 by chance
EXACT = 1e-5  # how far rounding leaves a mean from 0; published constants, of four digits, leave it further
FEW = 500  # at most one row in so many is at the end of its column that fewer are at; a fixed range cuts more, or none


def warn_of_fitted(data: RowDataset) -> None:
    """Warn of columns, channels or tensors of exactly mean 0 and deviation 1, and of tables from exactly 0 to 1.

    Edge cases: rows that were each scaled by their own statistics are none of them.
    """
    if not isinstance(data, Arrays) or len(data) < LEAST:
        return
    for place, (label, first) in enumerate(labelled(data.rows(torch.arange(LEAST, device="cpu")))):
        if not first.is_floating_point() or not 0 < first[0].numel() * len(data) <= MOST:
            continue
        how = "a mean of 0 and a deviation of 1" if _standardised(data, place, first) else None
        if how is None and first.dim() == 2 and _from_end_to_end(data, place):
            how = "a range from end to end of [0, 1] or [-1, 1]"
        if how is not None:
            warn(
                f"data{label} has exactly {how}, as where it was scaled by its own statistics: one person then moves "
                "everybody's rows, which no ε covers; scale by constants that are known without these data (published "
                "means, (age - 50) / 50), or by each row's own"
            )


def _pieces(data: Arrays, place: int) -> Iterator[Tensor]:
    for some in torch.arange(len(data), device="cpu").split(1024):
        yield labelled(data.rows(some))[place][1].detach().double()


def _standardised(data: Arrays, place: int, first: Tensor) -> bool:
    """Whether more than one column in a hundred, all channels, or the whole have a mean of 0 and a deviation of 1."""
    pieces = (torch.stack([x.sum(0), x.square().sum(0), x.abs().sum(0)]) for x in _pieces(data, place))
    moments = functools.reduce(torch.add, pieces) / len(data)
    varies = moments[1] - moments[0].square() > 0
    if bool(_exact(moments, len(data)).sum() > varies.sum() / 100):
        return True
    inner = range(1, first.dim())
    for kept in {None, 1, first.dim() - 1} if first.dim() > 2 else {None} if first.dim() > 1 else ():
        over = [axis for axis in inner if axis != kept]
        own = first.double().mean(over)  # of each row
        rows = len(data) * first[0].numel() // own[0].numel()
        if bool(_exact(moments.mean(over), rows).all()) and bool((own.abs() > 100 * EXACT).any()):
            return True
    return False


def _exact(moments: Tensor, rows: int) -> Tensor:
    """Where mean and deviation are 0 and 1 but for rounding, of values that are not merely −1 and 1."""
    mean, square, size = moments
    variance = square - mean.square()
    one = [(variance * by - 1).abs() < 2 * EXACT for by in (1.0, rows / (rows - 1))]
    return (mean.abs() < EXACT) & (one[0] | one[1]) & (size < 0.999)


def _from_end_to_end(data: Arrays, place: int) -> bool:
    """Whether all columns of a table go from exactly 0, or −1, to 1, half of them with few rows at one of their ends.

    Columns of nothing but their ends, as one-hot ones, do not count; there must be two others. Bytes have fixed ends.
    """
    some = next(_pieces(data, place))
    if any(bool(((levels - levels.round()).abs() < 1e-3).all()) for levels in (255 * some, 127.5 * (some + 1))):
        return False
    low = torch.stack([x.amin(0) for x in _pieces(data, place)]).amin(0)
    high = torch.stack([x.amax(0) for x in _pieces(data, place)]).amax(0)
    counts = [torch.stack([(x == end).sum(0) for x in _pieces(data, place)]).sum(0) for end in (low, high)]
    between = counts[0] + counts[1] < len(data)
    few = torch.minimum(*counts) <= max(1, len(data) // FEW)
    reached = ((low == 0) | ((low + 1).abs() < 1e-6)) & ((high - 1).abs() < 1e-6)
    return int(between.sum()) > 1 and bool(reached[between].all()) and bool(2 * few[between].sum() >= between.sum())
