"""Data sets: rows of everything a user may have, refusals, and the named data sets."""

from __future__ import annotations

import collections
import itertools
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

import clipwise as cw
from clipwise.data import Arrays, Samples, as_dataset, load
from clipwise.types import InputError, Refused

X = torch.arange(24, dtype=torch.float32).reshape(6, 2, 2)
Y = torch.arange(6)
SOME, NONE = torch.tensor([4, 1]), torch.empty(0, dtype=torch.long)
Pair = collections.namedtuple("Pair", ["x", "y"])


class Squares(Dataset[Any]):
    """A user's data set: sample i is made by ``form``."""

    def __init__(self, form: str = "tuple", size: int = 6) -> None:
        self.form, self.size = form, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        x, y = X[index], int(Y[index])
        nested = {"x": x, "more": (y, float(y)), "text": f"row {index}"}
        return {"tuple": (x, y), "dict": {"x": x, "y": y}, "nested": nested, "tensor": x}[self.form]


class Stream(IterableDataset[Any]):
    """Samples without an order to index."""

    def __iter__(self) -> Iterator[Any]:
        return iter(X)


# ---------------------------------------------------------------------------------------------------- rows of tensors


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        ((X, Y), tuple),
        ([X, Y], list),
        (Pair(X, Y), Pair),
        ((X.numpy(), Y.numpy()), tuple),
        (TensorDataset(X, Y), tuple),
    ],
)
def test_a_sequence_of_tensors_gives_batches_of_its_own_kind(data: Any, kind: type) -> None:
    dataset = as_dataset(data)
    assert isinstance(dataset, Arrays) and len(dataset) == 6
    for indices in (SOME, NONE, torch.arange(6)):
        batch = dataset.rows(indices)
        assert type(batch) is kind
        assert torch.equal(batch[0], X[indices]) and torch.equal(batch[1], Y[indices])
        assert [column.dtype for column in batch] == [torch.float32, torch.long]


TEXTS = [torch.randint(9, (12,)) for _ in range(300)]


@pytest.mark.parametrize("data", [TEXTS, tuple(TEXTS), TEXTS[:9], TensorDataset(*TEXTS), [t.numpy() for t in TEXTS]])
def test_a_list_of_samples_is_not_read_as_columns_of_which_each_position_is_a_sample(data: Any) -> None:
    with pytest.raises(Refused, match=r"got a (list|tuple) of \d+ tensors of 12 rows: .* write data=torch.stack\(list"):
        as_dataset(data)


@pytest.mark.parametrize("data", [TEXTS[:8], tuple(TEXTS[:12]), dict(enumerate(TEXTS)), torch.stack(TEXTS)])
def test_a_few_columns_and_named_ones_are_columns(data: Any) -> None:
    assert len(as_dataset(data)) == (300 if isinstance(data, torch.Tensor) else 12)


def test_a_dict_gives_dicts_and_a_tensor_gives_tensors() -> None:
    batch = as_dataset({"x": X, "y": Y.numpy()}).rows(SOME)
    assert type(batch) is dict and list(batch) == ["x", "y"]
    assert torch.equal(batch["x"], X[SOME]) and torch.equal(batch["y"], Y[SOME])
    assert as_dataset({"x": X}).rows(NONE)["x"].shape == (0, 2, 2)
    assert torch.equal(as_dataset(X).rows(SOME), X[SOME])
    assert torch.equal(as_dataset(X.numpy()).rows(SOME), X[SOME])


def test_arrays_are_a_torch_data_set_too() -> None:
    dataset = Arrays((X, Y))
    x, y = dataset[3]
    assert torch.equal(x, X[3]) and int(y) == 3
    assert len(list(DataLoader(dataset, batch_size=4))) == 2
    assert as_dataset(dataset) is dataset
    with pytest.raises(IndexError):
        dataset[6]


def test_an_array_that_cannot_be_written_or_has_an_odd_layout_is_read_without_a_warning(
    recwarn: pytest.WarningsRecorder,
) -> None:
    fixed = np.arange(12.0).reshape(6, 2)
    fixed.flags.writeable = False
    batch = as_dataset((fixed, fixed[:, ::-1], fixed.astype(">f8"), fixed.astype("<f8"))).rows(SOME)
    assert [column.tolist() for column in batch] == [[[8, 9], [2, 3]], [[9, 8], [3, 2]], *[[[8, 9], [2, 3]]] * 2]
    assert not list(recwarn)


# ---------------------------------------------------------------------------------------------------- rows of samples


@pytest.mark.parametrize("form", ["tuple", "dict", "nested", "tensor"])
def test_a_map_style_data_set_is_collated_as_a_data_loader_would(form: str) -> None:
    dataset = as_dataset(Squares(form))
    assert isinstance(dataset, Samples) and len(dataset) == 6
    (expected,) = DataLoader(Subset(Squares(form), SOME.tolist()), batch_size=2)
    assert repr(dataset.rows(SOME)) == repr(expected)


def test_an_empty_draw_has_the_structure_and_dtypes_of_a_full_one() -> None:
    x, y = as_dataset(Squares()).rows(NONE)
    assert x.shape == (0, 2, 2) and x.dtype == torch.float32 and y.shape == (0,) and y.dtype == torch.long
    batch = as_dataset(Squares("nested")).rows(NONE)
    assert batch["x"].shape == (0, 2, 2) and batch["text"] == []
    assert [(column.shape, column.dtype) for column in batch["more"]] == [((0,), torch.long), ((0,), torch.float64)]


def test_an_empty_batch_is_not_shared_between_draws() -> None:
    dataset = as_dataset(Squares("dict"))
    del dataset.rows(NONE)["x"]
    assert set(dataset.rows(NONE)) == {"x", "y"}


def test_a_collate_function_of_the_user_is_used_and_never_sees_an_empty_list() -> None:
    seen = []

    def collate(samples: list[Any]) -> Any:
        seen.append(len(samples))
        return {"pixels": torch.stack([x for x, _ in samples]) + 1, "label": torch.tensor([y for _, y in samples])}

    for data in (Squares(), TensorDataset(X, Y)):
        dataset = as_dataset(data, collate=collate)
        assert torch.equal(dataset.rows(SOME)["pixels"], X[SOME] + 1)
        assert dataset.rows(NONE)["pixels"].shape == (0, 2, 2)
    assert 0 not in seen


def test_a_data_set_that_reads_several_samples_at_once_is_asked_once() -> None:
    asked = []

    class Batched(Squares):
        def __getitems__(self, indices: list[int]) -> list[Any]:
            asked.append(indices)
            return [self[index] for index in indices]

    assert torch.equal(as_dataset(Batched()).rows(SOME)[0], X[SOME])
    assert asked == [[4, 1]]


def test_a_subset_is_a_data_set_but_its_rows_must_be_distinct() -> None:
    assert torch.equal(as_dataset(Subset(TensorDataset(X, Y), [5, 3, 0])).rows(torch.tensor([0, 2]))[1], Y[[5, 0]])
    with pytest.raises(Refused, match="Subset with index 3 repeated.*sensitivity"):
        as_dataset(Subset(TensorDataset(X, Y), [5, 3, 0, 3]))


def test_a_subclass_of_tensor_dataset_keeps_its_own_way_of_reading() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return tuple(2 * tensor for tensor in super().__getitem__(index))

    assert torch.equal(as_dataset(Doubled(X, Y)).rows(SOME)[0], 2 * X[SOME])


# ---------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"shuffle": True, "batch_size": 2}, "shuffled batches of a fixed size do not have the privacy amplification"),
        ({"batch_size": 2}, "fixed order have no privacy amplification"),
        ({"sampler": WeightedRandomSampler([1.0] * 6, 6)}, "WeightedRandomSampler the sampling rate"),
        ({"sampler": SubsetRandomSampler([1, 2])}, "SubsetRandomSampler the sampling rate"),
        ({"sampler": RandomSampler(Y, replacement=True)}, "RandomSampler the sampling rate"),  # type: ignore[arg-type]
        ({"sampler": RandomSampler(Y, num_samples=3)}, "RandomSampler the sampling rate"),  # type: ignore[arg-type]
        (
            {"batch_sampler": type("Own", (BatchSampler,), {})(SequentialSampler(Y), 2, False)},  # type: ignore[arg-type]
            "Own the sampling rate",
        ),
    ],
)
def test_a_data_loader_is_refused_with_the_reason_and_what_to_write(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(Refused, match=rf"{reason}.*; write data=loader\.dataset") as caught:
        as_dataset(DataLoader(TensorDataset(X, Y), **options))
    assert "\n" not in str(caught.value)


def stacked(samples: list[Any]) -> Any:
    return tuple(map(torch.stack, zip(*samples, strict=True)))


def test_a_refused_data_loader_with_a_collate_function_is_told_to_keep_it() -> None:
    with pytest.raises(Refused, match=r"write data=loader\.dataset, collate=loader\.collate_fn \(") as caught:
        as_dataset(loader := DataLoader(TensorDataset(X, Y), collate_fn=stacked))
    assert "as_dataset" not in str(caught.value)  # users have no such name
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 6))
    private = cw.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        data=loader.dataset,
        collate=loader.collate_fn,
        noise_multiplier=1.0,
        delta=1e-3,
        steps=1,
        batch=2,
    )
    for batch in private.batches():
        private.step(batch)
    assert private.steps_taken == 1


@pytest.mark.parametrize(
    "sampler", [WeightedRandomSampler([1.0], 1), SubsetRandomSampler([1]), RandomSampler(Squares())]
)
def test_a_sampler_is_refused(sampler: Any) -> None:
    with pytest.raises(Refused, match=f"{type(sampler).__name__}.*its own Poisson batches.*write data=dataset"):
        as_dataset(sampler)


@pytest.mark.parametrize("data", [Stream(), DataLoader(Stream())])
def test_an_iterable_data_set_is_refused_alone_and_in_a_loader(data: Any) -> None:
    with pytest.raises(Refused, match="got Stream, an IterableDataset: a stream cannot be Poisson sampled"):
        as_dataset(data)


@pytest.mark.parametrize("data", [(X[:0], Y[:0]), {"x": X[:0]}, X[:0], Squares(size=0), Subset(Squares(), [])])
def test_an_empty_data_set_is_an_error(data: Any) -> None:
    with pytest.raises(InputError, match="at least one row, got an empty data set"):
        as_dataset(data)


@pytest.mark.parametrize("data", [(), [], {}])
def test_no_tensors_at_all_are_an_error(data: Any) -> None:
    with pytest.raises(InputError, match=f"got an empty {type(data).__name__}"):
        as_dataset(data)


def test_lengths_that_differ_are_an_error_that_names_them() -> None:
    with pytest.raises(InputError, match=r"got 6 in data\['x'\], 5 in data\['y'\]"):
        as_dataset({"x": X, "y": Y[:5]})


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_counted_and_located(bad: float) -> None:
    x = torch.zeros(10_000, 3)
    x[5000, 1] = x[7000, 0] = x[7000, 2] = bad
    with pytest.raises(InputError, match=r"data\[0\] must hold finite numbers, got 3 .* first in row 5000"):
        as_dataset((x, torch.zeros(10_000)))
    with pytest.raises(InputError, match=r"data\['b'\].* got 1 .* row 2"):
        as_dataset({"a": Y[:3], "b": np.array([0, 1, bad])})


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "got NoneType"),
        (3, "got int"),
        ("digits", "got str"),
        ({1, 2}, "got set"),
        ((X, None), r"data\[1\] must be a tensor with one row per sample, got NoneType"),
        ([(X[0], 1), (X[1], 2)], r"data\[0\] must be a tensor .*, got tuple: stack the samples"),
        ((X, torch.tensor(1)), r"data\[1\] must have one row per sample, got a single number"),
        ((X, np.array(["a"] * 6)), r"data\[1\] must hold numbers, got an array of dtype <U1"),
        ((X, np.array([None] * 6)), "dtype object"),
        (
            type("Frame", (), {"__len__": lambda self: 3, "__getitem__": lambda self, key: {}[key]})(),
            "Frame gave KeyError",
        ),
        (type("Endless", (), {"__getitem__": lambda self, index: X[0]})(), "must have a length, got Endless"),
        (type("Objects", (Squares,), {"__getitem__": lambda self, index: object()})(), "first sample of this Objects"),
    ],
)
def test_what_is_no_data_set_is_an_error_that_says_what_is(data: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        as_dataset(data)
    assert "\n" not in str(caught.value)


def test_a_collate_function_is_not_silently_left_aside() -> None:
    with pytest.raises(InputError, match="collate must be left out"):
        as_dataset((X, Y), collate=list)
    with pytest.raises(InputError, match="collate must give tensors .*, got object"):
        as_dataset(Squares(), collate=lambda samples: object())


@pytest.mark.parametrize(
    ("column", "write"),
    [
        (X[:, 0].to_sparse(), r"sparse one: write x\.to_dense\(\)"),
        (X[:, 0].to_sparse_csr(), r"sparse one: write x\.to_dense\(\)"),
        (torch.nested.nested_tensor(list(X)), "nested one: write x.to_padded_tensor"),
        (torch.nested.nested_tensor(list(X), layout=torch.jagged), "nested one: write x.to_padded_tensor"),
    ],
)
def test_tensors_whose_rows_cannot_be_picked_are_told_what_to_write(column: Any, write: str) -> None:
    # they ended in torch's own errors, such as that an operator is missing from a backend
    with pytest.raises(InputError, match=rf"data\[0\] must be a dense tensor, got a {write}"):
        as_dataset((column, Y))


def test_a_list_of_samples_is_read_where_collate_says_how() -> None:
    # what DataLoader(list, collate_fn=…) reads was refused as columns
    data = as_dataset(list(zip(X, Y.tolist(), strict=True)), collate=default_collate)
    x, y = data.rows(torch.tensor([2, 0]))
    assert torch.equal(x, X[[2, 0]]) and y.tolist() == Y[[2, 0]].tolist()
    with pytest.raises(InputError, match="collate must be left out"):
        as_dataset([X, Y], collate=default_collate)


# ---------------------------------------------------------------------------------------------------- named data sets


def test_digits_are_images_in_the_unit_interval_split_80_to_20() -> None:
    splits = load("digits")
    assert (splits.name, splits.classes, splits.shape) == ("digits", 10, (1, 8, 8))
    assert len(splits.train) + len(splits.test) == 1797 and len(splits.test) in (359, 360)
    x, y = splits.train.rows(torch.arange(len(splits.train)))
    assert x.dtype == torch.float32 and x.shape[1:] == (1, 8, 8) and y.dtype == torch.long
    assert float(x.min()) == 0 and float(x.max()) == 1
    assert set(y.tolist()) == set(splits.test.data[1].tolist()) == set(range(10))
    assert torch.equal(load("digits").test.data[0], splits.test.data[0])


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(InputError, match=r"needs scikit-learn.*pip install 'clipwise\[demo\]'"):
        load("digits")


def saved(folder: Path, **arrays: Any) -> str:
    np.savez(folder / "set.npz", **arrays)
    return f"npz:{folder / 'set.npz'}"


def toy(rows: int = 50) -> dict[str, Any]:
    numbers = np.arange(rows)
    return {"x": np.stack([numbers, -numbers], 1).astype(np.float64), "y": (numbers % 3).astype(np.int32)}


def test_a_file_without_a_test_part_is_split_and_no_row_is_in_both(tmp_path: Path) -> None:
    splits = load(saved(tmp_path, **toy()))
    assert (len(splits.train), len(splits.test), splits.classes, splits.shape) == (40, 10, 3, (2,))
    x = torch.cat([splits.train.data[0], splits.test.data[0]])
    y = torch.cat([splits.train.data[1], splits.test.data[1]])
    assert sorted(x[:, 0].tolist()) == list(range(50)) and torch.equal(x[:, 0] % 3, y.float())
    assert x.dtype == torch.float32 and y.dtype == torch.long


def test_adding_a_row_moves_no_other_row_between_the_parts(tmp_path: Path) -> None:
    tests = [set(load(saved(tmp_path, **toy(rows))).test.data[0][:, 0].tolist()) for rows in range(50, 61)]
    for before, after in itertools.pairwise(tests):
        assert before <= after and len(after - before) <= 1
    places = [int(row) % 5 for row in tests[-1]]
    assert len(set(places)) > 2  # not every fifth row: data may have a period


def test_a_file_with_a_test_part_keeps_it(tmp_path: Path) -> None:
    splits = load(saved(tmp_path, **toy(), x_test=toy(7)["x"], y_test=toy(7)["y"]))
    assert (len(splits.train), len(splits.test)) == (50, 7)
    assert torch.equal(splits.test.data[0], torch.from_numpy(toy(7)["x"]).float())


def test_bytes_become_unit_floats_and_other_integers_stay_tokens(tmp_path: Path) -> None:
    images = np.full((10, 2, 2), 255, dtype=np.uint8)
    x, _ = load(saved(tmp_path, x=images, y=np.zeros(10, int))).train.rows(SOME)
    assert x.dtype == torch.float32 and float(x.min()) == 1
    x, _ = load(saved(tmp_path, x=images.astype(np.int16), y=np.zeros(10, int))).train.rows(SOME)
    assert x.dtype == torch.long and int(x.max()) == 255


def test_labels_may_be_true_or_false(tmp_path: Path) -> None:
    splits = load(saved(tmp_path, **{**toy(), "y": toy()["y"] == 1}))
    numbers = load(saved(tmp_path, **{**toy(), "y": (toy()["y"] == 1).astype(int)}))
    assert splits.classes == 2 and torch.equal(splits.train.data[1], numbers.train.data[1])
    assert splits.train.data[1].dtype == torch.long


def changed(**changes: Any) -> dict[str, Any]:
    return {key: value for key, value in {**toy(), **changes}.items() if value is not None}


TEST = {"x_test": toy(4)["x"], "y_test": toy(4)["y"]}
NAN = toy()["x"] * np.where(np.arange(50) < 30, 1, np.nan)[:, None]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (changed(y=None), "must hold x and y, got x: add it"),
        (changed(x_test=TEST["x_test"]), "must hold x and y and x_test and y_test, got x, y, x_test"),
        (changed(x_tets=NAN), "unknown array in set.npz, 'x_tets': did you mean 'x_test'?"),
        ({"images": NAN}, "unknown array in set.npz, 'images': write one of x, x_test, y, y_test"),
        (changed(x=np.array([[None]] * 50)), "file of numeric arrays, got an array of Python objects"),
        (changed(x=np.array([["a"]] * 50)), "x must hold real numbers, got dtype <U1"),
        (changed(x=1j * toy()["x"]), "x must hold real numbers, got dtype complex128"),
        (changed(x=NAN), "x must hold finite numbers, got 40 NaN or infinite, the first in row 30"),
        (changed(x=toy()["x"] * 1e300), "x must hold finite numbers, got 98 NaN or infinite, the first in row 1"),
        (
            changed(x=np.zeros((0, 2)), y=np.zeros(0, int)),
            "x must have rows of features, [rows, ...], got shape [0, 2]",
        ),
        (changed(x=np.zeros(50)), "x must have rows of features"),
        (changed(y=np.zeros(0, int)), "y must hold one integer label per row, got dtype int64 of shape [0]"),
        (changed(y=np.array(["cat"] * 50)), "got dtype <U3 of shape [50]: write np.unique(y, return_inverse=True)[1]"),
        (changed(**{**TEST, "y_test": np.array(["cat"] * 4)}), "write np.searchsorted(np.unique(y), y_test)"),
        (changed(y=np.zeros(50)), "y must hold one integer label per row, got dtype float64"),
        (changed(y=np.zeros((50, 1), int)), "y must hold one integer label per row, got dtype int64 of shape [50, 1]"),
        (changed(y=np.zeros((50, 1), int)), "write y.reshape(-1).astype('int64')"),
        (changed(y=np.zeros(50)), "write y.astype('int64'), or"),
        (changed(y=np.eye(2)[np.arange(50) % 2]), "got dtype float64 of shape [50, 2]: write y.argmax(1)"),
        (changed(y=np.eye(2, dtype=bool)[np.arange(50) % 2]), "write y.argmax(1)"),
        (changed(y=np.ones((50, 2), int)), "write y.reshape(len(y), -1)[:, 0].astype('int64')"),
        (changed(y=np.arange(50) - 1), "y must hold labels of at least 0, got -1 in row 0"),
        (changed(y=np.arange(50) * 10**6), "y must hold the labels 0 to classes − 1, got 49000000 in 50 rows"),
        (changed(y=toy(49)["y"]), "x and y must have equally many rows, got 50 and 49"),
        (changed(**{**TEST, "y_test": np.array([0, 1, 2, 3])}), "y_test must hold labels that y has, 0 to 2, got 3"),
        (changed(**{**TEST, "x_test": np.zeros((4, 3))}), "x_test must be torch.float32 of shape [4, 2]"),
        (changed(**{**TEST, "x_test": np.zeros((5, 2))}), "x_test must be torch.float32 of shape [4, 2]"),
        (changed(**{**TEST, "x_test": np.zeros((4, 2), int)}), "got torch.int64 of shape [4, 2]"),
        (toy(4), "must have at least 5 rows to be split, got 4"),
    ],
)
def test_a_bad_file_is_an_error_of_one_line(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        load(saved(tmp_path, **arrays))
    assert "\n" not in str(caught.value)


def test_numpy_s_advice_to_run_what_a_file_holds_is_not_passed_on(tmp_path: Path) -> None:
    (tmp_path / "text.npz").write_text("a,b\n1,2\n")
    np.savez(tmp_path / "objects.npz", x=np.array([None, "a"], dtype=object), y=np.array([0, 1]))
    for name, message in (("text", "got no npz file, whatever its name"), ("objects", "got an array of Python obj")):
        with pytest.raises(InputError, match=message) as caught:
            load(f"npz:{tmp_path / name}.npz")
        assert "pickle" not in str(caught.value) and "write it with numpy.savez" in str(caught.value)


def test_a_folder_is_answered_by_what_is_read_from_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digit").mkdir()
    with pytest.raises(InputError, match=r"it is a folder, .*cifar10:DIR.*imdb:DIR.*x=bytes\[n, channel, height,"):
        load("digit")


@pytest.mark.parametrize("content", [b"", b"not a zip", b"PK\x03\x04 cut short"])
def test_a_file_that_is_no_npz_is_unreadable(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "set.npz").write_bytes(content)
    with pytest.raises(InputError, match="set.npz must be a readable file of numeric arrays"):
        load(f"npz:{tmp_path / 'set.npz'}")


def test_a_truncated_file_and_a_bare_array_are_unreadable(tmp_path: Path) -> None:
    name = saved(tmp_path, **toy())
    path = tmp_path / "set.npz"
    whole = path.read_bytes()
    path.write_bytes(whole[:60] + bytes(100) + whole[160:])
    with pytest.raises(InputError, match="must be a readable file"):
        load(name)
    with path.open("wb") as file:
        np.save(file, toy()["x"])
    with pytest.raises(InputError, match="one array without a name; write it with numpy.savez"):
        load(name)


def test_a_missing_file_names_the_folder_and_the_nearest_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=re.escape(f"no file 'set.npz' in {tmp_path}: no .npz file is there")):
        load(f"npz:{tmp_path}/set.npz")
    saved(tmp_path, **toy())
    with pytest.raises(InputError, match=re.escape(f"no file 'sets.npz' in {tmp_path}: did you mean 'set.npz'?")):
        load(f"npz:{tmp_path}/sets.npz")
    with pytest.raises(InputError, match=re.escape(f"the folder {tmp_path}/none does not exist")):
        load(f"npz:{tmp_path}/none/set.npz")
    with pytest.raises(InputError, match="no file"):
        load(f"npz:{tmp_path}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("digts", "unknown data 'digts': did you mean 'digits'?"),
        ("mnist", "mnist needs its folder, got 'mnist': write mnist:DIR"),
        ("cifar10?train=5", "cifar10 needs its folder, got 'cifar10?train=5': write cifar10:DIR"),
        ("minst:folder", "unknown data 'minst:folder': did you mean 'mnist:DIR'?"),
        ("parquet:x", "unknown data 'parquet:x': write one of adult:DIR, california_housing:DIR, cifar10:DIR"),
        ("parquet:x", ", 'csv:PATH?label=NAME:low|high', digits"),
        ("npz", "npz needs its file, got 'npz': write npz:PATH"),
        ("npz:", "npz needs its file, got 'npz:': write npz:PATH"),
        ("csv", "csv needs its file, got 'csv': write 'csv:PATH?label=NAME:low|high'"),
        ("folder/set.npz", "write npz:folder/set.npz"),
        ("set.npz?train=5", "write 'npz:set.npz?train=5'"),
        ("my.csv", "unknown data 'my.csv': data must be named with its scheme: write 'csv:my.csv?label=NAME:low|high'"),
        ("my.csv?label=a:0..1", "write 'csv:my.csv?label=a:0..1'"),
        ("my.tsv", "write 'csv:my.tsv?label=NAME:low|high'"),
        ("my.jsonl", "write 'jsonl:my.jsonl?label=NAME:low|high'"),
        ("cvs:my.csv", "did you mean 'csv:PATH?label=NAME:low|high'?"),
        ("digits:8", "unknown data 'digits:8': did you mean 'digits'?"),
        (3, "unknown data 3"),
    ],
)
def test_an_unknown_name_is_an_error_that_says_what_to_write(text: Any, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        load(text)


def test_labels_that_do_not_begin_at_zero_are_warned_of(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"no label below 1, .* 1 class too many; write y - 1"):
        assert load(saved(tmp_path, **{**toy(), "y": toy()["y"] + 1})).classes == 4
    with warnings.catch_warnings(action="error"):
        whole = {**toy(), "y": toy()["y"] + 1}
        load(saved(tmp_path, **whole, x_test=whole["x"][:3], y_test=np.array([0, 1, 2])))
        load(saved(tmp_path, **toy()))


def test_a_data_set_of_lists_of_numbers_is_refused_since_torch_would_collate_them_place_by_place():
    class Tokenised(Dataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            return {"input_ids": [1, 2, index], "labels": 1}

    with pytest.raises(InputError, match=r"got a list of 3 numbers: .* dataset\.set_format"):
        as_dataset(Tokenised())
    together = as_dataset(Tokenised(), lambda samples: torch.tensor([each["input_ids"] for each in samples]))
    assert together.rows(torch.tensor([2, 0])).tolist() == [[1, 2, 2], [1, 2, 0]]
