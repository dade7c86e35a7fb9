"""Per-sample gradients of one parameter, in the form that is cheapest to keep.

Receives: layer inputs a and output gradients b, [sample, position, feature], or written-out gradients.
Gives: Outer, Convolution, Indexed and Dense, each with the same algebra: scaled, merged, sq_norm, inner, total, dense;
and Halved, an Outer or a Convolution as its norm and its sum are computed where products may be rounded to TF32.

To read in this order, in which they import each other: record (the algebra), dense, halved, outer, convolution,
indexed (one kind each), sums (what takes records of any kind).
"""

from clipwise.records.kinds.convolution import Convolution, Geometry
from clipwise.records.kinds.dense import PIECE, Dense
from clipwise.records.kinds.halved import Halved
from clipwise.records.kinds.indexed import Indexed
from clipwise.records.kinds.outer import Outer, outer_form
from clipwise.records.kinds.record import Record, full_precision, tensors_of, wide, wide_format, written_format
from clipwise.records.kinds.sums import beside, cross, joined, sq_norms, summed, totals, widened

__all__ = [
    "PIECE",
    "Convolution",
    "Dense",
    "Geometry",
    "Halved",
    "Indexed",
    "Outer",
    "Record",
    "beside",
    "cross",
    "full_precision",
    "joined",
    "outer_form",
    "sq_norms",
    "summed",
    "tensors_of",
    "totals",
    "wide",
    "wide_format",
    "widened",
    "written_format",
]
