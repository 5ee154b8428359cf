"""Carrying out: the same bytes each time, once only, by one process, and again after whatever went wrong."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ntkexp.capacity
import ntkexp.run.execute
import ntkexp.run.folder_listener
from ntkexp.cli.main import run
from ntkexp.config.compose import compose
from ntkexp.experiment.identity import folder_name
from ntkexp.path.budget import RunMemory
from ntkexp.records.folder import RunFolder
from ntkexp.records.results import read_timings
from tests.run.commands import TINY, only_run, promised

SHORT = (*TINY, "steps=6")

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    """A command in this process: its status, and what it printed."""

    def call(*arguments: str) -> tuple[int, str, str]:
        status = run(arguments)
        return status, *capfd.readouterr()

    return call


@pytest.fixture
def without_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than so small a run."""
    monkeypatch.setattr(ntkexp.run.execute, "draw_run", stand_in)


def stand_in(folder: Path) -> dict[str, str]:
    """Return a file in place of the pictures."""
    return {"none.svg": "<svg/>"}


def train(out: Path, *overrides: str) -> tuple[str, ...]:
    return ("train", *SHORT, *overrides, f"--out={out}", "--quiet")


def stamp(folder: Path) -> int:
    return (folder / "DONE.json").stat().st_mtime_ns


@pytest.mark.slow  # of a run without pictures, the test of `--force` says so; of pictures, those of the report
def test_the_same_command_writes_the_same_bytes(tmp_path: Path, command: Command) -> None:
    for place in ("one", "two"):
        assert command(*train(tmp_path / place)) == (0, "", "")
    one, two = (promised(only_run(tmp_path / place)) for place in ("one", "two"))
    assert one == two
    assert any(name.startswith("plots/") for name in one)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of a finished run."""
    out = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ntkexp.run.execute, "draw_run", stand_in)
        assert run(train(out)) == 0
    return out


@pytest.fixture(scope="module")
def undisturbed(finished: Path) -> dict[str, bytes]:
    """The files of a run that nothing disturbed."""
    return promised(only_run(finished))


@pytest.mark.usefixtures("without_plots")
@pytest.mark.parametrize(
    ("words", "added", "removed", "again"),
    [
        ((), "BEGUN.json", None, False),  # a kill after the last seal leaves it
        (("memory_gb=3", "checkpoint_seconds=5"), None, None, False),
        (("--force",), None, None, True),
        ((), None, "results.csv", True),
    ],
    ids=["leftovers", "circumstances", "forced", "lost a file"],
)
def test_a_finished_run_is_run_again_only_if_it_has_to(
    finished: Path,
    undisturbed: dict[str, bytes],
    tmp_path: Path,
    command: Command,
    words: tuple[str, ...],
    added: str | None,
    removed: str | None,
    again: bool,
) -> None:
    out = shutil.copytree(finished, tmp_path / "out")
    folder = only_run(out)
    before = stamp(folder)
    if added is not None:
        (folder / added).write_text("{}")
    if removed is not None:
        (folder / removed).unlink()
    assert command(*train(out), *words)[0] == 0
    assert (stamp(folder) != before) == again
    assert not (folder / "BEGUN.json").exists()
    assert promised(folder) == undisturbed


@pytest.mark.usefixtures("without_plots")
def test_a_data_file_that_changed_is_another_run(tmp_path: Path, command: Command) -> None:
    rows = [f"{k},{k * k % 7},{k % 3}" for k in range(40)]
    table = tmp_path / "table.csv"
    chosen = ("data=table", f"data.path={table}", "data.target=y", "data.train=12", "data.query=6", "data.test=6")
    for last in ("1,2,3", "1,2,4"):
        table.write_text("\n".join(["a,b,y", *rows, last]) + "\n")
        status, _, error = command(*train(tmp_path / "out", *chosen))
        assert status == 0, error
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 2


def test_two_processes_do_not_write_the_same_run(tmp_path: Path, command: Command) -> None:
    folder = RunFolder(tmp_path / "runs" / folder_name(compose(SHORT)))
    with folder.claim():
        status, out, error = command(*train(tmp_path))
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert "is being written by another process" in error


def full_disk(patch: pytest.MonkeyPatch, name: str, room: int = 0) -> None:
    """A disk with room for so many versions of a file, and for nothing after them."""
    replace, left = Path.replace, [room]

    def moved(partial: Path, place: Path) -> Path:
        left[0] -= place.name == name
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))
        return replace(partial, place)

    patch.setattr(Path, "replace", moved)


LAST = "DONE.json"
BEFORE = ("config.json", "data.npz", "checkpoint.pt", "results.csv", "weights.pt")


@pytest.mark.usefixtures("without_plots")
@pytest.mark.parametrize("name", [LAST, *(pytest.param(name, marks=pytest.mark.slow) for name in BEFORE)])
def test_a_full_disk_is_one_line_and_the_command_goes_on_afterwards(
    tmp_path: Path, command: Command, undisturbed: dict[str, bytes], name: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        full_disk(patch, name)
        status, out, error = command(*train(tmp_path))
    assert (status, out, error.count("\n")) == (1, "", 1), error
    assert "no space is left on the disk" in error
    assert command(*train(tmp_path))[0] == 0
    assert promised(only_run(tmp_path)) == undisturbed


@pytest.mark.usefixtures("without_plots")
def test_resume_goes_on_with_the_threads_of_the_checkpoint(
    tmp_path: Path, command: Command, undisturbed: dict[str, bytes]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        full_disk(patch, "checkpoint.pt", room=4)
        command(*train(tmp_path))
    torch.set_num_threads(2)
    folder = only_run(tmp_path)
    took = torch.load(folder / "checkpoint.pt")["took"]
    assert command("resume", str(folder), "--quiet") == (0, "", "")
    assert torch.get_num_threads() == 1
    assert promised(folder) == undisturbed
    assert not (folder / "checkpoint.pt").exists()
    earlier = read_timings(folder / "timings.csv")["earlier"]
    assert min(took) > 0
    assert (earlier.wall, earlier.processor) == pytest.approx(took, abs=1e-6)  # of which six digits are written


ADAM = ("optimizer=adam", "optimizer.step_size=0.01")


@pytest.mark.usefixtures("without_plots")
def test_a_trajectory_that_does_not_fit_is_found_out_before_the_first_step(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ntkexp.capacity, "disk_usage", lambda place: SimpleNamespace(free=1000))
    status, out, error = command(*train(tmp_path, *ADAM))
    assert (status, out, error.count("\n")) == (2, "", 1), error
    assert "trajectories take 6.8e-05 GB of disk and" in error
    assert (only_run(tmp_path) / "metrics.csv").read_text().count("\n") == 1


SPILLED = ("path.kernels=none", "path.rule=[secant,left]")


@pytest.mark.usefixtures("without_plots")
def test_sums_that_do_not_fit_on_the_disk_are_found_out_before_the_first_step(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunMemory, "spills", True)
    monkeypatch.setattr(ntkexp.capacity, "disk_usage", lambda place: SimpleNamespace(free=20_000))
    status, out, error = command(*train(tmp_path, *SPILLED))
    assert (status, out, error.count("\n")) == (2, "", 1), error
    # 24 points, 12 examples, 8 bytes: two rules and an error bar, three times
    assert f"contributions, their checkpoints and results take {3 * 3 * 24 * 12 * 8 / 1e9:.2g} GB of disk and " in error
    assert (only_run(tmp_path) / "metrics.csv").read_text().count("\n") == 1


@pytest.mark.slow
@pytest.mark.usefixtures("without_plots")
@pytest.mark.parametrize("name", ["sums-1-0.bin", "sums-4-1.bin"])
def test_a_disk_that_fills_up_while_sums_are_kept(
    tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(RunMemory, "spills", True)
    monkeypatch.setattr(ntkexp.run.folder_listener, "CHECKPOINT_PAUSE", 0)
    assert command(*train(tmp_path / "whole", *SPILLED))[0] == 0
    with pytest.MonkeyPatch.context() as patch:
        full_disk(patch, name)
        status, out, error = command(*train(tmp_path / "full", *SPILLED))
    assert (status, out, error.count("\n")) == (1, "", 1), error
    assert "no space is left on the disk" in error
    kept = [path.name for path in only_run(tmp_path / "full").glob("sums-*")]
    assert kept.count("sums-3-0.bin") == (name == "sums-4-1.bin")
    assert command(*train(tmp_path / "full", *SPILLED))[0] == 0
    assert promised(only_run(tmp_path / "full")) == promised(only_run(tmp_path / "whole"))


@pytest.mark.usefixtures("without_plots")
def test_a_run_that_walks_back_leaves_no_trajectory(tmp_path: Path, command: Command) -> None:
    status, _, error = command(*train(tmp_path, *ADAM))
    assert status == 0, error
    folder = only_run(tmp_path)
    assert not (folder / "trajectory.bin").exists()
    assert not (folder / "checkpoint.pt").exists()
