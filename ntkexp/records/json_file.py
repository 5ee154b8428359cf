"""JSON as the run folder writes it: keys in the order given, two blanks of indentation, a newline at the end.

JSON has no infinity and no NaN: a number that is not finite becomes null.

>>> to_text({"loss": float("nan"), "step": 3})
'{\\n  "loss": null,\\n  "step": 3\\n}\\n'
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from ntkexp.mistake import Mistake, refuse_special

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

LARGEST = 1 << 30
"""Bytes of a JSON file."""


def to_text(value: Json) -> str:
    """Write a value as JSON text."""
    return json.dumps(finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def read_object(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object."""
    return as_object(read_bytes(path), path)


def read_bytes(path: Path) -> bytes:
    """What a file holds."""
    try:
        refuse_special(path, str(path), LARGEST)
        return path.read_bytes()
    except OSError as error:
        raise Mistake(f"{path} cannot be read ({error.strerror})") from error


def as_object(content: bytes, path: Path) -> dict[str, Any]:
    """The object that a file holds as JSON."""
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise Mistake(f"{path} is not JSON; the file is damaged") from error
    if not isinstance(value, dict):
        raise Mistake(f"{path} holds a JSON {type(value).__name__}, not an object; the file is damaged")
    return value


def finite(value: Json) -> Json:
    """The value with null for every number that JSON cannot write."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(item) for item in value]
    return value
