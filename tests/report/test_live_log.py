"""What a log has of a run is what metrics.csv has, each step once, also of a run that was broken off."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ntkexp.cli.main import run
from ntkexp.progress import Silent
from ntkexp.records.results import read_results, read_rows
from ntkexp.report.live_log import PLACE, ladder_name, metric_name
from ntkexp.run.execute import execute
from tests.report.stand_ins import STAND_INS, Point, Service, stand_in
from tests.run.commands import only_run
from tests.run.small import small

WORDS = ("steps=6", "path.rule=[left]", "ladder.machine=[left]", "checkpoint_seconds=0")
FLOAT32 = 2.0**-23  # TensorBoard keeps single precision: the rounding of one number


class BrokenOff(Silent):
    """Progress that is interrupted after the fourth step, whose numbers are logged and which no checkpoint has."""

    def step(self, step: int, loss: float | None, drift: float | None) -> None:
        if step == 4:
            raise KeyboardInterrupt


class Heard(Silent):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def broken_off(out: Path, log: str | None) -> Path:
    """The folder of a run that was broken off."""
    with pytest.raises(KeyboardInterrupt):
        execute(small(*WORDS), WORDS, out, False, BrokenOff(), pictures=False, log=log)
    return only_run(out)


def resumed(out: Path, log: str) -> Path:
    return execute(small(*WORDS), WORDS, out, False, Silent(), pictures=False, log=log)


def measured(folder: Path) -> list[Point]:
    """Every number of metrics.csv, by its step."""
    rows = list(read_rows(folder / "metrics.csv"))
    assert [row["step"] for row in rows] == list(range(7))
    points = [(row["step"], metric_name(name), v) for row in rows for name, v in row.items() if name != "step"]
    return sorted((int(step), name, v) for step, name, v in points if step is not None and v is not None)


def ladder(folder: Path) -> dict[str, float]:
    rows = read_results(folder / "results.csv")
    return {ladder_name(r.split, r.machine): r.relative_error for r in rows if r.relative_error is not None}


@pytest.mark.parametrize("name", STAND_INS)
@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_service_has_each_step_once(name: str, first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = stand_in(monkeypatch, name)
    broken_off(tmp_path, name if first else None)
    folder = resumed(tmp_path, name)
    assert sorted(service.only.points) == measured(folder)
    assert service.only.results == ladder(folder)
    assert (service.only.name, service.only.states[-1]) == (folder.name, "FINISHED")
    assert ("KILLED" in service.only.states) == first
    assert {"model.width", "model"} & service.only.config.keys()


def test_tensorboard_has_each_step_once(tmp_path: Path) -> None:
    """Also one that reads the run since before it was broken off."""
    events = EventAccumulator(str(broken_off(tmp_path, "tensorboard") / PLACE), {"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("metrics/loss")] == [0, 1, 2, 3]
    folder = resumed(tmp_path, "tensorboard")
    events.Reload()
    found = [(e.step, name, e.value) for name in events.Tags()["scalars"] for e in events.Scalars(name)]
    expected = sorted([*measured(folder), *((6, name, value) for name, value in ladder(folder).items())])
    assert [point[:2] for point in sorted(found)] == [point[:2] for point in expected]
    assert [p[2] for p in sorted(found)] == pytest.approx([p[2] for p in expected], rel=FLOAT32, abs=1e-38)


@pytest.mark.parametrize("name", ["wandb", pytest.param("mlflow", marks=pytest.mark.slow)])
def test_a_run_goes_on_without_a_log_that_fails(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, heard = stand_in(monkeypatch, name), Heard()
    service.fails_at = 2
    folder = execute(small(*WORDS), WORDS, tmp_path, False, heard, pictures=False, log=name)
    assert len(measured(folder)) > len(service.only.points)
    (said,) = heard.warnings
    assert said.startswith(f"log={name} failed ")
    assert said.endswith(" (no route to host); the run goes on without it")


@pytest.mark.parametrize("command", ["train", "sweep", "resume"])
def test_a_missing_package_is_missed_before_anything_runs(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ntkexp.report.live_log.find_spec", lambda name: None)
    assert run([command, *(["here"] if command == "resume" else []), "--log=mlflow"]) == 2
    said = capfd.readouterr().err
    assert said == "ntkexp: --log=mlflow needs mlflow, which is not installed: pip install 'ntkexp[mlflow]'\n"
    assert not os.listdir(tmp_path)


@pytest.mark.slow
def test_a_log_that_cannot_begin_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stand_in(monkeypatch, "mlflow")
    monkeypatch.setattr(Service, "began", lambda *_: 1 / 0)
    words = ("data.train=4", "data.probe=2", "data.test=2", "steps=1", "threads=1")
    assert run(["train", *words, "--log=mlflow", f"--out={tmp_path}"]) == 2
    assert capfd.readouterr().err == "ntkexp: --log=mlflow cannot begin: division by zero\n"
