"""A command in a process of its own, forked from one in which everything is loaded, with limits.

Time is that of the processor, so that a machine with much else to do changes nothing; the wall's is for what sleeps.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import TypeAlias

from tests.torture.judge import Ended

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
