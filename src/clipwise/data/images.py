"""Pictures in the files that they are published in: MNIST and Fashion-MNIST, CIFAR-10 and -100, SVHN.

Receives: a folder.
Gives: Splits whose pictures stay bytes in memory; a batch is float32 [n, channel, height, width], made when it is read.
"""

from __future__ import annotations

import gzip
import importlib
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from clipwise.data.datasets import Arrays
from clipwise.data.pickles import unpickled
from clipwise.data.source import Layout, Source, folder_with, there
from clipwise.data.splits import Splits
from clipwise.plain import reason
from clipwise.types import Batch, InputError

Bytes = NDArray[np.uint8]
Part = tuple[Bytes, Bytes]  # pictures [n, channel, height, width], labels [n]

# mean and standard deviation of each channel, over 255, as the literature prints them; others took them from the
# training pictures, so they are not free of these
_PUBLISHED = {
    "mnist": ((0.1307,), (0.3081,)),
    "fashion_mnist": ((0.2860,), (0.3530,)),
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
    "svhn": ((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970)),
}
_IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))  # of other pictures in colour


@dataclass(frozen=True)
class Pixels:
    """Bytes → (bytes/255 − mean)/deviation in float32, by channel, with constants fixed before the data are seen."""

    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)

    def __call__(self, batch: Batch) -> Batch:
        """The batch (bytes, labels) with its pictures as numbers, computed where they are."""
        pictures, labels = batch
        x = pictures.float() / 255
        if self == Pixels():
            return x, labels
        mean, deviation = (
            torch.tensor(numbers, device=x.device).view(-1, 1, 1) for numbers in (self.mean, self.deviation)
        )
        return x.sub_(mean).div_(deviation), labels


def pixels(source: Source) -> Pixels:
    """The scale that the data's text asks for: [0, 1], [−1, 1], or the constants that the literature prints."""
    known = {"unit": Pixels(), "centred": Pixels((0.5,), (0.5,))}
    if source.name in _PUBLISHED:
        known["published"] = Pixels(*_PUBLISHED[source.name])
        if len(known["published"].mean) == 3:
            known["imagenet"] = Pixels(*_IMAGENET)
    return known[source.word("scale", "unit", tuple(known))]


# ------------------------------------------------------------------------------------------------------------- idx

_IDX = tuple(f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))


def mnist(source: Source) -> Splits:
    """MNIST, from idx files as they are or with .gz."""
    layout = Layout(_IDX, ("", "raw", "MNIST/raw"))
    return _of_idx(source, layout, "'The MNIST database of handwritten digits', yann.lecun.com/exdb/mnist")


def fashion_mnist(source: Source) -> Splits:
    """Fashion-MNIST, which has the same files."""
    layout = Layout(_IDX, ("", "raw", "FashionMNIST/raw"))
    return _of_idx(source, layout, "'Fashion-MNIST' of Zalando Research, github.com/zalandoresearch/fashion-mnist")


def _of_idx(source: Source, layout: Layout, home: str) -> Splits:
    _, folder = folder_with(source, [layout], home)
    x, y, x_test, y_test = (_idx(folder / file, sides) for file, sides in zip(_IDX, (3, 1, 3, 1), strict=True))
    return _splits(source, (x[:, None], y), (x_test[:, None], y_test), classes=10)


def _idx(path: Path, sides: int) -> Bytes:
    """The array of an idx file: 0, 0, 8 for bytes, the number of dimensions, each as four bytes, then the content."""
    content = _content(path)
    head = 4 + 4 * sides
    if len(content) < head or content[:4] != bytes((0, 0, 8, sides)):
        raise InputError(
            f"{path} must be an idx file of bytes with {sides} dimensions, got {content[:4]!r} at its start"
        )
    shape = struct.unpack(f">{sides}I", content[4:head])
    return _shaped(path, content[head:], shape)


# ------------------------------------------------------------------------------------------------------------ CIFAR

_SIDES = (3, 32, 32)


def cifar10(source: Source) -> Splits:
    """CIFAR-10, from its binary or its Python version."""
    names = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
    binary = Layout(tuple(f"{name}.bin" for name in names), ("", "cifar-10-batches-bin"))
    return _of_cifar(source, binary, Layout(names, ("", "cifar-10-batches-py")), ("labels",), "labels")


def cifar100(source: Source) -> Splits:
    """CIFAR-100 with its 100 fine labels, or with the 20 coarse ones where the text says ``labels=coarse``."""
    binary = Layout(("train.bin", "test.bin"), ("", "cifar-100-binary"))
    python = Layout(("train", "test"), ("", "cifar-100-python"))
    kinds = ("coarse_labels", "fine_labels")  # in the order in which the binary file holds them
    wanted = source.word("labels", "fine", ("fine", "coarse")) + "_labels"
    return _of_cifar(source, binary, python, kinds, wanted)


def _of_cifar(source: Source, binary: Layout, python: Layout, kinds: tuple[str, ...], wanted: str) -> Splits:
    home = "'The CIFAR-10 and CIFAR-100 datasets', www.cs.toronto.edu/~kriz/cifar.html"
    layout, folder = folder_with(source, [binary, python], home)

    def part(file: str) -> Part:
        path = folder / file
        return _rows(path, len(kinds), kinds.index(wanted)) if layout == binary else _batch(path, wanted)

    *parts, test = map(part, layout.files)
    train = np.concatenate([x for x, _ in parts]), np.concatenate([y for _, y in parts])
    return _splits(source, train, test, {"labels": 10, "fine_labels": 100, "coarse_labels": 20}[wanted])


def _rows(path: Path, labels: int, wanted: int) -> Part:
    """A file of the binary version: one row is its labels, a byte each, and 3 · 32 · 32 bytes."""
    content, width = _content(path), labels + 3072
    rows = _shaped(path, content, (len(content) // width, width))
    return rows[:, labels:].reshape(-1, *_SIDES), rows[:, wanted]


def _batch(path: Path, wanted: str) -> Part:
    """A file of the Python version."""
    try:
        found = unpickled(_content(path))
        data, labels = found["data"], found[wanted]
        if not isinstance(data, np.ndarray) or data.shape != (len(labels), 3072):
            raise ValueError(f"data of shape {list(np.shape(data))} for {len(labels)} labels")
        return data.reshape(-1, *_SIDES), np.asarray(labels, dtype=np.uint8)
    except Exception as error:  # an unpickler that is given nonsense may raise anything
        raise InputError(
            f"{path} must be a batch of CIFAR's Python version, got {reason(error)}; fetch it anew"
        ) from error


# ------------------------------------------------------------------------------------------------------------- SVHN


def svhn(source: Source) -> Splits:
    """The cropped digits of Street View House Numbers, from train_32x32.mat and test_32x32.mat."""
    layout = Layout(("train_32x32.mat", "test_32x32.mat"), ("",))
    _, folder = folder_with(
        source, [layout], "'The Street View House Numbers (SVHN) Dataset', format 2, ufldl.stanford.edu/housenumbers"
    )
    try:
        read: Callable[..., dict[str, Any]] = importlib.import_module("scipy.io").loadmat
    except ImportError as error:
        raise InputError(f"data 'svhn' needs SciPy to read .mat files ({error}): write pip install scipy") from error

    def part(file: str) -> Part:
        try:
            found = read(folder / file)
            x, y = found["X"], found["y"].reshape(-1)  # X is [height, width, channel, n]
            if x.dtype != np.uint8 or x.shape != (32, 32, 3, len(y)):
                raise ValueError(f"X of {x.dtype} {list(x.shape)} for {len(y)} labels")
        except Exception as error:  # SciPy does not say what it raises
            raise InputError(
                f"{folder / file} must hold X [32, 32, 3, n] and y, got {reason(error)}; fetch it anew"
            ) from error
        return np.ascontiguousarray(x.transpose(3, 2, 0, 1)), (y % 10).astype(np.uint8)  # 10 stands for the digit 0

    return _splits(source, part("train_32x32.mat"), part("test_32x32.mat"), classes=10)


# ------------------------------------------------------------------------------------------------------------- shared


def _splits(source: Source, train: Part, test: Part, classes: int) -> Splits:
    for kind, (x, y) in (("training", train), ("test", test)):
        if len(x) != len(y):
            raise InputError(f"{source.text} must have one label per picture, got {len(y)} for {len(x)} {kind} ones")
        if len(y) and int(y.max()) >= classes:
            raise InputError(f"{source.text} must hold the labels 0 to {classes - 1}, got {int(y.max())}")
    prepare = pixels(source)

    def part(x: Bytes, y: Bytes) -> Arrays:
        return Arrays((x, y.astype(np.int64)), prepare)

    return Splits(source.text, part(*train), part(*test), classes, tuple(train[0].shape[1:]))


def _content(path: Path) -> bytes:
    """All bytes of a file, or of the same with .gz."""
    found = there(path) or path
    try:
        raw = found.read_bytes()
        return gzip.decompress(raw) if found.suffix == ".gz" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{found} cannot be read ({error}): fetch it anew") from error


def _shaped(path: Path, content: bytes, shape: tuple[int, ...]) -> Bytes:
    if int(np.prod(shape)) != len(content) or not len(content):
        raise InputError(f"{path} must hold {int(np.prod(shape))} bytes ({shape}), got {len(content)}: fetch it anew")
    return np.frombuffer(content, np.uint8).reshape(shape)
