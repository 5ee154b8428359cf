"""Commands in separate processes, forked from a process that has loaded the package."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import SimpleNamespace
from typing import TypeVar
from unittest import mock

from ntkexp.cli.main import run
from ntkexp.records.atomic import read_object
from ntkexp.records.folder import DONE

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *("ntkexp.run.execute", "ntkexp.cli.train", "ntkexp.config.compose", "tests.run.commands"),
        *("matplotlib.figure", "ntkexp.report.plots.run_plots"),  # modules that draw, or each process would load them
    ]
)

TINY = (
    *("data.train=12", "data.query=6", "data.test=6", "model.width=8", "threads=1"),
    *("steps=30", "path.count=4", "path.error_samples=4", "checkpoint_seconds=0"),
)


def obey(arguments: list[str], said: Path) -> None:
    """Run a command as the entry point does, without a terminal.

    Unblock Ctrl-C. The server of an engine blocks it, and the same server may fork this process.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    print_into(os.devnull, said)
    command(arguments)


def print_into(*files: str | Path) -> None:
    """Write stdout and stderr into these files from now on."""
    for descriptor, file in enumerate(files, 1):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)


def command(arguments: Sequence[str]) -> None:
    raise SystemExit(run(arguments))


def undrawn(arguments: Sequence[str]) -> None:
    """Run a command without pictures. Other tests draw them, and they would take longer than the small run."""
    with mock.patch("ntkexp.run.execute.draw_run", return_value={}):
        command(arguments)


def program(text: str) -> None:
    """Run Python as `python -c` does."""
    sys.path.insert(0, "")
    exec(text, {"__name__": "__main__"})


def free_disk(size: float) -> Callable[[object], SimpleNamespace]:
    """Return a replacement of `os.statvfs` for a disk with this many free bytes."""
    return lambda _: SimpleNamespace(f_frsize=1, f_blocks=1e9, f_bfree=size, f_bavail=size)


Given = TypeVar("Given")


def call_within(
    act: Callable[[Given], None], given: Given, folder: Path, files: tuple[Path, Path], most_bytes: int
) -> None:
    """Call a function in a folder with a memory limit, and redirect its output into two files."""
    resource.setrlimit(resource.RLIMIT_DATA, (most_bytes, most_bytes))
    os.chdir(folder)
    print_into(*files)
    act(given)


def started(
    arguments: Sequence[str], out: Path, said: Path, obey: Callable[[list[str], Path], None] = obey
) -> ForkServerProcess:
    """Start `ntkexp train …`, with stderr in a file."""
    process = FORKS.Process(target=obey, args=(["train", *arguments, "--quiet", f"--out={out}"], said))
    process.start()
    return process


def only_run(out: Path) -> Path:
    (found,) = (out / "runs").iterdir()
    return found


def promised(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file that DONE.json lists, also inside folders."""
    listed = [folder / name for name in read_object(folder / DONE)["sizes"]]
    files = [file for path in listed for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}
