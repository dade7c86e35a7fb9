"""Triton where it is installed: the language that the kernels for GPUs are written in.

Receives: nothing; a CPU build of torch comes without Triton.
Gives: triton, tl and constexpr (None without it), and jit, which then leaves a function as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # Triton has no types to check against
    import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
    import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]

    constexpr: TypeAlias = Any
else:
    try:
        import triton
        import triton.language as tl
        from triton.language import constexpr
    except ImportError:
        triton = tl = constexpr = None

__all__ = ["constexpr", "jit", "tl", "triton"]

jit: Callable[..., Any] = triton.jit if triton else lambda function=None, **options: function or (lambda plain: plain)
