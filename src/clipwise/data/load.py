"""Data sets by name: the embedded digits, published sets in their own files, or the user's file.

Receives: a text such as "digits", "cifar10:DIR", "csv:PATH?label=NAME:low|high" or "npz:PATH?train=2000".
Gives: Splits, a training part and a test part that no sample crosses.
"""

from __future__ import annotations

import difflib
import importlib
import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from clipwise.data import images, npz, published, tables
from clipwise.data.datasets import Arrays
from clipwise.data.scattering import with_features
from clipwise.data.source import Source, parsed
from clipwise.data.splits import Splits, divided, taken
from clipwise.data.text import imdb
from clipwise.types import InputError, one_of

_LABEL = dict.fromkeys(("csv", "jsonl"), "?label=NAME:low|high")


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
    splits = replace(splits, train=_part(source, "train", splits.train), test=_part(source, "test", splits.test))
    return with_features(splits) if asks_features(source) else splits


def asks_features(source: Source) -> bool:
    """Whether the text asks for features in the place of pictures."""
    return "features" in source.options and bool(source.word("features", "", ("scattering",)))


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


def _digits(source: Source) -> Splits:
    try:
        pictures, labels = importlib.import_module("sklearn.datasets").load_digits(return_X_y=True)
    except ImportError as error:
        raise InputError(f"data 'digits' needs scikit-learn ({error}): write pip install 'clipwise[demo]'") from error
    x = torch.from_numpy(pictures.reshape(-1, 1, 8, 8)).float() / 16
    return Splits(source.text, *divided("digits", x, torch.from_numpy(labels).long()), 10, (1, 8, 8))


_IMAGES = ("scale", "features")
_TEXT = ("vocabulary", "tokens")
_TABLE = ("label", "columns", "text", "test_file", "person", "decimal", *_TEXT)

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
    "npz": _Set("PATH", npz.splits, (*_IMAGES, "task")),
}
