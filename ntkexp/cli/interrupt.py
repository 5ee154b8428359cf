"""Ctrl-C, or a polite kill, ends a command with one line that says how to go on."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interruptible(advice: Callable[[], str]) -> Iterator[None]:
    """Let an interrupt say more than that it was one: `advice` is asked for when it happens."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted{advice()}") from None


@contextmanager
def polite_kill() -> Iterator[None]:
    """Let SIGTERM be heard as Ctrl-C is, also in a notebook, whose process is not ours."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
