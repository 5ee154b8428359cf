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
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from ntkexp.engine.base import (
    AbstractEngine,
    Ended,
    Event,
    Lost,
    Task,
    Tell,
    WrongEngine,
    blocked,
    safe_path,
    work_interruptibly,
)

FORKS = multiprocessing.get_context("forkserver")
WATCH = "ntkexp.engine.orphan"
PRELOADED = ["ntkexp.engine.local"]
GRACE = 30.0  # seconds that a job has to keep what it has
REPEAT = (
    1.0  # seconds after which an interrupt is sent again, in case a process was not ready for it
)


def cores() -> int:
    """The processors that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Local(AbstractEngine):
    """This machine does `count` jobs at once, each with its share of the cores."""

    near = True
    count: int

    @property
    def workers(self) -> int:
        return self.count

    @property
    def threads(self) -> int:
        """Of each worker."""
        return max(1, cores() // self.count)

    def limit_threads(self) -> None:
        threads = str(self.threads)
        os.environ |= {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",
        }

    def executor(self, tell: Tell) -> LocalExecutor:
        return LocalExecutor(self.count, self.threads, tell)


class LocalExecutor(Executor):
    """A process for every task, which a thread of this process hears to its end."""

    def __init__(self, count: int, threads: int, tell: Tell) -> None:
        self.threads, self.tell = threads, tell
        self.listeners = ThreadPoolExecutor(count)
        self.running: set[BaseProcess] = set()
        self.futures: list[Future[Any]] = []
        self.lock = (
            threading.Lock()
        )  # multiprocessing looks at all processes whenever it starts one

    def submit(self, fn: Callable[..., Any], /, task: Task) -> Future[Any]:  # type: ignore[override]  # tasks alone
        start_server(type(task.job).__module__, *task.job.loads)
        ours, theirs = FORKS.Pipe(duplex=False)
        given = (fn, replace(task, threads=self.threads), theirs)
        process = FORKS.Process(target=serve, args=given, daemon=True)
        with blocked(signal.SIGINT):  # a half-started process is none, and each needs its listener
            with self.lock:
                process.start()
                self.running.add(process)
            theirs.close()
            future = self.listeners.submit(self.hear, process, ours)
            self.futures = [*(other for other in self.futures if not other.done()), future]
        return future

    def hear(self, process: BaseProcess, line: Connection) -> Ended:
        """Pass on what a process says, and give back its last word; silence at the end of the line is death."""
        event: Event | None = None
        with line, suppress(EOFError, OSError):
            while not isinstance(event := line.recv(), Ended):
                self.tell(event)
        wait([process.sentinel])
        with self.lock:
            process.join()
            code = process.exitcode or 0
            self.running.remove(process)
            process.close()
        if isinstance(event, Ended):
            return event
        if code == -signal.SIGKILL:
            raise Lost(
                "its process was killed (for its memory, perhaps: lower memory_gb or the number of workers)"
            )
        raise Lost(f"its process ended with {f'signal {-code}' if code < 0 else f'status {code}'}")

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        try:
            for _ in range(round(GRACE / REPEAT)):
                self.send_all(signal.SIGINT)  # a process that has heard one ignores the next
                if not wait_for(self.futures, REPEAT).not_done:
                    break
        finally:  # a second signal ends it at once
            self.send_all(signal.SIGKILL)
            self.listeners.shutdown()

    def send_all(self, number: signal.Signals) -> None:
        with self.lock:
            for process in self.running:
                assert process.pid is not None
                with suppress(ProcessLookupError):
                    os.kill(process.pid, number)


def open_engine(where: str, workers: int | None) -> Local:
    if where:
        raise WrongEngine(f"local:{where}: 'local' takes no address; write engine=local")
    return Local(workers or cores())


def start_server(*modules: str) -> None:
    """Load these modules once, for all, and torch with them.

    Ctrl-C is blocked there: pressed while the server loads, it would end it with a traceback.
    """
    FORKS.set_forkserver_preload([WATCH, *modules, *PRELOADED])
    with safe_path():
        resource_tracker.ensure_running()  # which unblocks it, and would be started by the server
        with blocked(signal.SIGINT):
            forkserver.ensure_running()


def serve(fn: Callable[[Task, Tell], Ended], task: Task, line: Connection) -> None:
    """Do in the new process what it was started for."""
    os.setsid()
    threading.Thread(target=die_with_parent, daemon=True).start()
    line.send(work_interruptibly(lambda: fn(task, line.send), task.name))


def die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
