"""Curves for TensorBoard, beside the run's own files.

Receives: measurements and looks at gradients, while a run goes on.
Gives: Board, which writes event files into the run's folder; a clear error where TensorBoard is not installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clipwise.report.runs import blind, own
from clipwise.types import InputError

TENSORBOARD = "tensorboard"  # the folder within the run's
WHOLE = ("direction_error", "magnitude", "cosine", "clipped", "signal_to_noise", "alignment")


def writer() -> Any:
    """TensorBoard's own writer, or what to install."""
    try:
        return importlib.import_module("torch.utils.tensorboard").SummaryWriter
    except ImportError as error:
        raise InputError(
            f"TensorBoard logging needs the package tensorboard ({error}): write pip install tensorboard"
        ) from error


class Board:
    """The run's curves; whatever looks at gradients stands under ``not private``."""

    def __init__(self, folder: Path) -> None:
        self._writer = writer()(str(folder / TENSORBOARD))

    def measured(self, row: Mapping[str, float]) -> None:
        """One measurement: each of its numbers is a curve over steps."""
        self._scalars("measured", row, int(row["step"]))

    def looked(self, row: Mapping[str, Any]) -> None:
        """One look at gradients: what the run's own method does, and how norms spread; nothing if none is finite."""
        if blind(row):
            return
        found = own(row)
        known = {name: found[name] for name in WHOLE} | {"sampling_noise": row["spread"]["sampling_noise"]}
        known |= {f"norm_{level}": value for level, value in row["spread"]["quantiles"].items()}
        self._scalars("not private", known, int(row["step"]))

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()

    def _scalars(self, group: str, values: Mapping[str, float | None], step: int) -> None:
        for name, value in values.items():
            if value is not None and name != "step":
                self._writer.add_scalar(f"{group}/{name}", value, step)
        self._writer.flush()
