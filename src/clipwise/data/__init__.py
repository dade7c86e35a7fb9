"""Data sets: what a user has, made ready for Poisson draws.

Receives: tensors, arrays, a map-style torch Dataset, or a name such as "digits" or "npz:PATH".
Gives: data sets with ``rows(indices) -> batch``, and ``Splits`` of a named one.
"""

from clipwise.data.datasets import Arrays, RowDataset, Samples, as_dataset
from clipwise.data.load import Splits, load

__all__ = ["Arrays", "RowDataset", "Samples", "Splits", "as_dataset", "load"]
