"""Killed without warning, at any moment, a run is finished by the same command, to the same bytes."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from unittest import mock

import pytest

from ntkexp.report.plots import run_plots
from ntkexp.run.folder_listener import FolderListener
from tests.run.commands import TINY, obey, only_run, promised, started

STOPPING = (*TINY, "stop_at_loss=0.17")  # somewhere on the way: room for kernels is given back at the end
OPTIMIZERS = (
    (),
    ("optimizer=adam", "optimizer.step_size=0.05"),  # walks its path back as well
    ("optimizer=sgd", "optimizer.batch=8", "path.every=snapshots", "path.schedule=adaptive"),
)


@dataclass(frozen=True)
class Undisturbed:
    """A run that nobody disturbed, and how long it took."""

    settings: tuple[str, ...]
    files: dict[str, bytes]
    seconds: float


@pytest.fixture(
    scope="module",
    params=(
        pytest.param(OPTIMIZERS[0], id="online", marks=pytest.mark.slow),
        pytest.param(OPTIMIZERS[1], id="back"),  # it goes both ways
        pytest.param(OPTIMIZERS[2], id="snapshots", marks=pytest.mark.slow),
    ),
)
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    chosen, out = (*STOPPING, *request.param), tmp_path_factory.mktemp("undisturbed")
    finish(chosen, out)  # the first child waits for the fork server
    start = time.monotonic()
    finish(chosen, out, "--force")
    return Undisturbed(chosen, promised(only_run(out)), time.monotonic() - start)


def hurried(arguments: list[str], said: Path) -> None:
    """The command, drawing one picture in place of all, which take longer than such a run."""
    first = next(iter(run_plots.gallery()))
    with mock.patch.object(run_plots, "gallery", return_value=[first]):
        obey(arguments, said)


def finish(chosen: tuple[str, ...], out: Path, *flags: str) -> None:
    """The command, to its end."""
    process = started([*chosen, *flags], out, out / "said.txt", hurried)
    process.join()
    assert process.exitcode == 0, (out / "said.txt").read_text("utf-8")


def kill(chosen: tuple[str, ...], out: Path, after: float, *flags: str) -> bool:
    """Start the command and kill it after so many seconds; whether it was still running."""
    process = started([*chosen, *flags], out, out / "said.txt", hurried)
    process.join(after)
    process.kill()
    process.join()
    assert process.exitcode in {0, -signal.SIGKILL}, (out / "said.txt").read_text("utf-8")
    return process.exitcode != 0


def hunt(out: Path, undisturbed: Undisturbed, kills: int) -> None:
    """Kill it so many times at moments drawn over the length of a run, starting anew whenever it came to its end."""
    moments = random.Random(kills)
    flags: tuple[str, ...] = ("--force",)
    while kills:
        killed = kill(undisturbed.settings, out, moments.uniform(0, undisturbed.seconds), *flags)
        kills -= killed
        flags = () if killed else ("--force",)
        if not killed:
            assert promised(only_run(out)) == undisturbed.files
    finish(undisturbed.settings, out)
    assert promised(only_run(out)) == undisturbed.files


@pytest.mark.slow
def test_three_kills(tmp_path: Path, undisturbed: Undisturbed) -> None:
    hunt(tmp_path, undisturbed, 3)


@pytest.mark.slow
@pytest.mark.parametrize("undisturbed", [OPTIMIZERS[1]], ids=["back"], indirect=True)
def test_twenty_kills(tmp_path: Path, undisturbed: Undisturbed) -> None:
    hunt(tmp_path, undisturbed, 20)


def interrupted_in(method: str, call: int, arguments: list[str], said: Path) -> None:
    """The command, to which Ctrl-C is pressed when its listener is told of something for the so manieth time."""
    told: Callable[..., None] = getattr(FolderListener, method)
    calls = count(1)

    def pressed(*about: object) -> None:
        if next(calls) == call:
            signal.raise_signal(signal.SIGINT)
        told(*about)

    with mock.patch.object(FolderListener, method, pressed):
        hurried(arguments, said)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "call"), [("on_step", 7), ("on_end", 1), ("on_snapshot", 4)])
def test_an_interrupt_leaves_a_run_that_goes_on(
    tmp_path: Path, undisturbed: Undisturbed, method: str, call: int
) -> None:
    """In the middle, after the last step, and while the run looks back, which keeps no checkpoint."""
    said = tmp_path / "said.txt"
    settings = [*undisturbed.settings, "checkpoint_seconds=1000"]
    process = started(settings, tmp_path, said, partial(interrupted_in, method, call))
    process.join()
    folder = only_run(tmp_path)
    assert (process.exitcode, (folder / "checkpoint.pt").is_file()) == (130, method == "on_step")
    line = said.read_text("utf-8")
    assert line.startswith("ntkexp: interrupted; ")
    assert line.count("\n") == 1
    assert f"ntkexp resume {folder}" in line
    finish(undisturbed.settings, tmp_path)
    files = promised(folder)
    assert {name: files[name] for name in files if name != "config.json"} == {
        name: undisturbed.files[name] for name in files if name != "config.json"
    }  # config.json also holds the circumstances, and the interval of checkpoints is one
