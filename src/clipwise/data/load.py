"""Data sets by name: the embedded digits, published sets in their own files, or the user's file.

Receives: a text such as "digits", "cifar10:DIR", "csv:PATH?label=NAME:low|high" or "npz:PATH?train=2000".
Gives: Splits, a training part and a test part that no sample crosses.
"""

from __future__ import annotations

import difflib
import importlib
import shlex
import warnings
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipwise.data import images, published, tables
from clipwise.data.datasets import Arrays, Prepare, check_finite
from clipwise.data.source import Source, parsed
from clipwise.data.splits import Splits, divided, taken
from clipwise.data.text import imdb
from clipwise.types import InputError, nearest, one_of

_LABEL = dict.fromkeys(("csv", "jsonl"), "?label=NAME:low|high")
_KEYS = ("x", "y", "x_test", "y_test")


@dataclass(frozen=True)
class _Set:
    """How a name is written, what reads it, and the options that it takes beside ``train`` and ``test``."""

    path: str  # what stands behind the colon: DIR, PATH, or nothing
    read: Callable[[Source], Splits]
    options: tuple[str, ...] = ()


def load(text: str) -> Splits:
    """The data set that the text names; ``?train=2000&test=1000`` takes as many rows of each part, in a fixed order.

    *Guarantees.* x finite: floats as float32, bytes (images) as float32 over 255 unless ``scale`` says otherwise, other
    integers (tokens) as int64; y int64 in 0 … classes − 1, or float32 for a regression. Without a test part of its own,
    the data set gives one row in five to it, chosen by the row's number alone.
    """
    source = parsed(text) if isinstance(text, str) else parsed("")
    known = SETS.get(source.name)
    _, named, path = str(text).partition("?")[0].partition(":")
    if known is not None and known.path and not path:
        what = "folder" if known.path == "DIR" else "file"
        raise InputError(f"{source.name} needs its {what}, got {text!r}: write {shlex.quote(_form(source.name))}")
    if known is None or bool(named) != bool(known.path):
        raise InputError(f"unknown data {text!r}: {_hint(source, str(text))}")
    for key in source.options:
        one_of(f"option of {source.name},", key, ("train", "test", *known.options))
    splits = known.read(source)
    return replace(splits, train=_part(source, "train", splits.train), test=_part(source, "test", splits.test))


def _part(source: Source, name: str, part: Arrays) -> Arrays:
    rows = source.number(name, len(part))
    return part if name not in source.options else taken(f"{name} of {source.name}", part, rows)


def _hint(source: Source, given: str) -> str:
    file = given.partition("?")[0]
    kind = file.rpartition(".")[2]
    if ":" not in file and kind in ("npz", "csv", "tsv", "jsonl"):
        scheme = "csv" if kind == "tsv" else kind
        named = f"{scheme}:{given}" if "?" in given else f"{scheme}:{given}{_LABEL.get(scheme, '')}"
        return f"data must be named with its scheme: write {shlex.quote(named)}"
    if Path(file).expanduser().is_dir():
        folders = ", ".join(_form(name) for name in sorted(SETS) if SETS[name].path == "DIR")
        return (
            f"it is a folder, and these are read from folders: {folders}; pictures of your own become one file by "
            "numpy.savez(path, x=bytes[n, channel, height, width], y=labels[n]), written npz:PATH"
        )
    close = difflib.get_close_matches(source.name, SETS, n=1)  # of the names alone: a path is not like DIR
    if close:
        return f"did you mean {_form(close[0])!r}?"
    return f"write one of {', '.join(shlex.quote(_form(name)) for name in sorted(SETS))}"


def _form(name: str) -> str:
    """The name with what must follow it."""
    path = SETS[name].path
    return f"{name}:{path}{_LABEL.get(name, '')}" if path else name


# --------------------------------------------------------------------------------------------------- digits and npz


def _digits(source: Source) -> Splits:
    try:
        pictures, labels = importlib.import_module("sklearn.datasets").load_digits(return_X_y=True)
    except ImportError as error:
        raise InputError(f"data 'digits' needs scikit-learn ({error}): write pip install 'clipwise[demo]'") from error
    x = torch.from_numpy(pictures.reshape(-1, 1, 8, 8)).float() / 16
    return Splits(source.text, *divided("digits", x, torch.from_numpy(labels).long()), 10, (1, 8, 8))


def _npz(source: Source) -> Splits:
    path = source.path
    arrays = read_npz(path)
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
    x, y = npz_inputs("x", arrays["x"]), outputs("y", arrays["y"])
    prepare: Prepare | None = images.pixels(source) if x.dtype == torch.uint8 else None
    if prepare is None and "scale" in source.options:
        raise InputError(f"scale is for pictures of dtype uint8, got x of {x.dtype}: leave scale out")
    if len(x) != len(y):
        raise InputError(f"x and y must have equally many rows, got {len(x)} and {len(y)}")
    if not regression and int(y.max()) >= len(y):
        raise InputError(f"y must hold the labels 0 to classes − 1, got {int(y.max())} in {len(y)} rows: renumber them")
    if len(needed) == 2:
        train, test = divided(source.text, x, y, prepare)
    else:
        x_test, y_test = npz_inputs("x_test", arrays["x_test"]), outputs("y_test", arrays["y_test"])
        if (len(x_test), *x.shape[1:]) != (len(y_test), *x_test.shape[1:]) or x_test.dtype != x.dtype:
            raise InputError(
                f"x_test must be {x.dtype} of shape {[len(y_test), *x.shape[1:]]} to match x and y_test, "
                f"got {x_test.dtype} of shape {list(x_test.shape)}"
            )
        if not regression and y_test.max() > y.max():
            raise InputError(f"y_test must hold labels that y has, 0 to {int(y.max())}, got {int(y_test.max())}")
        train, test = Arrays((x, y), prepare), Arrays((x_test, y_test), prepare)
    if not regression and (first := int(min(y.min(), test.data[1].min()))) > 0:
        warnings.warn(
            f"y holds no label below {first}, and labels are counted from 0: the model gets {first} "
            f"class{'es' if first > 1 else ''} too many; write y - {first}",
            stacklevel=2,
        )
    if regression:
        return Splits(source.text, train, test, 1, tuple(x.shape[1:]), task="regression")
    return Splits(source.text, train, test, int(y.max()) + 1, tuple(x.shape[1:]))


def read_npz(path: Path) -> dict[str, NDArray[np.generic]]:
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
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if "allow_pickle" in reason:  # an advice of NumPy's that would run whatever code the file holds
            reason = "an array of Python objects" if zipfile.is_zipfile(path) else "no npz file, whatever its name"
        raise InputError(
            f"{path} must be a readable file of numeric arrays, got {reason}; write it with numpy.savez(path, x=x, y=y)"
        ) from error


def npz_inputs(name: str, array: NDArray[np.generic]) -> Tensor:
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


_IMAGES = ("scale",)
_TEXT = ("vocabulary", "tokens")
_TABLE = ("label", "columns", "text", "test_file", *_TEXT)

SETS = {
    "digits": _Set("", _digits),
    "mnist": _Set("DIR", images.mnist, _IMAGES),
    "fashion_mnist": _Set("DIR", images.fashion_mnist, _IMAGES),
    "cifar10": _Set("DIR", images.cifar10, _IMAGES),
    "cifar100": _Set("DIR", images.cifar100, (*_IMAGES, "labels")),
    "svhn": _Set("DIR", images.svhn, _IMAGES),
    "imdb": _Set("DIR", imdb, _TEXT),
    **{
        name: _Set("DIR", published.table, _TEXT if "text=" in known.options else ())
        for name, known in published.PUBLISHED.items()
    },
    "csv": _Set("PATH", tables.splits, (*_TABLE, "separator", "names")),
    "jsonl": _Set("PATH", tables.splits, _TABLE),
    "npz": _Set("PATH", _npz, (*_IMAGES, "task")),
}
