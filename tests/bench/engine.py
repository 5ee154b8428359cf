"""What the local engine adds to a run: a process of its own, and a line to hear from it.

A run that is finished already is asked for again and again, so that nothing is computed: a loop in this process looks
it up, and the engine has it looked up by a new process each time.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from functools import partial
from itertools import repeat
from pathlib import Path

from ntkexp.config.compose import compose
from ntkexp.engine.base import Ended, Task, run_jobs, work
from ntkexp.engine.local import Local, cores
from ntkexp.progress import Silent
from ntkexp.run.execute import execute
from ntkexp.sweep.jobs import RunJob
from tests.bench.cell import Table, milliseconds, seconds

TINY = (
    *("model.width=8", "data.train=8", "data.probe=4", "data.test=4", "steps=2"),
    *("path.count=2", "path.error_samples=0", "threads=1"),
)


def report(*, quick: bool) -> list[Table]:
    """A row for the loop, and one for the engine with a worker for each core."""
    runs = 10 if quick else 1000
    with tempfile.TemporaryDirectory() as out:
        task = finished(Path(out))
        engine(task, 1)  # its server has loaded everything
        found = {"a loop": seconds(partial(loop, task, runs)), "the engine": seconds(partial(engine, task, runs))}
    rows = [[name, milliseconds(spent / runs)] for name, spent in found.items()]
    return [Table(f"Engine: {runs} runs with nothing to do, {cores()} workers", ("by", "ms a run"), rows)]


def finished(out: Path) -> Task:
    """A run that is finished, as a task."""
    experiment = compose(TINY)
    folder = execute(experiment, TINY, out, False, Silent())
    return Task(folder.name, RunJob(experiment.fields(), TINY, str(out), ()), os.getcwd(), str(out))


def loop(task: Task, runs: int) -> None:
    """Each in this process."""
    check(work(task) for _ in range(runs))


def engine(task: Task, runs: int) -> None:
    """Each in a process of its own, as many at once as there are cores."""
    events = run_jobs(Local(cores()), repeat(task, runs))
    check(event for event in events if isinstance(event, Ended))


def check(ends: Iterator[Ended]) -> None:
    """Nothing was to be done."""
    assert {end.how for end in ends} == {"found"}
