"""Stand-ins for wandb and MLflow, with the names, defaults and limits that a log uses. A test compares them with the
packages, if these are installed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

Point = tuple[int, str, float]
"""A step, a name and a number."""


@dataclass
class StoredRun:
    """A run that a service stores."""

    id: str
    name: str | None
    config: dict[str, Any]
    points: list[Point] = field(default_factory=list)
    results: dict[str, float] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)


class Service:
    """The runs that a service stores. At step `fails_at` it raises `failure`."""

    def __init__(self) -> None:
        self.runs: dict[str, StoredRun] = {}
        self.fails_at: int | None = None
        self.refuses = False  # new runs
        self.failure: BaseException = ConnectionError("no route to host")

    def add(self, name: str | None, config: Mapping[str, Any]) -> StoredRun:
        if self.refuses:
            raise LookupError("no such project")
        stored = StoredRun(f"id{len(self.runs)}", name, dict(config))
        self.runs[stored.id] = stored
        return stored

    def receive(self, stored: StoredRun, points: Iterable[Point]) -> None:
        for point in points:
            if point[0] == self.fails_at:
                raise self.failure
            stored.points.append(point)

    @property
    def only(self) -> StoredRun:
        (stored,) = self.runs.values()
        return stored


# --- wandb: a resumed run continues after its last step, and ignores earlier steps.


class WandbRun:
    def __init__(self, service: Service, stored: StoredRun) -> None:
        self.service, self.stored, self.id, self.summary = service, stored, stored.id, stored.results
        self.step = 1 + max((step for step, _, _ in stored.points), default=-1)

    def log(self, data: dict[str, Any], step: int | None = None) -> None:
        assert step is not None
        assert step >= self.step, "it would be ignored"
        self.step = step
        self.service.receive(self.stored, [(step, name, value) for name, value in data.items()])

    def finish(self, exit_code: int | None = None) -> None:
        self.stored.states.append("FINISHED" if exit_code == 0 else "KILLED")


def wandb(service: Service) -> dict[str, ModuleType]:
    def init(
        project: str | None = None,
        id: str | None = None,  # noqa: A002  wandb's name for it
        name: str | None = None,
        config: dict[str, Any] | str | None = None,
        resume: bool | str | None = None,
        settings: object = None,
    ) -> WandbRun:
        assert isinstance(config, dict)
        assert (id is None) == (resume is None)
        return WandbRun(service, service.add(name, config) if id is None else service.runs[id])

    def settings(console: str = "auto", silent: bool = False) -> None:
        pass

    return {"wandb": module("wandb", init=init, Settings=settings, Run=WandbRun)}


# --- MLflow: a client with limited batches.


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Param(NamedTuple):
    key: str
    value: str


def mlflow(service: Service) -> dict[str, ModuleType]:
    experiments = dict[str, str]()

    class MlflowClient:
        def get_experiment_by_name(self, name: str) -> object:
            known = experiments.get(name)
            return None if known is None else SimpleNamespace(experiment_id=known)

        def create_experiment(self, name: str) -> str:
            return experiments.setdefault(name, "1")

        def create_run(self, experiment_id: str, run_name: str | None = None) -> object:
            assert experiment_id in experiments.values()
            return SimpleNamespace(info=SimpleNamespace(run_id=service.add(run_name, {}).id))

        def update_run(self, run_id: str, status: str | None = None) -> None:
            service.runs[run_id].states.append(str(status))

        def get_metric_history(self, run_id: str, key: str) -> list[Metric]:
            return [Metric(key, value, 0, step) for step, name, value in service.runs[run_id].points if name == key]

        def log_batch(self, run_id: str, metrics: Sequence[Metric] = (), params: Sequence[Param] = ()) -> None:
            assert len(metrics) <= 1000
            assert len(params) <= 100
            stored = service.runs[run_id]
            stored.config |= {param.key: param.value for param in params}
            stored.results |= {each.key: each.value for each in metrics if each.key.startswith("ladder/")}
            service.receive(stored, [(m.step, m.key, m.value) for m in metrics if not m.key.startswith("ladder/")])

        def set_terminated(self, run_id: str, status: str | None = None) -> None:
            service.runs[run_id].states.append(str(status))

    entities = module("mlflow.entities", Metric=Metric, Param=Param)
    return {"mlflow": module("mlflow", MlflowClient=MlflowClient, entities=entities), "mlflow.entities": entities}


def module(name: str, **content: object) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(content)
    return made


STAND_INS = {"wandb": wandb, "mlflow": mlflow}


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str) -> Service:
    """Replace a package by its stand-in. Return the service behind it."""
    service = Service()
    for path, made in STAND_INS[name](service).items():
        monkeypatch.setitem(sys.modules, path, made)
    return service
