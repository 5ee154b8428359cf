"""Seconds by what they were spent on."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Clock:
    """What took how long."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def times(self, what: str) -> Iterator[None]:
        """Count the time spent inside."""
        start = time.perf_counter()
        yield
        self.seconds[what] = time.perf_counter() - start
