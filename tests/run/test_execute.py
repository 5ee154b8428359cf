"""Carrying out a run: the same bytes each time, once only, by one process, again after any damage, and no other run."""

from __future__ import annotations

import errno
import io
import os
import pickle
import shutil
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from ntkexp.cli.main import run
from ntkexp.config.compose import compose
from ntkexp.experiment.identity import folder_name
from ntkexp.mistake import Mistake
from ntkexp.model.functional import save_tensors
from ntkexp.progress import Silent
from ntkexp.records.atomic import read_object
from ntkexp.records.contributions import REMOVAL_FOLDER
from ntkexp.records.folder import RunFolder
from ntkexp.records.results import read_timings
from ntkexp.report.inventory import list_runs
from ntkexp.report.loaded_run import load_run
from ntkexp.report.material import what_came_out
from ntkexp.run.execute import remove_group
from ntkexp.run.setting import prepare
from ntkexp.run.state import spilled_bytes
from tests.run.commands import TINY, free_disk, only_run, promised
from tests.run.small import execute_in, small
from tests.run.test_recorded import Interrupting

SHORT = (*TINY, "steps=6")
ADAM = (*TINY, "steps=4", "path.error_samples=0", "optimizer=adam", "optimizer.step_size=0.05")  # walks back as well
SMALLEST = (
    *("data.train=8", "data.query=4", "data.test=4", "model.width=4", "threads=1", "steps=2", "path.error_samples=0"),
)
GROUP, POINTS = [1, 3], [0]
Said = pytest.CaptureFixture[str]


def stand_in(folder: Path) -> dict[str, str]:
    """Return a file in place of the pictures, which take longer than so small a run."""
    return {"none.svg": "<svg/>"}


@pytest.fixture(autouse=True, scope="module")
def _undrawn() -> Iterator[None]:
    with mock.patch("ntkexp.run.execute.draw_run", stand_in):
        yield


def train(out: Path, *words: str, base: Sequence[str] = SHORT) -> int:
    return run(("train", *base, *words, f"--out={out}", "--quiet"))


def only_line(capfd: Said) -> str:
    """Return the line of a refusal."""
    out, error = capfd.readouterr()
    (line,) = error.splitlines()
    assert out == ""
    return line


def copied(place: Path, to: Path) -> Path:
    return Path(shutil.copytree(place, to / place.name))


@contextmanager
def full_disk(name: str, room: int = 0, interrupt: bool = False) -> Iterator[None]:
    """A disk with room for some versions of a file, and for no file after them; or Ctrl-C once instead of the next."""
    replace, left = Path.replace, [room]

    def moved(partial: Path, place: Path) -> Path:
        left[0] -= place.name == name
        if left[0] < 0 and interrupt:
            left[0] = 1000
            signal.raise_signal(signal.SIGINT)
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(place))
        return replace(partial, place)

    with mock.patch.object(Path, "replace", moved):
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The outputs of a finished run."""
    out = tmp_path_factory.mktemp("finished")
    assert train(out) == 0
    return out


@pytest.fixture(scope="module")
def undisturbed(finished: Path) -> dict[str, bytes]:
    files = promised(only_run(finished))
    assert any(name.startswith("kernels.zarr/path_secant/c/") for name in files)
    return files


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
    words: tuple[str, ...],
    added: str | None,
    removed: str | None,
    again: bool,
) -> None:
    out = copied(finished, tmp_path)
    folder = only_run(out)
    before = (folder / "DONE.json").stat().st_mtime_ns
    if added is not None:
        (folder / added).write_text("{}")
    if removed is not None:
        (folder / removed).unlink()
    assert train(out, *words) == 0
    assert ((folder / "DONE.json").stat().st_mtime_ns != before) == again
    assert not (folder / "BEGUN.json").exists()
    assert promised(folder) == undisturbed


def test_a_data_file_that_changed_is_another_run(tmp_path: Path) -> None:
    for last in ("1,2,3", "1,2,4"):
        words = (table(tmp_path / "t.csv", last), "data=table", "data.target=y")
        assert train(tmp_path / "out", *words, base=SMALLEST) == 0
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 2


def test_two_processes_do_not_write_the_same_run(tmp_path: Path, capfd: Said) -> None:
    with RunFolder(tmp_path / "runs" / folder_name(compose(SHORT))).claim():
        assert train(tmp_path) == 2
    assert "is being written by another process" in only_line(capfd)


BEFORE = ("config.json", "data.npz", "checkpoint.pt", "results.csv", "weights.pt")


@pytest.mark.parametrize("name", ["DONE.json", *(pytest.param(name, marks=pytest.mark.slow) for name in BEFORE)])
def test_a_full_disk_is_one_line_and_the_command_goes_on_afterwards(
    tmp_path: Path, undisturbed: dict[str, bytes], name: str, capfd: Said
) -> None:
    with full_disk(name):
        assert train(tmp_path) == 1
    assert "no space is left on the disk" in only_line(capfd)
    assert train(tmp_path) == 0
    assert promised(only_run(tmp_path)) == undisturbed


def test_an_interrupt_leaves_a_run_that_goes_on(tmp_path: Path, undisturbed: dict[str, bytes], capfd: Said) -> None:
    with full_disk("checkpoint.pt", room=3, interrupt=True):
        assert train(tmp_path) == 130
    folder, line = only_run(tmp_path), only_line(capfd)
    assert line.startswith("ntkexp: interrupted; ")
    assert f"ntkexp resume {folder}" in line
    assert (folder / "checkpoint.pt").is_file()
    assert run(("resume", str(folder), "--quiet")) == 0
    assert promised(folder) == undisturbed


def test_resume_goes_on_with_the_threads_of_the_checkpoint(tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    with full_disk("checkpoint.pt", room=4):
        assert train(tmp_path) == 1
    torch.set_num_threads(2)
    folder = only_run(tmp_path)
    took = torch.load(folder / "checkpoint.pt")["took"]
    assert run(("resume", str(folder), "--quiet")) == 0
    assert torch.get_num_threads() == 1
    assert promised(folder) == undisturbed
    assert not (folder / "checkpoint.pt").exists()
    earlier = read_timings(folder / "timings.csv")["earlier"]
    assert min(took) > 0
    assert (earlier.wall, earlier.processor) == pytest.approx(took, abs=1e-6)  # six digits are written


def test_a_small_disk_is_found_out_before_the_first_step(tmp_path: Path, capfd: Said) -> None:
    with mock.patch("os.statvfs", free_disk(1000)):
        assert train(tmp_path, "optimizer=adam", "optimizer.step_size=0.01") == 2
    assert "trajectories take 6.8e-05 GB of disk and" in only_line(capfd)
    assert (only_run(tmp_path) / "metrics.csv").read_text().count("\n") == 1
    spilling = prepare(small("data.train=12", "path.kernels=none", "path.rule=[secant,left]", "path.error_samples=2"))
    assert spilled_bytes(spilling) == 3 * 3 * 36 * 12 * 8  # two rules and an error bar, three times, at 36 points


# An unfinished run with a damaged file ends in the bytes of one left alone, from its beginning if need be.


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run left alone, and the same broken off on its way back."""
    place = tmp_path_factory.mktemp("places")
    assert train(place / "whole", base=ADAM) == 0
    with full_disk("checkpoint.pt", room=6):  # four steps there, and two of the way back
        assert train(place / "begun", base=ADAM) == 1
    return place


RELIED_ON = ("checkpoint.pt", "trajectory.bin")
AND_ON = ("kernels.zarr/tangent/c/0/0/0/0/0", "metrics.csv", "data.npz", "config.json")


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [*RELIED_ON, *(pytest.param(name, marks=pytest.mark.slow) for name in AND_ON)])
def test_a_flipped_bit_is_seen_and_said(places: Path, tmp_path: Path, name: str, capfd: Said) -> None:
    folder = only_run(copied(places / "begun", tmp_path))
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 3] ^= 1
    (folder / name).write_bytes(content)
    with mock.patch("torch.load", side_effect=AssertionError if name == "checkpoint.pt" else torch.load):
        assert run(("train", *ADAM, f"--out={tmp_path / 'begun'}")) == 0  # torch reads no garbled checkpoint
    (said,) = (line for line in capfd.readouterr().err.splitlines() if "is damaged" in line)
    assert said.endswith("; the run starts again")
    assert str(folder) in said
    assert promised(folder) == promised(only_run(places / "whole"))
    assert not [file for file in RELIED_ON if (folder / file).exists()]


def test_a_run_without_its_identity_is_not_resumed(places: Path, tmp_path: Path, capfd: Said) -> None:
    """Circumstances are no part of its identity, and move its bits."""
    config = only_run(copied(places / "begun", tmp_path)) / "config.json"
    config.write_text(config.read_text("utf-8").replace('"threads": 1', '"threads": 2'), encoding="utf-8")
    assert run(("resume", str(config.parent))) == 2
    assert "config.json not as it was written; the command that began it" in only_line(capfd)


# A run is what its folder says only if each file was written for this run. Files of other runs are refused.


@pytest.fixture(scope="module")
def two_seeds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two finished runs, of two seeds."""
    out = tmp_path_factory.mktemp("seeds")
    for seed in (0, 1):
        assert train(out / str(seed), f"seed={seed}", base=SMALLEST) == 0
    return only_run(out / "0"), only_run(out / "1")


def test_a_run_in_the_place_of_another_is_not_that_run(
    two_seeds: tuple[Path, Path], tmp_path: Path, capfd: Said
) -> None:
    covered = Path(shutil.copytree(two_seeds[1], tmp_path / "runs" / two_seeds[0].name))
    assert train(tmp_path, "seed=0", base=SMALLEST) == 2
    assert "holds another run" in only_line(capfd)
    kernel = ("kernel", "tangent", f"--run={covered}", f"--out={tmp_path / 'k.zarr'}")
    for words in (
        ("resume", str(covered)),
        ("explain", str(covered)),
        ("report", str(covered), f"--out={tmp_path}"),
        kernel,
    ):
        assert run(words) == 2
        assert f"{covered} has the name of another run" in only_line(capfd)
    with pytest.raises(Mistake, match="has the name of another run"):
        load_run(covered)
    assert promised(covered) == promised(two_seeds[1])  # the refusals have lost nothing
    assert train(tmp_path, "seed=0", "--force", base=SMALLEST) == 0
    assert promised(covered) == promised(two_seeds[0])
    copy = shutil.copytree(two_seeds[1], tmp_path / "the best one")  # any name is fine except the name of another run
    assert load_run(copy).config["seed"] == 1
    assert run(["resume", str(copy), "--quiet"]) == 0


@pytest.mark.slow
def test_a_removal_of_another_run_is_not_read(two_seeds: tuple[Path, Path], tmp_path: Path) -> None:
    here, there = (copied(place, tmp_path) for place in two_seeds)
    true, other = (remove_group(place, GROUP, POINTS, Silent()) for place in (here, there))
    assert not np.array_equal(true.actual, other.actual)
    shutil.rmtree(here / REMOVAL_FOLDER)
    shutil.copytree(there / REMOVAL_FOLDER, here / REMOVAL_FOLDER)
    assert np.array_equal(remove_group(here, GROUP, POINTS, Silent()).actual, true.actual)


def table(path: Path, last: str) -> str:
    rows = [f"{k},{k % 5},{np.sin(k)}" for k in range(15)]
    path.write_text("\n".join(["a,b,y", *rows, last]) + "\n", encoding="utf-8")
    return f"data.path={path}"


@pytest.mark.slow
def test_a_kernel_of_a_run_with_changed_data_is_refused(tmp_path: Path, capfd: Said) -> None:
    words = ("data=table", table(tmp_path / "t.csv", "1,2,3"), "data.target=y")
    assert train(tmp_path, *words, base=SMALLEST) == 0
    asked = ("kernel", "tangent", f"--run={only_run(tmp_path)}", f"--out={tmp_path / 'k.zarr'}", "--quiet")
    assert run(asked) == 0
    table(tmp_path / "t.csv", "1,2,4")
    for more in ((), ("--force",)):
        assert run((*asked, *more)) == 2
        assert f"cannot be computed again, because {tmp_path / 't.csv'} has changed since" in only_line(capfd)
    with pytest.raises(Mistake, match="has changed since"):
        remove_group(only_run(tmp_path), GROUP, POINTS, Silent())
    table(tmp_path / "t.csv", "1,2,3")
    assert run(asked) == 0


@pytest.mark.slow
def test_a_relative_path_is_explained_in_another_working_folder(
    tmp_path: Path, capfd: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table(Path("t.csv"), "1,2,3")
    assert train(tmp_path, "data=table", "data.path=t.csv", "data.target=y", base=SMALLEST) == 0
    monkeypatch.chdir(tmp_path / "runs")
    assert run(("kernel", "tangent", f"--run={only_run(tmp_path)}", f"--out={tmp_path / 'k.zarr'}", "--quiet")) == 2
    assert f"there is no such file; the run was started in {tmp_path}, so give" in only_line(capfd)


@pytest.mark.slow
def test_a_kernel_of_a_network_with_changed_code_is_refused(tmp_path: Path, capfd: Said) -> None:
    """For a network in a run, and for one drawn for its kernel: the file holds the kernel of the earlier code."""
    layers = "nn.Flatten(), nn.Linear(2, 4), nn.{}(), nn.Linear(4, 1)"
    net = f"from torch import nn\ndef build():\n    return nn.Sequential({layers})\n"
    code = tmp_path / "net.py"
    code.write_text(net.format("Tanh"))
    module, trusted = ("data=moons", "model=module", f"model.path={code}:build"), f"--trust={code}"
    assert train(tmp_path, *module, trusted, base=SMALLEST) == 0
    kernel = ("kernel", "tangent", trusted, "--quiet")
    drawn = (*kernel, *SMALLEST[:3], *module, f"--out={tmp_path / 'drawn.zarr'}")
    of_run = (*kernel, f"--run={only_run(tmp_path)}", f"--out={tmp_path / 'k.zarr'}")
    assert (run(drawn), run(of_run)) == (0, 0)
    code.write_text(net.format("ReLU"))
    for words, told in ((of_run, "net.py has changed since"), (drawn, "is of other code")):
        assert run(words) == 2
        assert told in only_line(capfd)


class Trap:
    """A pickle that torch.load would carry out."""

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return Path.touch, (Path("trapped"),)


@pytest.mark.parametrize("content", [pickle.dumps(Trap()), b"", b"PK\3\4 no archive", pickle.dumps([1])])
def test_forged_weights_are_refused(two_seeds: tuple[Path, Path], tmp_path: Path, content: bytes, capfd: Said) -> None:
    """Also where the forger has sealed them."""
    folder = RunFolder(copied(two_seeds[0], tmp_path))
    folder.write("weights.pt", content)
    asked = ("kernel", "tangent", f"--run={folder.path}", f"--out={tmp_path / 'k.zarr'}", "--quiet")
    assert run(asked) == 2
    assert "not as it was written" in only_line(capfd)
    told = read_object(folder.path / "DONE.json")
    folder.finish(told["sizes"], "weights.pt", "provenance.json", identity=told["identity"])
    assert run(asked) == 2
    assert "weights.pt is damaged" in only_line(capfd)


def test_a_missing_device_is_refused_also_for_a_finished_run(
    two_seeds: tuple[Path, Path], capfd: Said, tmp_path: Path
) -> None:
    with mock.patch("torch.cuda.device_count", return_value=0):
        for out in (two_seeds[0].parents[1], tmp_path):
            assert train(out, "seed=0", "device=cuda", base=SMALLEST) == 2
            assert "device=cuda: this machine has cpu" in only_line(capfd)


def test_a_run_that_diverged_ends_by_saying_so(tmp_path: Path, capfd: Said) -> None:
    wild = ("steps=40", "optimizer.step_size=1e9", "ladder.machine=[secant]")
    assert run(["train", *SMALLEST, *wild, f"--out={tmp_path}"]) == 0
    _, verdict, *_, folder = capfd.readouterr().out.splitlines()
    assert Path(folder) == only_run(tmp_path)
    assert verdict.startswith("Training diverged; the network at the last step: on all 3 splits ")
    assert "reproduces it to rounding" in verdict
    assert "trained network" not in verdict
    assert what_came_out([load_run(folder)]) == verdict


def test_a_run_that_cannot_be_written_is_to_be_copied(finished: Path, tmp_path: Path, capfd: Said) -> None:
    """`explain` has no option --out."""
    run_folder = only_run(copied(finished, tmp_path))
    (run_folder / ".lock").unlink()
    (run_folder / ".lock").mkdir()  # nobody can open it for writing, not even root
    assert run(("explain", str(run_folder), "--query=0", "--without=1", "--json")) == 2
    assert only_line(capfd).endswith(" cannot be written (Is a directory); copy the run to another folder")


class FilledFile(io.BytesIO):
    """A file on a disk that is full after some bytes."""

    def __init__(self, room: int) -> None:
        super().__init__()
        self.room = room

    def write(self, content: Any) -> int:
        if self.tell() + memoryview(content).nbytes > self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(content)


def test_a_disk_that_fills_up_while_tensors_are_written_is_no_error_of_torch() -> None:
    tensors = {"start": torch.ones(300), "end": torch.ones(10)}
    whole = FilledFile(1 << 20)
    save_tensors(tensors, whole)
    for room in range(0, whole.tell(), 50):
        with pytest.raises(OSError, match="No space left"):
            save_tensors(tensors, FilledFile(room))


def test_the_list_of_runs_says_in_words_that_a_run_was_interrupted(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        execute_in(tmp_path, small(*TINY), TINY, Interrupting(4))
    (listed,) = list_runs(tmp_path / "runs")
    assert (listed.state, listed.outcome) == ("interrupted", "interrupted by Ctrl-C or SIGTERM at step 4 of 30")
