"""CIFAR's Python files, read without running what a pickle may ask for.

Receives: the bytes of a batch file.
Gives: its dict, with text keys; arrays of bytes are the only objects that can be in it.
"""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray


class _Bytes:
    """In the place of numpy.dtype: the one of unsigned bytes, and no other."""

    def __init__(self, name: Any, *_: Any) -> None:
        if name not in (b"u1", "u1"):
            raise pickle.UnpicklingError(f"an array of {name!r}, expected bytes")

    def __setstate__(self, state: Any) -> None:
        """Byte order and alignment mean nothing for single bytes."""


class _Array:
    """In the place of an empty array: its state becomes ``value``."""

    def __init__(self, *_: Any) -> None:
        self.value: NDArray[np.uint8] | None = None

    def __setstate__(self, state: Any) -> None:
        """Shape and content, as numpy writes them."""
        _, shape, kind, by_columns, content = state
        if not (isinstance(kind, _Bytes) and isinstance(content, bytes) and math.prod(shape) == len(content)):
            raise pickle.UnpicklingError("an array whose content is not its shape's")
        self.value = np.frombuffer(content, np.uint8).reshape(shape, order="F" if by_columns else "C")


# all that the official files name; numpy has moved one of them since
_ADMITTED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): None,  # an argument of the one above
    ("numpy", "dtype"): _Bytes,
}


# the one in Python: the one in C makes room for as many objects as a damaged file says, be it billions
class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ADMITTED:
            raise pickle.UnpicklingError(f"{module}.{name}, which CIFAR's files do not hold")
        return _ADMITTED[module, name]


def unpickled(content: bytes) -> dict[str, Any]:
    """The dict of a batch file; arrays are uint8.

    *Guarantees.* No function or class is called that the file names: the few names that CIFAR's files hold stand for
    the ones above, and any other is a ``pickle.UnpicklingError``.
    """
    found = _Unpickler(io.BytesIO(content), encoding="bytes").load()
    if not isinstance(found, dict):
        raise pickle.UnpicklingError(f"a {type(found).__name__}, expected a dict")
    return {
        key.decode("latin1") if isinstance(key, bytes) else str(key): item.value if isinstance(item, _Array) else item
        for key, item in found.items()
    }
