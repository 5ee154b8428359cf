"""A process for one task: `python -m ntkexp.engine.child` reads the task as a line of digits from
stdin.

It writes the end of the task as one line of JSON to stdout. The parent keeps stdin open: when it
closes, as by the death of the parent, the process dies. SIGINT asks it to save its state and to
end.
"""

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
    r"""Return a pickled task and its number of threads as one line.

    >>> to_line(b"task", 2)
    '2 7461736b\n'
    """
    return f"{threads} {pickled.hex()}\n"


def die_with_stdin() -> None:
    """Wait for the death of the parent, then die."""
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
