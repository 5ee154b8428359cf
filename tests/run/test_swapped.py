"""A run is what its folder says only if each file was written for this run: what belongs to another is refused."""

from __future__ import annotations

import pickle
import shutil
from pathlib import Path

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
from ntkexp.report.material import what_came_out
from ntkexp.report.run import load_run
from ntkexp.run.execute import without
from tests.run.commands import only_run, promised
from tests.run.test_execute import stand_in

WORDS = ("data.train=8", "data.probe=4", "data.test=4", "model.width=4", "threads=1", "steps=2", "path.error_samples=0")
NET = """
from torch import nn
def build():
    return nn.Sequential(nn.Flatten(), nn.Linear(2, 4), nn.{}(), nn.Linear(4, 1))
"""
GROUP, POINTS = [1, 3], [0]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ntkexp.run.execute, "painter", stand_in)


def train(out: Path, *words: str) -> int:
    return run(["train", *WORDS, *words, "--quiet", f"--out={out}"])


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two finished runs, of two seeds."""
    found = []
    for seed in (0, 1):
        out = tmp_path_factory.mktemp(f"seed{seed}")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ntkexp.run.execute, "painter", stand_in)
            assert train(out, f"seed={seed}") == 0
        found.append(only_run(out))
    return found[0], found[1]


def only_line(capfd: pytest.CaptureFixture[str]) -> str:
    """What a refusal says."""
    (line,) = capfd.readouterr().err.splitlines()
    return line


@pytest.fixture
def covered(places: tuple[Path, Path], tmp_path: Path) -> Path:
    """The second run, copied over the first."""
    return Path(shutil.copytree(places[1], tmp_path / "runs" / places[0].name))


def test_a_run_that_lies_in_the_place_of_another_is_not_that(
    places: tuple[Path, Path], covered: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = covered.parents[1]
    assert train(out, "seed=0") == 2
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
    assert promised(covered) == promised(places[1])  # nothing is lost by asking
    assert train(out, "seed=0", "--force") == 0
    assert promised(covered) == promised(places[0])


def test_a_copy_of_any_other_name_is_read(places: tuple[Path, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(places[1], tmp_path / "the best one")
    assert load_run(copy).config["seed"] == 1
    assert run(["resume", str(copy), "--quiet"]) == 0


@pytest.mark.slow
def test_a_removal_of_another_run_is_not_read(places: tuple[Path, Path], tmp_path: Path) -> None:
    here, there = (Path(shutil.copytree(place, tmp_path / place.name)) for place in places)
    true, other = (without(place, GROUP, POINTS, Silent()) for place in (here, there))
    assert not np.array_equal(true.actual, other.actual)
    shutil.rmtree(here / FOLDER)
    shutil.copytree(there / FOLDER, here / FOLDER)
    assert np.array_equal(without(here, GROUP, POINTS, Silent()).actual, true.actual)


def table(path: Path, last: str) -> str:
    rows = [f"{k},{k % 5},{np.sin(k)}" for k in range(15)]
    path.write_text("\n".join(["a,b,y", *rows, last]) + "\n", encoding="utf-8")
    return f"data.path={path}"


@pytest.mark.slow
def test_a_kernel_of_a_run_whose_data_have_changed_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("data=table", table(tmp_path / "t.csv", "1,2,3"), "data.target=y")
    assert train(tmp_path, *words) == 0
    asked = ("kernel", "tangent", f"--run={only_run(tmp_path)}", f"--out={tmp_path / 'k.zarr'}", "--quiet")
    assert run(asked) == 0
    table(tmp_path / "t.csv", "1,2,4")
    for more in ((), ("--force",)):
        assert run((*asked, *more)) == 2
        assert f"cannot be computed again, for {tmp_path / 't.csv'} has changed since" in only_line(capfd)
    with pytest.raises(Mistake, match="has changed since"):
        without(only_run(tmp_path), GROUP, POINTS, Silent())
    table(tmp_path / "t.csv", "1,2,3")
    assert run(asked) == 0


@pytest.mark.slow
def test_a_kernel_of_a_network_whose_code_has_changed_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of that in a run, and of that which is drawn anew: a file that is there holds the kernel of the earlier one."""
    (tmp_path / "net.py").write_text(NET.format("Tanh"))
    module = ("data=moons", "model=module", f"model.path={tmp_path / 'net.py'}:build")
    trusted = f"--trust={tmp_path / 'net.py'}"
    assert train(tmp_path, *module, trusted) == 0
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


@pytest.mark.parametrize("content", [pickle.dumps(Trap()), b"", b"PK\3\4 no archive", pickle.dumps([1])])
def test_forged_weights_are_refused(
    places: tuple[Path, Path], tmp_path: Path, content: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where the forger has sealed them."""
    folder = RunFolder(Path(shutil.copytree(places[0], tmp_path / places[0].name)))
    folder.write("weights.pt", content)
    asked = ("kernel", "tangent", f"--run={folder.path}", f"--out={tmp_path / 'k.zarr'}", "--quiet")
    assert run(asked) == 2
    assert "not as it was written" in only_line(capfd)
    told = read_object(folder.path / "DONE.json")
    folder.finish(told["sizes"], "weights.pt", "provenance.json", identity=told["identity"])
    assert run(asked) == 2
    assert "weights.pt is damaged" in only_line(capfd)


def test_another_device_is_refused_whether_or_not_the_run_is_finished(
    places: tuple[Path, Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    said = []
    for out in (places[0].parents[1], tmp_path):
        assert train(out, "seed=0", "device=cuda") == 2
        said.append(only_line(capfd))
    assert said[0] == said[1]
    assert "device=cuda: it takes cpu" in said[0]


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
