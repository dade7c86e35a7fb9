"""A run's folder: settings, ledger, metrics, checkpoint, model, statement.

Receives: what a run wants kept.
Gives: files that are whole or absent: each is written beside its place and then moved there.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from clipwise.accounting import Ledger
from clipwise.types import InputError

SETTINGS, LEDGER, METRICS, CHECKPOINT = "settings.toml", "ledger.jsonl", "metrics.jsonl", "checkpoint.pt"
MODEL, STATEMENT, STATEMENT_TEXT = "model.pt", "statement.json", "statement.txt"


class RunFolder:
    """One run's folder.

    Guarantees: an existing run is never written over; a file that could not be written whole is not there.
    """

    def __init__(self, path: str | os.PathLike[str], *, resume: bool = False) -> None:
        """Create the folder, or with ``resume`` open an existing one."""
        self.path = Path(path)
        if resume and not (self.path / CHECKPOINT).is_file():
            raise InputError(f"there is no run to resume in {self.path}: expected a folder with {CHECKPOINT}")
        if not resume and self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise InputError(f"the folder {self.path} is not empty; choose another, or resume the run that is in it")
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot create the folder {self.path} ({error.strerror or error})") from error

    def ledger(self) -> Ledger:
        """The run's ledger, continued where it ended."""
        return Ledger(self.path / LEDGER)

    def write(self, name: str, content: bytes | str) -> Path:
        """Write a file, whole or not at all."""
        place, beside = self.path / name, self.path / f".{name}.partial"
        try:
            with beside.open("wb") as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(place)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise InputError(
                f"cannot write {place} ({error.strerror or error}): free space or choose another folder, and resume"
            ) from error
        return place

    def save(self, name: str, value: Any) -> Path:
        """Write tensors and plain values."""
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return self.write(name, buffer.getvalue())

    def checkpoint(self) -> dict[str, Any]:
        """The last checkpoint."""
        try:
            found: dict[str, Any] = torch.load(self.path / CHECKPOINT, weights_only=True)
        except Exception as error:
            raise InputError(f"cannot read {self.path / CHECKPOINT} ({type(error).__name__}: {error})") from error
        return found

    def metrics(self) -> list[dict[str, Any]]:
        """Every measurement so far."""
        place = self.path / METRICS
        return [json.loads(line) for line in place.read_text().splitlines()] if place.exists() else []

    def measured(self, rows: list[Mapping[str, Any]]) -> None:
        """Write all measurements; there are few, so the file is written anew."""
        self.write(METRICS, "".join(json.dumps(dict(row)) + "\n" for row in rows))
