"""Kernels for what a library of tensors has no single operation for, each with its plain twin.

Receives: layer inputs and output gradients on any device; Triton where it is installed and the device is CUDA.
Gives: torch operators that compilers see as one node; without Triton the same operators, slower.
"""

from clipwise.records.kernels.convolution import convolution_dense, convolution_sq_norm, convolution_total
from clipwise.records.kernels.convolution_gram import convolution_gram_sq_norm
from clipwise.records.kernels.gram import gram_sq_norm
from clipwise.records.kernels.norms import outer_gram_sq_norms
from clipwise.records.kernels.rows import ZeroRows, zero_rows
from clipwise.records.kernels.totals import outer_totals
from clipwise.records.kernels.written import outer_dense, positions_total, rows_total

__all__ = [
    "ZeroRows",
    "convolution_dense",
    "convolution_gram_sq_norm",
    "convolution_sq_norm",
    "convolution_total",
    "gram_sq_norm",
    "outer_dense",
    "outer_gram_sq_norms",
    "outer_totals",
    "positions_total",
    "rows_total",
    "zero_rows",
]
