"""Jobs run on the executor of an engine, and what becomes of them is a stream of events (`run_jobs`); which engine is
meant, what a worker does with a task, and faults of the machine in words.
"""

from __future__ import annotations

import errno
import os
import signal
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from queue import SimpleQueue
from types import FrameType
from typing import ClassVar, Literal, TypeAlias

from ntkexp.mistake import Mistake, WrongArgument, first_line, nearest
from ntkexp.records.folder import Held

# --- What a task is, and what becomes of it: Began → Stepped, Stepped, … → Ended, mixed with the events of others.
#
# What a task warned of comes with its end, because not every engine hears a task while it runs.
#
# A job is plain data, since it may travel; what it brings about lies in a folder that all workers share.


Ending: TypeAlias = Literal["done", "found", "held", "stopped", "killed", "broken", "failed"]
"""How a task ended:

done      carried out            found   another process had finished it
held      another process is at it
stopped   it was asked to; it goes on from its checkpoint
killed    its process is gone    broken  the machine's fault: a full disk
failed    its own fault: it would fail again
"""


class WrongEngine(WrongArgument):
    """There is no such engine, or it cannot be had: the message begins with how it was spelled."""

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
    """A job continues without something that it was to have; `work` collects these."""

    name: str
    text: str


@dataclass(frozen=True)
class Ended:
    name: str
    how: Ending
    reason: str = field(default="")
    warnings: Sequence[str] = ()


Event: TypeAlias = Began | Stepped | Warned | Ended
Tell: TypeAlias = Callable[[Event], None]


class AbstractJob(ABC):
    """A job is what a worker does, as plain data: a frozen dataclass that can be pickled."""

    loads: ClassVar[tuple[str, ...]] = ()
    """Modules that it imports late, and that a server of workers loads once for all."""

    @abstractmethod
    def carry_out(self, name: str, threads: int, tell: Tell) -> Ending:
        """Do it in this process, with `threads` threads; `tell` gets the progress of the task."""


@dataclass(frozen=True)
class Task:
    """A job for a worker, under a name that no other task of the command has."""

    name: str
    job: AbstractJob
    home: str
    """The folder in which the command was given: paths start from there."""

    logs: str
    """The folder for what engines write by themselves."""

    threads: int = 1


class AbstractEngine(ABC):
    """A place where jobs are done."""

    near: ClassVar[bool] = False
    """Whether its workers are on this machine."""

    @property
    @abstractmethod
    def workers(self) -> int:
        """How many jobs are done at once."""

    @abstractmethod
    def executor(self, tell: Tell) -> Executor:
        """Open an executor that takes `submit(work, task)`; `tell` hears how far tasks are, where that is known.

        A process that ends before its task does is an exception of the task's future. `shutdown` asks jobs that are
        running to keep what they have, and waits until they have ended.
        """

    def limit_threads(self) -> None:  # noqa: B027  nothing is computed here, where workers are elsewhere
        """Leave jobs their cores: libraries read their number of threads when torch is imported, which comes next."""

    def refuse_longer(self, seconds: float) -> None:  # noqa: B027  most engines end no worker
        """Refuse work that cannot be kept before `seconds` are over, if no worker has that long."""


# --- Jobs run on an executor: one way for sweeps, kernels and claims.


class Lost(RuntimeError):
    """The process of a task ended before the task did; the message says of what."""


def run_jobs(engine: AbstractEngine, tasks: Iterator[Task]) -> Generator[Event]:
    """Run tasks on an engine, asking for the next one when a worker is free.

    A process that dies costs the task that it was at. Closing the generator, or an exception inside it, asks jobs to
    keep what they have and to end within seconds.
    """
    events: SimpleQueue[Event] = SimpleQueue()
    executor, running = engine.executor(events.put), 0
    try:
        while True:
            while running < engine.workers and (task := next(tasks, None)) is not None:
                yield Began(task.name)
                running += 1
                future: Future[Ended] = executor.submit(work, task)
                future.add_done_callback(partial(report_end, events, task.name))
            if not running:
                return
            event = events.get()
            running -= isinstance(event, Ended)
            yield event
    finally:
        executor.shutdown(cancel_futures=True)


def report_end(events: SimpleQueue[Event], name: str, future: Future[Ended]) -> None:
    """Put the end of a task behind whatever was heard of it."""
    if future.cancelled():
        events.put(Ended(name, "stopped"))
    elif (error := future.exception()) is None:
        events.put(future.result())
    else:
        lost = f"the cluster lost it: {type(error).__name__}: {first_line(error)}"
        events.put(Ended(name, "killed", str(error) if isinstance(error, Lost) else lost))


# --- Python processes that engines start.


SAFE_PATH = "PYTHONSAFEPATH"
"""With this variable, `python -c` and `python -m` do not search the working folder for modules.

Without it, they run a file `struct.py` of the working folder in place of Python's own module.
"""


@contextmanager
def safe_path() -> Iterator[None]:
    """Set the variable for processes that are started inside."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


@contextmanager
def blocked(number: signal.Signals) -> Iterator[None]:
    """Block a signal in this thread, and in processes that are started inside until they unblock it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# --- Engines by their names: KIND[:WHERE].


HOMES = {
    "local": "ntkexp.engine.local",
    "dask": "ntkexp.engine.dask_cluster",
    "slurm": "ntkexp.engine.slurm",
}
SPELLINGS = "local, dask:ADDRESS, dask:scheduler.json or slurm:KEY=VALUE,…"


def choose(given: str, workers: int | None) -> AbstractEngine:
    """Open the engine that was asked for; those that need an extra are imported when they are asked for.

    >>> choose("local", 2)
    Local(count=2)
    """
    kind, _, where = given.partition(":")
    if kind not in HOMES:
        raise WrongEngine(f"{given}: it takes {SPELLINGS}{nearest(kind, HOMES)}")
    try:
        open_engine: Callable[[str, int | None], AbstractEngine] = import_module(
            HOMES[kind]
        ).open_engine
    except ModuleNotFoundError as error:
        lacking = f"{kind} needs {error.name}; `pip install 'ntkexp[{kind}]'` brings it"
        raise WrongEngine(lacking) from None
    return open_engine(where, workers)


# --- What a worker does with a task, in a process of its own.


def ignore(event: Event) -> None:
    """Report no progress: a task's folder has it."""


def work(task: Task, tell: Tell = ignore) -> Ended:
    """Carry a task out; however that ends, it is said, and nothing is raised. Python's warnings are told as well."""
    texts = list[str]()

    def hear(event: Event) -> None:
        if isinstance(event, Warned):
            texts.append(event.text)
        else:
            tell(event)

    with warnings.catch_warnings(record=True) as caught:
        try:
            os.chdir(task.home)
            how, reason = task.job.carry_out(task.name, task.threads, hear), ""
        except (Exception, KeyboardInterrupt) as error:
            how, reason = ending_of(error)
    texts += [
        warning_in_words(each.message, each.category, each.filename, each.lineno) for each in caught
    ]
    return Ended(task.name, how, reason, tuple(texts))


def warning_in_words(message: Warning | str, category: type[Warning], file: str, line: int) -> str:
    """Say a warning of Python in one line.

    >>> warning_in_words("mind the gap", UserWarning, "net.py", 3)
    'net.py, line 3: UserWarning: mind the gap'
    """
    return f"{file}, line {line}: {category.__name__}: {' '.join(str(message).split())}"


def work_interruptibly(act: Callable[[], Ended], name: str) -> Ended:
    """Let SIGINT reach a task from here on, in a process that started with SIGINT blocked.

    An interrupt that came before ends the task as well; a second one is ignored.
    """
    signal.signal(signal.SIGINT, interrupt_once)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        ended = act()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    except KeyboardInterrupt:
        return Ended(name, "stopped")
    return ended


def interrupt_once(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def ending_of(error: BaseException) -> tuple[Ending, str]:
    """Say what an exception means for a task; the notes of an unexpected one belong to it.

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
            reason = f"{type(error).__name__}: {first_line(error)}"
            return "failed", "; ".join([reason, *getattr(error, "__notes__", ())])


# --- Faults of the machine and of permissions, in words: the same command continues once they are put right.
#
# status 1    the machine failed: its disk, memory, threads, or the reader of the output
# status 2    the user can name another place, or allow this one


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
    errno.EFBIG: "a file may not become so large here; raise the limit (ulimit -f), and the same command continues",
    errno.EPIPE: "the reader of the output has closed it",
    errno.EIO: "the disk cannot be read or written",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n)",
    errno.EAGAIN: "no more processes can be started; lower the number of workers, or raise the limit (ulimit -u)",
    errno.ENOMEM: "no memory is left; lower memory_gb or the number of workers",
}
SAID = {
    "can't start new thread": "no more threads can be started; lower threads, or raise the limit (ulimit -u)",
    "can't allocate memory": "no memory is left; lower memory_gb, model.width or data.train",
    "failed to map segment": "libraries do not fit into the memory that is allowed; raise the limit (ulimit -v)",
    "out of memory": "the device has no memory left; lower memory_gb, model.width or data.train",
}


class Unfinished(RuntimeError):
    """Workers did not finish what they were given; the message is one line, with what to try."""


def fault_in_words(error: OSError) -> str:
    """Say where a fault happened, and what it was.

    >>> fault_in_words(OSError(errno.EIO, "", "kernels.zarr"))
    'kernels.zarr: the disk cannot be read or written'
    """
    return f"{f'{error.filename}: ' if error.filename else ''}{FAULTS[error.errno or 0]}"


def exhausted(error: BaseException) -> str | None:
    """Say what the machine has no more of, if that is what an exception of Python's or of torch's says; or that workers
    did not finish.

    >>> exhausted(RuntimeError("can't start new thread")), exhausted(RuntimeError("shapes differ"))
    ('no more threads can be started; lower threads, or raise the limit (ulimit -u)', None)
    """
    if isinstance(error, Unfinished):
        return str(error)
    text = "can't allocate memory" if isinstance(error, MemoryError) else str(error)
    return next((words for sign, words in SAID.items() if sign in text), None)
