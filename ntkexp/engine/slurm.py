"""A Slurm cluster, by submitit: `slurm:KEY=VALUE,…`, with a Slurm job for every task.

Keys and their defaults:

    partition, account, qos, constraint     as for sbatch
    time (minutes, 60)   cpus (1)   memory_gb (8)   gpus (0)
    cluster=local        run processes on this machine instead, to try the settings

Scripts and logs are written to a folder `slurm/`. A job that reaches its time limit or
is pre-empted is queued again, and continues from its folder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import submitit
from submitit.helpers import DelayedSubmission

from ntkexp.engine.base import (
    SAFE_PATH,
    AbstractEngine,
    AbstractWorkers,
    Ended,
    ReportEvent,
    Task,
    WrongEngine,
    safe_path,
    work,
)
from ntkexp.mistake import nearest
from ntkexp.records.atomic import make_folder
from ntkexp.text import duration

MAX_QUEUED_JOBS = 100  # default number of jobs in the queue at once
QUEUE_POLL_SECONDS = 1.0  # interval between checks of the queue
CANCEL_SECONDS = 60.0  # time to wait until cancelled jobs end
# number of times that a job may be queued again after its time limit
REQUEUES = 1000
RESOURCES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "partition": ("slurm_partition", str),
    "account": ("slurm_account", str),
    "qos": ("slurm_qos", str),
    "constraint": ("slurm_constraint", str),
    "time": ("timeout_min", int),
    "cpus": ("cpus_per_task", int),
    "memory_gb": ("mem_gb", float),
    "gpus": ("gpus_per_node", int),
}
DEFAULT_RESOURCES = {
    "timeout_min": 60,
    "cpus_per_task": 1,
    "mem_gb": 8,
    "slurm_signal_delay_s": 120,
}


@dataclass(frozen=True)
class Slurm(AbstractEngine):
    """A Slurm cluster, with at most `workers` jobs in its queue."""

    cluster: str
    parameters: dict[str, Any]
    workers: int

    def open(self, report_event: ReportEvent) -> SlurmWorkers:
        return SlurmWorkers(self.cluster, self.parameters)

    def refuse_longer(self, seconds: float) -> None:
        minutes = self.parameters["timeout_min"]
        if seconds > 60 * minutes:
            raise WrongEngine(
                f"slurm: a job ends after time={minutes} minutes, but first saves its work after "
                f"about {duration(seconds)}; write, for example, time={ceil(seconds / 30)}"
            )


class SlurmWorkers(AbstractWorkers):
    """Jobs submitted by submitit, and a thread that polls the queue
    for finished jobs."""

    def __init__(self, cluster: str, parameters: dict[str, Any]) -> None:
        self.cluster = cluster
        self.parameters = parameters
        self.jobs: dict[Future[Ended], tuple[Task, Any]] = {}
        self.stopping = threading.Event()
        self.watcher = threading.Thread(target=self.watch, daemon=True)

    def submit(self, task: Task) -> Future[Ended]:
        future: Future[Ended] = Future()
        future.set_running_or_notify_cancel()
        self.jobs[future] = (task, self.submit_job(task))
        if not self.watcher.is_alive():
            self.watcher.start()
        return future

    def submit_job(self, task: Task) -> Any:
        threads = str(self.parameters["cpus_per_task"])
        folder = Path(task.logs) / "slurm"
        make_folder(folder)
        executor = submitit.AutoExecutor(
            folder=folder, cluster=self.cluster, slurm_max_num_timeout=REQUEUES
        )
        limits = f"OMP_NUM_THREADS={threads} MKL_NUM_THREADS={threads} OMP_WAIT_POLICY=PASSIVE"
        setup = [f"export {limits}", f"export {SAFE_PATH}=1"]
        executor.update_parameters(**self.parameters, name=task.name, slurm_setup=setup)
        with safe_path():  # `cluster=local` ignores `slurm_setup`
            return executor.submit(
                Job(), replace(task, threads=self.parameters["cpus_per_task"])
            )

    def watch(self) -> None:
        """Complete the futures of finished jobs, until `shutdown` is called and all
        jobs have ended."""
        while self.jobs or not self.stopping.is_set():
            for future, (task, job) in list(self.jobs.items()):
                try:
                    if not job.done():
                        continue
                    del self.jobs[future]
                    future.set_result(end_of(task, job))
                except Exception as error:  # a command such as sacct has failed
                    self.jobs.pop(future, None)
                    future.set_exception(error)
            if self.stopping.wait(QUEUE_POLL_SECONDS):
                time.sleep(QUEUE_POLL_SECONDS / 10)

    def shutdown(self) -> None:
        for _, job in list(self.jobs.values()):
            with suppress(Exception):  # the job has ended already
                job.cancel(check=False)
        self.stopping.set()
        if self.watcher.is_alive():
            self.watcher.join(CANCEL_SECONDS)


def end_of(task: Task, job: Any) -> Ended:
    """Return the `Ended` event of a task whose Slurm job has ended."""
    error = job.exception()
    if error is None:
        ended: Ended = job.result()
        return ended
    reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    return Ended(
        task.name,
        "killed",
        f"job {job.job_id} ended with {reason}; see {job.paths.stderr}",
    )


class Job:
    """The callable that submitit runs in a Slurm job.

    Before a job is killed, submitit calls `checkpoint` and submits the returned job.
    """

    def __call__(self, task: Task) -> Ended:
        return work(task)

    def checkpoint(self, task: Task) -> Any:
        """Return a submission of the same task,
        which continues from its last saved state."""
        return DelayedSubmission(self, task)


def open_engine(where: str, workers: int | None) -> Slurm:
    """Return the engine for the command line's `slurm:KEY=VALUE,…`.
    Raise if a key or value is invalid."""
    cluster = "slurm"
    parameters: dict[str, Any] = {}
    for entry in filter(None, where.split(",")):
        key, _, value = entry.partition("=")
        if key == "cluster":
            cluster = value
            continue
        if key not in RESOURCES:
            hint = nearest(key, RESOURCES)
            raise WrongEngine(
                f"slurm:{where}: there is no '{key}'; it has {', '.join(RESOURCES)}, cluster{hint}"
            )
        name, kind = RESOURCES[key]
        try:
            parameters[name] = kind(value)
        except ValueError:
            raise WrongEngine(
                f"slurm:{where}: {key}={value} is not a number; write, for example, {key}=2"
            ) from None
    if cluster not in {"slurm", "local"}:
        raise WrongEngine(
            f"slurm:{where}: cluster takes slurm or local{nearest(cluster, ['slurm', 'local'])}"
        )
    if cluster == "slurm" and submitit.SlurmExecutor.affinity() < 0:
        raise WrongEngine(
            "slurm: there is no srun here; call it on a machine that can submit jobs"
        )
    return Slurm(cluster, DEFAULT_RESOURCES | parameters, workers or MAX_QUEUED_JOBS)
