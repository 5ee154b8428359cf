"""A process for one task: `python -m ntkexp.engine.child`.

The process reads the pickled task as a line of hexadecimal digits from stdin, and
writes the `Ended` event as a line of JSON to stdout. The parent keeps stdin open. If
stdin closes, for example because the parent died, the process kills itself. After
SIGINT, the process saves its state and ends."""

from __future__ import annotations

import json
import os
import pickle
import signal
import sys
import threading
from dataclasses import asdict, replace

from ntkexp.engine.base import Task, work_interruptibly


def to_line(pickled: bytes, threads: int) -> str:
    r"""Encode a pickled task and its number of threads as one line.

    >>> to_line(b"task", 2)
    '2 7461736b\n'
    """
    return f"{threads} {pickled.hex()}\n"


def die_with_stdin() -> None:
    """Wait until stdin closes, then kill this process."""
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    threads, digits = sys.stdin.readline().split()
    task: Task = pickle.loads(bytes.fromhex(digits))
    threading.Thread(target=die_with_stdin, daemon=True).start()
    ended = work_interruptibly(replace(task, threads=int(threads)))
    sys.stdout.write(json.dumps(asdict(ended)) + "\n")


if __name__ == "__main__":
    main()
