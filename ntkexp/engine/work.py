"""What a worker does with a task, in a process of its own."""

from __future__ import annotations

import os

from ntkexp.engine.base import Ended, Ending, Task, Tell
from ntkexp.engine.fault import FAULTS, in_words
from ntkexp.mistake import Mistake, first_line
from ntkexp.records.folder import Held


def work(task: Task, tell: Tell) -> Ended:
    """Carry a task out; however that ends, it is said, and nothing is raised."""
    try:
        os.chdir(task.home)
        return Ended(task.name, task.job.carry_out(task.name, task.threads, tell))
    except (Exception, KeyboardInterrupt) as error:
        return Ended(task.name, *ending(error))


def ending(error: BaseException) -> tuple[Ending, str]:
    """Say what an exception means for a task; the notes of one that nobody expected belong to it.

    >>> ending(KeyError("weights"))
    ('failed', "KeyError: 'weights'")
    """
    match error:
        case Held():
            return "held", ""
        case KeyboardInterrupt():
            return "stopped", ""
        case Mistake():
            return "failed", str(error)
        case OSError() if error.errno in FAULTS:
            return "broken", in_words(error)
        case _:
            said = f"{type(error).__name__}: {first_line(error)}"
            return "failed", "; ".join([said, *getattr(error, "__notes__", ())])
