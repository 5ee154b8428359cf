"""A real Dask cluster on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.docs.readme import ROOT


@dataclass(frozen=True)
class Cluster:
    """A scheduler, by its file, and the process groups of two workers."""

    file: Path
    workers: tuple[subprocess.Popen[bytes], ...]

    @property
    def engine(self) -> str:
        return f"--engine=dask:{self.file}"


def started(place: Path, *words: str) -> subprocess.Popen[bytes]:
    """`dask …` in a folder of its own."""
    place.mkdir()
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    with (place / "log.txt").open("wb") as log:
        command = [sys.executable, "-m", "dask", *words]
        environment = os.environ | {"PYTHONPATH": path}
        return subprocess.Popen(command, cwd=place, env=environment, stdout=log, stderr=log, start_new_session=True)


@contextmanager
def dask_cluster(place: Path) -> Iterator[Cluster]:
    """A scheduler and two workers with a thread each, while they are needed."""
    file = place / "scheduler.json"
    scheduler = started(
        place / "scheduler", "scheduler", "--port=0", "--dashboard-address=:0", f"--scheduler-file={file}"
    )
    worker = ("worker", f"--scheduler-file={file}", "--nthreads=1", "--no-dashboard")
    workers = tuple(started(place / name, *worker) for name in ("one", "two"))
    end = time.monotonic() + 60
    while time.monotonic() < end and not all(
        b"Registered" in (place / name / "log.txt").read_bytes() for name in ("one", "two")
    ):
        time.sleep(0.1)
    try:
        yield Cluster(file, workers)
    finally:
        for process in (*workers, scheduler):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
