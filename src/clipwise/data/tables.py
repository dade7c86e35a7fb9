"""Tables: csv and jsonl files with columns of numbers, of categories or of text.

Receives: a file and what the user says about its columns (``clipwise.data.columns``).
Gives: Splits; a row's numbers come from that row and from what the user said, never from other rows.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from clipwise.data.columns import (
    AsIs,
    Cells,
    Meaning,
    Range,
    Values,
    is_number,
    is_text,
    meaning,
    notations,
    numeric,
    wide_range,
    word,
)
from clipwise.data.datasets import Arrays
from clipwise.data.source import Source, escaped, file_of, unescaped
from clipwise.data.splits import Splits, divided
from clipwise.data.text import sizes, tokenised
from clipwise.types import InputError, nearest, warn

Table: TypeAlias = "dict[str, Cells]"  # by the column's name
SEPARATORS = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|", "space": " "}
PACKED = {b"\x1f\x8b": "a gzip file: unpack it", b"PK": "a zip or Excel file: unpack it, or save it as csv"}

# ------------------------------------------------------------------------------------------------------------- reading


def splits(source: Source) -> Splits:
    """A csv, tsv or jsonl file, and the one with its test part where ``test_file`` names it."""
    files = [source.path]
    if "test_file" in source.options:
        if "person" in source.options:
            raise InputError(
                "data must have either person, which parts one file, or test_file, got both: leave one out, and with "
                "test_file keep all rows of a person in one file"
            )
        files.append(Path(unescaped(source.options["test_file"])).expanduser())
    return encoded(source, [read(source, file) for file in files])


def read(source: Source, path: Path, without: str | None = None) -> Table:
    """The columns of a file that is written as the source says.

    ``without`` is a column that may be missing though the source names it; such a file may also have a line of names.
    """
    comma = source.word("decimal", "point", ("point", "comma")) == "comma"
    try:
        file = file_of(source, path)
        return _jsonl(file, comma) if source.name == "jsonl" else _csv(source, without, file, comma)
    except (OSError, UnicodeError, csv.Error) as error:
        encoded_otherwise = isinstance(error, UnicodeError)
        packed = encoded_otherwise and next(filter(path.read_bytes().startswith, PACKED), None)
        excel = "save it as 'CSV UTF-8', as Excel calls it, or by iconv -f WINDOWS-1252 -t UTF-8"
        write = excel if encoded_otherwise else "write it anew"
        got = PACKED[packed] if packed else f"{error}: {write}"
        raise InputError(f"{path} must be a text file in UTF-8 with rows, got {got}") from error


def _text_of(path: Path) -> str:
    """In UTF-8, or in UTF-16 behind its mark, as Excel saves "Unicode Text" and PowerShell writes files."""
    with path.open("rb") as file:
        marked = file.read(2) in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    text = path.read_text(encoding="utf-16" if marked else "utf-8-sig")
    if "\0" in text:
        raise InputError(
            f"{path} must be a text file in UTF-8, got bytes that are zero, as in UTF-16 without its mark: save it as "
            "'CSV UTF-8', as Excel calls it, or by iconv -f UTF-16LE -t UTF-8"
        )
    return text


def _csv(source: Source, without: str | None, path: Path, comma: bool) -> Table:
    """``separator`` and ``names`` (of the columns) say where the file has others, or no first line."""
    names = [unescaped(name) for name in source.listed("names")]
    tabs = path.suffix == ".tsv"
    given = source.options.get("separator", "tab" if tabs else "comma")
    separator = SEPARATORS.get(given, unescaped(given))
    if len(separator) != 1:
        raise InputError(f"separator must be one sign or {', '.join(SEPARATORS)}, got {given!r}: write separator=;")
    return read_csv(path, _text_of(path), names, separator, quoted=not tabs, comma=comma, without=without)


def read_csv(
    path: Path,
    text: str,
    names: Sequence[str],
    separator: str,
    *,
    quoted: bool,
    comma: bool = False,
    without: str | None = None,
) -> Table:
    """The columns of a text with one row per line, below a line of their names where ``names`` does not say them."""
    quoting: Any = csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE  # tab-separated files do not quote
    # strict: a quote that nobody closes would take all lines up to the next one into its cell
    form: dict[str, Any] = {"delimiter": separator, "quoting": quoting, "skipinitialspace": True, "strict": True}
    lines = csv.reader(io.StringIO(text, newline=""), **form)
    rows: list[tuple[int, list[str]]] = []
    try:
        rows += ((lines.line_num, [cell.strip() for cell in cells]) for cells in lines if cells)
    except csv.Error as error:
        begins = 1 + (rows[-1][0] if rows else 0)
        raise InputError(
            f'{path} must have quotes around a whole cell and doubled within it, as in "5"" wide", got others between '
            f"lines {begins} and {lines.line_num} ({error}): mend them"
        ) from error
    if without is not None and rows and len({*rows[0][1]} & {*names}) == len(rows[0][1]):
        names = []  # they stand in the file too, perhaps in another order
    elif without is not None and rows and len(rows[0][1]) == len(names) - 1:
        names = [name for name in names if name != without]
    given = bool(names)
    if not given:
        names, rows = (rows[0][1] if rows else []), rows[1:]
    if not rows:
        raise InputError(
            f"{path} must have a line of names and rows below it, got no rows: write names=… if it has none"
        )
    values = not given and _like_values(names)
    if len(set(names)) < len(names):
        got = _HEADLESS if values else f"got {_shown(names)}: write names=…"
        raise InputError(f"{path} must have a different name for each column, {got}")
    for line, cells in rows:
        if len(cells) != len(names):
            which = "of its first line" if values else _shown(names)
            write = other_separator(names) or "separator=… or names=…"
            raise InputError(
                f"{path} must have the {len(names)} columns {which} in each row, got {len(cells)} in line "
                f"{line}: mend it, or write {write}"
            )
    numbers = [line for line, _ in rows]
    columns = zip(*(cells for _, cells in rows), strict=True)
    return {name: Cells(name, column, numbers, comma) for name, column in zip(names, columns, strict=True)}


def _jsonl(path: Path, comma: bool) -> Table:
    table: Table = {}
    lines: list[int] = []
    for line, text in enumerate(_text_of(path).split("\n"), start=1):
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
            table.setdefault(key, Cells(key, [], lines, comma)).append(value)
    if not table:
        raise InputError(f"{path} must have one JSON object per line, got no rows: add some")
    return table


# ------------------------------------------------------------------------------------------------------------ encoding


@dataclass(frozen=True)
class Said:
    """What the source's options say: the label's column and what it means, and the columns that are inputs."""

    name: str
    label: Range | Values
    text: tuple[str, ...]
    columns: Mapping[str, Meaning]  # empty where there is text


def encoded(source: Source, tables: Sequence[Table]) -> Splits:
    """A training part, and a test part if there is one, as the source's options say what their columns mean."""
    said = said_of(source, tables[0])
    parts: list[tuple[Tensor, Tensor]] = []
    for table in tables:
        try:
            y = _labels(said.label, _column(source, table, said.name))  # first: it tells a file without names
            _refuse_words(source, table, said.columns)
            parts.append((inputs(source, said, table), y))
        except InputError as error:
            if not parts:
                raise
            raise InputError(f"in the test part, {error}") from error  # its lines are another file's
    train, test = map(Arrays, parts) if len(parts) == 2 else _divided(source, tables[0], *parts[0])
    _warn_of_bare(said.columns)
    _warn_of_idle(said.columns, tables[0])
    label = said.label
    classes, unit = (len(label.names), 1.0) if isinstance(label, Values) else (1, (label.high - label.low) / 2)
    return Splits(
        source.text,
        train,
        test,
        classes,
        tuple(parts[0][0].shape[1:]),
        task="classes" if isinstance(label, Values) else "regression",
        vocabulary=sizes(source)[0] if said.text else None,
        unit=unit,
    )


def _divided(source: Source, table: Table, x: Tensor, y: Tensor) -> tuple[Arrays, Arrays]:
    """One row in five to the test, or where a column says whose a row is, one person in five with all of theirs.

    On which side somebody is depends on their own cell alone, so that adding a person moves nobody else.
    """
    if "person" not in source.options:
        return divided(source.name, x, y)
    whose = _column(source, table, unescaped(source.options["person"]))
    test = torch.tensor([zlib.crc32(word(cell).encode("utf-8", "replace")) % 5 == 0 for cell in whose])
    if test.all() or not test.any():
        raise InputError(
            f"{source.name} must have rows of so many persons that some are tested on, got too few in "
            f"{source.options['person']}: write '?test_file=PATH' with rows of others"
        )
    return Arrays((x[~test], y[~test])), Arrays((x[test], y[test]))


def inputs(source: Source, said: Said, table: Table) -> Tensor:
    """[n, …]: tokens or numbers, every row by itself."""
    found = [_column(source, table, column) for column in said.text or said.columns]
    if said.text:
        return tokenised(zip(*([word(cell) for cell in cells] for cells in found), strict=True), *sizes(source))
    columns = [as_said(cells) for as_said, cells in zip(said.columns.values(), found, strict=True)]
    return torch.from_numpy(np.concatenate(columns, 1).astype(np.float32))


def said_of(source: Source, table: Table) -> Said:
    """What the options say; where they name no columns, all of the table's but the label are inputs."""
    if "label" not in source.options:
        if headless(source, table):
            raise InputError(f"{source.name} needs to know the label's column: {_HEADLESS}")
        raise InputError(
            f"{source.name} needs to know the label's column, one of {_shown(table)}: write "
            f"'{source.name}:PATH?label=NAME:low|high' for classes, or ?label=NAME:0..10 for numbers"
        )
    name, label = meaning(source.options["label"])
    # an error has one unit, of numbers alone
    several = isinstance(label, Range) and (label.log or label.missing or label.dates)
    if not isinstance(label, Range | Values) or several:
        raise InputError(
            f"the label {name} must be said to be classes or a range, got {source.options['label']!r}: write "
            f"'label={name}:low|high' or label={name}:0..10, all of --data in quotes"
        )
    text = tuple(map(unescaped, source.listed("text")))
    if text and "columns" in source.options:
        raise InputError("data must have either text or columns, got both: leave one out")
    columns = dict(map(meaning, source.listed("columns")))
    if not text and not columns:
        apart = {
            name,
            unescaped(source.options.get("person", name)),
        }  # a number by which somebody is known says nothing
        columns = {column: AsIs() for column in table if column not in apart}
    if name in (*text, *columns):
        raise InputError(
            f"the label {name} must not be among the inputs, got it in text or columns: leave it out there"
        )
    return Said(name, label, text, columns)


def _warn_of_bare(columns: Mapping[str, Meaning]) -> None:
    bare = [column for column, said in columns.items() if said == AsIs()]
    if bare:
        warn(
            f"nothing is said about the range of {_shown(bare)}: v enters as sign(v)·log(1 + |v|); where you know the "
            f"range, write 'columns={escaped(bare[0])}:LOW..HIGH,…'"
        )


def _warn_of_idle(columns: Mapping[str, Meaning], table: Table) -> None:
    """Warn of columns of which what was said fits no cell, such as F|M where the file has f and m."""
    for column, said in columns.items():
        cells = table[column]
        if isinstance(said, Values) and not said(cells).any():
            why = f"no cell is one of {_shown(said.names)}: write its values as the file does, in the same case"
        elif isinstance(said, Range) and (ends := _ends(said, cells)) and len(ends) == 1 and abs(ends.pop()) == 1:
            why = "every number is at one end of its range or beyond it: write a range that it lies in"
        else:
            continue
        warn(f"the column {column} tells nothing, since {why}")


def _ends(said: Range, cells: Cells) -> set[float]:
    """The numbers that a column becomes, where they are not missing."""
    found = said(cells)
    return set(found[found[:, 1:].sum(1) == 0, 0].tolist())


def _refuse_words(source: Source, table: Table, columns: Mapping[str, Meaning]) -> None:
    """Refuse columns of words of which nothing was said; the error is the line to write."""
    bare = {name: _column(source, table, name) for name, said in columns.items() if said == AsIs()}
    texts = [name for name, cells in bare.items() if is_text(cells)]
    if texts:
        raise InputError(
            f"the column {texts[0]} must hold numbers, got texts: write "
            f"{source.with_options(columns=None, text=','.join(map(escaped, texts)))} to train on words alone, say "
            f"'{escaped(texts[0])}:#16' if they are categories, or name the other columns in columns=…"
        )
    words = [name for name, cells in bare.items() if not any(map(numeric, cells))]
    if words:
        items = source.listed("columns") or [escaped(name) for name in columns]
        first = bare[words[0]]
        meant = {escaped(name): (_dates(bare[name]) or ["#16"])[0] for name in words}
        items = [f"{item}:{meant[name]}" if (name := escaped(unescaped(item))) in meant else item for item in items]
        how = (
            "with the first and the last day that you know it can hold"
            + "".join(f" (or {escaped(words[0])}:{other} if its months come first)" for other in _dates(first)[1:])
            if _dates(first)
            else f"for 16 buckets of its values, or '{escaped(words[0])}:VALUE|VALUE' with those that you know it has"
        )
        raise InputError(
            f"the column {words[0]} must hold numbers, got {word(first[0])!r} in line {first.lines[0]}: write "
            f"{source.with_options(columns=','.join(items))} {how}; leave out what says nothing, such as a name or a "
            "number by which a row is known"
        )


def _dates(cells: Cells) -> list[str]:
    """What to write for a column of dates, taken from no cell of it; nothing for another column."""
    there = [cell for cell in cells if word(cell) != ""]
    blank = "|" if len(there) < len(cells) else ""
    return [f"{wide_range(notation)}{blank}" for notation in notations(there)] if there else []


def _labels(label: Range | Values, cells: Cells) -> Tensor:
    """[n]: places in the list of classes, or numbers in [−1, 1]."""
    if isinstance(label, Range):
        for line, cell in zip(cells.lines, cells, strict=True):
            if not numeric(cell):  # a number that is only written otherwise has a message of its own
                got = f"got {word(cell)!r} in line {line}"
                raise InputError(f"the label {cells.name} must be a number, {got}: mend the row, or remove it")
        return torch.from_numpy(label(cells)[:, 0].astype(np.float32))
    places = {value: place for place, value in enumerate(label.names)}
    for line, cell in zip(cells.lines, cells, strict=True):
        if word(cell) not in places:
            raise InputError(
                f"the label {cells.name} must be one of {', '.join(label.names)}, got {word(cell)!r} in line {line}: "
                "write classes as the file does; if this is one more, name it too, "
                f"'label={cells.name}:{'|'.join(label.names)}|…', or remove the row"
            )
    return torch.tensor([places[word(cell)] for cell in cells])


def _column(source: Source, table: Table, column: str) -> Cells:
    if column not in table:
        separator = other_separator(table)
        if headless(source, table) and not separator:
            raise InputError(f"{source.name} has no column {column!r}: {_HEADLESS}")
        hint = f"write {separator}" if separator else nearest(column, table)
        if "|" in source.options.get("columns", "") and column in source.listed("columns"):
            hint += "; a comma within a value is written %2C"
        raise InputError(f"{source.name} has no column {column!r}: {hint}")
    return table[column]


# What is in a line without names may be private: it is not printed.
_HEADLESS = "the first line seems to hold values, not names; write names=a,b,… (one for each column), then label=a:…"


def headless(source: Source, table: Table) -> bool:
    """Whether a file without a line of names was taken for one that has it."""
    return source.name == "csv" and "names" not in source.options and _like_values(table)


def _like_values(names: Iterable[str]) -> bool:
    """Whether there is a number among them, also where they were not separated."""
    return any(is_number(piece) for name in names for piece in re.split("[;\t|]", name))


def other_separator(names: Iterable[str]) -> str | None:
    """What to write where the first line seems to be separated by another sign."""
    first, *more = names
    return next((f"separator={name}" for name, sign in SEPARATORS.items() if not more and sign in first), None)


def _shown(names: Sequence[str] | Mapping[str, Any]) -> str:
    """A few of them, with the last one, which is often the label."""
    cut = [name if len(name) <= 40 else f"{name[:40]}…" for name in names]
    return ", ".join(cut if len(cut) <= 8 else [*cut[:7], "…", cut[-1]])
