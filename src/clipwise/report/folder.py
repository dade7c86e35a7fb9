"""A run's folder: settings, ledger, metrics, diagnostics, checkpoint, model, statement.

Receives: what a run wants kept.
Gives: files that are whole or absent: each is written beside its place and then moved there. What is measured grows
line by line.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from clipwise.accounting import Ledger
from clipwise.plain import as_json, reason, with_nan
from clipwise.types import InputError

SETTINGS, LEDGER, METRICS, CHECKPOINT = "settings.toml", "ledger.jsonl", "metrics.jsonl", "checkpoint.pt"
MODEL, STATEMENT, STATEMENT_TEXT = "model.pt", "statement.json", "statement.txt"
DIAGNOSTICS, CALIBRATION, AUDIT = "diagnostics.jsonl", "calibration.json", "audit.json"  # each only where it was made
WITHOUT = "no-privacy.jsonl"  # beside the runs of a comparison: what was measured of the network without privacy
HIDDEN = "private-state.pt"  # not released by any step: it must not leave the machine, and goes when the run ends

FREE_SPACE = "free space or choose another folder"
AND_RESUME = f"{FREE_SPACE}, and resume"


def refuse_unfit(folder: Path) -> None:
    """Refuse a folder that is not empty, since no run is written over another, or that cannot be written to.

    *Guarantees*: what it creates to see that is gone again.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file, expected a folder that is new or empty: choose another")
    if folder.exists() and any(folder.iterdir()):
        begun = any((folder / name).is_file() for name in (SETTINGS, CHECKPOINT))  # one made in Python has no settings
        holds = ", or resume what was begun in it" if begun else ""
        if (folder / STATEMENT).is_file():
            holds = f"; the run in it is finished, and its model is {MODEL}"
        raise InputError(f"the folder {folder} is not empty: choose another{holds}")
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"cannot write into the folder {folder} ({error.strerror or error}): choose another"
        ) from error
    finally:
        for place in made:
            with suppress(OSError):
                place.rmdir()


class RunFolder:
    """One run's folder.

    Guarantees: an existing run is never written over; a file that could not be written whole is not there.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume: bool = False) -> None:
        """Create the folder, or with ``resume`` open an existing one."""
        self.path = Path(path)
        if resume and not (self.path / CHECKPOINT).is_file():
            if (self.path / STATEMENT).is_file():
                raise InputError(f"the run in {self.path} is finished: load its {MODEL}, or write another folder")
            raise InputError(
                f"there is no run to resume in {self.path}: expected a folder with {CHECKPOINT}; to begin a run or go "
                f"on with it by the same line, write resume=os.path.exists({str(self.path / CHECKPOINT)!r})"
            )
        if not resume:
            refuse_unfit(self.path)
        self.path.mkdir(parents=True, exist_ok=True)

    def ledger(self) -> Ledger:
        """The run's ledger, continued where it ended."""
        return Ledger(self.path / LEDGER)

    def write(self, name: str, content: bytes | str) -> Path:
        """Write a file, whole or not at all."""
        return write(self.path / name, content, AND_RESUME)

    def save(self, name: str, value: Any) -> Path:
        """Write tensors and plain values."""
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return self.write(name, buffer.getvalue())

    def load(self, name: str) -> dict[str, Any]:
        """Read what ``save`` wrote."""
        return tensors_in(self.path / name)

    def metrics(self) -> list[dict[str, Any]]:
        """Every measurement so far."""
        return measurements(self.path / METRICS)

    def measured(self, row: Mapping[str, Any]) -> None:
        """Add one measurement."""
        self._append(METRICS, row)

    def diagnostics(self) -> list[dict[str, Any]]:
        """Every look at gradients so far."""
        return lines(self.path / DIAGNOSTICS)

    def diagnosed(self, row: Mapping[str, Any]) -> None:
        """Add one look at gradients."""
        self._append(DIAGNOSTICS, row)

    def forget_after(self, step: int) -> None:
        """Leave out what was seen after this step: the run goes on from there."""
        for name in (METRICS, DIAGNOSTICS):
            if (self.path / name).exists():
                kept = [row for row in lines(self.path / name) if row["step"] <= step]
                self.write(name, "".join(as_json(row, indent=None) for row in kept))

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        place = self.path / name
        try:
            with place.open("a", encoding="utf-8") as file:
                file.write(as_json(row, indent=None))
        except OSError as error:
            raise _unwritten(place, error, AND_RESUME) from error


def tensors_in(place: Path) -> dict[str, Any]:
    """Tensors and plain values from a file, to the CPU: the machine that reads it may have no GPU."""
    try:
        found: dict[str, Any] = torch.load(place, weights_only=True, map_location="cpu")
    except Exception as error:
        raise InputError(f"cannot read {place} ({reason(error)})") from error
    return found


def text_in(place: Path) -> str:
    """What ``write`` wrote, whatever this machine's own encoding is; nothing where there is no such file."""
    return place.read_text(encoding="utf-8") if place.is_file() else ""


def lines(place: Path) -> list[dict[str, Any]]:
    """What a file of one JSON object per line holds; nothing where there is no such file."""
    try:  # without the last line, within which a machine may have stopped
        found = [json.loads(line) for line in text_in(place).split("\n")[:-1]]
        if not all(isinstance(row, dict) for row in found):
            raise ValueError("expected {…} in every line")
    except ValueError as error:
        raise InputError(f"{place} is damaged ({error}): take out the lines that clipwise did not write") from error
    return found


def measurements(place: Path) -> list[dict[str, float]]:
    """The rows of a file of measurements: all numbers."""
    return [with_nan(row) for row in lines(place)]


def digest(file: Path) -> str:
    """SHA-256 of a file, by which a statement names the model that it speaks of."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def write(place: Path, content: bytes | str, otherwise: str = FREE_SPACE) -> Path:
    """Write a file, whole or not at all; ``otherwise`` is what to do where it cannot be written."""
    beside = place.parent / f".{place.name}.partial"
    try:
        with beside.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(place)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise _unwritten(place, error, otherwise) from error
    return place


def _unwritten(place: Path, error: OSError, otherwise: str) -> InputError:
    return InputError(f"cannot write {place} ({error.strerror or error}): {otherwise}")
