"""Named data sets from small files in their published formats; also from real ones in the folder CLIPWISE_DATA."""

from __future__ import annotations

import binascii
import contextlib
import gzip
import json
import math
import os
import pickle
import re
import shlex
import struct
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from clipwise import make_private
from clipwise.data import Arrays, Splits, load
from clipwise.data.load import SETS
from clipwise.data.published import PUBLISHED
from clipwise.types import InputError

RANDOM = np.random.RandomState(5)


def refused(text: str, message: str) -> str:
    """The error of a text, which is one line, and holds the message."""
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        load(text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def every(part: Arrays) -> tuple[Tensor, Tensor]:
    x, y = part.rows(torch.arange(len(part)))
    return x, y


# ---------------------------------------------------------------------------------------------------- stored as bytes


def test_arrays_prepare_what_is_read_and_keep_what_is_stored() -> None:
    stored, y = torch.arange(40, dtype=torch.uint8).view(10, 2, 2), torch.arange(10)
    data = Arrays((stored, y), lambda batch: (batch[0].double() / 2, batch[1]))
    some = torch.tensor([3, 9])
    taken = data.take(torch.tensor([1, 9, 3])).rows(torch.tensor([2, 1]))
    for found in (data.rows(some), taken, data.to("cpu").rows(some)):
        assert torch.equal(found[0], stored[some].double() / 2) and torch.equal(found[1], y[some])
    assert data.rows(some[:0])[0].shape == (0, 2, 2) and data.rows(some[:0])[0].dtype == torch.double
    assert torch.equal(data[3][0], stored[3].double() / 2) and torch.equal(data.data[0], stored.double() / 2)
    assert len(data.take(some)) == 2 and len(list(DataLoader(data, batch_size=4))) == 3


# ------------------------------------------------------------------------------------------------------ MNIST's files


def idx(array: np.ndarray[Any, Any]) -> bytes:
    head = bytes([0, 0, 8, array.ndim])
    return head + b"".join(side.to_bytes(4, "big") for side in array.shape) + array.astype(np.uint8).tobytes()


X, Y = RANDOM.randint(256, size=(12, 28, 28)), np.arange(12) % 10
X_TEST, Y_TEST = RANDOM.randint(256, size=(5, 28, 28)), np.array([9, 0, 3, 3, 1])
IDX = {
    "train-images-idx3-ubyte": idx(X),
    "train-labels-idx1-ubyte": idx(Y),
    "t10k-images-idx3-ubyte": idx(X_TEST),
    "t10k-labels-idx1-ubyte": idx(Y_TEST),
}


def written(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return folder


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
@pytest.mark.parametrize("place", ["", "raw", "{}/raw"])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read_plain_and_zipped_from_the_usual_places(
    tmp_path: Path, name: str, place: str, suffix: str
) -> None:
    place = place.format({"mnist": "MNIST", "fashion_mnist": "FashionMNIST"}[name])
    written(tmp_path / place, {file + suffix: content for file, content in IDX.items()})
    splits = load(f"{name}:{tmp_path}")
    assert (splits.classes, splits.shape, splits.task, splits.tokens) == (10, (1, 28, 28), "classes", False)
    for part, x, y in ((splits.train, X, Y), (splits.test, X_TEST, Y_TEST)):
        assert torch.equal(every(part)[0], torch.from_numpy(x[:, None].astype(np.float32) / np.float32(255)))
        assert every(part)[0].dtype == torch.float32 and every(part)[1].tolist() == y.tolist()


def test_pictures_stay_bytes_in_memory(tmp_path: Path) -> None:
    splits = load(f"mnist:{written(tmp_path, IDX)}")
    assert splits.train._stored[0].dtype == torch.uint8
    np.savez(tmp_path / "set.npz", x=X.astype(np.uint8), y=Y)
    assert load(f"npz:{tmp_path}/set.npz").train._stored[0].dtype == torch.uint8


def test_the_scale_of_pictures_is_by_constants_and_not_by_the_data(tmp_path: Path) -> None:
    written(tmp_path, IDX)
    unit = X[:, None] / 255
    for scale, expected in {"unit": unit, "centred": 2 * unit - 1, "published": (unit - 0.1307) / 0.3081}.items():
        x = every(load(f"mnist:{tmp_path}?scale={scale}").train)[0]
        assert x.dtype == torch.float32 and np.abs(x.numpy() - expected).max() < 1e-6
    refused(f"mnist:{tmp_path}?scale=standard", "unknown scale in")
    np.savez(tmp_path / "set.npz", x=X.astype(np.uint8), y=Y)
    x = every(load(f"npz:{tmp_path}/set.npz?scale=centred&train=4").train)[0]
    assert float(x.min()) < -0.9
    refused(f"npz:{tmp_path}/set.npz?scale=published", "unknown scale in")
    refused(f"mnist:{tmp_path}?scale=imagenet", "unknown scale in")  # it has one channel
    written(tmp_path / "colour", cifar10_files("bin"))
    plain, scaled = (every(load(f"cifar10:{tmp_path}/colour{how}").train)[0] for how in ("", "?scale=imagenet"))
    means, deviations = (torch.tensor(of).view(3, 1, 1) for of in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    assert torch.allclose(scaled, (plain - means) / deviations, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train-images-idx3-ubyte": IDX["train-images-idx3-ubyte"][:-1]}, "must hold 9408 bytes ((12, 28, 28)), got"),
        ({"train-images-idx3-ubyte": IDX["train-labels-idx1-ubyte"]}, "idx file of bytes with 3 dimensions"),
        ({"train-labels-idx1-ubyte": b""}, "got b'' at its start"),
        ({"train-labels-idx1-ubyte": b"\x00\x00\x0d" + IDX["train-labels-idx1-ubyte"][3:]}, "idx file of bytes with 1"),
        ({"train-labels-idx1-ubyte": idx(Y[:11])}, "one label per picture, got 11 for 12 training ones"),
        ({"t10k-labels-idx1-ubyte": idx(Y_TEST + 1)}, "must hold the labels 0 to 9, got 10"),
    ],
)
def test_a_damaged_idx_file_is_an_error_of_one_line(tmp_path: Path, change: dict[str, bytes], message: str) -> None:
    refused(f"mnist:{written(tmp_path, {**IDX, **change})}", message)


def test_a_damaged_zipped_file_is_an_error_of_one_line(tmp_path: Path) -> None:
    written(tmp_path, {f"{file}.gz": content for file, content in IDX.items()})
    path = tmp_path / "t10k-images-idx3-ubyte.gz"
    for content in (b"not gzip", path.read_bytes()[:200]):
        path.write_bytes(content)
        refused(f"mnist:{tmp_path}", "t10k-images-idx3-ubyte.gz cannot be read")


# ------------------------------------------------------------------------------------------------------------- CIFAR

C, FINE, COARSE = RANDOM.randint(256, size=(14, 3, 32, 32)).astype(np.uint8), np.arange(14) * 7, np.arange(14) + 3


def old_pickle(value: Any) -> bytes:
    """As Python 2 wrote it: the strings are bytes, the array names numpy.core.multiarray."""
    if isinstance(value, bytes):
        return (b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + struct.pack("<i", len(value))) + value
    if isinstance(value, (int, np.integer)):
        return b"K" + bytes([value]) if value < 256 else b"J" + struct.pack("<i", value)
    if isinstance(value, list):
        return b"](" + b"".join(map(old_pickle, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(old_pickle(key) + old_pickle(item) for key, item in value.items()) + b"u"
    shape = b"(" + b"".join(map(old_pickle, value.shape)) + b"t"
    kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb"
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    return empty + b"(K\x01" + shape + kind + b"\x89" + old_pickle(value.tobytes()) + b"tb"


def batch(x: np.ndarray[Any, Any], **labels: np.ndarray[Any, Any]) -> bytes:
    named = {key.encode(): [int(label) for label in value] for key, value in labels.items()}
    values = {b"batch_label": b"one of 5", **named, b"data": x.reshape(len(x), -1), b"filenames": [b"a.png"] * len(x)}
    return b"\x80\x02" + old_pickle(values) + b"."


def rows(*columns: np.ndarray[Any, Any]) -> bytes:
    return np.concatenate([column.reshape(len(column), -1).astype(np.uint8) for column in columns], 1).tobytes()


def cifar10_files(kind: str) -> dict[str, bytes]:
    cuts = [slice(2 * k, 2 * k + 2) for k in range(5)] + [slice(10, 14)]
    names = [f"data_batch_{k}" for k in range(1, 6)] + ["test_batch"]
    if kind == "bin":
        return {f"{name}.bin": rows(FINE[cut] % 10, C[cut]) for name, cut in zip(names, cuts, strict=True)}
    return {name: batch(C[cut], labels=FINE[cut] % 10) for name, cut in zip(names, cuts, strict=True)}


def cifar100_files(kind: str) -> dict[str, bytes]:
    cuts = {"train": slice(0, 9), "test": slice(9, 14)}
    if kind == "bin":
        return {f"{name}.bin": rows(COARSE[cut], FINE[cut], C[cut]) for name, cut in cuts.items()}
    return {n: batch(C[cut], fine_labels=FINE[cut], coarse_labels=COARSE[cut]) for n, cut in cuts.items()}


def test_the_pickles_of_these_tests_are_what_python_reads() -> None:
    found = pickle.loads(batch(C, labels=FINE), encoding="bytes")
    assert np.array_equal(found[b"data"], C.reshape(14, -1)) and found[b"labels"] == FINE.tolist()


@pytest.mark.parametrize(
    ("kind", "place"), [("bin", ""), ("bin", "cifar-10-batches-bin"), ("py", ""), ("py", "cifar-10-batches-py")]
)
def test_cifar10_is_read_from_both_its_versions(tmp_path: Path, kind: str, place: str) -> None:
    written(tmp_path / place, cifar10_files(kind))
    splits = load(f"cifar10:{tmp_path}")
    assert (splits.classes, splits.shape, len(splits.train), len(splits.test)) == (10, (3, 32, 32), 10, 4)
    (x, y), (x_test, y_test) = every(splits.train), every(splits.test)
    assert np.array_equal((torch.cat([x, x_test]) * 255).round().numpy(), C)
    assert torch.cat([y, y_test]).tolist() == (FINE % 10).tolist()


@pytest.mark.parametrize(("kind", "place"), [("bin", "cifar-100-binary"), ("py", "cifar-100-python"), ("py", "")])
@pytest.mark.parametrize(("labels", "expected", "classes"), [("", FINE, 100), ("?labels=coarse", COARSE, 20)])
def test_cifar100_has_fine_labels_or_coarse_ones(
    tmp_path: Path, kind: str, place: str, labels: str, expected: Any, classes: int
) -> None:
    written(tmp_path / place, cifar100_files(kind))
    splits = load(f"cifar100:{tmp_path}{labels}")
    assert splits.classes == classes and len(splits.train) == 9
    assert [*every(splits.train)[1].tolist(), *every(splits.test)[1].tolist()] == expected.tolist()
    assert np.array_equal((every(splits.test)[0] * 255).round().numpy(), C[9:])


class Evil:
    """A pickle that calls something when it is read."""

    def __init__(self, call: Any, *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> Any:
        return self.call, self.arguments


def test_a_pickle_runs_nothing_that_it_names(tmp_path: Path) -> None:
    files = cifar100_files("py")
    mark = tmp_path / "was here"
    evil = [
        Evil(os.system, f"touch '{mark}'"),
        Evil(eval, f"open({str(mark)!r}, 'w')"),
        Evil(np.load, "x.npy"),
        Evil(getattr, [], "sort"),
    ]
    for value in [*evil, {b"data": evil[0], b"fine_labels": [1]}, [evil[1]]]:
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            written(tmp_path, {**files, "train": pickle.dumps(value, protocol)})
            assert "which CIFAR's files do not hold" in refused(f"cifar100:{tmp_path}", "must be a batch of CIFAR's")
            assert not mark.exists()


def test_arrays_of_anything_but_bytes_are_refused(tmp_path: Path) -> None:
    good = cifar100_files("py")
    for content in (
        good["train"].replace(b"U\x02u1", b"U\x02O8"),
        good["train"].replace(b"U\x02u1", b"U\x02f8"),
        good["train"].replace(old_pickle(b"x" * 9 * 3072)[:5], old_pickle(b"x" * 9 * 3071)[:5]),
        pickle.dumps([1, 2]),
        pickle.dumps({b"data": [1], b"fine_labels": [1]}),
        pickle.dumps({b"data": 1}),
        good["train"][:500],
        b"",
    ):
        assert content != good["train"]
        written(tmp_path, {**good, "train": content})
        refused(f"cifar100:{tmp_path}", "must be a batch of CIFAR's Python version")


def test_a_pickle_with_any_byte_changed_is_read_or_refused_but_never_anything_else(tmp_path: Path) -> None:
    files = {name: batch(C[:1], fine_labels=FINE[:1], coarse_labels=COARSE[:1]) for name in ("train", "test")}
    whole = files["train"]
    written(tmp_path, files)
    for place in [*range(300), *range(len(whole) - 120, len(whole))]:  # all but the pixels
        for value in (whole[place] ^ 1, ord("c")):
            (tmp_path / "train").write_bytes(whole[:place] + bytes([value]) + whole[place + 1 :])
            with contextlib.suppress(InputError):
                load(f"cifar100:{tmp_path}")


def test_a_cut_binary_file_is_an_error(tmp_path: Path) -> None:
    files = cifar10_files("bin")
    written(tmp_path, {**files, "data_batch_3.bin": files["data_batch_3.bin"][:-1]})
    refused(f"cifar10:{tmp_path}", "data_batch_3.bin must hold 3073 bytes")
    written(tmp_path, {**files, "data_batch_3.bin": b""})
    refused(f"cifar10:{tmp_path}", "data_batch_3.bin must hold 0 bytes")


# -------------------------------------------------------------------------------------------------------------- SVHN


def test_svhn_is_read_from_its_mat_files_and_ten_is_the_digit_zero(tmp_path: Path) -> None:
    scipy_io = pytest.importorskip("scipy.io")
    y = np.array([10, 1, 9, 10, 5])
    for part, cut in (("train", slice(0, 5)), ("test", slice(5, 10))):
        scipy_io.savemat(tmp_path / f"{part}_32x32.mat", {"X": C[cut].transpose(2, 3, 1, 0), "y": y[:, None]})
    splits = load(f"svhn:{tmp_path}")
    assert (splits.classes, splits.shape) == (10, (3, 32, 32)) and every(splits.train)[1].tolist() == [0, 1, 9, 0, 5]
    assert np.array_equal((every(splits.test)[0] * 255).round().numpy(), C[5:10])
    scipy_io.savemat(tmp_path / "test_32x32.mat", {"X": C[:5], "y": y})
    refused(f"svhn:{tmp_path}", "must hold X [32, 32, 3, n] and y, got ValueError: X of uint8 [5, 3, 32, 32]")
    (tmp_path / "test_32x32.mat").write_bytes(b"no mat file")
    refused(f"svhn:{tmp_path}", "test_32x32.mat must hold X")


def test_svhn_without_scipy_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, {"train_32x32.mat": b"", "test_32x32.mat": b""})
    monkeypatch.setitem(sys.modules, "scipy.io", None)
    refused(f"svhn:{tmp_path}", "needs SciPy to read .mat files")


# ---------------------------------------------------------------------------------------------------- missing files

FOLDERS = sorted(name for name, known in SETS.items() if known.path == "DIR")


@pytest.mark.parametrize("name", FOLDERS)
def test_missing_files_are_named_with_the_folder_and_where_to_get_them(tmp_path: Path, name: str) -> None:
    absent = refused(f"{name}:{tmp_path}/none", f"but {tmp_path}/none does not exist: get them from ")
    empty = refused(f"{name}:{tmp_path}", f"but {tmp_path} has none of them")
    assert absent.split("get them from ")[1] == empty.split("get them from ")[1] != ""
    file = re.search(rf"{name} needs (?:a folder with )?([^ ,]+)", empty)
    assert file and file[1] in absent
    (tmp_path / "file").write_text("")
    refused(f"{name}:{tmp_path}/file", f"{tmp_path}/file is a file")


def test_one_missing_file_is_named_alone(tmp_path: Path) -> None:
    files = cifar10_files("py")
    del files["data_batch_4"]
    place = written(tmp_path / "cifar-10-batches-py", files)
    refused(f"cifar10:{tmp_path}", f"cifar10 lacks data_batch_4 in {place}: get them from 'The CIFAR-10")


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    written(tmp_path / "sets", IDX)
    assert len(load("mnist:~/sets").train) == 12


# -------------------------------------------------------------------------------------------------------------- text


def number(word: str, vocabulary: int) -> int:
    return 2 + binascii.crc32(word.encode()) % (vocabulary - 2)


def reviews(folder: Path, **texts: list[str]) -> Path:
    for place in ("train_neg", "train_pos", "test_neg", "test_pos"):
        for count, text in enumerate(texts.get(place, ["so so"])):
            written(folder / place.replace("_", "/"), {f"{count}_5.txt": text.encode()})
    return folder


def test_imdb_is_hashed_words_filled_up_in_front(tmp_path: Path) -> None:
    reviews(tmp_path / "aclImdb", train_neg=["Bad.<br /><br />Isn't it BAD?"], train_pos=["Café_noir, 10 of 10!"] * 3)
    splits = load(f"imdb:{tmp_path}?tokens=7&vocabulary=50")
    assert (splits.classes, splits.shape, splits.vocabulary, splits.tokens) == (2, (7,), 50, True)
    x, y = every(splits.train)
    assert x.dtype == y.dtype == torch.long and sorted(y.tolist()) == [0, 1, 1, 1]
    negative = [0, 0, *(number(word, 50) for word in ["bad", "isn't", "it", "bad", "?"])]
    positive = [0, *(number(word, 50) for word in ["café", "noir", "10", "of", "10", "!"])]
    assert [negative if label == 0 else positive for label in y] == x.tolist()
    assert load(f"imdb:{tmp_path}").shape == (128,)


def test_the_first_words_are_kept_and_a_text_without_words_is_padding(tmp_path: Path) -> None:
    reviews(tmp_path, train_neg=["a b c d"], train_pos=["... _ "])
    x, y = every(load(f"imdb:{tmp_path}?tokens=2").train)
    assert x[y == 0].tolist() == [[number("a", 10_000), number("b", 10_000)]] and x[y == 1].tolist() == [[0, 0]]


def test_a_reviews_tokens_do_not_depend_on_other_reviews(tmp_path: Path) -> None:
    def found(place: Path, **texts: list[str]) -> set[tuple[int, ...]]:
        return set(map(tuple, every(load(f"imdb:{reviews(place, **texts)}?tokens=9").train)[0].tolist()))

    few = found(tmp_path / "a", train_neg=["one thing", "another thing"])
    assert few < found(tmp_path / "b", train_neg=["one thing", "another thing", "thing one zebra"])


def test_reviews_are_shuffled_in_a_fixed_order_so_that_the_first_rows_are_of_both_kinds(tmp_path: Path) -> None:
    reviews(tmp_path, train_neg=["n"] * 40, train_pos=["p"] * 40)
    x, y = every(load(f"imdb:{tmp_path}").train)
    assert 5 < int(y[:20].sum()) < 15 and torch.equal(every(load(f"imdb:{tmp_path}").train)[1], y)
    assert set(zip(x[:, -1].tolist(), y.tolist(), strict=True)) == {(number("n", 10_000), 0), (number("p", 10_000), 1)}


def test_a_folder_of_reviews_without_files_is_an_error(tmp_path: Path) -> None:
    reviews(tmp_path, test_pos=[])
    (tmp_path / "test" / "pos").mkdir()
    refused(f"imdb:{tmp_path}", "must have .txt files in")


def test_reviews_in_one_file_are_answered_by_the_line_to_write_which_works(tmp_path: Path) -> None:
    lines = [("not good", "negative"), ("good", "positive")] * 5
    (tmp_path / "r.csv").write_text("review,sentiment\n" + "".join(f"{a},{b}\n" for a, b in lines))
    (tmp_path / "r.jsonl").write_text("".join(json.dumps({"review": a, "sentiment": b}) + "\n" for a, b in lines))
    for file in ("r.csv", "r.jsonl"):
        message = refused(f"imdb:{tmp_path / file}", "is a file: write ")
        x, y = every(load(message.split("write '")[1].split("', with")[0]).train)
        assert set(zip((x != 0).sum(1).tolist(), y.tolist(), strict=True)) == {(2, 0), (1, 1)}


# ------------------------------------------------------------------------------------------------------------- tables

TABLE = """age, pay ,town,kind,note,answer
17,0,Oslo,a,"well, yes",no
90,999,Bergen,b,no,yes
53.5,9,Oslo,c,"say ""hm"", eh",no
200,-5,Bodø,b,"",yes
-3,99,Oslo,a,x y z,yes
"""


def table(folder: Path, text: str = TABLE, name: str = "t.csv") -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_rows_of_one_person_are_on_one_side_and_nobody_moves_when_another_leaves(tmp_path: Path) -> None:
    rows = [(f"P{n % 40}", n, n % 2) for n in range(120)]

    def parts(without: str = "") -> list[set[float]]:
        path = tmp_path / f"visits{without}.csv"
        kept = "".join(f"{who},{n},{y}\n" for who, n, y in rows if who != without)
        path.write_text("patient,visit,y\n" + kept)
        found = load(f"csv:{path}?label=y:0|1&person=patient&columns=visit:0..1000")
        return [{round((float(x) + 1) * 500) % 40 for x in every(part)[0]} for part in (found.train, found.test)]

    train, test = parts()
    assert train and test and not train & test and len(train | test) == 40
    assert parts(without="P3") == [train - {3}, test - {3}]


@pytest.mark.filterwarnings("ignore:nothing is said about the range")
def test_whose_a_row_is_is_no_input_and_says_nothing_of_a_test_file(tmp_path: Path) -> None:
    path = tmp_path / "visits.csv"
    path.write_text("patient,visit,y\n" + "".join(f"P{n},{n},{n % 2}\n" for n in range(40)))
    assert load(f"csv:{path}?label=y:0|1&person=patient").shape == (1,)
    with pytest.raises(InputError, match="either person, which parts one file, or test_file, got both"):
        load(f"csv:{path}?label=y:0|1&person=patient&test_file={path}")
    path.write_text("patient,visit,y\n" + "".join(f"same,{n},{n % 2}\n" for n in range(40)))
    with pytest.raises(InputError, match="too few in patient: write"):
        load(f"csv:{path}?label=y:0|1&person=patient")


def test_each_column_is_encoded_as_the_user_says(tmp_path: Path) -> None:
    path = table(tmp_path)
    said = "columns=age:17..90,pay:log(0..999),kind:a|b,town:#4"
    splits = load(f"csv:{path}?label=answer:no|yes&{said}&test_file={path}")
    assert (splits.classes, splits.shape, splits.task, splits.vocabulary) == (2, (8,), "classes", None)
    x, y = every(splits.train)
    assert y.tolist() == [0, 1, 0, 1, 1] and y.dtype == torch.long and x.dtype == torch.float32
    age = [-1, 1, 0, 1, -1]  # beyond the range it is clipped
    pay = [-1, 1, 2 * math.log(10) / math.log(1000) - 1, -1, 2 * math.log(100) / math.log(1000) - 1]
    kind = [[1, 0], [0, 1], [0, 0], [0, 1], [1, 0]]
    buckets = [binascii.crc32(name.encode()) % 4 for name in ("Oslo", "Bergen", "Oslo", "Bodø", "Oslo")]
    town = [[float(bucket == k) for k in range(4)] for bucket in buckets]
    expected = [[a, p, *k, *t] for a, p, k, t in zip(age, pay, kind, town, strict=True)]
    assert np.abs(x.numpy() - np.array(expected)).max() < 1e-6


def test_missing_numbers_are_the_middle_of_their_range_and_marked_behind_it(tmp_path: Path) -> None:
    path = table(tmp_path, "age,pay,y\n20,NA,0\n,999,1\n40,-1,0\n60,0,1\n")
    splits = load(f"csv:{path}?label=y:0|1&columns=age:20..60|,pay:log(0..999)|NA|-1&test_file={path}")
    expected = [[-1, 0, 0, 1, 0], [0, 1, 1, 0, 0], [0, 0, 0, 0, 1], [1, 0, -1, 0, 0]]  # 40 is the middle, and is there
    assert np.abs(every(splits.train)[0].numpy() - np.array(expected)).max() < 1e-6
    path = table(tmp_path, '{"age": 20, "y": 0}\n{"age": null, "y": 1}\n', "t.jsonl")
    x, _ = every(load(f"jsonl:{path}?label=y:0|1&columns=age:20..60|null&test_file={path}").train)
    assert x.tolist() == [[-1, 0], [0, 1]]


def test_columns_of_which_nothing_is_said_get_the_same_transform_whatever_the_data(tmp_path: Path) -> None:
    path = table(tmp_path, "a,b,y\n0,1000,0\n-3,1e9,1\n2.5,-7,1\n1,1,0\n0.1,2,0\n")
    x, _ = every(load(f"csv:{path}?label=y:0|1&test_file={path}").train)
    raw = np.array([[0, 1000], [-3, 1e9], [2.5, -7], [1, 1], [0.1, 2]])
    assert np.abs(x.numpy() - np.sign(raw) * np.log(1 + np.abs(raw))).max() < 1e-5
    only = every(load(f"csv:{path}?label=y:0|1&test_file={path}&columns=b").train)[0]
    assert torch.equal(only, x[:, 1:])


@pytest.mark.parametrize(
    "said",
    ["age:17..90", "pay:log(0..999)", "town:17..90|Oslo|Bergen|Bodø|Rome", "kind:a|b", "town:#4", "pay", "text=note"],
)
def test_a_rows_numbers_do_not_depend_on_other_rows(tmp_path: Path, said: str) -> None:
    option = said if "=" in said else f"columns={said}"

    def first(lines: list[str]) -> tuple[list[float], float]:
        path = table(tmp_path, "".join(lines))
        label = "pay" if "age" in said else "age"
        x, y = load(f"csv:{path}?label={label}:0..100&test_file={path}&{option}").train.rows(torch.arange(1))
        return x[0].tolist(), float(y)

    lines = TABLE.splitlines(keepends=True)
    alone = first(lines[:2])
    assert alone == first(lines) == first([*lines[:2], "1e6,-7e8,Rome,zz,other words,yes\n"])


def test_numbers_as_labels_make_a_regression(tmp_path: Path) -> None:
    path = table(tmp_path, "a,quality\n" + "".join(f"{k},{k}\n" for k in range(12)))
    splits = load(f"csv:{path}?label=quality:0..10")
    assert (splits.task, splits.classes, splits.shape, splits.unit) == ("regression", 1, (1,), 5.0)
    assert (len(splits.train), len(splits.test)) == (10, 2)
    for part in (splits.train, splits.test):
        x, y = every(part)
        assert y.dtype == torch.float32 and y.shape == (len(part),)
        quality = np.expm1(x[:, 0].double().numpy())
        assert np.abs(y.numpy() * splits.unit + 5 - np.minimum(quality, 10)).max() < 1e-5
    np.savez(tmp_path / "set.npz", x=np.ones((10, 2)), y=np.arange(10) / 3)
    splits = load(f"npz:{tmp_path}/set.npz?task=regression")
    assert (splits.task, splits.classes) == ("regression", 1) and every(splits.train)[1].dtype == torch.float32
    assert set(every(splits.train)[1].tolist()) < set((np.arange(10) / 3).astype(np.float32).tolist())
    refused(f"npz:{tmp_path}/set.npz", "or 'npz:PATH?task=regression' for numbers")
    np.savez(tmp_path / "set.npz", x=np.ones((10, 2)), y=np.array([np.nan] * 10))
    refused(f"npz:{tmp_path}/set.npz?task=regression", "y must hold finite numbers")
    np.savez(tmp_path / "set.npz", x=np.ones((10, 2)), y=np.ones((10, 1)))
    refused(f"npz:{tmp_path}/set.npz?task=regression", "y must hold one number per row")


def test_text_columns_are_tokens_with_a_break_between_two(tmp_path: Path) -> None:
    path = table(tmp_path)
    splits = load(f"csv:{path}?label=answer:no|yes&text=note,town&tokens=5&vocabulary=99&test_file={path}")
    assert (splits.shape, splits.vocabulary, splits.tokens) == ((5,), 99, True)
    x, _ = every(splits.train)
    word = lambda *words: [number(each, 99) for each in words]
    assert x[0].tolist() == [0, *word("well", "yes"), 1, *word("oslo")]
    assert x[3].tolist() == [0, 0, 0, 0, *word("bodø")] and x[4].tolist() == [*word("x", "y", "z"), 1, *word("oslo")]


def test_a_jsonl_file_gives_what_the_same_csv_gives(tmp_path: Path) -> None:
    objects = [
        {"age": 17, "kind": "a", "good": True, "note": "well, yes"},
        {"age": 53.5, "kind": "b", "good": False, "note": "no"},
        {"age": 90, "kind": None, "good": True, "note": "line\nbreak \u2028 here"},
    ]
    lines = table(tmp_path, "\n".join(json.dumps(one, ensure_ascii=False) for one in objects) + "\n\n", "t.jsonl")
    cells = table(tmp_path, 'age,kind,good,note\n17,a,true,"well, yes"\n53.5,b,false,no\n90,,true,line break here\n')
    for said in ("columns=age:17..90,kind:a|b", "text=note", "columns=age"):
        found = [
            every(load(f"{name}:{path}?label=good:false|true&test_file={path}&{said}").train)
            for name, path in (("jsonl", lines), ("csv", cells))
        ]
        assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_other_separators_names_and_signs_in_values(tmp_path: Path) -> None:
    expected = [[-1.0], [1.0]]
    for text, said in (
        ("a;y\n0;p\n2;q\n", "separator=;&label=y:p|q&columns=a:0..2"),
        ("a;y\n0;p\n2;q\n", "separator=semicolon&label=y:p|q&columns=a:0..2"),
        ("a\ty\n0\tp\n2\tq\n", "separator=tab&label=y:p|q&columns=a:0..2"),
        ("0,p\n2,q\n", "names=a,y&label=y:p|q&columns=a:0..2"),
        ("\ufeffa,y\n0,p\n2,q\n", "label=y:p|q&columns=a:0..2"),
        ('"a, b & c:d",y\n0,p|1\n2,q\n', "label=y:p%7C1|q&columns=a%2C b %26 c%3Ad:0..2"),
        ("a,y\r\n\r\n0,p\r\n2,q\r\n", "label=y:p|q&columns=a:0..2"),
    ):
        path = table(tmp_path, text)
        x, y = every(load(f"csv:{path}?{said}&test_file={path}").train)
        assert x.tolist() == expected and y.tolist() == [0, 1]
    path = table(tmp_path, 'a\ty\n"0\tp\n2"\tq\n', "t.tsv")  # tab-separated files do not quote
    x, _ = every(load(f"csv:{path}?text=a&label=y:p|q&test_file={path}").train)
    assert x[:, -1].tolist() == [number("0", 10_000), number("2", 10_000)]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be"])
def test_a_marked_file_of_a_windows_program_is_read_whatever_its_encoding(tmp_path: Path, encoding: str) -> None:
    """Excel's "Unicode Text" is UTF-16."""
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    path = tmp_path / "t.txt"
    for name, text, said in (
        ("csv", "Größe\ty\r\n0\tp\r\n2\tŁódź\r\n", "separator=tab&"),
        ("jsonl", '{"Größe": 0, "y": "p"}\r\n{"Größe": 2, "y": "Łódź"}\r\n', ""),
    ):
        path.write_bytes((mark + text).encode(encoding))
        x, y = every(load(f"{name}:{path}?{said}label=y:p|Łódź&columns=Größe:0..2&test_file={path}").train)
        assert x.tolist() == [[-1.0], [1.0]] and y.tolist() == [0, 1]


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_file_in_utf_16_without_its_mark_is_named(tmp_path: Path, encoding: str) -> None:
    """It was a table whose names had spaces between their letters."""
    path = tmp_path / "t.csv"
    path.write_bytes("a,y\n1,p\n2,q\n".encode(encoding))
    with pytest.raises(InputError, match="UTF-16 without its mark: save it"):
        load(f"csv:{path}?label=y:p|q&columns=a:0..2")


@pytest.mark.parametrize(
    ("cell", "lines"), [('"so much', "5 and 21"), ('"so" much', "5 and 5"), ('"so \\"much\\""', "5 and 5")]
)
def test_a_quote_that_does_not_close_its_cell_is_named(tmp_path: Path, cell: str, lines: str) -> None:
    """It took half of the rows into one cell, without a word."""
    rows = [f"text {i},{'pq'[i % 2]}" for i in range(20)]
    rows[3] = f"{cell},p"
    path = table(tmp_path, "\n".join(["t,y", *rows]) + "\n")
    with pytest.raises(InputError, match=f"quotes around a whole cell .* between lines {lines}"):
        load(f"csv:{path}?text=t&label=y:p|q")
    rows[3] = '"so ""much"",\nand more",p'
    path = table(tmp_path, "\n".join(["t,y", *rows]) + "\n")
    assert len(every(load(f"csv:{path}?text=t&label=y:p|q&test_file={path}").train)[0]) == 20


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("", "the label's column, one of age, pay, town, kind, note, answer: write 'csv:PATH?label=NAME:low|high'"),
        ("label=answer", "be said to be classes or a range, got 'answer': write 'label=answer:low|high' or"),
        ("label=answer:#3", "must be said to be classes or a range"),
        ("label=pay:log(0..9)&columns=age", "must be said to be classes or a range, got 'pay:log(0..9)': write"),
        ("label=anwser:no|yes", "csv has no column 'anwser': did you mean 'answer'?"),
        ("label=answer:no|maybe", "must be one of no, maybe, got 'yes' in line 3: write classes as the file does; if"),
        ("label=answer:no|yes", "the column town must hold numbers, got 'Oslo' in line 2"),
        ("label=answer:no|yes&columns=agee", "csv has no column 'agee': did you mean 'age'?"),
        ("label=answer:no|yes&columns=age:90..17", "range of age must be LOW..HIGH with LOW < HIGH, got '90..17'"),
        ("label=answer:no|yes&columns=age:1..x", "range of age must be LOW..HIGH"),
        ("label=answer:no|yes&columns=age:log(-2..9)", "range of age must be LOW..HIGH"),
        ("label=answer:no|yes&columns=age:nan..9", "range of age must be LOW..HIGH"),
        (
            "label=answer:no|yes&columns=age:1..9|NA|NA",
            "a missing number, each once, got '1..9|NA|NA': write 'age:1..9",
        ),
        ("label=answer:no|yes&columns=age:1..9|10..20", "a missing number, each once, got '1..9|10..20'"),
        ("label=age:1..9|NA&columns=pay", "must be said to be classes or a range, got 'age:1..9|NA'"),
        ("label=answer:no|yes&columns=age:old", "age must be said to be a range, values or buckets, got 'old'"),
        ("label=answer:no|yes&columns=age:a|a", "'age:low|high' with two values or more, each once"),
        ("label=answer:no|yes&columns=town:#many", "the buckets of town must be a whole number, got 'many'"),
        ("label=answer:no|yes&columns=town:#0", "the buckets of town must be a whole number, got '0'"),
        ("label=answer:no|yes&columns=age,answer:#2", "the label answer must not be among the inputs"),
        ("label=answer:no|yes&columns=age&text=note", "either text or columns, got both"),
        ("label=answer:no|yes&text=notes", "csv has no column 'notes': did you mean 'note'?"),
        ("label=answer:no|yes&text=note&tokens=0", "tokens must be a whole number of at least 1, got '0'"),
        ("label=answer:no|yes&text=note&vocabulary=many", "vocabulary must be a whole number of at least 3, got 'm"),
        ("label=answer:no|yes&lable=x", "unknown option of csv, 'lable': did you mean 'label'?"),
        ("label=answer:no|yes&label=age:0..1", "got label twice"),
        ("label", "data options must be key=value, got 'label' in"),
        ("label=answer:no|yes&separator=,,", "separator must be one sign or comma, semicolon"),
        ("label=answer:no|yes&separator=;", "csv has no column 'answer': write separator=comma"),
        ("label=answer:no|yes&names=a,b", "must have the 2 columns a, b in each row, got 6 in line 1"),
        ("label=answer:no|yes&columns=age&test_file=none.csv", "'none.csv' does not exist (looked in"),
        ("label=answer:no|yes&columns=age&train=9", "train of csv must be at most the 4 rows that there are, got 9"),
        ("label=answer:no|yes&columns=age&train=0", "train must be a whole number of at least 1, got '0'"),
    ],
)
def test_what_does_not_fit_a_table_is_an_error_that_says_what_to_write(tmp_path: Path, said: str, message: str) -> None:
    refused(f"csv:{table(tmp_path)}" + (f"?{said}" if said else ""), message)


def test_a_column_of_words_is_answered_by_the_line_to_write_which_works(tmp_path: Path) -> None:
    for columns, wanted in (
        ("", "age,pay,town:#16,kind:#16,note:#16"),
        ("&columns=age:17..90,town,kind:a|b", "age:17..90,town:#16,kind:a|b"),
    ):
        path = table(tmp_path)
        said = refused(f"csv:{path}?label=answer:no|yes{columns}", "the column town must hold numbers, got 'Oslo'")
        (line,) = (word for word in shlex.split(said) if word.startswith("csv:"))
        assert line == f"csv:{path}?label=answer:no|yes&columns={wanted}"
        assert load(line).classes == 2
    path = table(tmp_path, '"a, b & c:d",y\n' + "p,0\nq,1\n" * 5)  # a name with the signs of the text
    said = refused(f"csv:{path}?label=y:0|1", "must hold numbers, got 'p' in line 2")
    (line,) = (word for word in shlex.split(said) if word.startswith("csv:"))
    assert load(line).shape == (16,)


def test_a_column_of_texts_is_answered_by_the_line_to_write_which_works_and_prints_none_of_them(tmp_path: Path) -> None:
    text = "".join(f'{{"note": {note}, "age": 1, "y": 0}}\n' for note in ['"what a very good day"'] * 9 + ["7"])
    path = table(tmp_path, text, "t.jsonl")
    for columns in ("", "&columns=age:0..9,note"):
        said = refused(f"jsonl:{path}?label=y:0|1{columns}", "the column note must hold numbers, got texts: write")
        assert "good day" not in said
        (line,) = (word for word in shlex.split(said) if word.startswith("jsonl:"))
        assert line == f"jsonl:{path}?label=y:0|1&text=note"
        assert load(line).tokens


def test_one_message_names_every_word_that_stands_for_a_missing_number_and_what_it_says_to_write_works(
    tmp_path: Path,
) -> None:
    path = table(tmp_path, "crp,y\n" + "3.5,0\n<0.3,1\n,0\nNA,1\n" * 5)
    for said, limits in (("", "LOW..HIGH"), (":log(0..9)", "log(LOW..HIGH)"), (":log(0..9)|", "log(LOW..HIGH)|")):
        message = refused(f"csv:{path}?label=y:0|1&columns=crp{said}", "the column crp must hold numbers, got '<0.3'")
        line = message.split("write '")[1].split("'")[0]
        assert line == f"crp:{limits}|<0.3{'' if said.endswith('|') else '|'}|NA"
        assert load(f"csv:{path}?label=y:0|1&columns={line.replace('LOW..HIGH', '0..9')}").shape == (4,)
    path = table(tmp_path, "seen,y\n" + "2020-01-01,0\n,1\nunknown,0\n" * 5)
    refused(f"csv:{path}?label=y:0|1&columns=seen:2020-01-01..2020-01-21|", "'seen:FIRST..LAST||unknown' where a date")
    path = table(tmp_path, "a,y\n1,0\n" + "".join(f"word {n},1\n" for n in range(9)))  # no list of all patients' words
    refused(f"csv:{path}?label=y:0|1&columns=a:0..9", "write 'a:LOW..HIGH|word 0' where a number is missing")


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("sex:F|M", "the column sex tells nothing, since no cell is one of F, M: write its values as the file does"),
        ("age:200..300|", "the column age tells nothing, since every number is at one end of its range or beyond it"),
        ("sex:f|m|d", None),
        ("age:0..1|", None),
    ],
)
def test_a_column_of_which_what_was_said_fits_no_cell_is_warned_of(
    tmp_path: Path, said: str, message: str | None
) -> None:
    path = table(tmp_path, "sex,age,y\n" + "f,1,0\nm,,1\nf,0,0\n" * 3)
    with warnings.catch_warnings(record=True, action="always") as found:
        load(f"csv:{path}?label=y:0|1&columns={said}")
    assert [str(each.message).startswith(message or "-") for each in found] == [True] * (message is not None)


def test_a_label_that_is_missing_is_not_said_to_be_given_a_range_that_labels_do_not_take(tmp_path: Path) -> None:
    path = table(tmp_path, "a,pay\n" + "1,2\n3,\n" * 5)
    said = refused(f"csv:{path}?label=pay:0..9&columns=a:0..9", "the label pay must be a number, got '' in line 3")
    assert "LOW..HIGH" not in said


def test_dates_are_numbers_of_days_between_two_that_were_said(tmp_path: Path) -> None:
    days = ("2020-01-01", "2020-01-11 12:00", "2020-01-21T00:00:00Z", "1999-12-31", "2031-01-01")
    path = table(tmp_path, "seen,y\n" + "".join(f"{day},{n % 2}\n" for n, day in enumerate(days)))
    data = load(f"csv:{path}?label=y:0|1&columns=seen:2020-01-01..2020-01-21&test_file={path}")
    assert data.train.data[0].flatten().tolist() == pytest.approx([-1, 0.05, 1, -1, 1])
    path = table(tmp_path, "seen,y\n" + "2020-01-01,0\n,1\n" * 5)
    data = load(f"csv:{path}?label=y:0|1&columns=seen:2020-01-01..2020-01-21|&test_file={path}")
    assert data.train.data[0][:2].tolist() == [[-1, 0], [0, 1]]
    refused(f"csv:{path}?label=y:0|1&columns=seen:2020-01-01..2020-01-21", "must hold dates such as 2100-12-31, got ''")
    refused(f"csv:{path}?label=y:0|1&columns=seen:2020-01-21..2020-01-01", "01.01.2000..31.12.2030 for dates")
    refused(f"csv:{path}?label=seen:2020-01-01..2020-01-21&columns=y", "must be said to be classes or a range")
    said = refused(f"csv:{path}?label=y:0|1", "with the first and the last day that you know")
    (line,) = (word for word in shlex.split(said) if word.startswith("csv:"))
    assert line.endswith("columns=seen:1900-01-01..2100-12-31|") and load(line).shape == (2,)


@pytest.mark.parametrize(
    ("ends", "days", "said"),
    [
        ("01.01.2020..21.01.2020", ("01.01.2020", "11.1.2020 12:00", "21.01.2020"), "01.01.1900..31.12.2100"),
        ("01/01/2020..21/01/2020", ("01/01/2020", "11/01/2020 12:00", "21/01/2020"), "01/01/1900..31/12/2100"),
        ("1/1/2020..1/21/2020", ("1/1/2020 0:00", "1/11/2020 12:00", "1/21/2020"), "01/01/1900..12/31/2100"),
        ("01-01-2020..21-01-2020", ("01-01-2020", "11-01-2020 12:00", "21-01-2020"), "01-01-1900..31-12-2100"),
    ],
)
def test_dates_are_read_as_the_ends_of_their_range_are_written(
    tmp_path: Path, ends: str, days: tuple[str, ...], said: str
) -> None:
    path = table(tmp_path, "seen,y\n" + "".join(f"{day},{n % 2}\n" for n, day in enumerate(days)) * 2)
    data = load(f"csv:{path}?label=y:0|1&columns=seen:{ends}&test_file={path}")
    assert data.train.data[0][:3].flatten().tolist() == pytest.approx([-1, 0.05, 1])
    (line,) = (word for word in shlex.split(refused(f"csv:{path}?label=y:0|1", "the last day")) if "csv:" in word)
    assert line.endswith(f"columns=seen:{said}") and load(line).shape == (1,)
    iso = f"csv:{path}?label=y:0|1&columns=seen:2020-01-01..2020-01-21"
    refused(iso, f"write the range as the file has its dates, as in seen:{said}")


def test_nobody_guesses_whether_the_day_or_the_month_stands_in_front(tmp_path: Path) -> None:
    path = table(tmp_path, "seen,y\n" + "02/01/2020,0\n01/02/2020,1\n" * 5)
    refused(f"csv:{path}?label=y:0|1&columns=seen:01/01/2020..01/02/2020", "let it end on 31/12/2100 or 12/31/2100")
    refused(f"csv:{path}?label=y:0|1", "(or seen:01/01/1900..12/31/2100 if its months come first)")
    both = "as in seen:01/01/1900..31/12/2100 or 01/01/1900..12/31/2100"
    refused(f"csv:{path}?label=y:0|1&columns=seen:2020-01-01..2020-01-21", both)
    for ends, expected in (("01/01/2020..31/01/2020", [-1 + 2 / 30, 1]), ("01/01/2020..01/31/2020", [1, -1 + 2 / 30])):
        x, _ = every(load(f"csv:{path}?label=y:0|1&columns=seen:{ends}&test_file={path}").train)
        assert x[:2].flatten().tolist() == pytest.approx(expected)


def test_numbers_may_have_a_decimal_comma(tmp_path: Path) -> None:
    path = table(tmp_path, "dose;ward;y\n" + "0,5;1,5;0\n1.234,5;a;1\n1.000;1,5;0\n-2,5e1;;1\n;b;0\n")
    said = "separator=;&label=y:0|1&columns=dose:-100..1234.5|,ward:1%2C5|a"
    x, _ = every(load(f"csv:{path}?decimal=comma&{said}&test_file={path}").train)
    number = lambda v: (2 * v - 1134.5) / 1334.5
    expected = [[number(0.5), 0, 1, 0], [1, 0, 0, 1], [number(1000), 0, 1, 0], [number(-25), 0, 0, 0], [0, 1, 0, 0]]
    assert x.tolist() == [pytest.approx(row) for row in expected]
    refused(f"csv:{path}?{said}", "got '0,5' in line 2: write it with a point and no other signs, as in 1234.5 (or dec")
    refused(f"csv:{path}?decimal=,&{said}", "write one of comma, point")


def test_a_comma_within_a_value_is_explained(tmp_path: Path) -> None:
    path = table(tmp_path, "ward,y\n" + '"Heart, unit 2",0\nEye,1\n' * 5)
    refused(f"csv:{path}?label=y:0|1&columns=ward:Eye|Heart, unit 2", "a comma within a value is written %2C")
    assert load(f"csv:{path}?label=y:0|1&columns=ward:Eye|Heart%2C unit 2").shape == (2,)


def test_numbers_of_which_no_range_is_said_are_one_warning(tmp_path: Path) -> None:
    path = table(tmp_path)
    with pytest.warns(UserWarning, match=re.escape("the range of age, pay: v enters as sign(v)·log(1 + |v|)")) as seen:
        load(f"csv:{path}?label=answer:no|yes&columns=age,pay,town:#2&test_file={path}")
    assert len(seen) == 1 and "write 'columns=age:LOW..HIGH,…'" in str(seen[0].message)
    with warnings.catch_warnings(action="error"):
        load(f"csv:{path}?label=answer:no|yes&columns=age:0..99,town:#2")


def test_of_many_columns_the_last_is_named_too_since_it_is_often_the_label(tmp_path: Path) -> None:
    path = table(tmp_path, ",".join([f"c{i}" for i in range(20)] + ["answer"]) + "\n" + ",".join("1" * 21) + "\n")
    refused(f"csv:{path}", "label's column, one of c0, c1, c2, c3, c4, c5, c6, …, answer: write")


def test_an_error_in_the_test_part_says_so_since_its_line_is_another_file_s(tmp_path: Path) -> None:
    train = table(tmp_path, "a,y\n" + "1,>50K\n2,<=50K\n" * 5)
    dots = table(tmp_path, "a,y\n1,>50K.\n", "test.csv")  # as in Adult's own test file
    where = f"csv:{train}?label=y:<=50K|>50K&columns=a:0..9&test_file={dots}"
    refused(where, "in the test part, the label y must be one of <=50K, >50K, got '>50K.' in line 2: write classes as")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got no rows"),
        ("a,y\n", "got no rows"),
        ("a,a\n1,2\n", "a different name for each column, got a, a"),
        ("a,y\n1,0\n1,2,0\n", "must have the 2 columns a, y in each row, got 3 in line 3"),
        ("a,y\n1,0\n,1\n", "the column a must hold numbers, got '' in line 3: write 'a:LOW..HIGH|' where"),
        ("a,y\n\n1,0\n\n1,x\n", "must be one of 0, 1, got 'x' in line 5"),
        ("a,y\n1,0\nnan,1\n", "the column a must hold numbers, got 'nan' in line 3"),
        ("a,y\n1,0\n" + "1" * 400 + ",1\n", "the column a must hold numbers"),
        ("a,y\n1,0\n2,1\n", "csv must have at least 5 rows to be split, got 2"),
        ('a,y\n"0,5",0\n"1,5",1\n', "got '0,5' in line 2: write it with a point and no other signs, as in 1234.5"),
        ('a,y\n7,0\n"$1,234.5",1\n', "got '$1,234.5' in line 3: write it with a point and no other signs"),
        (
            "a;y\n0,5;0\n1,5;1\n",
            "the 1 columns a;y in each row, got 2 in line 2: mend it, or write separator=semicolon",
        ),
        (500 * "a" + ",y\n1\n", f"the 2 columns {40 * 'a'}…, y in each row, got 1"),
    ],
)
def test_a_bad_table_is_an_error_of_one_line(tmp_path: Path, text: str, message: str) -> None:
    refused(f"csv:{table(tmp_path, text)}?label=y:0|1", message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got no rows"),
        ("[1]\n", "one JSON object per line, got another in line 1"),
        ('{"a": 1, "y": 0}\n{"a": 1}\n', "with the keys a, y per line, got another in line 2"),
        ('{"a": 1, "y": 0}\n{"a": 1,\n', "in line 2: mend it"),
        ('{"a": null, "y": 0}\n', "the column a must hold numbers, got 'null' in line 1"),
        ('{"a": [1], "y": 0}\n', "the column a must hold numbers, got '[1]' in line 1"),
    ],
)
def test_a_bad_jsonl_file_is_an_error_of_one_line(tmp_path: Path, text: str, message: str) -> None:
    refused(f"jsonl:{table(tmp_path, text, 't.jsonl')}?label=y:0|1", message)


def test_a_file_that_is_no_text_or_no_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"\xff\x00a")
    refused(f"csv:{tmp_path}/t.csv?label=y:0|1", "must be a text file in UTF-8")
    (tmp_path / "t.csv").write_text("town,y\nMünster,0\n", encoding="latin-1")
    refused(f"csv:{tmp_path}/t.csv?label=y:0|1", "or by iconv -f WINDOWS-1252 -t UTF-8")
    refused(f"csv:{tmp_path}?label=y:0|1", "is a folder: write csv:PATH")
    (tmp_path / "t.csv").write_bytes(gzip.compress(b"a,y\n1,0\n"))
    refused(f"csv:{tmp_path}/t.csv?label=y:0|1", "got a gzip file: unpack it")
    (tmp_path / "t.csv").write_bytes(b"PK\x03\x04\xff")
    refused(f"csv:{tmp_path}/t.csv?label=y:0|1", "Excel file: unpack it, or save it as csv")


@pytest.mark.parametrize("said", ["", "?label=income:low|high", "?label=high:low|high&columns=age"])
@pytest.mark.parametrize("row", ["41,8012,high\n", "41,41,high\n", "41;8012;high\n", "41,8012,high\n23,777\n"])
def test_a_file_without_names_is_told_so_and_none_of_its_values_are_printed(
    tmp_path: Path, row: str, said: str
) -> None:
    told = refused(f"csv:{table(tmp_path, 2 * row)}{said}", "write ")
    assert not re.search("41|8012|777", told.replace(str(tmp_path), "")) and re.search("names=|separator=semic", told)


def test_a_semicolon_file_is_told_so(tmp_path: Path) -> None:
    refused(f"csv:{table(tmp_path, 'a;y' + chr(10) + '1;0' + chr(10))}?label=y:0|1", "write separator=semicolon")


# -------------------------------------------------------------------------------------------------- well-known tables

ADULT = (
    "39, State-gov, 77516, Bachelors, 13, Never-married, Adm-clerical, Not-in-family, White, Male, 2174, 0, 40, "
    "United-States, <=50K{dot}\n"
    "90, ?, 83311, HS-grad, 9, Widowed, ?, Unmarried, Black, Female, 0, 0, 99, ?, >50K{dot}\n\n"
)


def test_adult_is_read_from_uci_s_files(tmp_path: Path) -> None:
    test = "|1x3 Cross validator\n" + ADULT.format(dot=".")
    written(tmp_path, {"adult.data": ADULT.format(dot="").encode(), "adult.test": test.encode()})
    splits = load(f"adult:{tmp_path}")
    assert (splits.classes, len(splits.train), len(splits.test)) == (2, 2, 2)
    (x, y), (x_test, y_test) = every(splits.train), every(splits.test)
    assert torch.equal(x, x_test) and y.tolist() == y_test.tolist() == [0, 1]
    # age, workclass of 8, education, marital 7, occupation 14, relationship 6, race 5, sex 2, three numbers, 16 buckets
    assert splits.shape == (1 + 8 + 1 + 7 + 14 + 6 + 5 + 2 + 3 + 16,)
    assert x[1, 0] == 1 and not x[1, 1:9].any() and x[0, 1:9].tolist() == [0, 0, 0, 0, 0, 1, 0, 0]
    assert float(x[0, 9]) == pytest.approx(2 * (13 - 1) / 15 - 1)


def test_wine_california_and_sst2_are_read_from_their_files(tmp_path: Path) -> None:
    names = [item.split(":")[0] for item in re.findall(r"columns=([^&]*)", PUBLISHED["wine_red"].options)[0].split(",")]
    head = ";".join(f'"{name}"' for name in [*names, "quality"])
    row = "\n7.4;0.7;0;1.9;0.076;11;34;0.9978;3.51;0.56;9.4;5"
    written(tmp_path, {"winequality-red.csv": (head + 6 * row).encode()})
    splits = load(f"wine_red:{tmp_path}")
    assert (splits.task, splits.shape, splits.unit) == ("regression", (11,), 5.0)
    assert not every(splits.train)[1].any()  # 5 is the middle
    assert float(every(splits.train)[0][0, 0]) == pytest.approx((7.4 - 10) / 6)
    row = "-122.23,37.88,41.0,880.0,129.0,322.0,126.0,8.3252,452600.0\n"
    written(tmp_path / "CaliforniaHousing", {"cal_housing.data": (5 * row).encode()})
    splits = load(f"california_housing:{tmp_path}")
    assert (splits.task, splits.shape) == ("regression", (8,))
    assert float(every(splits.train)[1][0]) * splits.unit + splits.unit == pytest.approx(452600, rel=1e-5)
    tsv = b'sentence\tlabel\nit \'s "fine" .\t1\nhide\t0\n'
    splits = load(f"sst2:{written(tmp_path, {'train.tsv': tsv, 'dev.tsv': tsv})}?tokens=4")
    assert every(splits.test)[0].tolist()[0] == [0, *(number(word, 10_000) for word in ("it", "s", "fine"))]
    assert every(splits.train)[1].tolist() == [1, 0]


@pytest.mark.parametrize("name", PUBLISHED)
def test_what_is_said_of_a_known_table_cannot_be_said_otherwise(name: str, tmp_path: Path) -> None:
    refused(f"{name}:{tmp_path}?label=x:0..1", f"unknown option of {name}, 'label'")


# ----------------------------------------------------------------------------------------------------------- training


def trained(splits: Splits, outputs: int, loss: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
    """How far three private steps move a linear model."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(math.prod(splits.shape), outputs))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    private = make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        splits.train,
        loss=lambda model, batch: loss(model(batch[0]), batch[1]),
        noise_multiplier=1.0,
        delta=1e-3,
        steps=3,
        batch=4,
        noise=1,
    )
    for drawn in private.batches():
        private.step(drawn)
    return [after.detach() - first for after, first in zip(model.parameters(), before, strict=True)]


def test_a_regression_trains_with_a_squared_loss_of_one_output(tmp_path: Path) -> None:
    path = table(tmp_path, "a,b,y\n" + "".join(f"{k},{k * k},{k % 7}\n" for k in range(20)))
    splits = load(f"csv:{path}?label=y:0..6")
    moved = trained(splits, splits.classes, lambda out, y: (out[:, 0] - y) ** 2)
    assert moved[0].shape == (1, 2) and all(bool(part.isfinite().all()) and bool(part.any()) for part in moved)


def test_pictures_kept_as_bytes_train_as_the_same_floats_do(tmp_path: Path) -> None:
    splits = load(f"mnist:{written(tmp_path, IDX)}?scale=centred")
    moves = []
    for train in (splits.train, Arrays(every(splits.train))):
        torch.manual_seed(0)
        moves.append(trained(replace(splits, train=train), 10, lambda out, y: cross_entropy(out, y, reduction="none")))
    assert all(torch.equal(a, b) for a, b in zip(*moves, strict=True))


# ------------------------------------------------------------------------------------------------------------ subsets


def numbered(folder: Path, count: int) -> str:
    x = np.arange(count, dtype=np.float32)[:, None]
    np.savez(folder / "set.npz", x=x, y=np.arange(count) % 2, x_test=x, y_test=np.arange(count) % 2)
    return f"npz:{folder}/set.npz"


def chosen(text: str, part: str = "train") -> list[int]:
    return [int(value) for value in every(getattr(load(text), part))[0][:, 0]]


def test_a_part_is_as_large_as_asked_without_repeats_and_smaller_ones_are_in_larger_ones(tmp_path: Path) -> None:
    text = numbered(tmp_path, 200)
    few, more = chosen(f"{text}?train=30"), chosen(f"{text}?train=90&test=10")
    assert len(set(few)) == 30 and len(set(more)) == 90 and more[:30] == few
    assert chosen(f"{text}?train=90&test=10", "test") == chosen(f"{text}?test=10", "test") == more[:10]
    assert chosen(text) == list(range(200)) and sorted(chosen(f"{text}?train=200")) == list(range(200))
    assert few != sorted(few) and 60 < np.mean(few) < 140
    x, y = every(load(f"{text}?train=30").train)
    assert torch.equal(x[:, 0].long() % 2, y)


def test_adding_a_row_replaces_at_most_one_row_of_a_part(tmp_path: Path) -> None:
    before = set(chosen(f"{numbered(tmp_path, 100)}?train=40"))
    changes = 0
    for count in range(101, 130):
        after = set(chosen(f"{numbered(tmp_path, count)}?train=40"))
        assert len(before - after) <= 1 and after - before <= {count - 1}
        changes += len(before - after)
        before = after
    assert changes > 3


def test_options_are_for_the_digits_too_and_unknown_ones_are_errors() -> None:
    splits = load("digits?train=100&test=50")
    assert (len(splits.train), len(splits.test), splits.classes) == (100, 50, 10)
    refused("digits?tran=100", "unknown option of digits, 'tran': did you mean 'train'?")
    refused("digits?train=many", "train must be a whole number of at least 1, got 'many'")
    refused("digits?", "data options must be key=value, got ''")


# ---------------------------------------------------------------------------------------------------- the real files

REAL = Path(os.environ.get("CLIPWISE_DATA", "/nowhere"))


def real(name: str) -> Splits:
    if not (REAL / name).is_dir():
        pytest.skip(f"no folder {name} in the one that CLIPWISE_DATA names")
    return load(f"{name}:{REAL / name}")


def test_real_mnist_has_its_known_counts() -> None:
    splits = real("mnist")
    assert (len(splits.train), len(splits.test)) == (60_000, 10_000)
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert torch.bincount(every(splits.train)[1]).tolist() == counts
    assert float(every(splits.train)[0].mean()) == pytest.approx(0.1307, abs=5e-5)


@pytest.mark.parametrize(
    ("name", "sizes", "each", "mean"),
    [
        ("fashion_mnist", (60_000, 10_000), (6000, 1000), [0.2860]),
        ("cifar10", (50_000, 10_000), (5000, 1000), [0.4914, 0.4822, 0.4465]),
        ("cifar100", (50_000, 10_000), (500, 100), [0.5071, 0.4865, 0.4409]),
    ],
)
def test_real_balanced_sets_have_their_known_counts_and_means(
    name: str, sizes: tuple[int, int], each: tuple[int, int], mean: list[float]
) -> None:
    splits = real(name)
    assert (len(splits.train), len(splits.test)) == sizes
    for part, count in zip((splits.train, splits.test), each, strict=True):
        assert set(torch.bincount(every(part)[1]).tolist()) == {count}
    found = splits.train._stored[0].double().mean((0, 2, 3)) / 255
    assert found.tolist() == pytest.approx(mean, abs=1e-4)


def test_real_cifar10_is_the_same_in_both_versions() -> None:
    real("cifar10")
    folders = [REAL / "cifar10" / place for place in ("cifar-10-batches-bin", "cifar-10-batches-py")]
    if not all(folder.is_dir() for folder in folders):
        pytest.skip("only one version is there")
    binary, python = (load(f"cifar10:{folder}") for folder in folders)
    for part in ("train", "test"):
        for a, b in zip(getattr(binary, part)._stored, getattr(python, part)._stored, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "sizes", "summary", "expected"),
    [
        ("adult", (32_561, 16_281), lambda y: float(y.double().mean()), 0.2408),
        ("sst2", (67_349, 872), lambda y: int(y.sum()), 37_569),
        ("wine_red", (1279, 320), lambda y: float(y.min()) * 5 + 5, 3.0),
        ("california_housing", (16_512, 4128), lambda y: float(y.max()), 1.0),
    ],
)
def test_real_tables_have_their_known_sizes(
    name: str, sizes: tuple[int, int], summary: Callable[[Tensor], float], expected: float
) -> None:
    splits = real(name)
    assert (len(splits.train), len(splits.test)) == sizes
    assert summary(every(splits.train)[1]) == pytest.approx(expected, abs=1e-4)


def test_real_imdb_is_balanced() -> None:
    splits = real("imdb")
    for part in (splits.train, splits.test):
        x, y = every(part)
        assert len(part) == 25_000 and int(y.sum()) == 12_500
        assert int(x.max()) < 10_000 and 0.4 < float(y[:512].double().mean()) < 0.6
