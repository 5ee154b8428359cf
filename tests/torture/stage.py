r"""What a command promises: what was asked for and status 0, or one line that says why not and status 2.

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
"""A quiet command says one thing on its way: what work was lost."""
SHOWN = 1200  # characters of a complaint


class Fault(AssertionError):
    """A command that did not keep its promise."""


@dataclass(frozen=True)
class Ended:
    """How a command ended, and what it printed; a status below zero is the signal that it died of."""

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
    """What became of a command that was to be quiet; anything but its two good ends is a fault."""
    lines = ended.err.split("\n")[:-1] if ended.err.endswith("\n") else ended.err.split("\n")
    if ended.status == 2 and len(lines) == 1 and lines[0].startswith(OURS) and len(lines[0]) > len(OURS):
        return "refused"
    if ended.status == 0 and all(line.startswith(OURS) or is_of_lost_work(line) for line in lines if line):
        return "done"
    raise Fault(str(ended))


def is_of_lost_work(line: str) -> bool:
    """Whether a line says that a run begins anew, and why.

    >>> is_of_lost_work("outputs/runs/a was left without a checkpoint; the run starts again")
    True
    """
    return any(reason in line for reason in LOST)


def agree(found: dict[str, bytes], expected: dict[str, bytes], what: str) -> None:
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise Fault(f"{what}: {name} {'is missing' if name not in found else 'has other bytes'}")


# A command in a process of its own, forked from one in which everything is loaded, with limits.
#
# Time is that of the processor, so that a machine with much else to do changes nothing; the wall's is for what sleeps.


FORKS = multiprocessing.get_context("fork")
PROCESSOR, WALL = 40, 300.0  # seconds
MEMORY = 9 << 30  # bytes of addresses: memory_gb's default, and what was loaded, twice

Command: TypeAlias = Callable[[Sequence[str]], int]


def ntkexp(arguments: Sequence[str]) -> int:
    """The command itself, as its entry point runs it."""
    from ntkexp.cli.main import run  # noqa: PLC0415  the numbers of threads must be set before torch is imported

    return run(arguments)


def warm() -> None:
    """Load what commands load, once for all of them."""
    from importlib import import_module  # noqa: PLC0415

    for name in ("cli.main", "kernel_file.fill", "run.execute", "sweep.jobs", "report.page.build"):
        import_module(f"ntkexp.{name}")
    from ntkexp.config.compose import compose  # noqa: PLC0415

    compose([])


def started(arguments: Sequence[str], folder: Path, command: Command = ntkexp) -> ForkProcess:
    """A command, running in a folder; what it prints goes to `.out` and `.err` there."""
    process = FORKS.Process(target=obey, args=(command, list(arguments), folder))
    process.start()
    return process


def ended(process: ForkProcess, arguments: Sequence[str], folder: Path, wait: float = WALL) -> Ended:
    """The same at its end, or when it has been waited for so long, which is the end of its whole session."""
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
    """What the forked process does."""
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


# Where a case is played: a folder of its own, the commands that are run in it, and what all cases of a kind share.


SMALL = (
    *("data.train=12", "data.query=6", "data.test=6", "model.width=8", "threads=1"),
    *("steps=3", "path.count=3", "path.error_samples=2"),
)


@dataclass(frozen=True)
class Stage:
    """A folder for one case, and one that outlives it."""

    folder: Path
    shared: Path

    def run(self, *arguments: str, command: Command = ntkexp) -> Ended:
        """A command, to its end."""
        return ended(started(arguments, self.folder, command), arguments, self.folder, WALL)

    def killed(self, arguments: Sequence[str], after: float, command: Command = ntkexp) -> Ended:
        """A command that is killed after so many seconds, unless it has come to its end."""
        return ended(started(arguments, self.folder, command), arguments, self.folder, after)

    def outcome(self, *arguments: str) -> Outcome:
        """What became of a command."""
        return judged(self.run(*arguments))

    def done(self, *arguments: str) -> Ended:
        """A command that has no reason to refuse."""
        found = self.run(*arguments)
        if judged(found) != "done":
            raise Fault(str(found))
        return found

    def kept(self, name: str, make: Callable[[Stage], object]) -> Path:
        """A folder that is made once, whoever asks first."""
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
        """What is shared, for this case alone."""
        return Path(shutil.copytree(place, self.folder / name, symlinks=True))


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def cleared(folder: Path) -> None:
    """Remove a folder, whatever was done to its permissions."""
    for place, _, _ in os.walk(folder):
        Path(place).chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)
