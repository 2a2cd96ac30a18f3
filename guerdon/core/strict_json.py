"""The one writer of JSON for results, summaries, metrics and pages: what every parser reads, NaN left out."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any


def dumps(value: Any, *, indent: int | None = None) -> str:
    """`value` as JSON text. NaN and infinity, which JSON does not have, become null.

    Also takes NumPy's numbers and arrays, tuples and paths.
    """
    return json.dumps(_plain(value), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if hasattr(value, "tolist"):  # of NumPy, which is not imported for it
        return _plain(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return os.fspath(value) if isinstance(value, os.PathLike) else value
