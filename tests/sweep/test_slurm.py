"""Jobs by submitit: on this machine in place of Slurm, and what a Slurm that runs nothing is asked for."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from unittest.mock import Mock

import pytest
from submitit import Job
from submitit.core.job_environment import SignalHandler
from submitit.helpers import DelayedSubmission
from submitit.slurm.slurm import SlurmJobEnvironment

from ntkexp.engine.base import Task, ignore, work
from ntkexp.engine.slurm import REQUEUES, USUAL, open_engine
from ntkexp.sweep.jobs import RunJob
from tests.sweep.commands import TINY, states, swept

TWO = ("model.width=8,9", *TINY)


@pytest.mark.slow
def test_jobs_carry_runs_out(tmp_path: Path) -> None:
    found = swept(tmp_path, *TWO, "--engine=slurm:cluster=local,cpus=1")
    assert found.status == 0, found
    assert states(tmp_path) == ["done", "done"]


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine whose Slurm writes down what it is asked for, and runs nothing."""
    folder = tmp_path / "slurm"
    folder.mkdir()
    for program, answer in {"srun": "", "scontrol": "", "sbatch": "Submitted batch job 7"}.items():
        (folder / program).write_text(f"#!/bin/sh\necho {program} $* >> {folder}/asked\necho {answer}\n")
        (folder / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return folder


def submitted(out: Path) -> Job:
    """A job of an engine that asks for a little of everything."""
    engine = open_engine("partition=short,account=us,time=90,cpus=4,memory_gb=6,gpus=1", None)
    task = Task("mlp-w8-s0-0", RunJob({}, (), str(out), ()), str(out), str(out), engine.parameters["cpus_per_task"])
    return engine.executor(ignore).submitted(task)


def test_what_is_asked_for_stands_in_the_script(queue: Path, tmp_path: Path) -> None:
    submitted(tmp_path)
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
    job = submitted(tmp_path)
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
    executor = open_engine("cluster=local", 1).executor(ignore)
    monkeypatch.setattr(executor, "submitted", lambda task: Mock(done=Mock(side_effect=OSError("sacct is gone"))))
    future = executor.submit(work, Task("a", RunJob({}, (), "", ()), "", ""))
    assert str(future.exception(timeout=60)) == "sacct is gone"
    executor.shutdown()
    assert not executor.watcher.is_alive()


def test_many_jobs_wait_at_once(queue: Path) -> None:
    assert open_engine("", None).workers == 100
    assert open_engine("", 7).workers == 7


def test_what_is_not_asked_for_is_as_usual() -> None:
    assert open_engine("cluster=local", 3).parameters == USUAL
