"""JSON for other programs, all of it by one function: it has no NaN and no infinity, so these are null.

Receives: numbers, texts, lists and mappings.
Gives: plain, the same without what JSON does not have; as_json, its text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """The value without NaN and infinity."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_json(value: Any, indent: int | None = 2) -> str:
    """The value as JSON, with a line end; on one line where ``indent`` is None."""
    return json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
