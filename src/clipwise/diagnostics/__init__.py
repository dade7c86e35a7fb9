"""Measurements of what clipping does. Everything here reads raw gradients: not private, for the data's owner only.

Receives: per-sample gradients and methods.
Gives: numbers marked ``not private``.
"""

from clipwise.diagnostics.bias import ClippingBias, clipping_bias

__all__ = ["ClippingBias", "clipping_bias"]
