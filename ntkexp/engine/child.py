"""A run in a process that others start: `python -m ntkexp.engine.child`, a task as one line of JSON on its stdin.

How it ended is one line of JSON on stdout. Whoever starts it keeps stdin open: the process dies when that is closed,
so it dies with its parent. SIGINT asks it for a checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from dataclasses import asdict

from ntkexp.engine.base import Event, Task
from ntkexp.engine.work import work


def task(line: str) -> Task:
    """Read a task from its line.

    >>> task('{"name": "a", "fields": {}, "overrides": [], "out": "", "home": "", "trust": [], "threads": 1}').name
    'a'
    """
    fields = json.loads(line)
    return Task(**fields)


def die_with_stdin() -> None:
    """Wait until nobody is there any more."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def ignored(event: Event) -> None:
    """Nobody is told how far the run is: its folder says so."""


def main() -> None:
    """Read a task, work on it, and say how that ended."""
    given = task(sys.stdin.readline())
    threading.Thread(target=die_with_stdin, daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.stdout.write(json.dumps(asdict(work(given, ignored))) + "\n")


if __name__ == "__main__":
    main()
