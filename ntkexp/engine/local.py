"""This machine: a process for every task, forked from a server in which torch is loaded already.

Nothing is shared between tasks, so one that is killed (by the kernel, for its memory) costs itself alone. Workers are
sessions of their own: a terminal's Ctrl-C reaches the command, which passes it on, once. They hold one end of a pipe
whose other end the command holds; when it dies, however it dies, they do.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from ntkexp.engine.base import AbstractEngine, Began, Ended, Event, Task, WrongEngine, work

FORKS = multiprocessing.get_context("forkserver")
PRELOADED = ["ntkexp.engine.local"]
GRACE = 30.0  # seconds that a job has to keep what it has


def cores() -> int:
    """Count the processors that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Local(AbstractEngine):
    """This machine does so many jobs at once, each with its share of the cores."""

    count: int

    @property
    def workers(self) -> int:
        return self.count

    @property
    def near(self) -> bool:
        return True

    @property
    def threads(self) -> int:
        """How many threads each worker has."""
        return max(1, cores() // self.count)

    def limit_threads(self) -> None:
        threads = str(self.threads)
        os.environ |= {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE"}

    def refuse_longer(self, seconds: float) -> None:
        pass  # nobody ends a worker

    def perform(self, tasks: Iterator[Task]) -> Generator[Event]:
        crew: dict[Connection, Worker] = {}
        try:
            while True:
                while len(crew) < self.count and (task := next(tasks, None)) is not None:
                    yield Began(task.name)
                    start_server(type(task.job).__module__, *task.job.loads)
                    worker = start_worker(replace(task, threads=self.threads))
                    crew[worker.line] = worker
                if not crew:
                    return
                for line in wait(list(crew)):
                    assert isinstance(line, Connection)
                    event = crew[line].heard()
                    if isinstance(event, Ended):
                        crew.pop(line).leave()
                    yield event
        finally:
            dismiss(list(crew.values()))


@dataclass(frozen=True)
class Worker:
    """A process at work on a task, and the line on which it tells how far it is."""

    task: Task
    process: BaseProcess
    line: Connection

    def heard(self) -> Event:
        """The next word of the process; silence at the end of the line is death."""
        try:
            event: Event = self.line.recv()
        except (EOFError, OSError):
            self.process.join()
            return Ended(self.task.name, "killed", self.died_of)
        return event

    @property
    def died_of(self) -> str:
        """Why the process is gone."""
        code = self.process.exitcode or 0
        if code == -signal.SIGKILL:
            return "its process was killed (for its memory, perhaps: lower memory_gb or the number of workers)"
        return f"its process ended with {f'signal {-code}' if code < 0 else f'status {code}'}"

    def leave(self) -> None:
        """Let go of a process that has said its last word."""
        self.process.join()
        self.process.close()
        self.line.close()


def open_engine(where: str, workers: int | None) -> Local:
    """Open the engine of this machine."""
    if where:
        raise WrongEngine(f"local:{where}: there is nothing to say after 'local'; write engine=local")
    return Local(workers or cores())


def start_server(*modules: str) -> None:
    """Load these modules once, for all, and torch with them.

    Ctrl-C is blocked there: pressed while the server loads, it would end it with a traceback.
    """
    FORKS.set_forkserver_preload([*modules, *PRELOADED])
    resource_tracker.ensure_running()  # which unblocks it, and would be started by the server
    with blocked(signal.SIGINT):
        forkserver.ensure_running()


@contextmanager
def blocked(number: signal.Signals) -> Iterator[None]:
    """Hold a signal back."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker(task: Task) -> Worker:
    """Start a new process for a task."""
    ours, theirs = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=serve, args=(task, theirs), daemon=True)
    with blocked(signal.SIGINT):  # half a process is none
        process.start()
        theirs.close()
    return Worker(task, process, ours)


def serve(task: Task, line: Connection) -> None:
    """Do in the new process what it was started for."""
    os.setsid()
    threading.Thread(target=die_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    line.send(work(task, line.send))


def die_with_parent() -> None:
    """Wait until the command is gone."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def dismiss(crew: list[Worker]) -> None:
    """Ask everybody to stop, and see that they do; whoever is asked a second time has no patience left."""
    for worker in crew:
        with suppress(ProcessLookupError):
            assert worker.process.pid is not None
            os.kill(worker.process.pid, signal.SIGINT)
    end = time.monotonic() + GRACE
    try:
        for worker in crew:
            worker.process.join(max(0.0, end - time.monotonic()))
    finally:
        for worker in crew:
            worker.process.kill()
            worker.leave()
