"""How large a count may be: beyond these ends no machine holds or finishes it, and arithmetic would fail before memory.

They are far from what is reasonable: what fits between them is measured against `memory_gb`, and against time.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

LARGEST = 10**7
DEEPEST = 1000
LONGEST = 10**12

Count: TypeAlias = Annotated[int, Field(ge=1, le=LARGEST)]
"""Of examples, units, features."""

CountOrNone: TypeAlias = Annotated[int, Field(ge=0, le=LARGEST)]
"""The same, or none."""

Depth: TypeAlias = Annotated[int, Field(ge=1, le=DEEPEST)]
"""Of layers one after the other, or pixels of a window."""

Steps: TypeAlias = Annotated[int, Field(ge=1, le=LONGEST)]
"""Of an optimizer."""
