"""A real Dask cluster on this machine."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from unittest.mock import Mock

import pytest
from submitit import AutoExecutor, Job
from submitit.core.job_environment import SignalHandler
from submitit.helpers import DelayedSubmission
from submitit.slurm.slurm import SlurmJobEnvironment

from ntkexp.cli.main import run
from ntkexp.engine.base import Task, ignore
from ntkexp.engine.slurm import DEFAULT_RESOURCES, REQUEUES, open_engine
from ntkexp.sweep.jobs import RunJob
from tests.docs.readme import ROOT
from tests.sweep.commands import TINY, begun, ended, journal, record, states, swept, until_stepping


@dataclass(frozen=True)
class Cluster:
    """A scheduler, by its file, and the process groups of two workers."""

    file: Path
    workers: tuple[subprocess.Popen[bytes], ...]

    @property
    def engine(self) -> str:
        return f"--engine=dask:{self.file}"


def started(place: Path, *words: str) -> subprocess.Popen[bytes]:
    """`dask …` in a separate folder."""
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


# A real Dask cluster, with workers in another folder than the client's.


FOUR = ("model.width=8,9", "seed=0..1", *TINY)
TWO = ("model.width=8,9", *TINY)


@pytest.mark.slow
def test_an_interrupt_reaches_the_workers_and_a_worker_that_is_killed_costs_nothing(tmp_path: Path) -> None:
    """Both share a cluster, because its start takes longer than the sweeps."""
    with dask_cluster(tmp_path) as cluster:
        out = tmp_path / "interrupted"
        process = begun(out, *TWO, "steps=100000", "checkpoint_seconds=1000", cluster.engine)
        until_stepping(process, out, 2)
        process.send_signal(signal.SIGINT)
        found = ended(process)
        assert found.status == 130, found
        assert len(list(out.glob("runs/*/checkpoint.pt"))) == 2
        out = tmp_path / "killed"
        process = begun(out, *TWO, "steps=60", cluster.engine)
        until_stepping(process, out, 2)
        os.killpg(cluster.workers[0].pid, signal.SIGKILL)
        found = ended(process)
        assert found.status == 0, found
        assert states(out) == ["done"] * 2
        assert sorted(journal(out, "done")) == sorted(run["folder"] for run in record(out)["runs"])


async def in_a_loop(words: Sequence[str]) -> int:
    return run(words)


@pytest.mark.parametrize("carry_out", [run, lambda words: asyncio.run(in_a_loop(words))], ids=["shell", "notebook"])
def test_an_address_that_does_not_answer_is_one_line_in_time(
    carry_out: Callable[[Sequence[str]], int], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A loop of asyncio that runs already, as in a notebook, is not in the way."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # no process listens
        engine = f"--engine=dask:tcp://127.0.0.1:{silent.getsockname()[1]},timeout=0.5"
        assert carry_out(["sweep", *FOUR, engine, f"--out={tmp_path}"]) == 2
    said = capfd.readouterr().err
    assert "does not answer within 0.5 s" in said
    assert said.count("\n") == 1


def test_a_server_of_another_kind_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        Thread(target=speak_otherwise, args=(server,), daemon=True).start()
        found = swept(tmp_path, *FOUR, f"--engine=dask:tcp://127.0.0.1:{server.getsockname()[1]},timeout=3")
    assert (found.status, found.err.count("\n")) == (2, 1), found.err
    assert "does not answer within 3 s" in found.err


def speak_otherwise(server: socket.socket) -> None:
    """As a web server does."""
    line, _ = server.accept()
    with line:
        line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        while line.recv(4096):
            pass


# Jobs by submitit: what a Slurm that runs nothing is asked for; tests/kernel_file/test_elsewhere.py carries some out.


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose Slurm writes down its requests, and runs nothing."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for program, answer in {"srun": "", "scontrol": "", "sbatch": "Submitted batch job 7"}.items():
        (folder / program).write_text(f"#!/bin/sh\necho {program} $* >> {folder}/asked\necho {answer}\n")
        (folder / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def submitted_job(out: Path) -> Job:
    """A job of an engine that asks for a little of everything."""
    engine = open_engine("partition=short,account=us,time=90,cpus=4,memory_gb=6,gpus=1", None)
    task = Task("mlp-w8-s0-0", RunJob({}, (), str(out), ()), str(out), str(out), engine.parameters["cpus_per_task"])
    return engine.open(ignore).submit_job(task)


def test_what_is_asked_for_stands_in_the_script(queue: Path, tmp_path: Path) -> None:
    submitted_job(tmp_path)
    (line,) = (queue / "asked").read_text().splitlines()
    script = Path(line.removeprefix("sbatch ")).read_text()
    for option in (
        *("job-name=mlp-w8-s0-0", "partition=short", "account=us", "time=90", "cpus-per-task=4", "mem=6GB"),
        *("gpus-per-node=1", "signal=USR2@120", "open-mode=append"),
    ):
        assert f"#SBATCH --{option}\n" in script
    threads = script.index("export OMP_NUM_THREADS=4 MKL_NUM_THREADS=4 OMP_WAIT_POLICY=PASSIVE\n")
    assert threads < script.index("\nsrun ")  # else they come too late
    assert f"{tmp_path}/slurm" in script


def test_a_job_out_of_time_is_queued_again_with_the_same_task(
    queue: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = submitted_job(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", job.job_id)
    monkeypatch.setenv("SLURM_PROCID", "0")
    waiting = DelayedSubmission.load(job.paths.submitted_pickle)
    assert waiting._timeout_countdown == REQUEUES
    handler = SignalHandler(SlurmJobEnvironment(), job.paths, waiting)
    handler._start_time -= 90 * 60
    with pytest.raises(SystemExit):
        handler.checkpoint_and_try_requeue(signal.SIGUSR2)
    assert (queue / "asked").read_text().splitlines()[-1] == f"scontrol requeue {job.job_id}"
    again = DelayedSubmission.load(job.paths.submitted_pickle)
    assert (type(again.function), again.args) == (type(waiting.function), waiting.args)


def test_a_queue_that_cannot_be_asked_loses_the_job_and_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Mock(done=Mock(side_effect=OSError("sacct is gone")))
    monkeypatch.setattr(AutoExecutor, "submit", lambda *_: job)
    workers = open_engine("cluster=local", 1).open(ignore)
    future = workers.submit(Task("a", RunJob({}, (), "", ()), str(tmp_path)))
    assert str(future.exception(timeout=60)) == "sacct is gone"
    workers.shutdown()
    assert not workers.watcher.is_alive()


def test_many_jobs_wait_at_once(queue: Path) -> None:
    assert open_engine("", None).workers == 100
    assert open_engine("", 7).workers == 7


def test_what_is_not_asked_for_is_as_usual() -> None:
    assert open_engine("cluster=local", 3).parameters == DEFAULT_RESOURCES
