"""`ntkexp sweep` in a separate process, its workers, and its files.

Run as a module, this is `ntkexp` with workers that draw nothing.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from tests.docs.readme import ROOT

TINY = (
    *("data.train=12", "data.query=6", "data.test=6", "steps=20", "path.count=4", "path.error_samples=4"),
    *("threads=1", "checkpoint_seconds=0"),
)


class Ended(NamedTuple):
    """The status of a command, and its output."""

    status: int
    out: str
    err: str


def begun(out: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    """Start `ntkexp sweep …`."""
    return running("sweep", *words, f"--out={out}", **environment)


def running(*words: str, **environment: str) -> subprocess.Popen[str]:
    """Start `ntkexp …`."""
    return python("-m", "tests.sweep.commands", *words, **environment)


def python(*words: str, **environment: str) -> subprocess.Popen[str]:
    """Start `python …` in a separate process group. Workers find tests by PYTHONPATH, not by the working folder."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def until_stepping(process: subprocess.Popen[str], out: Path, count: int) -> None:
    """Wait until `count` runs have begun."""
    while process.poll() is None and len(list(out.glob("runs/*/progress.json"))) < count:
        time.sleep(0.01)
    assert process.poll() is None, process.communicate()


def ended(process: subprocess.Popen[str]) -> Ended:
    out, err = process.communicate()
    return Ended(process.returncode, out, err)


def swept(out: Path, *words: str, **environment: str) -> Ended:
    """Run `ntkexp sweep …`."""
    return ended(begun(out, *words, **environment))


def record(out: Path) -> dict[str, Any]:
    (found,) = (out / "sweeps").glob("*.json")
    value: dict[str, Any] = json.loads(found.read_text("utf-8"))
    return value


def states(out: Path) -> list[str]:
    """Return the states of the runs of the only sweep."""
    return [run["state"] for run in record(out)["runs"]]


def journal(out: Path, event: str) -> list[str]:
    """Return the runs with this event in the event log."""
    file = out / "sweeps" / "journal.jsonl"
    lines = file.read_text("utf-8").split("\n") if file.is_file() else []
    return [found["run"] for found in map(json.loads, filter(None, lines)) if found["event"] == event]


def children(pid: int) -> list[int]:
    """Return the processes that a process has started."""
    return [int(word) for task in Path(f"/proc/{pid}/task").glob("*/children") for word in task.read_text().split()]


def workers(pid: int) -> list[int]:
    """Return the processes that the server of a command has forked."""
    return [worker for server in children(pid) for worker in children(server)]


def strike(pid: int) -> None:
    """Kill a process, unless it has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def main(arguments: Sequence[str]) -> int:
    """Run a command with workers that draw nothing."""
    from ntkexp.cli.main import run  # noqa: PLC0415  not needed by tests
    from ntkexp.engine import local  # noqa: PLC0415

    local.PRELOADED.append("tests.sweep.undrawn")
    return run(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for background processes
    sys.exit(main(sys.argv[1:]))
