"""This machine: a process for every task, forked from a server that has imported torch.

Tasks share nothing. If a process dies, for example for lack of memory, only its task is
lost. Workers run in separate sessions, so that Ctrl-C in a terminal reaches only the
command, which then interrupts the workers. If the command dies, the workers kill
themselves."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor, wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from ntkexp.engine.base import (
    SAVE_SECONDS,
    AbstractEngine,
    AbstractWorkers,
    Ended,
    Event,
    ReportEvent,
    Task,
    WrongEngine,
    blocked,
    safe_path,
    work_interruptibly,
)

FORKS = multiprocessing.get_context("forkserver")
WATCH = "ntkexp.engine.orphan"
PRELOADED = ["ntkexp.engine.local"]
# interrupts are repeated at this interval, because processes that are still starting
# may miss one
REPEAT_SECONDS = 1.0


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Local(AbstractEngine):
    """The engine of this machine. Its jobs share the cores."""

    is_local = True
    workers: int

    @property
    def threads(self) -> int:
        """The number of threads of each worker."""
        return max(1, cores() // self.workers)

    def limit_threads(self) -> None:
        threads = str(self.threads)
        os.environ |= {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "OMP_WAIT_POLICY": "PASSIVE",
        }

    def open(self, report_event: ReportEvent) -> LocalWorkers:
        return LocalWorkers(self.workers, self.threads, report_event)


class LocalWorkers(AbstractWorkers):
    """Workers on this machine. Each task runs in a separate process, and a thread of
    the main process receives its events."""

    def __init__(self, count: int, threads: int, report_event: ReportEvent) -> None:
        self.threads = threads
        self.report_event = report_event
        self.listeners = ThreadPoolExecutor(count)
        self.running: set[BaseProcess] = set()
        self.futures: list[Future[Ended]] = []
        # held while a process starts or is joined, because multiprocessing then checks
        # all child processes, which two threads must not do at once
        self.lock = threading.Lock()

    def submit(self, task: Task) -> Future[Ended]:
        start_server(type(task.job).__module__, *task.job.loads)
        ours, theirs = FORKS.Pipe(duplex=False)
        arguments = (replace(task, threads=self.threads), theirs)
        process = FORKS.Process(target=serve, args=arguments, daemon=True)
        # block interrupts between the start of a process and the start of its listener
        with blocked(signal.SIGINT):
            with self.lock:
                process.start()
                self.running.add(process)
            theirs.close()
            future = self.listeners.submit(
                self.receive_events, task.name, process, ours
            )
            unfinished = [other for other in self.futures if not other.done()]
            self.futures = [*unfinished, future]
        return future

    def receive_events(
        self, name: str, process: BaseProcess, line: Connection
    ) -> Ended:
        """Pass the events of a process to `report_event`, and return its `Ended`
        event."""
        event: Event | None = None
        with line, suppress(EOFError, OSError):
            while not isinstance(event := line.recv(), Ended):
                self.report_event(event)
        wait([process.sentinel])
        with self.lock:
            process.join()
            code = process.exitcode or 0
            self.running.remove(process)
            process.close()
        if isinstance(event, Ended):
            return event
        reason = f"its process ended with status {code}"
        if code == -signal.SIGKILL:
            reason = (
                "its process was killed (for its memory, perhaps: lower memory_gb or the number "
                "of workers)"
            )
        elif code < 0:
            reason = f"its process ended with signal {-code}"
        return Ended(name, "killed", reason)

    def shutdown(self) -> None:
        try:
            for _ in range(round(SAVE_SECONDS / REPEAT_SECONDS)):
                # a process ignores all interrupts except the first
                self.send_all(signal.SIGINT)
                if not wait_for(self.futures, REPEAT_SECONDS).not_done:
                    break
        finally:  # also after a second Ctrl-C, which interrupts the loop above
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
        raise WrongEngine(
            f"local:{where}: 'local' takes no address; write engine=local"
        )
    return Local(workers or cores())


def start_server(*modules: str) -> None:
    """Start the fork server. It imports torch and these modules once for all workers.

    Ctrl-C is blocked in the server, because it would end the imports with a traceback.
    """
    FORKS.set_forkserver_preload([WATCH, *modules, *PRELOADED])
    with safe_path():
        # start the resource tracker first; otherwise the server would start it, and it
        # unblocks signals
        resource_tracker.ensure_running()
        with blocked(signal.SIGINT):
            forkserver.ensure_running()


def serve(task: Task, line: Connection) -> None:
    """Carry out a task in a new process, and send its events to the command."""
    os.setsid()
    threading.Thread(target=die_with_parent, daemon=True).start()
    line.send(work_interruptibly(task, line.send))


def die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
