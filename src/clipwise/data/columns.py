"""What the columns of a table mean: a range, some values, buckets, or nothing that was said.

Receives: what the user says about a column, such as ``age:17..90``, and the column's cells.
Gives: Range, Values, Buckets or AsIs, each of which turns cells into numbers, every row by itself.

Standardising by a mean and deviation of private data, or listing the categories that occur in them, would be a release
that no ε covers. So the user gives what is public about a column, or it gets a transform that is the same for all data.
"""

from __future__ import annotations

import datetime
import json
import math
import re
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from clipwise.data.source import escaped, unescaped
from clipwise.types import InputError, whole


class Cells(list[Any]):
    """A column: its cells, one per row, its name, and the line of the file that each row ends in.

    With ``comma``, its numbers are written as in 1.234,5.
    """

    def __init__(self, name: str, cells: Iterable[Any], lines: Sequence[int], comma: bool = False) -> None:
        super().__init__(cells)
        self.name, self.lines, self.comma = name, lines, comma


@dataclass(frozen=True)
class Range:
    """A number between two public ones: mapped to [−1, 1] by itself or by log(1 + v), and clipped to it.

    With ``dates``, a notation such as %d.%m.%Y, cells are dates, and numbers are days. ``missing`` are the words that
    stand where there is none: 0, the middle, and a one-hot row behind it.
    """

    low: float
    high: float
    log: bool = False
    missing: tuple[str, ...] = ()
    dates: str = ""

    def __call__(self, cells: Cells) -> NDArray[np.float64]:
        """[n, 1 + number of words]."""
        absent = Values(self.missing)(cells)
        none = absent.sum(1) > 0
        there = [(cell, line) for gone, cell, line in zip(none, cells, cells.lines, strict=True) if not gone]
        known = np.full(len(cells), self.low)
        limits = "FIRST..LAST" if self.dates else "log(LOW..HIGH)" if self.log else "LOW..HIGH"
        known[~none] = (partial(_days, self.dates) if self.dates else _numbers)(
            Cells(cells.name, [cell for cell, _ in there], [line for _, line in there], cells.comma),
            said=limits + "".join(f"|{escaped(each)}" for each in self.missing),
        )
        values = np.array([self.low, self.high, *np.clip(known, self.low, self.high)])
        values = np.log1p(values) if self.log else values
        low, high = values[:2]
        scaled = np.where(none, 0.0, (2 * values[2:] - low - high) / (high - low))
        return np.column_stack([scaled, absent])


@dataclass(frozen=True)
class Values:
    """One of several values that the user names: a one-hot row, or zeros where it is none of them."""

    names: tuple[str, ...]

    def __call__(self, cells: Cells) -> NDArray[np.float64]:
        """[n, number of values]."""
        places = {value: place for place, value in enumerate(self.names)}
        return _one_hot([places.get(word(cell), -1) for cell in cells], len(self.names))


@dataclass(frozen=True)
class Buckets:
    """Any values: a one-hot row of CRC-32 modulo the number of buckets, so that nobody lists the values that occur."""

    count: int

    def __call__(self, cells: Cells) -> NDArray[np.float64]:
        """[n, count]."""
        return _one_hot([zlib.crc32(word(cell).encode()) % self.count for cell in cells], self.count)


@dataclass(frozen=True)
class AsIs:
    """A number of which nothing is said: sign(v) · log(1 + |v|), the same for all data."""

    def __call__(self, cells: Cells) -> NDArray[np.float64]:
        """[n, 1]."""
        values = _numbers(cells)[:, None]
        return np.asarray(np.sign(values) * np.log1p(np.abs(values)))


Meaning: TypeAlias = Range | Values | Buckets | AsIs
_RANGE = re.compile(r"(log\()?([^()]+?)\.\.([^()]+?)(\))?")


def meaning(text: str) -> tuple[str, Meaning]:
    """``age:17..90``, ``born:1900-01-01..2020-12-31|``, ``sex:Female|Male``, ``town:#16`` or ``age``: what it means."""
    name, colon, said = text.partition(":")
    number, *missing = said.split("|")
    name, match = unescaped(name), _RANGE.fullmatch(number)
    if not colon:
        return name, AsIs()
    if said.startswith("#"):
        return name, Buckets(_whole(name, said[1:]))
    if match and (match[1] is None) == (match[4] is None):
        limits = (match[2], match[3])
        dates, *others = ([] if match[1] else notations(limits)) or [""]
        if others:
            raise InputError(
                f"the range of {name} must say whether the day or the month stands in front, got {number!r}: let it "
                f"end on {_LAST:{dates}} or {_LAST:{others[0]}}"
            )
        try:
            low, high = (_day(limit, dates) if dates else float(limit) for limit in limits)
        except ValueError:
            low = high = np.nan
        words = tuple(map(unescaped, missing))
        if not (np.isfinite([low, high]).all() and low < high and (low > -1 or not match[1])):
            raise InputError(
                f"the range of {name} must be LOW..HIGH with LOW < HIGH, got {number!r}: write {name}:0..100, or "
                f"{name}:2000-01-01..2030-12-31 or {name}:01.01.2000..31.12.2030 for dates"
            )
        if len(set(words)) < len(words) or any(".." in each for each in words):
            raise InputError(
                f"behind the range of {name} must stand what is written for a missing number, each once, got {said!r}: "
                f"write '{name}:{number}|NA', or '{name}:{number}|' where cells are blank"
            )
        return name, Range(low, high, log=bool(match[1]), missing=words, dates=dates)
    values = tuple(unescaped(value) for value in said.split("|"))
    if len(values) < 2 or len(set(values)) < len(values) or not all(values):
        raise InputError(
            f"{name} must be said to be a range, values or buckets, got {said!r}: write {name}:0..100, "
            f"'{name}:low|high' with two values or more, each once, or '{name}:#16', all of --data in quotes"
        )
    return name, Values(values)


def is_number(cell: Any) -> bool:
    """Whether a cell is a finite number, or the text of one."""
    try:
        return math.isfinite(float(cell))
    except (TypeError, ValueError, OverflowError):
        return False


# A range's ends say which one its column has: nobody can tell from 01/02/2024 which is the day.
_NOTATIONS = ("%Y-%m-%d", "%Y/%m/%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y")
_DATE = re.compile(r"([\d./-]+)(?:[T ] *(\d.*))?")
_FIRST, _LAST = datetime.date(1900, 1, 1), datetime.date(2100, 12, 31)


def notations(cells: Sequence[Any]) -> list[str]:
    """The notations in which every cell is a date, perhaps with a time: several where no day is above 12."""
    return [notation for notation in _NOTATIONS if all(_is_date(cell, notation) for cell in cells)]


def wide_range(notation: str) -> str:
    """A range of dates, for whoever has not said one."""
    return f"{_FIRST:{notation}}..{_LAST:{notation}}"


def _is_date(cell: Any, notation: str) -> bool:
    try:
        _day(cell, notation)
    except ValueError:
        return False
    return True


def _day(cell: Any, notation: str) -> float:
    """The day's number, and with a time a part of it; ValueError where the cell is no date."""
    match = _DATE.fullmatch(cell.strip()) if isinstance(cell, str) else None
    if match is None:
        raise ValueError("no date")
    time = match[2] or "00:00"
    clock = datetime.time.fromisoformat(f"0{time}" if time[1:2] == ":" else time)  # 8:05
    moment = datetime.datetime.combine(datetime.datetime.strptime(match[1], notation), clock.replace(tzinfo=None))
    return (moment - datetime.datetime.min) / datetime.timedelta(days=1)


def _days(notation: str, cells: Cells, said: str) -> NDArray[np.float64]:
    """[n]; as with numbers, a cell that is no date is an error."""
    for line, cell in zip(cells.lines, cells, strict=True):
        if not _is_date(cell, notation):
            ranges = " or ".join(map(wide_range, notations(cells)))
            also = "".join(f"|{escaped(each)}" for each in _strangers(cells, lambda each: _is_date(each, notation)))
            write = (
                f"the range as the file has its dates, as in {cells.name}:{ranges}"
                if ranges
                else f"it so, or '{escaped(cells.name)}:{said}{also}' where a date is missing"
            )
            raise InputError(
                f"the column {cells.name} must hold dates such as {_LAST:{notation}}, got {word(cell)!r} in "
                f"line {line}: write {write}"
            )
    return np.array([_day(cell, notation) for cell in cells])


_WRITTEN_OTHERWISE = re.compile(r"[-+]?[$€£]?\s?\d[\d.,' ]*\s?[%$€£]?")  # 0,5 or 1,234.5 or 12 % or $3


def numeric(cell: Any) -> bool:
    """Whether a cell is a number, perhaps written as only people read it."""
    return is_number(_with_point(cell)) or (
        _WRITTEN_OTHERWISE.fullmatch(word(cell)) is not None and not notations([cell])
    )


def is_text(cells: Sequence[Any]) -> bool:
    """Whether most cells are several words, as texts are rather than categories."""
    return 2 * sum(len(word(cell).split()) > 3 for cell in cells) > len(cells)


def _strangers(cells: Cells, fits: Callable[[Any], bool]) -> list[str]:
    """The words in a column that do not fit, in order, for one message to name them all; the first if they are many."""
    found = list(dict.fromkeys(word(cell) for cell in cells if not fits(cell)))
    return found if len(found) <= 4 else found[:1]


def _numbers(cells: Cells, said: str = "LOW..HIGH") -> NDArray[np.float64]:
    """[n]; a cell that is no finite number is an error: a guess for it would have to come from other rows."""
    name, values = cells.name, np.empty(len(cells))
    for row, cell in enumerate(cells):
        number = _with_point(cell) if cells.comma else cell
        if not is_number(number):
            also = "".join(f"|{escaped(each)}" for each in _strangers(cells, numeric))
            missing = f"write '{escaped(name)}:{said}{also}' where a number is missing"
            comma = not cells.comma and is_number(_with_point(cell))
            point = f"write it with a point and no other signs, as in 1234.5{' (or decimal=comma)' if comma else ''}"
            write = point if numeric(cell) else missing
            raise InputError(
                f"the column {name} must hold numbers, got {word(cell)!r} in line {cells.lines[row]}: {write}, "
                f"say '{name}:VALUE|VALUE' or '{name}:#16' for categories, or leave {name} out of columns=…"
            )
        values[row] = float(number)
    return values


_WITH_COMMA = re.compile(r"[-+]?(\d{1,3}(\.\d{3})+|\d+)(,\d+)?([eE][-+]?\d+)?")


def _with_point(cell: Any) -> Any:
    """1234.5 for 1.234,5; what is written in another way as it is."""
    commas = isinstance(cell, str) and _WITH_COMMA.fullmatch(cell.strip())
    return cell.replace(".", "").replace(",", ".") if commas else cell


def _one_hot(places: Sequence[int], width: int) -> NDArray[np.float64]:
    """[n, width]; −1 is a row of zeros."""
    return np.asarray(np.eye(width + 1, width)[np.array(places, dtype=np.int64)])  # the last row is zeros


def word(cell: Any) -> str:
    """A cell as text; JSON's true, null and 3.0 as they are written there."""
    return cell.strip() if isinstance(cell, str) else json.dumps(cell, ensure_ascii=False)


def _whole(name: str, text: str) -> int:
    try:
        return whole(f"buckets of {name}", int(text))
    except ValueError:
        raise InputError(f"the buckets of {name} must be a whole number, got {text!r}: write {name}:#16") from None
