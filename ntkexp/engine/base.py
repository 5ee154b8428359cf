"""Engines and jobs: `run_jobs` runs jobs on an engine and yields events.

The end of the file translates faults of the machine, such as a full disk,
into error messages."""

from __future__ import annotations

import errno
import os
import signal
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import ClassVar, Literal, TypeAlias

from ntkexp.mistake import Mistake, WrongArgument, first_line, line_of_user, nearest
from ntkexp.records.folder import Held

# --- Tasks and their events: Began → Stepped, Stepped, … → Ended. Events of concurrent
# tasks are interleaved.
#
# Warnings are reported with the end of a task,
# because not every engine can report them earlier.
#
# A job is plain data, so that it can be sent to other machines. Its results are written
# to a folder that all workers share.


Ending: TypeAlias = Literal[
    "done", "found", "held", "stopped", "killed", "broken", "failed"
]
"""The reason why a task ended:

done      its work is complete
found     its work was complete already
held      another process works on it
stopped   it was interrupted; it can continue from its checkpoint
killed    its process died
broken    the machine failed, for example because of a full disk
failed    the job raised an error, and would raise it again
"""


class WrongEngine(WrongArgument):
    """Raised for an unknown or unavailable engine.
    The message begins with `engine=`."""

    def __init__(self, message: str) -> None:
        super().__init__(f"engine={message}", "engine")


@dataclass(frozen=True)
class Began:
    name: str


@dataclass(frozen=True)
class Stepped:
    name: str
    step: int
    steps: int


@dataclass(frozen=True)
class Warned:
    """A warning of a job that continues. The function `work` collects these events in
    `Ended.warnings`."""

    name: str
    text: str


@dataclass(frozen=True)
class Ended:
    name: str
    how: Ending
    reason: str = field(default="")
    warnings: Sequence[str] = ()


Event: TypeAlias = Began | Stepped | Warned | Ended
ReportEvent: TypeAlias = Callable[[Event], None]


class AbstractJob(ABC):
    """A job for a worker. Subclasses are frozen dataclasses, which can be pickled."""

    loads: ClassVar[tuple[str, ...]] = ()
    """Modules that the job imports lazily. A fork server imports them
    only once for all workers."""

    advice: ClassVar[str] = ""
    """Advice that is appended to the message of an unexpected error."""

    @abstractmethod
    def carry_out(self, name: str, threads: int, report_event: ReportEvent) -> Ending:
        """Do the work in this process with `threads` threads.
        Report progress to `report_event`."""


@dataclass(frozen=True)
class Task:
    """A job with a name that is unique within the command."""

    name: str
    job: AbstractJob
    logs: str  # the folder for scripts and logs of the engine
    # the working folder, from which workers resolve relative paths
    working_folder: str = field(default_factory=os.getcwd)
    threads: int = 1


class AbstractWorkers(ABC):
    """The pool of workers of an engine."""

    @abstractmethod
    def submit(self, task: Task) -> Future[Ended]:
        """Send a task to a worker. If the worker's process dies,
        the task ends as `killed`."""

    @abstractmethod
    def shutdown(self) -> None:
        """Ask running jobs to save their state, and wait until they end."""


class AbstractEngine(ABC):
    """An execution backend: a pool of workers that run jobs."""

    is_local: ClassVar[bool] = False
    """True if the workers are on this machine."""

    workers: int
    """The number of jobs that run at once."""

    @abstractmethod
    def open(self, report_event: ReportEvent) -> AbstractWorkers:
        """Open the workers. They call `report_event` if they can report progress."""

    def limit_threads(self) -> None:  # noqa: B027  remote workers leave this process its threads
        """Limit the threads of this process and its workers to their share
        of the cores.

        Call this before the import of torch.
        """

    def refuse_longer(self, seconds: float) -> None:  # noqa: B027  most workers have no time limit
        """Raise if the time limit of jobs is shorter than `seconds`.

        `seconds` is the time until a job first saves its work.
        """


# --- Running jobs, for sweeps, kernels and claims.


def run_jobs(engine: AbstractEngine, tasks: Iterator[Task]) -> Generator[Event]:
    """Run tasks on an engine, and yield their events.

    The next task is taken from the iterator when a worker is free. If a process dies,
    only its current task is lost. If the generator is closed, or if an exception is
    raised inside it, running jobs are asked to save their state
    and to end within seconds."""
    events: SimpleQueue[Event] = SimpleQueue()
    workers = engine.open(events.put)
    running = 0
    try:
        while True:
            while running < engine.workers and (task := next(tasks, None)) is not None:
                yield Began(task.name)
                running += 1
                workers.submit(task).add_done_callback(
                    partial(report_end, events, task.name)
                )
            if not running:
                return
            event = events.get()
            running -= isinstance(event, Ended)
            yield event
    finally:
        workers.shutdown()


def report_end(events: SimpleQueue[Event], name: str, future: Future[Ended]) -> None:
    """Put the `Ended` event of a finished future into the queue."""
    if future.cancelled():
        events.put(Ended(name, "stopped"))
    elif (error := future.exception()) is None:
        events.put(future.result())
    else:
        reason = f"the cluster lost it: {type(error).__name__}: {first_line(error)}"
        events.put(Ended(name, "killed", reason))


class Unfinished(RuntimeError):
    """Raised if workers left a result incomplete. The message is one line,
    with advice."""


def reason_of_loss(event: Event, place: Path) -> str:
    """Return the reason why a worker was lost, or "" if the event reports no loss.

    If a job failed, raise `Unfinished`: other jobs for the result at `place` would also
    fail."""
    match event:
        case Ended(how="failed" | "broken"):
            raise Unfinished(f"{place}: {event.reason}")
        case Ended(how="killed" | "stopped"):
            return event.reason or "it was told to stop"
    return ""


# --- Settings of the Python processes that engines start.


SAFE_PATH = "PYTHONSAFEPATH"
"""The environment variable that stops Python from importing modules from the working
folder.

Without it, a file `struct.py` in the working folder would replace Python's own module.
"""


@contextmanager
def safe_path() -> Iterator[None]:
    """Set `SAFE_PATH` for processes that start inside the block."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


SAVE_SECONDS = 30.0
"""An interrupted job must save its state within this many seconds."""


@contextmanager
def blocked(number: signal.Signals) -> Iterator[None]:
    """Block a signal in this thread until the context ends.

    Processes that start inside the context inherit the blocked signal,
    and may unblock it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- Engines, as written on the command line: KIND[:WHERE].


ENGINE_MODULES = {
    "local": "ntkexp.engine.local",
    "dask": "ntkexp.engine.dask_cluster",
    "slurm": "ntkexp.engine.slurm",
}
SPELLINGS = "local, dask:ADDRESS, dask:scheduler.json or slurm:KEY=VALUE,…"


def choose(spelling: str, workers: int | None) -> AbstractEngine:
    """Return the engine that a text on the command line specifies, such as `local` or
    `slurm:KEY=VALUE`.

    The engine's module is imported here, because some engines need an optional
    dependency. Raise if the engine is unknown or unavailable.

    >>> choose("local", 2)
    Local(workers=2)
    """
    kind, _, where = spelling.partition(":")
    if kind not in ENGINE_MODULES:
        raise WrongEngine(
            f"{spelling}: it takes {SPELLINGS}{nearest(kind, ENGINE_MODULES)}"
        )
    try:
        module = import_module(ENGINE_MODULES[kind])
    except ModuleNotFoundError as error:
        raise WrongEngine(
            f"{kind} needs {error.name}; `pip install 'ntkexp[{kind}]'` brings it"
        ) from None
    open_engine: Callable[[str, int | None], AbstractEngine] = module.open_engine
    return open_engine(where, workers)


# --- The code that runs in a worker's process.


def ignore(event: Event) -> None:
    """Discard an event, for engines without a way to report progress."""


def work(task: Task, report_event: ReportEvent = ignore) -> Ended:
    """Carry out a task, and return its `Ended` event with all warnings. Convert an
    exception to an ending."""
    texts: list[str] = []

    def collect_warnings(event: Event) -> None:
        if isinstance(event, Warned):
            texts.append(event.text)
        else:
            report_event(event)

    with warnings.catch_warnings(record=True) as caught:
        try:
            os.chdir(task.working_folder)
            how = task.job.carry_out(task.name, task.threads, collect_warnings)
            reason = ""
        except (Exception, KeyboardInterrupt) as error:
            how, reason = ending_of(error, task.job.advice)
    texts += [
        warning_in_words(w.message, w.category, w.filename, w.lineno) for w in caught
    ]
    return Ended(task.name, how, reason, tuple(texts))


def warning_in_words(
    message: Warning | str, category: type[Warning], file: str, line: int
) -> str:
    """Format a Python warning as one line.

    >>> warning_in_words("mind the gap", UserWarning, "net.py", 3)
    'net.py, line 3: UserWarning: mind the gap'
    """
    return f"{file}, line {line}: {category.__name__}: {' '.join(str(message).split())}"


def work_interruptibly(task: Task, report_event: ReportEvent = ignore) -> Ended:
    """Carry out a task with SIGINT unblocked,
    in a process that started with SIGINT blocked.

    The first SIGINT stops the task, even if it arrived before this call. Later signals
    are ignored."""
    signal.signal(signal.SIGINT, interrupt_once)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        ended = work(task, report_event)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    except KeyboardInterrupt:
        return Ended(task.name, "stopped")
    return ended


def interrupt_once(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def ending_of(error: BaseException, advice: str = "") -> tuple[Ending, str]:
    """Return the ending of a task that raised an exception, and the reason.

    If the exception is unexpected, the reason includes its notes and `advice`.

    >>> ending_of(KeyError("weights"))
    ('failed', "KeyError: 'weights'")
    """
    match error:
        case Held():
            return "held", ""
        case KeyboardInterrupt():
            return "stopped", ""
        case Mistake():
            return "failed", str(error)
        case OSError() if error.errno in FAULTS:
            return "broken", fault_in_words(error)
        case _:
            unexpected = f"{type(error).__name__}: {first_line(error)}"
            reason = line_of_user(error) or unexpected
            parts = [reason, *getattr(error, "__notes__", ()), advice]
            return "failed", "; ".join(filter(None, parts))


# --- Error messages for faults of the machine and missing permissions. When the cause
# is removed, the same command continues. The exit status of the failed command is
#
# status 1    if the machine failed (its disk, memory or threads), or if the program
#             that reads the output has closed it
# status 2    if the user can choose a different path, or change permissions


DENIED = {
    errno.EACCES: "permission denied",
    errno.EPERM: "permission denied",
    errno.EROFS: "the file system can only be read",
    errno.ENAMETOOLONG: "the name is too long",
    errno.ELOOP: "its links form a circle",
    errno.ENOTDIR: "a file stands where a folder should be",
    errno.EISDIR: "a folder stands where a file should be",
}
FAULTS = DENIED | {
    errno.ENOSPC: "no space is left on the disk; free some, and the same command continues",
    errno.EDQUOT: "the disk quota is used up; free some, and the same command continues",
    errno.EFBIG: (
        "a file may not become so large here; raise the limit (ulimit -f), and the same command "
        "continues"
    ),
    errno.EPIPE: "the reader of the output has closed it",
    errno.EIO: "the disk cannot be read or written",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n)",
    errno.EAGAIN: (
        "no more processes can be started; lower the number of workers, or raise the limit "
        "(ulimit -u)"
    ),
    errno.ENOMEM: "no memory is left; lower memory_gb or the number of workers",
}
MESSAGES = {
    "can't start new thread": (
        "no more threads can be started; lower threads, or raise the limit (ulimit -u)"
    ),
    "can't allocate memory": "no memory is left; lower memory_gb, model.width or data.train",
    "failed to map segment": (
        "libraries do not fit into the memory that is allowed; raise the limit (ulimit -v)"
    ),
    "out of memory": "the device has no memory left; lower memory_gb, model.width or data.train",
}
"""Advice for exceptions whose message contains the key."""


def fault_in_words(error: OSError) -> str:
    """Return the message for an `OSError` of `FAULTS`, with the name of the file.

    >>> fault_in_words(OSError(errno.EIO, "", "kernels.zarr"))
    'kernels.zarr: the disk cannot be read or written'
    """
    place = f"{error.filename}: " if error.filename else ""
    return f"{place}{FAULTS[error.errno or 0]}"


def exhaustion_message(error: BaseException) -> str | None:
    """Return a message if an exception reports exhausted resources or unfinished work.

    Return None for other exceptions.

    >>> exhaustion_message(RuntimeError("can't start new thread")), exhaustion_message(RuntimeError("shapes differ"))
    ('no more threads can be started; lower threads, or raise the limit (ulimit -u)', None)
    """
    if isinstance(error, Unfinished):
        return str(error)
    text = "can't allocate memory" if isinstance(error, MemoryError) else str(error)
    return next((advice for part, advice in MESSAGES.items() if part in text), None)
