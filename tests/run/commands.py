"""Commands in processes of their own, forked from one in which the package is loaded already."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from ntkexp.cli.main import run
from ntkexp.records.atomic import read_object
from ntkexp.records.folder import DONE

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        *("ntkexp.run.execute", "ntkexp.cli.train", "ntkexp.config.compose", "tests.run.commands"),
        *("matplotlib.figure", "ntkexp.report.plots.run_plots"),  # what draws, or a process beside would load it anew
    ]
)

TINY = (
    *("data.train=12", "data.probe=6", "data.test=6", "model.width=8", "threads=1"),
    *("steps=30", "path.count=4", "path.error_samples=4", "checkpoint_seconds=0"),
)


def obey(arguments: list[str], said: Path, printed: Path = Path(os.devnull)) -> None:
    """Run a command as the entry point does, without a terminal.

    Ctrl-C is heard, though the server of an engine, which may be the one that forks here too, holds it back.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for name, descriptor in ((printed, 1), (said, 2)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), descriptor)
    raise SystemExit(run(arguments))


def started(
    arguments: Sequence[str], out: Path, said: Path, obey: Callable[[list[str], Path], None] = obey
) -> ForkServerProcess:
    """`ntkexp train …`, running; what it says on stderr goes to a file."""
    process = FORKS.Process(target=obey, args=(["train", *arguments, "--quiet", f"--out={out}"], said))
    process.start()
    return process


def only_run(out: Path) -> Path:
    (found,) = (out / "runs").iterdir()
    return found


def promised(folder: Path) -> dict[str, bytes]:
    """The bytes of every file that DONE.json lists, folders file by file."""
    listed = [folder / name for name in read_object(folder / DONE)["sizes"]]
    files = [file for path in listed for file in (path.rglob("*") if path.is_dir() else [path]) if file.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}
