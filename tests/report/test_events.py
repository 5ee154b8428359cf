"""What TensorBoard reads of a run is what its records hold, each point once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ntkexp.cli.main import run
from ntkexp.records.folder import RunFolder
from ntkexp.records.results import read_results
from ntkexp.report.events import NAME, PLACE
from ntkexp.report.plots.run_plots import figure_of, gallery, png
from ntkexp.report.run import load_run
from tests.run.commands import TINY, only_run

pytestmark = pytest.mark.slow  # TensorBoard takes seconds to load

FLOAT32 = 2.0**-23  # TensorBoard keeps single precision: the rounding of one number


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was made with its events."""
    out = tmp_path_factory.mktemp("outputs")
    assert run(["train", *TINY, "--quiet", "--tensorboard", f"--out={out}"]) == 0
    return only_run(out)


@pytest.fixture(scope="module")
def events(finished: Path) -> EventAccumulator:
    """What is read back, in full."""
    accumulator = EventAccumulator(str(finished / PLACE), {"scalars": 0, "images": 0})
    accumulator.Reload()
    return accumulator


def test_scalars_are_the_metrics(finished: Path, events: EventAccumulator) -> None:
    metrics = load_run(finished).metrics
    for column in ("loss", "drift", "weights_moved"):
        told = events.Scalars(f"metrics/{column}")
        known = metrics[column].dropna()
        assert [event.step for event in told] == metrics.loc[known.index, "step"].tolist()
        np.testing.assert_allclose([event.value for event in told], known, rtol=FLOAT32, atol=1e-38)
    assert len(events.Scalars("metrics/drift")) < len(events.Scalars("metrics/loss"))


def test_the_ladder_is_there(finished: Path, events: EventAccumulator) -> None:
    for result in read_results(finished / "results.csv"):
        if result.relative_error is not None:
            (told,) = events.Scalars(f"ladder/{result.split}/{result.machine}")
            assert (told.step, told.value) == (30, pytest.approx(result.relative_error, rel=FLOAT32))


def test_pictures_are_those_of_the_run(finished: Path, events: EventAccumulator) -> None:
    figures = {name: figure_of(load_run(finished), draw) for name, draw in gallery()}
    drawn = {f"plots/{name}": png(figure) for name, figure in figures.items() if figure is not None}
    assert {tag: events.Images(tag)[0].encoded_image_string for tag in events.Tags()["images"]} == drawn
    assert drawn.keys() == {f"plots/{path.stem}" for path in (finished / "plots").glob("*.svg")}


@pytest.mark.parametrize("command", ["train", "resume", "sweep"])
def test_finished_runs_get_their_events_once(command: str, finished: Path) -> None:
    (path,), out = (finished / PLACE).iterdir(), finished.parents[1]
    before = path.read_bytes()
    path.unlink()
    words = [str(finished)] if command == "resume" else [*TINY, f"--out={out}"]
    for _ in range(2):
        (path.parent / f"{NAME}0123456789ab").write_text("those of another run")
        assert run([command, *words, "--quiet", "--tensorboard"]) == 0
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert RunFolder(finished).done


def test_the_extra_is_asked_for_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ntkexp.report.events.find_spec", lambda name: None)
    assert run(["train", "--tensorboard", f"--out={tmp_path / 'outputs'}"]) == 2
    said = capfd.readouterr().err
    assert "pip install 'ntkexp[tensorboard]'" in said
    assert said.count("\n") == 1
    assert not (tmp_path / "outputs").exists()
