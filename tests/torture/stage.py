r"""A command promises its result and status 0, or one line with the reason and status 2.

>>> judged(Ended(("train", "seed=-1"), 2, "", "ntkexp: seed=-1: it takes a whole number ≥ 0\n", 0.1))
'refused'
>>> judged(Ended(("train",), 1, "", "Traceback (most recent call last):\nKeyError: 0\n", 0.1))
Traceback (most recent call last):
tests.torture.stage.Fault: ntkexp train: status 1
Traceback (most recent call last):
KeyError: 0
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import resource
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Literal, TypeAlias

Outcome: TypeAlias = Literal["done", "refused"]
OURS = "ntkexp: "
LOST = (" is damaged", " was left without a checkpoint; ")
"""The only messages of a quiet command: work was lost."""
SHOWN = 1200  # characters of an error


class Fault(AssertionError):
    """A command broke its promise."""


@dataclass(frozen=True)
class Ended:
    """The status and the output of a command. A negative status is the signal that killed it."""

    arguments: tuple[str, ...]
    status: int
    out: str
    err: str
    seconds: float

    def __str__(self) -> str:
        tail = self.err if len(self.err) <= SHOWN else f"…{self.err[-SHOWN:]}"
        line = shlex.join(["ntkexp", *self.arguments])
        shown = line if len(line) <= SHOWN else f"{line[:SHOWN]}…"
        return f"{shown}: status {self.status}\n{tail}".rstrip()


def judged(ended: Ended) -> Outcome:
    """Return the outcome of a quiet command. Raise a fault unless it kept its promise."""
    lines = ended.err.split("\n")[:-1] if ended.err.endswith("\n") else ended.err.split("\n")
    if ended.status == 2 and len(lines) == 1 and lines[0].startswith(OURS) and len(lines[0]) > len(OURS):
        return "refused"
    if ended.status == 0 and all(line.startswith(OURS) or is_of_lost_work(line) for line in lines if line):
        return "done"
    raise Fault(str(ended))


def is_of_lost_work(line: str) -> bool:
    """Return true for a message about lost work.

    >>> is_of_lost_work("outputs/runs/a was left without a checkpoint; the run starts again")
    True
    """
    return any(reason in line for reason in LOST)


def agree(found: dict[str, bytes], expected: dict[str, bytes], what: str) -> None:
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise Fault(f"{what}: {name} {'is missing' if name not in found else 'has other bytes'}")


# A command runs in a process that is forked from one with all modules, with limits of CPU time, wall time and memory.


FORKS = multiprocessing.get_context("fork")
PROCESSOR, WALL = 40, 300.0  # seconds
MEMORY = 9 << 30  # bytes: twice the default of memory_gb and the loaded modules

Command: TypeAlias = Callable[[Sequence[str]], int]


def ntkexp(arguments: Sequence[str]) -> int:
    """Run the command, as its entry point does."""
    from ntkexp.cli.main import run  # noqa: PLC0415  after the number of threads is set

    return run(arguments)


def warm() -> None:
    """Load the modules of commands."""
    from importlib import import_module  # noqa: PLC0415

    for name in ("cli.main", "kernel_file.fill", "run.execute", "sweep.jobs", "report.page.build"):
        import_module(f"ntkexp.{name}")
    from ntkexp.config.compose import compose  # noqa: PLC0415

    compose([])


def started(arguments: Sequence[str], folder: Path, command: Command = ntkexp) -> ForkProcess:
    """Start a command in a folder. Its output goes to `.out` and `.err` there."""
    process = FORKS.Process(target=obey, args=(command, list(arguments), folder))
    process.start()
    return process


def ended(process: ForkProcess, arguments: Sequence[str], folder: Path, wait: float = WALL) -> Ended:
    """Wait for the end of a command, or kill its session after `wait` seconds."""
    begun = time.monotonic()
    process.join(wait)
    if process.is_alive():
        assert process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
    assert process.exitcode is not None
    out, err = ((folder / name).read_text("utf-8", "replace") for name in (".out", ".err"))
    return Ended(tuple(arguments), process.exitcode, out, err, time.monotonic() - begun)


def obey(command: Command, arguments: list[str], folder: Path) -> None:
    """Run a command in the forked process."""
    os.setsid()
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for name, descriptor, mode in ((os.devnull, 0, os.O_RDONLY), (".out", 1, os.O_WRONLY), (".err", 2, os.O_WRONLY)):
        opened = os.open(name, mode | (os.O_CREAT | os.O_TRUNC if mode else 0), 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  multiprocessing closed it
    resource.setrlimit(resource.RLIMIT_CPU, (PROCESSOR, PROCESSOR + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    raise SystemExit(command(arguments))


# Each case has a folder, and the cases of a kind share another one.


SMALL = (
    *("data.train=12", "data.query=6", "data.test=6", "model.width=8", "threads=1"),
    *("steps=3", "path.count=3", "path.error_samples=2"),
)


@dataclass(frozen=True)
class Stage:
    """The folder of a case, and the shared folder."""

    folder: Path
    shared: Path

    def run(self, *arguments: str, command: Command = ntkexp) -> Ended:
        """Run a command."""
        return ended(started(arguments, self.folder, command), arguments, self.folder, WALL)

    def killed(self, arguments: Sequence[str], after: float, command: Command = ntkexp) -> Ended:
        """Run a command, and kill it after some seconds."""
        return ended(started(arguments, self.folder, command), arguments, self.folder, after)

    def outcome(self, *arguments: str) -> Outcome:
        """Run a command. Return its outcome."""
        return judged(self.run(*arguments))

    def done(self, *arguments: str) -> Ended:
        """Run a command that must succeed."""
        found = self.run(*arguments)
        if judged(found) != "done":
            raise Fault(str(found))
        return found

    def kept(self, name: str, make: Callable[[Stage], object]) -> Path:
        """Return a shared folder, and create it at the first call."""
        place = self.shared / name
        with (self.shared / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.is_dir():
                made = self.shared / f"{name}.begun"
                shutil.rmtree(made, ignore_errors=True)
                made.mkdir()
                make(Stage(made, self.shared))
                made.rename(place)
        return place

    def copy(self, place: Path, name: str) -> Path:
        """Copy a shared folder into this case."""
        return Path(shutil.copytree(place, self.folder / name, symlinks=True))


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def cleared(folder: Path) -> None:
    """Remove a folder, despite its permissions."""
    for place, _, _ in os.walk(folder):
        Path(place).chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
