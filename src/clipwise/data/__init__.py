"""Data sets: what a user has, made ready for Poisson draws.

Receives: tensors, arrays, a map-style torch Dataset, or a name such as "digits", "cifar10:DIR" or "npz:PATH".
Gives: data sets with ``rows(indices) -> batch``, ``Splits`` of a named one, and views (augmentations) and
scattering features of pictures.
"""

from clipwise.data.datasets import Arrays, RowDataset, Samples, as_dataset
from clipwise.data.load import load
from clipwise.data.scattering import Scattering, scattered
from clipwise.data.splits import Splits
from clipwise.data.views import views

__all__ = ["Arrays", "RowDataset", "Samples", "Scattering", "Splits", "as_dataset", "load", "scattered", "views"]
