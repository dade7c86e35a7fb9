"""Data sets by name: the embedded digits, or a NumPy file.

Receives: "digits" or "npz:PATH".
Gives: Splits, a training part and a test part that no sample crosses.
"""

from __future__ import annotations

import importlib
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipwise.data.datasets import Arrays, check_finite
from clipwise.types import InputError, nearest, one_of

_SCHEMES = ("digits", "npz:PATH")
_KEYS = ("x", "y", "x_test", "y_test")


@dataclass(frozen=True)
class Splits:
    """A named data set: ``train`` is private, ``test`` only measures; batches are tuples (x, y)."""

    name: str
    train: Arrays
    test: Arrays
    classes: int
    shape: tuple[int, ...]  # of one x


def load(text: str) -> Splits:
    """The data set that the text names.

    *Guarantees.* x finite: floats as float32, bytes (images) as float32 over 255, other integers (tokens) as int64;
    y int64 in 0 … classes − 1. Without a test part of its own, the data set gives one row in five to it, chosen by the
    row's number alone.
    """
    if text == "digits":
        return _digits()
    if isinstance(text, str) and text.startswith("npz:"):
        return _npz(text, Path(text.removeprefix("npz:")).expanduser())
    if isinstance(text, str) and text.endswith(".npz"):
        raise InputError(f"data must be named with its scheme, got {text!r}: write npz:{text}")
    head = str(text).partition(":")[0]
    hint = "write npz:PATH" if head == "npz" else nearest(head, _SCHEMES)
    raise InputError(f"unknown data {text!r}: {hint}")


def _digits() -> Splits:
    try:
        images, labels = importlib.import_module("sklearn.datasets").load_digits(return_X_y=True)
    except ImportError as error:
        raise InputError(f"data 'digits' needs scikit-learn ({error}): write pip install scikit-learn") from error
    x = torch.from_numpy(images.reshape(-1, 1, 8, 8)).float() / 16
    return _split("digits", x, torch.from_numpy(labels).long())


def _npz(name: str, path: Path) -> Splits:
    arrays = _read(path)
    for key in arrays:
        one_of(f"array in {path.name},", key, _KEYS)
    needed = _KEYS if "x_test" in arrays or "y_test" in arrays else _KEYS[:2]
    for key in needed:
        if key not in arrays:
            raise InputError(
                f"{path} must hold {' and '.join(needed)}, got {', '.join(arrays) or 'no arrays'}: "
                f"add it with numpy.savez(..., {key}={key})"
            )
    x, y = _inputs("x", arrays["x"]), _labels("y", arrays["y"])
    if len(x) != len(y):
        raise InputError(f"x and y must have equally many rows, got {len(x)} and {len(y)}")
    if int(y.max()) >= len(y):
        raise InputError(f"y must hold the labels 0 to classes − 1, got {int(y.max())} in {len(y)} rows: renumber them")
    if len(needed) == 2:
        return _split(name, x, y)
    x_test, y_test = _inputs("x_test", arrays["x_test"]), _labels("y_test", arrays["y_test"])
    if (len(x_test), *x.shape[1:]) != (len(y_test), *x_test.shape[1:]) or x_test.dtype != x.dtype:
        raise InputError(
            f"x_test must be {x.dtype} of shape {[len(y_test), *x.shape[1:]]} to match x and y_test, "
            f"got {x_test.dtype} of shape {list(x_test.shape)}"
        )
    if y_test.max() > y.max():
        raise InputError(f"y_test must hold labels that y has, 0 to {int(y.max())}, got {int(y_test.max())}")
    return Splits(name, Arrays((x, y)), Arrays((x_test, y_test)), int(y.max()) + 1, tuple(x.shape[1:]))


def _read(path: Path) -> dict[str, NDArray[np.generic]]:
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
        reason = " ".join(str(error).split())
        raise InputError(
            f"{path} must be a readable file of numeric arrays, got {type(error).__name__}: {reason}; "
            "write it with numpy.savez(path, x=x, y=y)"
        ) from error


def _inputs(name: str, array: NDArray[np.generic]) -> Tensor:
    if array.ndim < 2 or not array.size:
        raise InputError(f"{name} must have rows of features, [rows, ...], got shape {list(array.shape)}")
    if array.dtype == np.uint8:
        return torch.from_numpy(array).float() / 255
    if np.issubdtype(array.dtype, np.integer):
        return torch.from_numpy(array.astype(np.int64))
    if not (np.issubdtype(array.dtype, np.floating) or array.dtype == np.bool_):
        raise InputError(f"{name} must hold real numbers, got dtype {array.dtype}")
    with np.errstate(over="ignore"):  # what float32 cannot hold is infinite below
        x = torch.from_numpy(array.astype(np.float32))
    check_finite(name, x)
    return x


def _labels(name: str, array: NDArray[np.generic]) -> Tensor:
    if array.ndim != 1 or not array.size or not np.issubdtype(array.dtype, np.integer):
        raise InputError(
            f"{name} must hold one integer label per row, got dtype {array.dtype} of shape {list(array.shape)}: "
            f"write {name}.astype('int64').reshape(-1)"
        )
    y = torch.from_numpy(array.astype(np.int64))
    if int(y.min()) < 0:
        row = int((y < 0).nonzero()[0])
        raise InputError(f"{name} must hold labels of at least 0, got {int(y[row])} in row {row}")
    return y


def _split(name: str, x: Tensor, y: Tensor) -> Splits:
    """Of every five rows, one for the test: which one is fixed, so that adding a row moves no other row."""
    if len(x) < 5:
        raise InputError(f"{name} must have at least 5 rows to be split, got {len(x)}: add rows, or x_test and y_test")
    fives = -(-len(x) // 5)
    chosen = 5 * np.arange(fives) + np.random.RandomState(0).randint(5, size=fives)
    test = torch.zeros(5 * fives, dtype=torch.bool)
    test[torch.from_numpy(chosen)] = True
    test = test[: len(x)]
    return Splits(name, Arrays((x[~test], y[~test])), Arrays((x[test], y[test])), int(y.max()) + 1, tuple(x.shape[1:]))
