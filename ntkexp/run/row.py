"""A row of the log: numbers by the names of their columns."""

from __future__ import annotations

from typing import TypeAlias

Row: TypeAlias = dict[str, float | int | None]
