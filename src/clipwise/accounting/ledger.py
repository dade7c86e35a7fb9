"""The ledger: every release of a run, in memory or in a file that only grows.

Receives: events, one per release, before the release is used.
Gives: how many there were, what they cost together, and a file of JSON lines that a resumed run continues.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from clipwise.accounting.events import cost, spent
from clipwise.types import BlockGaussian, Event, Gaussian, InputError, MemoryGaussian, PoissonGaussian, Refused, whole

# how a line calls each kind of release
KINDS: dict[str, type[Event]] = {
    "poisson_gaussian": PoissonGaussian,
    "gaussian": Gaussian,
    "memory_gaussian": MemoryGaussian,
    "block_gaussian": BlockGaussian,
}


class Ledger:
    """An append-only record of releases.

    *Guarantees*: it never counts fewer releases than were used, if ``record`` is called before each is used: a line is
    on file before ``record`` returns, and ``record`` raises where the line could not be written.
    *Edge cases*: opening a file reads it and changes nothing, so a finished run can be read on a read-only disk.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        """An empty ledger in memory, or the one in ``path``, which is created by the first release if it is missing."""
        self._path = None if path is None else Path(path)
        self._file: FileIO | None = None
        self._runs: list[tuple[Event, int]] = []
        self._size = 0  # bytes of the file that were read or written by this ledger
        self._repair = b""  # what makes the file's last line whole, written before the next one
        if self._path is not None:
            self._read(self._path)

    def __repr__(self) -> str:
        """How many releases it holds, and where."""
        return f"<ledger of {self.releases} releases{'' if self._path is None else f' in {self._path}'}>"

    @property
    def path(self) -> Path | None:
        """Its file, if it has one."""
        return self._path

    @property
    def entries(self) -> list[tuple[Event, int]]:
        """The releases in their order, equal neighbours as one entry with their count."""
        return list(self._runs)

    @property
    def releases(self) -> int:
        """How many releases there were."""
        return sum(count for _, count in self._runs)

    def record(self, event: Event, *, sync: bool = False) -> None:
        """Count one release; call it before the release is used.

        *Guarantees*: afterwards its line survives the end of this process; with ``sync`` (write it wherever a
        checkpoint follows) it and all earlier ones also survive a power failure. After an error nothing was counted.
        """
        self._record(event, 1, sync)

    def extend(self, entries: Iterable[tuple[Event, int]]) -> None:
        """Count what another ledger holds, such as an earlier use of the same data."""
        for event, count in entries:
            if whole("count", count, least=0):
                self._record(event, count, sync=False)

    def sync(self) -> None:
        """Make what was recorded survive a power failure; call it before a checkpoint is written."""
        if self._file is not None:
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                raise InputError(f"cannot write the ledger {self._path} ({error.strerror or error})") from error

    def epsilon(self, delta: float, accountant: str = "pld", *, rows_per_person: int = 1) -> float:
        """An upper bound on the ε of everything released so far; 0 when there was nothing."""
        return spent(self._runs, delta, accountant, rows_per_person=rows_per_person)

    def close(self) -> None:
        """Let go of the file; a later ``record`` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        """The ledger itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of the file."""
        self.close()

    def _record(self, event: Event, count: int, sync: bool) -> None:
        cost(event)
        numbers = {name: float(v) for name, v in vars(event).items() if not isinstance(v, (bool, str))}
        event = replace(event, **numbers)  # type: ignore[arg-type]  # 2 and 2.0 are one event, written in one way
        # File first: whoever is stopped between the two lines has counted a release too many, never one too few.
        self._write(_line(event) * count, sync)
        self._count(event, count)

    def _count(self, event: Event, count: int = 1) -> None:
        if self._runs and self._runs[-1][0] == event:
            self._runs[-1] = (event, self._runs[-1][1] + count)
        else:
            self._runs.append((event, count))

    def _write(self, lines: bytes, sync: bool) -> None:
        """Append lines, all of them whole or none."""
        if self._path is None:
            return
        text = self._repair + lines
        try:
            if self._file is None:
                # Unbuffered: a buffer would keep a line that failed and write it later, uncounted.
                self._file = FileIO(self._path, "ab")
            descriptor = self._file.fileno()
            if os.fstat(descriptor).st_size != self._size:
                raise InputError(
                    f"ledger {self._path} changed since it was read, so something else writes to it: "
                    "give each run a folder of its own"
                )
            try:
                if self._file.write(text) != len(text):  # a full disk takes part of a line and says so only next time
                    raise OSError("only part of a line fitted")
                if sync:
                    os.fsync(descriptor)
            except OSError:
                # What is left if this fails too is a torn line, which counts as a release: too many, never too few.
                with suppress(OSError):
                    os.ftruncate(descriptor, self._size)
                raise
        except OSError as error:
            reason = error.strerror or error
            raise InputError(
                f"cannot write the ledger {self._path} ({reason}), so the release was not made: "
                "free space or choose another folder, and resume"
            ) from error
        self._size += len(text)
        self._repair = b""

    def _read(self, path: Path) -> None:
        """Count what the file holds.

        A file that does not end in a newline was cut off while its last line was written. ``record`` had not returned,
        so that release was not used, unless power failed and took later lines along; hence it is counted, as
        the event of the line before it. Where what is left of it contradicts that line, or there is none, nobody
        can tell what it would have cost, and guessing might count too little: that is an error. A torn line of a block
        is taken to begin one, unless it says otherwise.
        """
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            reason = error.strerror or error
            raise InputError(f"cannot read the ledger {path} ({reason}): give the ledger of a run") from error
        *whole_lines, torn = content.split(b"\n")
        previous, event = b"", None
        for number, line in enumerate(whole_lines, start=1):
            if line != previous or event is None:  # equal lines are parsed once: a long run reads fast
                previous, event = line, _parse(line, f"line {number} of ledger {path}")
            self._count(event)
        if torn:
            where = f"line {len(whole_lines) + 1} of ledger {path}"
            likely = [(e, line) for e in _likely(event) if (line := _line(e)).startswith(torn)]
            if likely:
                event, line = likely[0]
                rest = line[len(torn) : -1]
            elif torn.endswith(b"}"):  # only its newline is missing
                event, rest = _parse(torn, where), b""
            else:
                raise InputError(
                    f"{where} was cut off and cannot be the same as the line before it, so its cost is unknown: "
                    "complete it by hand with the event that the run would have written"
                )
            self._repair = rest + b"\n"
            self._count(event)
        self._size = len(content)


def totals(entries: Iterable[tuple[Event, int]]) -> Counter[Event]:
    """How often each event is there, whatever the order."""
    found: Counter[Event] = Counter()
    for event, count in entries:
        found[event] += count
    return found


def listed(entries: Iterable[tuple[Event, int]]) -> list[dict[str, Any]]:
    """Entries as plain values: the kind, its numbers and the count."""
    return [{**_fields(event), "count": count} for event, count in entries]


def counts(entries: Iterable[Mapping[str, Any]]) -> Counter[str]:
    """How many releases of each kind there are among such plain values, which may have been read from a file."""
    found: Counter[str] = Counter()
    for entry in entries:
        kind = {name: value for name, value in entry.items() if name != "count"}
        found[json.dumps(kind, sort_keys=True)] += entry["count"]
    return found


def _likely(previous: Event | None) -> list[Event]:
    """What a torn line may have been, the dearest first."""
    if isinstance(previous, BlockGaussian):
        return [replace(previous, begins=True), replace(previous, begins=False)]
    return [] if previous is None else [previous]


def _fields(event: Event) -> dict[str, Any]:
    return {"event": _NAMES[type(event)], **vars(event)}


def _line(event: Event) -> bytes:
    return json.dumps(_fields(event)).encode() + b"\n"


def _parse(line: bytes, where: str) -> Event:
    """The event of one line; whatever is not exactly that is an error that says where."""
    try:
        fields = json.loads(line)
        kind = fields.pop("event")
        if kind in KINDS:
            event = KINDS[kind](**fields)
            cost(event)
            return event
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{where} is not a release ({error}): it must look like {_EXAMPLE}") from error
    raise Refused(
        f"{where} is a release of unknown kind {kind!r}: there is no proof for it; known are {', '.join(KINDS)}"
    )


_NAMES = {kind: name for name, kind in KINDS.items()}
_EXAMPLE = _line(PoissonGaussian(1.0, 0.01)).decode().strip()
