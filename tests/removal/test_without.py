"""A finished run tells what changes without some of its examples; once that is computed, it is there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import xarray as xr

from ntkexp.cli.explain import influences
from ntkexp.cli.main import run
from ntkexp.mistake import Mistake
from ntkexp.progress import Silent
from ntkexp.records.contributions import REMOVAL_FOLDER, STORE, key, read_leave_out, write_leave_out
from ntkexp.records.folder import RunFolder
from ntkexp.records.kernels import read_predictions, write_predictions
from ntkexp.report.known_effects import known_effects
from ntkexp.report.loaded_run import load_run
from ntkexp.report.removal_group import choose_group
from ntkexp.report.run import Run
from ntkexp.run.execute import remove_group
from tests.run.small import execute_in, small

ADAM = ("optimizer=adam", "optimizer.batch=6", "optimizer.step_size=0.01", "steps=8")
GROUP = [3, 7, 20]


def trained(place: Path, *words: str) -> Path:
    """A run, without its pictures."""
    quick = ("data=digits", "threads=1", "path.rule=[left]", "ladder.machine=[left]")
    return execute_in(place, small(*quick, *words), words)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = trained(tmp_path_factory.mktemp("outputs"), *ADAM)
    remove_group(folder, GROUP, [1, 5], Silent())
    return folder


def asked(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """The command `explain`, in this process."""
    status = run(["explain", *words])
    return status, *capfd.readouterr()


def contents(folder: Path) -> dict[Path, int]:
    return {file: file.stat().st_mtime_ns for file in folder.rglob("*") if file.is_file()}


def test_a_removal_is_computed_once_and_again_if_it_is_damaged(finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / finished.name))
    found, before = remove_group(finished, GROUP, [1, 5], Silent()), contents(folder)
    assert np.array_equal(remove_group(folder, [20, 3, 7], [1, 5], Silent()).shares, found.shares)
    assert contents(folder) == before
    assert found.closure < 1e-12
    assert found.repeated < 1e-9
    assert load_run(finished).path == finished  # the run is as whole as it was
    chunk = next(
        file for file in (folder / REMOVAL_FOLDER / f"{key(GROUP, [1, 5])}.zarr").rglob("c/*") if file.is_file()
    )
    chunk.write_bytes(bytes(chunk.stat().st_size))
    assert np.array_equal(remove_group(folder, GROUP, [1, 5], Silent()).shares, found.shares)
    assert chunk.read_bytes().strip(b"\0")


@contextmanager
def rewritten(finished: Path, place: Path) -> Iterator[RunFolder]:
    """A copy of a run with exchanged files and new seals."""
    folder = RunFolder(Path(shutil.copytree(finished, place / finished.name)))
    told = folder.read_json("DONE.json")
    yield folder
    facts = {name: fact for name, fact in told.items() if name not in {"sizes", "seals", "seal"}}
    folder.finish(told["sizes"], *(set(told["seals"]) - set(told["sizes"])), **facts)


def test_a_run_unlike_its_weights_is_refused(finished: Path, tmp_path: Path) -> None:
    with rewritten(finished, tmp_path) as folder:
        store = folder.path / "predictions.zarr"
        predictions = read_predictions(store)
        shutil.rmtree(store)
        write_predictions(store, predictions | {"f_T": predictions["f_T"] + 1})
    with pytest.raises(Mistake, match="an exact repetition of the training changes the outputs by"):
        remove_group(folder.path, [5], [0], Silent())


def run_of(names: list[str]) -> Run:
    """A run of a loop whose examples have these names."""
    contributions = xr.Dataset(coords={"example": names})
    data = {"train_index": np.arange(len(names)), "classes": np.array([], dtype=str)}
    return cast(Run, SimpleNamespace(name="loop", contributions=contributions, data=data))


IDS = ["12", "0", "2", "3"]


@pytest.mark.parametrize(
    ("names", "text", "found"),
    [
        (None, "3,7", [3, 7]),
        (None, " 7, 2..4,3", [2, 3, 4, 7]),
        (None, "top:2", [0, 23]),
        (None, "#INDEX", [5]),
        (IDS, "2", [2]),  # numbers that are ids are no places
        (IDS, "2..11,12", [0, 2, 3]),
        (["a", "b", "c"], "2", [2]),
        (["a", "b", "1234567890123456"], "1234567890123456", [2]),
    ],
)
def test_a_group_is_meant(finished: Path, names: list[str] | None, text: str, found: list[int]) -> None:
    loaded = load_run(finished) if names is None else run_of(names)
    index = loaded.data["train_index"]
    text, influence = text.replace("INDEX", str(index[5 % len(index)])), np.zeros(len(index))
    influence[[0, -1]] = 9.0, 8.0
    assert choose_group(loaded, text, lambda: influence) == found


def test_a_class_is_meant_and_an_id_of_no_example_is_refused(finished: Path) -> None:
    loaded = load_run(finished)
    of_class = choose_group(loaded, f"class:{loaded.data['classes'][0]}", lambda: np.zeros(24))
    assert 0 < len(of_class) < 24
    assert not loaded.data["train_target"][of_class].any()
    with pytest.raises(Mistake, match="no training example has this id"):
        choose_group(run_of(IDS), "1", lambda: np.zeros(4))


def test_examples_at_the_top_are_those_that_added_most(finished: Path) -> None:
    said: list[str] = []

    class Spy(Silent):
        def say(self, text: str) -> None:
            said.append(text)

    run = load_run(finished)
    parts = run.parts(run.rules[0]).to_numpy()[[0, 5]]
    np.testing.assert_allclose(influences(run, [0, 5], Spy()), np.sqrt(np.square(parts).sum((0, 1))), rtol=1e-12)
    assert said == ["at the top are examples that added most, as this run has no effects (path.effects=true)"]


def test_the_command_prints_and_tells_the_same(finished: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = (str(finished), "--without=3,7,20", "--split=query", "--query=1", "--query=5")
    points = [24 + 1, 24 + 5]  # the axis begins with the training examples
    found = remove_group(finished, GROUP, points, Silent())
    status, out, _ = asked(capfd, *words, "--json")
    breakdown = json.loads(out)["breakdown"]
    assert (status, [(entry["split"], entry["point"], entry["out"]) for entry in breakdown]) == (
        0,
        [("query", 1, 0), ("query", 5, 0)],
    )
    for entry, actual, shares in zip(breakdown, found.actual[:, 0], found.shares[:, 0], strict=True):
        assert entry["actual"] == actual
        assert entry["predicted"] is None
        assert list(entry["shares"].values()) == shares.tolist()
        assert sum(entry["by_step"]) == pytest.approx(actual, rel=1e-9)
    status, out, err = asked(capfd, *words)
    assert (status, err) == (0, "")
    assert "trained again without 3 examples" in out
    assert out.count("not computed: path.effects=true") == 2
    status, out, _ = asked(capfd, *words, "--page")
    page = Path(out.strip()).read_text(encoding="utf-8")
    assert (status, page.count("Trained again without 3 of the examples")) == (0, 2)


@pytest.mark.parametrize(
    ("text", "advice"),
    [
        ("99", "the training examples have places 0 to 23"),
        ("20..29", "places 0 to 23"),
        ("9..2", "write 2..9"),
        ("", "it names no training example"),
        ("0..23", "all 24 training examples"),
        ("#99999", "no training example has this number"),
        ("class:elephant", "no such class"),
        ("top:0", "a number from 1 to 24"),
        ("0123ab", "no training example is called that"),
    ],
)
def test_a_group_that_cannot_be_is_one_line(
    finished: Path, capfd: pytest.CaptureFixture[str], text: str, advice: str
) -> None:
    status, _, err = asked(capfd, str(finished), f"--without={text}")
    assert (status, err.count("\n")) == (2, 1)
    assert err.startswith("ntkexp: --without=")
    assert advice in err


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        pytest.param(("optimizer=flow", "steps=2"), "is a flow without steps", marks=pytest.mark.slow),
        (("optimizer=gd", "optimizer.step_size=1e30", "steps=30"), "diverged, so its examples have no contributions"),
    ],
)
def test_a_run_that_cannot_be_trained_again_is_one_line(tmp_path: Path, words: tuple[str, ...], advice: str) -> None:
    with pytest.raises(Mistake, match=advice):
        remove_group(trained(tmp_path, *words), GROUP, [0], Silent())


@pytest.fixture(scope="module")
def effective(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A smooth run with effects, at fewer outputs than would be cheap to train for."""
    smooth = ("model.activation=tanh", "path.effects=true", "path.attributed=6", "data.train=40", "optimizer=sgd")
    return trained(tmp_path_factory.mktemp("outputs"), *smooth, "optimizer.step_size=0.1", "optimizer.batch=10")


@pytest.mark.slow
def test_effects_are_checked_and_stand_beside_what_was_added(
    effective: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    loaded = load_run(effective)
    known = known_effects(loaded)
    assert known is not None
    assert known.agreement is not None
    assert known.agreement.sentence in loaded.outcome
    assert STORE in loaded.facts["sizes"]
    assert known.agreement.correlation > 0.9
    status, out, _ = asked(capfd, str(effective), "--split=query", "--query=0")
    assert (status, "if left out" in out) == (0, True)
    assert "predicted by its effect" in out
    status, out, _ = asked(capfd, str(effective), "--split=query", "--query=0", "--without=top:3", "--json")
    assert json.loads(out)["top"] == "of the largest effects"
    (entry,) = json.loads(out)["breakdown"]
    effect = loaded.contributions["effect"].to_numpy()[40, 0]
    strongest = np.argsort(-np.abs(effect), kind="stable")[:3]
    assert sorted(entry["shares"]) == sorted(str(k) for k in strongest)
    assert entry["predicted"] == pytest.approx(effect[strongest].sum(), rel=1e-12)
    assert abs(entry["predicted"] - entry["actual"]) < 0.5 * abs(entry["actual"])
    told = asked(capfd, str(effective), "--split=query", "--query=0", "--without=top:3")[1]
    assert "without 3 examples (at the top: those of the largest effects)" in told
    assert "predicted: the sum of the 3 effects of single examples; the actual change differs from this sum" in told


@pytest.mark.slow
def test_effects_that_trainings_have_found_are_the_truth(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("path.effects=true", "path.attributed=40", "data.train=40", "optimizer=sgd", "optimizer.batch=10")
    folder = trained(tmp_path, *words, "optimizer.step_size=0.1")
    loaded = load_run(folder)
    assert "effects are changes in 40 trainings, each without one example" in loaded.outcome
    _, out, _ = asked(capfd, str(folder), "--split=query", "--query=0")
    assert "found by training without it" in out
    _, out, _ = asked(capfd, str(folder), "--split=query", "--query=0", "--without=3", "--json")
    (entry,) = json.loads(out)["breakdown"]
    assert entry["predicted"] == pytest.approx(entry["actual"], rel=1e-9)


@pytest.mark.slow
def test_effects_that_predicted_nothing_are_withheld(
    effective: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with rewritten(effective, tmp_path) as folder:
        real = read_leave_out(folder.path / STORE)
        shutil.rmtree(folder.path / STORE)
        write_leave_out(folder.path / STORE, replace(real, predicted=-real.predicted))
    _, out, _ = asked(capfd, str(folder.path), "--split=query", "--query=0")
    assert "if left out: withheld; 8 retrainings" in out
    assert "cannot be predicted here" in out
    assert "target  added  of all parts  half by\n" in out.replace("   ", "  ").replace("   ", "  ")
