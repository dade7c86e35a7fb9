"""Tables: csv and jsonl files with columns of numbers, of categories or of text.

Receives: a file and what the user says about its columns: a range, the values, a number of buckets.
Gives: Splits; a row's numbers come from that row and from what the user said, never from other rows.

Standardising by a mean and deviation of private data, or listing the categories that occur in them, would be a release
that no ε covers. So the user gives what is public about a column, or it gets a transform that is the same for all data.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
import warnings
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from clipwise.data.datasets import Arrays
from clipwise.data.source import Layout, Source, escaped, file_of, folder_with, parsed, plain
from clipwise.data.splits import Splits, divided
from clipwise.data.text import sizes, tokenised
from clipwise.types import InputError, nearest, whole


class Cells(list[Any]):
    """A column's cells, one per row, and the line of the file that each row ends in."""

    def __init__(self, cells: Iterable[Any], lines: Sequence[int]) -> None:
        super().__init__(cells)
        self.lines = lines


Table: TypeAlias = "dict[str, Cells]"  # by the column's name
_SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|", "space": " "}

# ---------------------------------------------------------------------------------------------------- what columns mean


@dataclass(frozen=True)
class Range:
    """A number between two public ones: mapped to [−1, 1] by itself or by log(1 + v), and clipped to it."""

    low: float
    high: float
    log: bool = False

    def __call__(self, name: str, cells: Cells) -> NDArray[np.float64]:
        """[n, 1]."""
        values = np.array([self.low, self.high, *np.clip(_numbers(name, cells), self.low, self.high)])
        values = np.log1p(values) if self.log else values
        low, high = values[:2]
        return np.asarray((2 * values[2:, None] - low - high) / (high - low))


@dataclass(frozen=True)
class Values:
    """One of several values that the user names: a one-hot row, or zeros where it is none of them."""

    names: tuple[str, ...]

    def __call__(self, name: str, cells: Cells) -> NDArray[np.float64]:
        """[n, number of values]."""
        places = {value: place for place, value in enumerate(self.names)}
        return _one_hot([places.get(_word(cell), -1) for cell in cells], len(self.names))


@dataclass(frozen=True)
class Buckets:
    """Any values: a one-hot row of CRC-32 modulo the number of buckets, so that nobody lists the values that occur."""

    count: int

    def __call__(self, name: str, cells: Cells) -> NDArray[np.float64]:
        """[n, count]."""
        return _one_hot([zlib.crc32(_word(cell).encode()) % self.count for cell in cells], self.count)


@dataclass(frozen=True)
class AsIs:
    """A number of which nothing is said: sign(v) · log(1 + |v|), the same for all data."""

    def __call__(self, name: str, cells: Cells) -> NDArray[np.float64]:
        """[n, 1]."""
        values = _numbers(name, cells)[:, None]
        return np.asarray(np.sign(values) * np.log1p(np.abs(values)))


Meaning: TypeAlias = Range | Values | Buckets | AsIs
_RANGE = re.compile(r"(log\()?([^()]+?)\.\.([^()]+?)(\))?")


def meaning(text: str) -> tuple[str, Meaning]:
    """``age:17..90``, ``income:log(0..500000)``, ``sex:Female|Male``, ``country:#16`` or ``age`` → name and meaning."""
    name, colon, said = text.partition(":")
    name, match = plain(name), _RANGE.fullmatch(said)
    if not colon:
        return name, AsIs()
    if said.startswith("#"):
        return name, Buckets(_whole(name, said[1:]))
    if match and (match[1] is None) == (match[4] is None):
        try:
            low, high = float(match[2]), float(match[3])
        except ValueError:
            low = high = np.nan
        if not (np.isfinite([low, high]).all() and low < high and (low > -1 or not match[1])):
            raise InputError(
                f"the range of {name} must be LOW..HIGH with LOW < HIGH, got {said!r}: write {name}:0..100"
            )
        return name, Range(low, high, log=bool(match[1]))
    values = tuple(plain(value) for value in said.split("|"))
    if len(values) < 2 or len(set(values)) < len(values) or not all(values):
        raise InputError(
            f"{name} must be said to be a range, values or buckets, got {said!r}: write {name}:0..100, "
            f"'{name}:low|high' or '{name}:#16', all of --data in quotes"
        )
    return name, Values(values)


# ------------------------------------------------------------------------------------------------------------- reading


def from_csv(source: Source) -> Splits:
    """A csv or tsv file; ``separator`` and ``names`` (of the columns) where it has others, or no first line."""
    names = [plain(name) for name in source.listed("names")]
    tabs = source.path.suffix == ".tsv"
    given = source.options.get("separator", "tab" if tabs else "comma")
    separator = _SEPARATORS.get(given, plain(given))
    if len(separator) != 1:
        raise InputError(f"separator must be one sign or {', '.join(_SEPARATORS)}, got {given!r}: write separator=;")
    return _splits(
        source, lambda path: _csv(path, path.read_text(encoding="utf-8-sig"), names, separator, quoted=not tabs)
    )


def from_jsonl(source: Source) -> Splits:
    """A file with one JSON object per line; its keys are the columns."""
    return _splits(source, _jsonl)


def _splits(source: Source, read: Callable[[Path], Table]) -> Splits:
    def table(path: Path) -> Table:
        try:
            return read(file_of(source, path))
        except (OSError, UnicodeError, csv.Error) as error:
            raise InputError(f"{path} must be a text file in UTF-8 with rows, got {error}: write it anew") from error

    tables = [table(source.path)]
    if "test_file" in source.options:
        tables.append(table(Path(plain(source.options["test_file"])).expanduser()))
    return _encoded(source, tables)


def _csv(path: Path, text: str, names: Sequence[str], separator: str, *, quoted: bool = True) -> Table:
    quoting: Any = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE  # tab-separated files do not quote
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=separator, quoting=quoting, skipinitialspace=True)
    rows = [(lines.line_num, [cell.strip() for cell in cells]) for cells in lines if cells]
    given = bool(names)
    if not given:
        names, rows = (rows[0][1] if rows else []), rows[1:]
    if not rows:
        raise InputError(
            f"{path} must have a line of names and rows below it, got no rows: write names=… if it has none"
        )
    values = not given and _like_values(names)
    if len(set(names)) < len(names):
        got = _HEADLESS if values else f"got {', '.join(names)}: write names=…"
        raise InputError(f"{path} must have a different name for each column, {got}")
    for line, cells in rows:
        if len(cells) != len(names):
            which = "of its first line" if values else _shown(names)
            raise InputError(
                f"{path} must have the {len(names)} columns {which} in each row, got {len(cells)} in line "
                f"{line}: mend it, or write separator=… or names=…"
            )
    numbers = [line for line, _ in rows]
    columns = zip(*(cells for _, cells in rows), strict=True)
    return {name: Cells(column, numbers) for name, column in zip(names, columns, strict=True)}


def _jsonl(path: Path) -> Table:
    table: Table = {}
    lines: list[int] = []
    for line, text in enumerate(path.read_text(encoding="utf-8-sig").split("\n"), start=1):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            raise InputError(
                f"{path} must have one JSON object per line, got {error} in line {line}: mend it"
            ) from None
        if not isinstance(row, dict) or (table and table.keys() != row.keys()):
            expected = f"with the keys {_shown(table)} " if table else ""
            raise InputError(
                f"{path} must have one JSON object {expected}per line, got another in line {line}: mend it"
            )
        lines.append(line)
        for key, value in row.items():
            table.setdefault(key, Cells([], lines)).append(value)
    if not table:
        raise InputError(f"{path} must have one JSON object per line, got no rows: add some")
    return table


# ------------------------------------------------------------------------------------------------------------ encoding


def _encoded(source: Source, tables: Sequence[Table]) -> Splits:
    if "label" not in source.options:
        if _headless(source, tables[0]):
            raise InputError(f"{source.name} needs to know the label's column: {_HEADLESS}")
        raise InputError(
            f"{source.name} needs to know the label's column, one of {_shown(tables[0])}: write "
            f"'{source.name}:PATH?label=NAME:low|high' for classes, or ?label=NAME:0..10 for numbers"
        )
    name, label = meaning(source.options["label"])
    if not isinstance(label, (Range, Values)):
        raise InputError(
            f"the label {name} must be said to be classes or a range, got {source.options['label']!r}: write "
            f"'label={name}:low|high' or label={name}:0..10, all of --data in quotes"
        )
    text = [plain(column) for column in source.listed("text")]
    if text and "columns" in source.options:
        raise InputError("data must have either text or columns, got both: leave one out")
    columns = dict(map(meaning, source.listed("columns")))
    if not text and not columns:
        columns = {column: AsIs() for column in tables[0] if column != name}
    if name in (*text, *columns):
        raise InputError(
            f"the label {name} must not be among the inputs, got it in text or columns: leave it out there"
        )
    vocabulary, tokens = sizes(source)
    parts: list[tuple[Tensor, Tensor]] = []
    for table in tables:
        cells = {column: _column(source, table, column) for column in (name, *text, *columns)}
        y = _labels(name, label, cells[name])
        if not parts:
            _refuse_words(source, cells, columns)
        if text:
            rows = zip(*([_word(cell) for cell in cells[column]] for column in text), strict=True)
            parts.append((tokenised(rows, vocabulary, tokens), y))
        else:
            numbers = np.concatenate([said(column, cells[column]) for column, said in columns.items()], 1)
            parts.append((torch.from_numpy(numbers.astype(np.float32)), y))
    train, test = map(Arrays, parts) if len(parts) == 2 else divided(source.name, *parts[0])
    bare = [column for column, said in columns.items() if said == AsIs()]
    if bare:
        warnings.warn(
            f"nothing is said about the range of {_shown(bare)}: v enters as sign(v)·log(1 + |v|); where you know the "
            f"range, write 'columns={escaped(bare[0])}:LOW..HIGH,…'",
            stacklevel=2,
        )
    classes, unit = (len(label.names), 1.0) if isinstance(label, Values) else (1, (label.high - label.low) / 2)
    return Splits(
        source.text,
        train,
        test,
        classes,
        tuple(parts[0][0].shape[1:]),
        task="classes" if isinstance(label, Values) else "regression",
        vocabulary=vocabulary if text else None,
        unit=unit,
    )


def _refuse_words(source: Source, cells: Table, columns: Mapping[str, Meaning]) -> None:
    """Refuse columns of words of which nothing was said; the error is the line to write."""
    words = [name for name, said in columns.items() if said == AsIs() and not any(map(_is_number, cells[name]))]
    if words:
        items = source.listed("columns") or [escaped(name) for name in columns]
        first = cells[words[0]]
        line = source.written(columns=",".join(f"{item}:#16" if plain(item) in words else item for item in items))
        raise InputError(
            f"the column {words[0]} must hold numbers, got {_word(first[0])!r} in line {first.lines[0]}: write {line} "
            f"for 16 buckets of its values, or '{escaped(words[0])}:VALUE|VALUE' with the values that you know it has"
        )


def _is_number(cell: Any) -> bool:
    try:
        return math.isfinite(float(cell))
    except (TypeError, ValueError, OverflowError):
        return False


def _labels(name: str, label: Range | Values, cells: Cells) -> Tensor:
    """[n]: places in the list of classes, or numbers in [−1, 1]."""
    if isinstance(label, Range):
        return torch.from_numpy(label(name, cells)[:, 0].astype(np.float32))
    places = {value: place for place, value in enumerate(label.names)}
    for line, cell in zip(cells.lines, cells, strict=True):
        if _word(cell) not in places:
            raise InputError(
                f"the label {name} must be one of {', '.join(label.names)}, got {_word(cell)!r} in line {line}: name "
                f"it too, 'label={name}:{'|'.join(label.names)}|…', or remove the row"
            )
    return torch.tensor([places[_word(cell)] for cell in cells])


def _column(source: Source, table: Table, column: str) -> Cells:
    if column not in table:
        other = next((sign for sign in ";\t|" if len(table) == 1 and sign in next(iter(table))), None)
        word = next((word for word, sign in _SEPARATORS.items() if sign == other), None)
        if _headless(source, table) and not word:
            raise InputError(f"{source.name} has no column {column!r}: {_HEADLESS}")
        hint = f"write separator={word}" if word else nearest(column, table)
        raise InputError(f"{source.name} has no column {column!r}: {hint}")
    return table[column]


def _numbers(name: str, cells: Cells) -> NDArray[np.float64]:
    """[n]; a cell that is no finite number is an error, since a guess for it would have to come from other rows."""
    values = np.empty(len(cells))
    for row, cell in enumerate(cells):
        if not _is_number(cell):
            raise InputError(
                f"the column {name} must hold numbers, got {_word(cell)!r} in line {cells.lines[row]}: fill or "
                f"remove it, say '{name}:VALUE|VALUE' or '{name}:#16' for categories, or leave {name} out of columns=…"
            )
        values[row] = float(cell)
    return values


def _one_hot(places: Sequence[int], width: int) -> NDArray[np.float64]:
    """[n, width]; −1 is a row of zeros."""
    return np.asarray(np.eye(width + 1, width)[np.array(places, dtype=np.int64)])  # the last row is zeros


def _word(cell: Any) -> str:
    """A cell as text; JSON's true, null and 3.0 as they are written there."""
    return cell.strip() if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False)


def _whole(name: str, text: str) -> int:
    try:
        return whole(f"buckets of {name}", int(text))
    except ValueError:
        raise InputError(f"the buckets of {name} must be a whole number, got {text!r}: write {name}:#16") from None


# What is in a line without names may be private: it is not printed.
_HEADLESS = "the first line seems to hold values, not names; write names=a,b,… (one for each column), then label=a:…"


def _headless(source: Source, table: Table) -> bool:
    return source.name == "csv" and "names" not in source.options and _like_values(table)


def _like_values(names: Iterable[str]) -> bool:
    """Whether there is a number among them, also where they were not separated."""
    return any(_is_number(piece) for name in names for piece in re.split("[;\t|]", name))


def _shown(names: Sequence[str] | Mapping[str, Any]) -> str:
    few = list(names)[:8]
    return ", ".join(few) + (", …" if len(names) > len(few) else "")


# ------------------------------------------------------------------------------------------------- well-known tables


@dataclass(frozen=True)
class Known:
    """A published table: its files, what is public about its columns, and where it comes from."""

    files: tuple[str, ...]  # the training part, and perhaps the test part
    options: str
    home: str
    places: tuple[str, ...] = ("",)
    mend: Callable[[str], str] = str  # the file's text → csv


_UCI = "the UCI Machine Learning Repository, archive.ics.uci.edu"

KNOWN = {
    "sst2": Known(
        ("train.tsv", "dev.tsv"),
        "text=sentence&label=label:0|1&separator=tab",
        "'SST-2' of GLUE, gluebenchmark.com/tasks",
        ("", "SST-2"),
    ),
    # ranges: round numbers around those that Cortez et al. (2009) print in their Table 1
    "wine_red": Known(
        ("winequality-red.csv",),
        "separator=semicolon&label=quality:0..10&columns=fixed acidity:4..16,volatile acidity:0..1.6,citric acid:0..1,"
        "residual sugar:log(0..16),chlorides:log(0..0.7),free sulfur dioxide:0..72,total sulfur dioxide:0..290,"
        "density:0.99..1.004,pH:2.7..4,sulphates:0.3..2,alcohol:8..15",
        f"'Wine Quality', {_UCI}",
    ),
    # the state's borders, and the caps that the set's description names: age 52, income 15, value 500 001
    "california_housing": Known(
        ("cal_housing.data",),
        "names=longitude,latitude,housingMedianAge,totalRooms,totalBedrooms,population,households,medianIncome,"
        "medianHouseValue&label=medianHouseValue:0..500001&columns=longitude:-125..-114,latitude:32..42,"
        "housingMedianAge:0..52,totalRooms:log(0..40000),totalBedrooms:log(0..7000),population:log(0..40000),"
        "households:log(0..7000),medianIncome:0..15",
        "'California Housing' (cal_housing.tgz, Pace and Barry 1997), www.dcc.fc.up.pt/~ltorgo/Regression",
        ("", "CaliforniaHousing"),
    ),
    # the values that adult.names lists; education is there twice, once as a number, and fnlwgt is a survey's weight
    "adult": Known(
        ("adult.data", "adult.test"),
        "names=age,workclass,fnlwgt,education,education-num,marital-status,occupation,relationship,race,sex,"
        "capital-gain,capital-loss,hours-per-week,native-country,income&label=income:<=50K|>50K&columns=age:17..90,"
        "workclass:Private|Self-emp-not-inc|Self-emp-inc|Federal-gov|Local-gov|State-gov|Without-pay|Never-worked,"
        "education-num:1..16,marital-status:Married-civ-spouse|Divorced|Never-married|Separated|Widowed|"
        "Married-spouse-absent|Married-AF-spouse,occupation:Tech-support|Craft-repair|Other-service|Sales|"
        "Exec-managerial|Prof-specialty|Handlers-cleaners|Machine-op-inspct|Adm-clerical|Farming-fishing|"
        "Transport-moving|Priv-house-serv|Protective-serv|Armed-Forces,relationship:Wife|Own-child|Husband|"
        "Not-in-family|Other-relative|Unmarried,race:White|Asian-Pac-Islander|Amer-Indian-Eskimo|Other|Black,"
        "sex:Female|Male,capital-gain:log(0..100000),capital-loss:log(0..5000),hours-per-week:1..99,"
        "native-country:#16",
        f"'Adult', {_UCI}",
        # the C4.5 format: a line with | is a comment, a dot ends a row
        mend=lambda text: re.sub(r"^\|.*$|\.$", "", text, flags=re.MULTILINE),
    ),
}


def known(source: Source) -> Splits:
    """A published table from its folder, with what is public about its columns."""
    table = KNOWN[source.name]
    _, folder = folder_with(source, [Layout(table.files, table.places)], table.home)
    said = {**parsed(f"{source.name}?{table.options}").options, **source.options}
    names = [plain(name) for name in said.get("names", "").split(",") if name]
    separator = _SEPARATORS[said.get("separator", "comma")]

    def read(path: Path) -> Table:
        text = table.mend(path.read_text(encoding="utf-8-sig"))
        return _csv(path, text, names, separator, quoted=separator != "\t")

    return _encoded(Source(source.text, source.name, folder, said), [read(folder / file) for file in table.files])
