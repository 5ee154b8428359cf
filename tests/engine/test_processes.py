"""Processes that engines start: an interrupt is never a traceback, and none outlives the command."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

from ntkexp.engine.base import Task, blocked
from ntkexp.engine.child import to_line
from ntkexp.engine.dask_cluster import Dask
from ntkexp.engine.local import Local
from ntkexp.engine.slurm import Slurm
from tests.docs.readme import ROOT
from tests.engine.jobs import Waiting
from tests.sweep.commands import python

INTERRUPTED = """
from ntkexp.engine.base import Task, choose, ignore
from tests.engine.jobs import Waiting

if __name__ == "__main__":
    for _ in range(4):
        workers = choose("local", 1).open(ignore)
        future = workers.submit(Task("one", Waiting(), "."))
        workers.shutdown()  # it interrupts the worker, which is starting
        assert future.result().how == "stopped", future.result()
"""

KILLED = """
from ntkexp.engine.base import Task, choose, ignore
from tests.engine.jobs import Loading

if __name__ == "__main__":
    choose("local", 1).open(ignore).submit(Task("one", Loading(), ".")).result()
"""


def test_an_interrupt_while_a_worker_starts_is_no_traceback() -> None:
    process = python("-c", INTERRUPTED)
    assert (*process.communicate(), process.returncode) == ("", "", 0)


def test_an_interrupt_before_a_child_of_dask_has_its_task_stops_the_task() -> None:
    with blocked(signal.SIGINT):  # as the Dask worker does
        process = subprocess.Popen(
            [sys.executable, "-m", "ntkexp.engine.child"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    process.send_signal(signal.SIGINT)
    assert process.stdin is not None
    process.stdin.write(to_line(pickle.dumps(Task("one", Waiting(), str(ROOT), str(ROOT))), 1))
    process.stdin.flush()
    assert process.stdout is not None
    answer = json.loads(process.stdout.readline())
    assert (answer["name"], answer["how"]) == ("one", "stopped")
    assert process.wait() == 0
    assert process.communicate()[1] == ""


def test_a_server_that_loads_modules_ends_with_its_command(tmp_path: Path) -> None:
    """A command that is killed with SIGKILL sends no message."""
    loading = tmp_path / "loading"
    process = python("-c", KILLED, LOADING=str(loading))
    while not (loading.is_file() and loading.read_text()):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.kill()
    process.communicate()
    server = int(loading.read_text())
    end = time.monotonic() + 60  # without a watch, it would load forever
    while (left := is_alive(server)) and time.monotonic() < end:
        time.sleep(0.01)
    if left:
        os.kill(server, signal.SIGKILL)
    assert not left


def is_alive(pid: int) -> bool:
    """Return whether a process runs, and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_only_the_local_engine_is_local() -> None:
    """Commands compute little work in their own process if the engine is local."""
    assert [engine.__name__ for engine in (Local, Dask, Slurm) if engine.is_local] == ["Local"]
