"""What the text of ``--data`` says, and the files that a folder must hold.

Receives: a text such as "cifar10:DIR?train=2000" or "csv:PATH?label=quality:0..10".
Gives: Source, with options read by type; folder_with, which finds the files or says what is missing and where it is.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from clipwise.types import InputError, one_of, whole


@dataclass(frozen=True)
class Source:
    """The parts of ``name:path?option=value&option=value``."""

    text: str
    name: str
    path: Path
    options: Mapping[str, str]  # as they were written: %26 is still no &

    def word(self, key: str, default: str, known: Sequence[str]) -> str:
        """An option that is one of several words."""
        return one_of(f"{key} in {self.text!r},", self.options.get(key, default), known)

    def number(self, key: str, default: int, *, least: int = 1) -> int:
        """An option that is a whole number."""
        given = self.options.get(key, str(default))
        try:
            return whole(key, int(given), least=least)
        except ValueError:
            raise InputError(
                f"{key} must be a whole number of at least {least}, got {given!r}: write {key}={max(least, default)}"
            ) from None

    def with_options(self, **changed: str | None) -> str:
        """The text again with these options changed, or without those that are None, in quotes for a shell."""
        given = {**self.options, **changed}.items()
        options = "&".join(f"{key}={value}" for key, value in given if value is not None)
        return shlex.quote(f"{self.text.partition('?')[0]}?{options}")

    def listed(self, key: str) -> list[str]:
        """An option that is a list, separated by commas; its items may still hold %2C for a comma of their own."""
        given = self.options.get(key, "")
        return [item.strip() for item in given.split(",")] if given else []


def parsed(text: str) -> Source:
    """The text, taken apart; in values %26 stands for &, %2C for a comma, and so on."""
    head, mark, tail = text.partition("?")
    name, _, path = head.partition(":")
    options: dict[str, str] = {}
    for piece in tail.split("&") if mark else ():
        key, equals, value = piece.partition("=")
        if not (key and equals and value):
            raise InputError(f"data options must be key=value, got {piece!r} in {text!r}: write ?key=value&key=value")
        if key in options:
            raise InputError(f"data options must be given once, got {key} twice in {text!r}: leave one out")
        options[key] = value
    return Source(text, name, Path(path).expanduser(), options)


def unescaped(text: str) -> str:
    """An item of a value with its %-signs resolved."""
    return unquote(text).strip()


def escaped(item: str) -> str:
    """The item as it is written in a value."""
    return re.sub("[%&,:|]", lambda sign: f"%{ord(sign[0]):02X}", item)


@dataclass(frozen=True)
class Layout:
    """Files that belong together, and the folders, relative to the one that is named, in which they are looked for."""

    files: tuple[str, ...]
    places: tuple[str, ...]


def folder_with(source: Source, layouts: Sequence[Layout], home: str) -> tuple[Layout, Path]:
    """The first folder that holds all files of a layout; a file may also have .gz at its end, or be a folder."""
    root = source.path
    if not root.is_dir():
        reason = "is a file" if root.exists() else "does not exist"
        raise InputError(
            f"{source.name} needs a folder with {_either(layouts)}, but {root.absolute()} {reason}: {_get(home)}"
        )
    missing = {
        (layout, root / place): [file for file in layout.files if there(root / place / file) is None]
        for layout in layouts
        for place in layout.places
    }
    for found, lacking in missing.items():
        if not lacking:
            return found
    (layout, nearest), lacking = min(missing.items(), key=lambda item: len(item[1]) / len(item[0][0].files))
    if len(lacking) < len(layout.files):
        raise InputError(f"{source.name} lacks {', '.join(lacking)} in {nearest.absolute()}: {_get(home)}")
    places = sorted({place for layout in layouts for place in layout.places if place})
    raise InputError(
        f"{source.name} needs {_either(layouts)}, but {root.absolute()} has none of them, nor has a folder "
        f"{' or '.join(places)} in it: {_get(home)}"
    )


def there(path: Path) -> Path | None:
    """The path, or the same with .gz, whichever exists."""
    zipped = path.with_name(path.name + ".gz")
    return path if path.exists() else zipped if zipped.exists() else None


def file_of(source: Source, path: Path) -> Path:
    """The path, if it is a file; the error says what was found in its place."""
    if not path.is_file():
        reason = "is a folder" if path.is_dir() else f"does not exist (looked in {path.parent.absolute()})"
        raise InputError(f"{source.name} needs a file, but {str(path)!r} {reason}: write {source.name}:PATH")
    return path


def _either(layouts: Sequence[Layout]) -> str:
    shown = dict.fromkeys(layout.files for layout in layouts)
    return " or ".join(", ".join(files if len(files) <= 4 else (*files[:2], "…", files[-1])) for files in shown)


def _get(home: str) -> str:
    return f"get them from {home}"
