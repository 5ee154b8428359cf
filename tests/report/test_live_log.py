"""A log has every number of metrics.csv, each step once, even if the run was interrupted and resumed."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ntkexp.cli.main import run
from ntkexp.mistake import WrongArgument
from ntkexp.progress import Silent
from ntkexp.records.results import Result, read_results, read_rows
from ntkexp.report.live_log import PLACE, Row, ladder_name, metric_name, open_log
from tests.report.stand_ins import STAND_INS, Point, Service, stand_in
from tests.run.commands import only_run
from tests.run.small import execute_in, small

FLOAT32 = 2.0**-23  # TensorBoard keeps single precision: the rounding of one number

# --- The log of made-up rows. The first attempt is interrupted after step 3, and its checkpoint is of step 2.

CONFIG = {"model": {"width": 8}, "seed": 0}
ROWS: list[Row] = [{"step": k, "loss": 0.5**k, "kernel_change": None if k % 2 else 0.1 * k} for k in range(7)]
LADDER = [Result("query", "secant", relative_error=1e-12), Result("query", "left")]


def points(rows: Iterable[Row]) -> list[Point]:
    """Return the numbers of some rows with their steps."""
    of_all = [
        (int(row["step"] or 0), metric_name(name), v) for row in rows for name, v in row.items() if name != "step"
    ]
    return sorted((step, name, float(v)) for step, name, v in of_all if v is not None)


POINTS = points(ROWS)


class Heard(Silent):
    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def broken_off(name: str, folder: Path) -> str:
    """Log the first attempt. Return the key of the log."""
    with suppress(KeyboardInterrupt), open_log(name, folder, CONFIG, None, (), Silent()) as log:
        for row in ROWS[:4]:
            log.write_row(row)
        raise KeyboardInterrupt
    return log.key


def resumed(name: str, folder: Path, key: str | None) -> Heard:
    """Log the second attempt. Return its warnings."""
    heard = Heard()
    with open_log(name, folder, CONFIG, key, ROWS[:3], heard) as log:
        for row in ROWS[3:]:
            log.write_row(row)
        log.conclude(LADDER, 6)
    return heard


@pytest.mark.parametrize("name", STAND_INS)
@pytest.mark.parametrize("first", [True, False])
def test_a_service_has_each_step_once(name: str, first: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = stand_in(monkeypatch, name)
    heard = resumed(name, tmp_path, broken_off(name, tmp_path) if first else None)
    assert sorted(service.only.points) == POINTS
    assert service.only.results == {"ladder/query/secant": 1e-12}
    assert service.only.config in ({"model.width": "8", "seed": "0"}, CONFIG)
    assert (service.only.name, service.only.states[-1]) == (tmp_path.name, "FINISHED")
    assert ("KILLED" in service.only.states) == first
    assert heard.warnings == []


def test_tensorboard_has_each_step_once(tmp_path: Path) -> None:
    """A reader that has followed the run since its first attempt has them too."""
    key = broken_off("tensorboard", tmp_path)
    events = EventAccumulator(str(tmp_path / PLACE), {"scalars": 0})
    events.Reload()
    assert [event.step for event in events.Scalars("metrics/loss")] == [0, 1, 2, 3]
    resumed("tensorboard", tmp_path, key)
    events.Reload()
    found = sorted((e.step, name, e.value) for name in events.Tags()["scalars"] for e in events.Scalars(name))
    expected = sorted([*POINTS, (6, "ladder/query/secant", 1e-12)])
    assert [point[:2] for point in found] == [point[:2] for point in expected]
    assert [point[2] for point in found] == pytest.approx([point[2] for point in expected], rel=FLOAT32)


@pytest.mark.parametrize("name", STAND_INS)
def test_a_log_that_fails_is_said_once_and_raises_nothing(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, name).fails_at = 2
    (said,) = resumed(name, tmp_path, None).warnings
    assert said.startswith(f"log={name} failed ")
    assert said.endswith(" (no route to host); the run goes on without it")


def test_a_log_that_cannot_begin_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "mlflow").refuses = True
    with pytest.raises(WrongArgument, match=r"^log=mlflow cannot begin: no such project$"):
        resumed("mlflow", tmp_path, None)


MISSING = {"--log=mlflow": "--log=mlflow needs mlflow", "--tensorboard": "tensorboard"}


@pytest.mark.parametrize("option", MISSING)
@pytest.mark.parametrize("command", ["train", "sweep", "resume"])
def test_a_missing_package_is_refused_before_anything_runs(
    command: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = option.removeprefix("--").rpartition("=")[2]
    monkeypatch.setattr(sys, "meta_path", [Without(finder, name) for finder in sys.meta_path])
    for module in [each for each in sys.modules if each.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)
    assert run([command, *(["here"] if command == "resume" else []), option]) == 2
    error = capfd.readouterr().err
    assert MISSING[option] in error
    assert error.endswith(f"pip install 'ntkexp[{name}]'\n")
    assert error.count("\n") == 1
    assert not os.listdir(tmp_path)


class Without:
    """A finder of modules that does not find one package."""

    def __init__(self, finder: Any, name: str) -> None:
        self.finder, self.name = finder, name

    def find_spec(self, name: str, *about: object) -> Any:
        return None if name == self.name else self.finder.find_spec(name, *about)


# --- The packages, if they are installed.

CLIENT = (
    *("get_experiment_by_name", "create_experiment", "create_run", "update_run", "get_metric_history", "log_batch"),
    "set_terminated",
)
USED = {"wandb": ("init", "Run.log", "Run.finish"), "mlflow": tuple(f"MlflowClient.{name}" for name in CLIENT)}


def signature(package: ModuleType, path: str) -> dict[str, tuple[object, object]]:
    """Return the kind and default of each argument of a function of a package."""
    found: object = package
    for name in path.split("."):
        found = getattr(found, name)
    assert callable(found)
    return {name: (each.kind, each.default) for name, each in inspect.signature(found).parameters.items()}


@pytest.mark.others
@pytest.mark.parametrize(("name", "path"), [(name, path) for name, paths in USED.items() for path in paths])
@pytest.mark.filterwarnings("ignore")
def test_stand_ins_take_what_packages_take(name: str, path: str) -> None:
    package = import_module(name)
    imitation = STAND_INS[name](Service())[name]
    assert signature(imitation, path).items() <= signature(package, path).items()


@pytest.mark.others
@pytest.mark.filterwarnings("ignore")
def test_mlflow_itself_has_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mlflow  # noqa: PLC0415  dev leaves it out

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    key = broken_off("mlflow", tmp_path)
    assert resumed("mlflow", tmp_path, key).warnings == []
    client = mlflow.MlflowClient()
    of_run = client.get_run(key)
    assert (of_run.info.status, of_run.info.run_name) == ("FINISHED", tmp_path.name)
    assert of_run.data.params == {"model.width": "8", "seed": "0"}
    histories = {name: client.get_metric_history(key, name) for name in of_run.data.metrics}
    found = [(at.step, name, at.value) for name, history in histories.items() for at in history]
    assert sorted(found) == sorted([*POINTS, (6, "ladder/query/secant", 1e-12)])


@pytest.mark.others
@pytest.mark.filterwarnings("ignore")
def test_wandb_itself_takes_each_step_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline, wandb cannot resume runs, and writes a file."""
    import wandb  # noqa: PLC0415  dev leaves it out

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    log, logged = wandb.Run.log, list[Point]()

    def spy(self: object, data: dict[str, float], step: int) -> None:
        log(self, data, step=step)
        logged.extend((step, name, value) for name, value in data.items())

    monkeypatch.setattr(wandb.Run, "log", spy)
    assert resumed("wandb", tmp_path, None).warnings == []
    assert sorted(logged) == POINTS
    (file,) = tmp_path.rglob("*.wandb")
    assert file.stat().st_size > 0


# --- Runs.

WORDS = ("data.train=4", "data.query=2", "data.test=2", "model.width=4", "model.depth=1", "steps=3", "threads=1")
LEFT = ("path.rule=[left]", "ladder.machine=[left]", "checkpoint_seconds=0")


class BrokenOff(Silent):
    """Progress that is interrupted after the second step, which is logged but has no checkpoint."""

    def step(self, done: int, note: str = "") -> None:
        if done == 2:
            raise KeyboardInterrupt


def test_a_run_logs_what_it_measures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service, words = stand_in(monkeypatch, "wandb"), [*WORDS, *LEFT]
    experiment = small(*words)
    with pytest.raises(KeyboardInterrupt):
        execute_in(tmp_path, experiment, words, BrokenOff(), log="wandb")
    folder = execute_in(tmp_path, experiment, words, log="wandb")
    assert folder == only_run(tmp_path)
    assert {step for step, _, _ in service.only.points} == {0, 1, 2, 3}
    assert sorted(service.only.points) == points(read_rows(folder / "metrics.csv"))
    errors = {ladder_name(r.split, r.machine): r.relative_error for r in read_results(folder / "results.csv")}
    assert service.only.results == {name: error for name, error in errors.items() if error is not None}
    assert service.only.states == ["KILLED", "FINISHED"]
