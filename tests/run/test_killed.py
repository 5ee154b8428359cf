"""Killed without warning, at any moment, a run is finished by the same command, to the same bytes."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ntkexp.path.budget import Budget
from ntkexp.report.plots import run_plots
from ntkexp.run.folder_listener import FolderListener, both_ends
from tests.run.commands import TINY, obey, only_run, promised, started
from tests.torture.kind.kills import no_pictures

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


SPILLED = (*TINY, "data=sequence", "path.kernels=none", "optimizer=sgd", "optimizer.batch=5", "steps=20")
MOMENTS = (
    ("ntkexp.path.integrals.put_back", 43),  # a block of a step is added, others are not
    ("ntkexp.run.state.written", 14),  # some sums of a checkpoint are written
    ("ntkexp.run.state.being_sealed", 5),  # all of them, but not what names them
    ("ntkexp.run.state.drop_sums", 2),  # those of the checkpoint before are there as well
)
"""A function that is called at such a moment, and how many calls go before."""


def on_disk(moment: tuple[str, int] | None, arguments: list[str], said: Path) -> None:
    """The command, whose sums lie on disk and are kept after every step; killed at such a moment."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(Budget, "spills", new=True))
        stack.enter_context(mock.patch("ntkexp.run.folder_listener.PATIENCE", 0))
        if moment is not None:
            stack.enter_context(dying(*moment))
        stack.enter_context(mock.patch("ntkexp.run.execute.painter", no_pictures))
        obey(arguments, said)


@contextmanager
def dying(name: str, before: int) -> Iterator[None]:
    """This process is killed at a call of a function after so many others."""
    module, _, attribute = name.rpartition(".")
    told: Callable[..., Any] = getattr(import_module(module), attribute)
    calls = count()

    def called(*about: Any) -> Any:
        if next(calls) == before:
            os.kill(os.getpid(), signal.SIGKILL)
        return told(*about)

    with mock.patch(name, called):
        yield


def exit_code(out: Path, moment: tuple[str, int] | None) -> int | None:
    """How the command ended."""
    process = started(SPILLED, out, out.with_suffix(".txt"), partial(on_disk, moment))
    process.join()
    return process.exitcode


@pytest.mark.slow
def test_sums_on_disk_survive_a_kill_at_any_moment(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert exit_code(whole, None) == 0
    done = [0]
    for moment in MOMENTS:
        assert exit_code(killed, moment) == -signal.SIGKILL, moment
        saved = torch.load(only_run(killed) / "checkpoint.pt")
        done.append(len(saved["run"]["step_sizes"]))
        assert done[-1] > done[-2], moment  # it went on, and did not begin anew
    assert exit_code(killed, None) == 0
    assert promised(only_run(killed)) == promised(only_run(whole))
    assert not list(only_run(killed).glob("*sums-*"))


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


def test_files_do_not_tell_whether_names_came_from_a_checkpoint() -> None:
    """As of a run that was killed after its last step: it goes on with nothing to do."""
    start, end = {"layer.weight": torch.ones(2)}, {"layer.weight": torch.zeros(2)}
    read = {"".join(list(name)): weight for name, weight in end.items()}
    assert next(iter(read)) is not next(iter(start))
    one, two = BytesIO(), BytesIO()
    torch.save(both_ends(start, dict(zip(start, end.values(), strict=True))), one)
    torch.save(both_ends(start, read), two)
    assert one.getvalue() == two.getvalue()
