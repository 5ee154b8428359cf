"""A first Ctrl-C (or SIGTERM) lets a step be finished and its checkpoint be written; a second one interrupts."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType


@dataclass
class Interrupt:
    """Whether the run was asked to stop, and whether its last step is behind."""

    asked: bool = False
    over: bool = False

    def receive(self, number: int, frame: FrameType | None) -> None:
        """The handler of both signals."""
        if self.asked or self.over:
            raise KeyboardInterrupt
        self.asked = True

    def end(self) -> None:
        """There are no more steps to finish."""
        self.over = True
        if self.asked:
            raise KeyboardInterrupt


@contextmanager
def deferred_interrupt() -> Iterator[Interrupt]:
    """Both signals are received by the interrupt, and afterwards by whoever received them before."""
    interrupt = Interrupt()
    before = {number: signal.signal(number, interrupt.receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
