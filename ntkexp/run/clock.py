"""What each part of a piece of work takes: by the clock on the wall, and by the processor.

    wall         from its beginning to its end, with whatever else the machine did meanwhile
    processor    while its threads, and children that have ended, were computing: so long takes one idle core

>>> ticks, work = iter([0.0, 60.0]), iter([1.0, 4.0])
>>> clock = Clock(wall=lambda: next(ticks), processor=lambda: next(work))
>>> with clock.times("run"):
...     pass  # three seconds of work, during a minute in which others were at work as well
>>> clock.parts
{'run': Took(wall=60.0, processor=3.0)}
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ntkexp.records.timings import Took


def processor_seconds() -> float:
    """Read how long processors have worked for this process, and for those of its children that have ended."""
    children = os.times()
    return time.process_time() + children.children_user + children.children_system


@dataclass
class Clock:
    """What took how long; both clocks can be replaced."""

    wall: Callable[[], float] = time.perf_counter
    processor: Callable[[], float] = processor_seconds
    parts: dict[str, Took] = field(default_factory=dict)
    since: tuple[float, float] | None = None  # both clocks, when the part that is going on began

    @contextmanager
    def times(self, what: str) -> Iterator[None]:
        """Count the time spent inside."""
        self.since = self.wall(), self.processor()
        yield
        self.parts[what], self.since = self.current, None

    @property
    def current(self) -> Took:
        """What the part that is going on has taken."""
        if self.since is None:
            return Took(0.0, 0.0)
        wall, processor = self.since
        return Took(self.wall() - wall, self.processor() - processor)

    @property
    def whole(self) -> Took:
        """What all parts have taken, with the one that is going on."""
        return sum([*self.parts.values(), self.current], start=Took(0.0, 0.0))
