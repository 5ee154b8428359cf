"""Why pydantic refused a component, in one line: the key, the value, what is allowed, the nearest spelling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from ntkexp.component import Component
from ntkexp.config.as_text import spelled
from ntkexp.config.field_types import kinds, takes
from ntkexp.mistake import Mistake, nearest


def refusal(error: ValidationError, kind: type[Component], key: str, given: Mapping[str, Any]) -> Mistake:
    """The first thing that is wrong with a component."""
    first = error.errors()[0]
    said = str(first.get("ctx", {}).get("error", "")) if first["type"] == "value_error" else ""
    if not first["loc"]:
        return Mistake(said or f"{key}: {first['msg']}".removeprefix(": "))  # a component's own words name its keys
    name = str(first["loc"][0])
    whole = f"{key}.{name}".removeprefix(".")
    if first["type"] == "extra_forbidden":
        return stranger(whole, kind, key)
    allowed = takes(kind.model_fields[name])
    if first["type"] == "missing":
        return Mistake(f"{whole} is missing; it takes {allowed}")
    return Mistake(f"{whole}={spelled(given.get(name))}: {said or wrong(kind, name, given.get(name))}")


def wrong(kind: type[Component], name: str, value: object) -> str:
    """What a field takes instead of a value."""
    field = kind.model_fields[name]
    words = [plain for plain in kinds(field.annotation) if isinstance(plain, str)]
    return f"it takes {takes(field)}{nearest(str(value), words)}"


def stranger(whole: str, kind: type[Component], key: str) -> Mistake:
    """A key that a component does not have."""
    known = [f"{key}.{name}".removeprefix(".") for name in kind.model_fields]
    keys = f"its keys are {', '.join(known)}" if known else "it has none"
    return Mistake(f"{whole}: {kind.__name__} has no such key; {keys}{nearest(whole, known)}")
