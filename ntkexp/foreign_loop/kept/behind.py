"""What need not be on disk before a step ends is written by a thread, while the loop goes on: one file at a time.

A kill may leave the latest of these files out, and no half of it. A write that failed is told at the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field


@dataclass
class Behind:
    """Writes one thing at a time.

    >>> behind, done = Behind(), []
    >>> for number in range(3):
    ...     behind.do(lambda number=number: done.append(number))
    >>> behind.wait()
    >>> done
    [0, 1, 2]
    """

    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "ntkexp-follow"))
    pending: Future[object] | None = None

    def do(self, write: Callable[[], object]) -> None:
        """Begin a write, once the one before is done."""
        self.wait()
        self.pending = self.thread.submit(write)

    def wait(self) -> None:
        """Wait for the write that is under way; raise what it raised."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def look(self) -> None:
        """Raise what a write raised that is done by now."""
        if self.pending is not None and self.pending.done():
            self.wait()
