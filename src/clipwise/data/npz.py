"""npz files: arrays x and y, and perhaps x_test and y_test.

Receives: a file.
Gives: Splits; read, the arrays of a file, and inputs, one of them as it enters a model.
"""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipwise.data.datasets import Arrays, Prepare, check_finite
from clipwise.data.images import pixels
from clipwise.data.source import Source
from clipwise.data.splits import Splits, divided
from clipwise.plain import reason
from clipwise.types import InputError, nearest, one_of, warn

_KEYS = ("x", "y", "x_test", "y_test")


def splits(source: Source) -> Splits:
    """The arrays of a file, with their test part or one row in five."""
    path = source.path
    arrays = read(path)
    for key in arrays:
        one_of(f"array in {path.name},", key, _KEYS)
    needed = _KEYS if "x_test" in arrays or "y_test" in arrays else _KEYS[:2]
    for key in needed:
        if key not in arrays:
            raise InputError(
                f"{path} must hold {' and '.join(needed)}, got {', '.join(arrays) or 'no arrays'}: "
                f"add it with numpy.savez(..., {key}={key})"
            )
    regression = source.word("task", "classes", ("classes", "regression")) == "regression"
    outputs = _targets if regression else _labels
    x, y = inputs("x", arrays["x"]), outputs("y", arrays["y"])
    prepare: Prepare | None = pixels(source) if x.dtype == torch.uint8 else None
    if prepare is None and "scale" in source.options:
        raise InputError(f"scale is for pictures of dtype uint8, got x of {x.dtype}: leave scale out")
    if len(x) != len(y):
        raise InputError(f"x and y must have equally many rows, got {len(x)} and {len(y)}")
    if not regression and int(y.max()) >= len(y):
        raise InputError(f"y must hold the labels 0 to classes − 1, got {int(y.max())} in {len(y)} rows: renumber them")
    if len(needed) == 2:
        train, test = divided(source.text, x, y, prepare)
    else:
        x_test, y_test = inputs("x_test", arrays["x_test"]), outputs("y_test", arrays["y_test"])
        if (len(x_test), *x.shape[1:]) != (len(y_test), *x_test.shape[1:]) or x_test.dtype != x.dtype:
            raise InputError(
                f"x_test must be {x.dtype} of shape {[len(y_test), *x.shape[1:]]} to match x and y_test, "
                f"got {x_test.dtype} of shape {list(x_test.shape)}"
            )
        if not regression and y_test.max() > y.max():
            raise InputError(f"y_test must hold labels that y has, 0 to {int(y.max())}, got {int(y_test.max())}")
        train, test = Arrays((x, y), prepare), Arrays((x_test, y_test), prepare)
    if not regression and (first := int(min(y.min(), test.data[1].min()))) > 0:
        warn(
            f"y holds no label below {first}, and labels are counted from 0: the model gets {first} "
            f"class{'es' if first > 1 else ''} too many; write y - {first}"
        )
    if regression:
        return Splits(source.text, train, test, 1, tuple(x.shape[1:]), task="regression")
    return Splits(source.text, train, test, int(y.max()) + 1, tuple(x.shape[1:]))


def read(path: Path) -> dict[str, NDArray[np.generic]]:
    """Every array of the file; pickled objects, which could run code, are not read."""
    folder = path.parent.resolve()
    if not folder.is_dir():
        raise InputError(f"no file {path.name!r}: the folder {folder} does not exist")
    if not path.is_file():
        others = [other.name for other in folder.glob("*.npz") if other.is_file()]
        hint = nearest(path.name, others) if others else "no .npz file is there"
        raise InputError(f"no file {path.name!r} in {folder}: {hint}")
    try:
        file = np.load(path, allow_pickle=False)
        if not isinstance(file, np.lib.npyio.NpzFile):
            raise TypeError("one array without a name")
        with file:
            return {key: file[key] for key in file}
    except (OSError, TypeError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        got = reason(error)
        if "allow_pickle" in got:  # an advice of NumPy's that would run whatever code the file holds
            got = "an array of Python objects" if zipfile.is_zipfile(path) else "no npz file, whatever its name"
        raise InputError(
            f"{path} must be a readable file of numeric arrays, got {got}; write it with numpy.savez(path, x=x, y=y)"
        ) from error


def inputs(name: str, array: NDArray[np.generic]) -> Tensor:
    """An array of inputs: bytes as they are, other integers as int64, fractions as float32."""
    if array.ndim < 2 or not array.size:
        raise InputError(f"{name} must have rows of features, [rows, ...], got shape {list(array.shape)}")
    if array.dtype == np.uint8:
        return torch.from_numpy(array)
    if np.issubdtype(array.dtype, np.integer):
        return torch.from_numpy(array.astype(np.int64))
    if not (np.issubdtype(array.dtype, np.floating) or array.dtype == np.bool_):
        raise InputError(f"{name} must hold real numbers, got dtype {array.dtype}")
    with np.errstate(over="ignore"):  # what float32 cannot hold is infinite below
        x = torch.from_numpy(array.astype(np.float32))
    check_finite(name, x)
    return x


def _labels(name: str, array: NDArray[np.generic]) -> Tensor:
    if array.ndim != 1 or not array.size or not (np.issubdtype(array.dtype, np.integer) or array.dtype == np.bool_):
        write = f"{_one_column(name, array)}.astype('int64'), or 'npz:PATH?task=regression' for numbers"
        if array.ndim == 2 and array.shape[1] > 1 and _one_hot(array):
            write = f"{name}.argmax(1)"
        if array.dtype.kind == "U":
            write = "np.unique(y, return_inverse=True)[1]" if name == "y" else f"np.searchsorted(np.unique(y), {name})"
        raise InputError(
            f"{name} must hold one integer label per row, got dtype {array.dtype} of shape {list(array.shape)}: "
            f"write {write}"
        )
    y = torch.from_numpy(array.astype(np.int64))
    if int(y.min()) < 0:
        row = int((y < 0).nonzero()[0])
        raise InputError(f"{name} must hold labels of at least 0, got {int(y[row])} in row {row}")
    return y


def _one_column(name: str, array: NDArray[np.generic]) -> str:
    """What to write for one value per row; of several columns somebody must choose."""
    if array.ndim == 1:
        return name
    several = array.ndim > 1 and array.size > len(array)
    return f"{name}.reshape(len({name}), -1)[:, 0]" if several else f"{name}.reshape(-1)"


def _one_hot(array: NDArray[np.generic]) -> bool:
    return array.dtype.kind in "biuf" and bool(((array == 0) | (array == 1)).all() and (array.sum(1) == 1).all())


def _targets(name: str, array: NDArray[np.generic]) -> Tensor:
    if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.number) or np.iscomplexobj(array):
        raise InputError(
            f"{name} must hold one number per row, got dtype {array.dtype} of shape {list(array.shape)}: "
            f"write {_one_column(name, array)}.astype('float32')"
        )
    y = torch.from_numpy(array.astype(np.float32))
    check_finite(name, y)
    return y
