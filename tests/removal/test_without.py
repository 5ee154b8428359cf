"""A finished run tells what changes without some of its examples; once that is computed, it is there."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import xarray as xr

import ntkexp.report.known_effects
import ntkexp.run.execute
from ntkexp.cli.explain import influences
from ntkexp.cli.main import run
from ntkexp.mistake import Mistake
from ntkexp.progress import Silent
from ntkexp.records.contributions import FOLDER, STORE, key, read_leave_out
from ntkexp.records.kernels import read_predictions
from ntkexp.report.known_effects import known_effects
from ntkexp.report.loaded_run import load_run
from ntkexp.report.removal_group import choose_group
from ntkexp.report.run import Run
from ntkexp.run.execute import execute, remove_group
from tests.run.small import small
from tests.run.test_execute import stand_in

ADAM = ("optimizer=adam", "optimizer.batch=6", "optimizer.step_size=0.01", "steps=8")
GROUP = [3, 7, 20]


def trained(place: Path, *words: str) -> Path:
    """A run, without its pictures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ntkexp.run.execute, "draw_run", stand_in)
        quick = ("data=digits", "threads=1", "path.rule=[left]", "ladder.machine=[left]")
        return execute(small(*quick, *words), words, place, False, Silent())


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = trained(tmp_path_factory.mktemp("outputs"), *ADAM)
    remove_group(folder, GROUP, [1, 5], Silent())
    return folder


def asked(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """The command `explain`, in this process."""
    status = run(["explain", *words])
    return status, *capfd.readouterr()


def test_it_is_found_once(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = remove_group(finished, GROUP, [1, 5], Silent())
    monkeypatch.setattr(ntkexp.run.execute, "train_without", None)
    again = remove_group(finished, [20, 3, 7], [1, 5], Silent())
    assert np.array_equal(again.shares, found.shares)
    assert found.closure < 1e-12
    assert found.repeated < 1e-9
    assert load_run(finished).path == finished  # the run is as whole as it was


def test_a_damaged_breakdown_is_computed_anew(finished: Path, tmp_path: Path) -> None:
    run_folder = shutil.copytree(finished, tmp_path / finished.name)
    chunk = next(file for file in (run_folder / FOLDER / f"{key(GROUP, [1, 5])}.zarr").rglob("c/*") if file.is_file())
    first = remove_group(finished, GROUP, [1, 5], Silent())
    chunk.write_bytes(bytes(chunk.stat().st_size))
    assert np.array_equal(remove_group(run_folder, GROUP, [1, 5], Silent()).shares, first.shares)
    assert chunk.read_bytes().strip(b"\0")


def test_a_run_that_is_not_what_its_weights_say_is_refused(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ntkexp.run.execute, "read_predictions", lambda path: {"f_T": read_predictions(path)["f_T"] + 1})
    with pytest.raises(Mistake, match="trained again as it was, the run ends"):
        remove_group(finished, [5], [0], Silent())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("3,7", [3, 7]),
        (" 7, 2..4,3", [2, 3, 4, 7]),
        ("top:2", [0, 23]),
        ("#INDEX", [5]),
    ],
)
def test_examples_are_meant(finished: Path, text: str, found: list[int]) -> None:
    loaded = load_run(finished)
    text = text.replace("INDEX", str(loaded.data["train_index"][5]))
    least = np.concatenate([[9.0], np.zeros(22), [8.0]])
    assert choose_group(loaded, text, lambda: least) == found


def test_it_is_said_by_what_examples_are_at_the_top(finished: Path) -> None:
    said: list[str] = []

    class Spy(Silent):
        def say(self, text: str) -> None:
            said.append(text)

    run = load_run(finished)
    found = influences(run, [0, 5], Spy())
    parts = run.parts(run.rules[0]).to_numpy()[[0, 5]]
    np.testing.assert_allclose(found, np.sqrt(np.square(parts).sum((0, 1))), rtol=1e-12)
    assert said == ["at the top are examples that added most, as this run has no effects (path.effects=true)"]


def test_a_class_is_meant(finished: Path) -> None:
    loaded = load_run(finished)
    name = str(loaded.data["classes"][0])
    of_class = choose_group(loaded, f"class:{name}", lambda: np.zeros(24))
    assert 0 < len(of_class) < 24
    assert not loaded.data["train_target"][of_class].any()


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("optimizer=flow", "steps=2"), "takes no steps that could be taken again"),
        (("optimizer=gd", "optimizer.step_size=1e30", "steps=30"), "diverged"),
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
    assert (
        "predicted: the sum of 3 effects, each of leaving out one example alone; effects of a group do not add" in told
    )


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
    effective: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = read_leave_out(effective / STORE)
    turned = replace(real, predicted=-real.predicted)
    monkeypatch.setattr(ntkexp.report.known_effects, "read_leave_out", lambda path: turned)
    _, out, _ = asked(capfd, str(effective), "--split=query", "--query=0")
    assert "if left out: withheld; 8 retrainings" in out
    assert "not predictable here" in out
    assert "target  added  of all parts  half by\n" in out.replace("   ", "  ").replace("   ", "  ")


def run_of(names: list[str]) -> Run:
    """A run of a loop whose examples go by these names."""
    contributions = xr.Dataset(coords={"example": names})
    data = {"train_index": np.arange(len(names)), "classes": np.array([], dtype=str)}
    return cast(Run, SimpleNamespace(name="loop", contributions=contributions, data=data))


@pytest.mark.parametrize(
    ("names", "text", "places"),
    [
        (["12", "0", "2", "3"], "2", [2]),
        (["12", "0", "2", "3"], "2..11,12", [0, 2, 3]),
        (["a", "b", "c"], "2", [2]),
        (["a", "b", "1234567890123456"], "1234567890123456", [2]),
    ],
)
def test_numbers_that_are_ids_are_no_places(names: list[str], text: str, places: list[int]) -> None:
    assert choose_group(run_of(names), text, lambda: np.zeros(len(names))) == places


def test_an_id_that_nobody_has_is_no_place() -> None:
    with pytest.raises(Mistake, match="no training example has this id"):
        choose_group(run_of(["12", "0", "2"]), "1", lambda: np.zeros(3))
