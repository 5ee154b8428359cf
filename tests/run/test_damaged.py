"""An unfinished run of which a file is damaged ends in the bytes of one left alone, from its beginning if need be."""

from __future__ import annotations

import pickle
import shutil
from itertools import count
from pathlib import Path
from random import Random
from unittest import mock

import numpy as np
import pytest
import torch

import ntkexp.run.execute
from ntkexp.cli.main import run
from ntkexp.mistake import Mistake
from ntkexp.progress import Silent
from ntkexp.records.atomic import read_object
from ntkexp.records.contributions import FOLDER
from ntkexp.records.folder import RunFolder
from ntkexp.report.loaded_run import load_run
from ntkexp.report.material import what_came_out
from ntkexp.run.execute import remove_group
from ntkexp.run.folder_listener import FolderListener
from ntkexp.run.loop import Way
from ntkexp.run.state import RunState
from tests.run.commands import TINY, only_run, promised
from tests.run.test_execute import stand_in
from tests.torture.damage import damage
from tests.torture.kind.kills import no_pictures

ADAM = (*TINY, "steps=4", "path.error_samples=0", "optimizer=adam", "optimizer.step_size=0.05")  # it goes both ways
RELIED_ON = ("checkpoint.pt", "trajectory.bin")
AND_ON = ("kernels.zarr/tangent/c/0/0/0/0/0", "metrics.csv", "data.npz", "config.json")


def train(out: Path, *words: str) -> int:
    with mock.patch.object(ntkexp.run.execute, "draw_run", no_pictures):
        return run(("train", *ADAM, *words, f"--out={out}"))


def broken_off(out: Path, *words: str) -> None:
    """A run that is interrupted on its way back."""
    told, calls = FolderListener.on_step_back, count(1)

    def interrupted(listener: FolderListener, state: RunState, way: Way, done: int, total: int) -> None:
        told(listener, state, way, done, total)
        if next(calls) == 3:
            raise KeyboardInterrupt

    with mock.patch.object(FolderListener, "on_step_back", interrupted):
        assert train(out, *words) == 130


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run left alone, and the same broken off."""
    place = tmp_path_factory.mktemp("places")
    assert train(place / "whole") == 0
    broken_off(place / "begun")
    return place


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another run, broken off."""
    out = tmp_path_factory.mktemp("twin")
    broken_off(out, "seed=1")
    return only_run(out)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", [*RELIED_ON, *(pytest.param(name, marks=pytest.mark.slow) for name in AND_ON)])
def test_a_bit_is_seen_and_said(places: Path, tmp_path: Path, name: str, capfd: pytest.CaptureFixture[str]) -> None:
    folder = only_run(Path(shutil.copytree(places / "begun", tmp_path / "out")))
    content = bytearray((folder / name).read_bytes())
    content[len(content) // 3] ^= 1
    (folder / name).write_bytes(content)
    with mock.patch("torch.load", side_effect=AssertionError if name == "checkpoint.pt" else torch.load):
        assert train(tmp_path / "out") == 0  # nothing of a garbled checkpoint reaches torch
    said = [line for line in capfd.readouterr().err.splitlines() if "is damaged" in line]
    assert len(said) == 1
    assert said[0].endswith("; the run starts again")
    assert str(folder) in said[0]
    assert promised(folder) == promised(only_run(places / "whole"))


def test_a_run_that_cannot_say_what_it_was_is_not_resumed(
    places: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Circumstances are no part of its identity, and move its bits."""
    folder = only_run(Path(shutil.copytree(places / "begun", tmp_path / "out")))
    told = (folder / "config.json").read_text("utf-8")
    (folder / "config.json").write_text(told.replace('"threads": 1', '"threads": 2'), encoding="utf-8")
    assert run(("resume", str(folder))) == 2
    assert "config.json not as it was written; the command that began it" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_any_damage(places: Path, twin: Path, tmp_path: Path, seed: int) -> None:
    shutil.copytree(places / "begun", tmp_path / "out")
    folder = only_run(tmp_path / "out")
    done = damage(Random(seed), folder, twin)
    resuming = ("resume", str(folder), "--quiet")
    with mock.patch.object(ntkexp.run.execute, "draw_run", no_pictures):
        status = run(resuming) if seed % 3 == 0 else train(tmp_path / "out")
    assert status in {0, 2}, done
    if status == 0:
        assert promised(folder) == promised(only_run(places / "whole")), done


# A run is what its folder says only if each file was written for this run: what belongs to another is refused.


WORDS = ("data.train=8", "data.query=4", "data.test=4", "model.width=4", "threads=1", "steps=2", "path.error_samples=0")
NET = """
from torch import nn
def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(2, 4), nn.{}(), nn.Linear(4, 1))
"""
GROUP, POINTS = [1, 3], [0]


@pytest.fixture
def nothing_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ntkexp.run.execute, "draw_run", stand_in)


def train_tiny(out: Path, *words: str) -> int:
    return run(["train", *WORDS, *words, "--quiet", f"--out={out}"])


@pytest.fixture(scope="module")
def two_seeds(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two finished runs, of two seeds."""
    found = []
    for seed in (0, 1):
        out = tmp_path_factory.mktemp(f"seed{seed}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ntkexp.run.execute, "draw_run", stand_in)
            assert train_tiny(out, f"seed={seed}") == 0
        found.append(only_run(out))
    return found[0], found[1]


def only_line(capfd: pytest.CaptureFixture[str]) -> str:
    """What a refusal says."""
    (line,) = capfd.readouterr().err.splitlines()
    return line


@pytest.fixture
def covered(two_seeds: tuple[Path, Path], tmp_path: Path) -> Path:
    """The second run, copied over the first."""
    return Path(shutil.copytree(two_seeds[1], tmp_path / "runs" / two_seeds[0].name))


@pytest.mark.usefixtures("nothing_drawn")
def test_a_run_that_lies_in_the_place_of_another_is_not_that(
    two_seeds: tuple[Path, Path], covered: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = covered.parents[1]
    assert train_tiny(out, "seed=0") == 2
    assert "holds another run" in only_line(capfd)
    kernel = ("kernel", "tangent", f"--run={covered}", f"--out={out / 'k.zarr'}")
    for words in (
        ("resume", str(covered)),
        ("explain", str(covered)),
        ("report", str(covered), f"--out={out}"),
        kernel,
    ):
        assert run(words) == 2
        assert f"{covered} has the name of another run" in only_line(capfd)
    with pytest.raises(Mistake, match="has the name of another run"):
        load_run(covered)
    assert promised(covered) == promised(two_seeds[1])  # nothing is lost by asking
    assert train_tiny(out, "seed=0", "--force") == 0
    assert promised(covered) == promised(two_seeds[0])


@pytest.mark.usefixtures("nothing_drawn")
def test_a_copy_of_any_other_name_is_read(two_seeds: tuple[Path, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(two_seeds[1], tmp_path / "the best one")
    assert load_run(copy).config["seed"] == 1
    assert run(["resume", str(copy), "--quiet"]) == 0


@pytest.mark.usefixtures("nothing_drawn")
@pytest.mark.slow
def test_a_removal_of_another_run_is_not_read(two_seeds: tuple[Path, Path], tmp_path: Path) -> None:
    here, there = (Path(shutil.copytree(place, tmp_path / place.name)) for place in two_seeds)
    true, other = (remove_group(place, GROUP, POINTS, Silent()) for place in (here, there))
    assert not np.array_equal(true.actual, other.actual)
    shutil.rmtree(here / FOLDER)
    shutil.copytree(there / FOLDER, here / FOLDER)
    assert np.array_equal(remove_group(here, GROUP, POINTS, Silent()).actual, true.actual)


def table(path: Path, last: str) -> str:
    rows = [f"{k},{k % 5},{np.sin(k)}" for k in range(15)]
    path.write_text("\n".join(["a,b,y", *rows, last]) + "\n", encoding="utf-8")
    return f"data.path={path}"


@pytest.mark.usefixtures("nothing_drawn")
@pytest.mark.slow
def test_a_kernel_of_a_run_whose_data_have_changed_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("data=table", table(tmp_path / "t.csv", "1,2,3"), "data.target=y")
    assert train_tiny(tmp_path, *words) == 0
    asked = ("kernel", "tangent", f"--run={only_run(tmp_path)}", f"--out={tmp_path / 'k.zarr'}", "--quiet")
    assert run(asked) == 0
    table(tmp_path / "t.csv", "1,2,4")
    for more in ((), ("--force",)):
        assert run((*asked, *more)) == 2
        assert f"cannot be computed again, for {tmp_path / 't.csv'} has changed since" in only_line(capfd)
    with pytest.raises(Mistake, match="has changed since"):
        remove_group(only_run(tmp_path), GROUP, POINTS, Silent())
    table(tmp_path / "t.csv", "1,2,3")
    assert run(asked) == 0


@pytest.mark.usefixtures("nothing_drawn")
@pytest.mark.slow
def test_a_kernel_of_a_network_whose_code_has_changed_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of that in a run, and of that which is drawn anew: a file that is there holds the kernel of the earlier one."""
    (tmp_path / "net.py").write_text(NET.format("Tanh"))
    module = ("data=moons", "model=module", f"model.path={tmp_path / 'net.py'}:build")
    trusted = f"--trust={tmp_path / 'net.py'}"
    assert train_tiny(tmp_path, *module, trusted) == 0
    drawn = ("kernel", "tangent", *WORDS[:3], *module, f"--out={tmp_path / 'drawn.zarr'}", trusted, "--quiet")
    of_run = ("kernel", "tangent", f"--run={only_run(tmp_path)}", f"--out={tmp_path / 'k.zarr'}", trusted, "--quiet")
    assert (run(drawn), run(of_run)) == (0, 0)
    (tmp_path / "net.py").write_text(NET.format("ReLU"))
    assert run(of_run) == 2
    assert "net.py has changed since" in only_line(capfd)
    assert run(drawn) == 2
    assert "is of other code" in only_line(capfd)


class Trap:
    """What a pickle may hold that torch.load would carry out."""

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (Path("trapped"),)


@pytest.mark.usefixtures("nothing_drawn")
@pytest.mark.parametrize("content", [pickle.dumps(Trap()), b"", b"PK\3\4 no archive", pickle.dumps([1])])
def test_forged_weights_are_refused(
    two_seeds: tuple[Path, Path], tmp_path: Path, content: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where the forger has sealed them."""
    folder = RunFolder(Path(shutil.copytree(two_seeds[0], tmp_path / two_seeds[0].name)))
    folder.write("weights.pt", content)
    asked = ("kernel", "tangent", f"--run={folder.path}", f"--out={tmp_path / 'k.zarr'}", "--quiet")
    assert run(asked) == 2
    assert "not as it was written" in only_line(capfd)
    told = read_object(folder.path / "DONE.json")
    folder.finish(told["sizes"], "weights.pt", "provenance.json", identity=told["identity"])
    assert run(asked) == 2
    assert "weights.pt is damaged" in only_line(capfd)


@pytest.mark.usefixtures("nothing_drawn")
def test_another_device_is_refused_whether_or_not_the_run_is_finished(
    two_seeds: tuple[Path, Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    said = []
    for out in (two_seeds[0].parents[1], tmp_path):
        assert train_tiny(out, "seed=0", "device=cuda") == 2
        said.append(only_line(capfd))
    assert said[0] == said[1]
    assert "device=cuda: this machine has cpu" in said[0]


@pytest.mark.usefixtures("nothing_drawn")
def test_a_run_that_diverged_ends_by_saying_so(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert (
        run(["train", *WORDS, "steps=40", "optimizer.step_size=1e9", "ladder.machine=[secant]", f"--out={tmp_path}"])
        == 0
    )
    *_, last, folder = capfd.readouterr().out.splitlines()
    assert Path(folder) == only_run(tmp_path)
    assert last.startswith("Training diverged; what remains true is of the network that is left: on all 3 splits ")
    assert "reproduces it to rounding" in last
    assert "trained network" not in last
    assert what_came_out([load_run(folder)]) == last
