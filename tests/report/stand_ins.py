"""Stand-ins for wandb and MLflow: the part of their interfaces that a log uses, and what they refuse."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest

Point = tuple[int, str, float]
"""A step, and a number by its name."""


@dataclass
class Kept:
    """What a service has of one run."""

    id: str
    name: str
    config: dict[str, Any]
    points: list[Point] = field(default_factory=list)
    results: dict[str, float] = field(default_factory=dict)
    states: list[str] = field(default_factory=list)


class Service:
    """What a service has of all runs; at the step `fails_at` it cannot be reached."""

    def __init__(self) -> None:
        self.runs: dict[str, Kept] = {}
        self.fails_at: int | None = None

    def began(self, name: str, config: Mapping[str, Any]) -> Kept:
        kept = Kept(f"id{len(self.runs)}", name, dict(config))
        self.runs[kept.id] = kept
        return kept

    def take(self, kept: Kept, points: Iterable[Point]) -> None:
        for point in points:
            if point[0] == self.fails_at:
                raise ConnectionError("no route to host")
            kept.points.append(point)

    @property
    def only(self) -> Kept:
        (kept,) = self.runs.values()
        return kept


class WandbRun:
    """A run that somebody has open; steps that go back are lost, and no test loses any."""

    def __init__(self, service: Service, kept: Kept) -> None:
        self.service, self.kept, self.id, self.summary = service, kept, kept.id, kept.results
        self.step = 1 + max((step for step, _, _ in kept.points), default=-1)

    def log(self, numbers: dict[str, float], step: int) -> None:
        assert step >= self.step
        self.step = step
        self.service.take(self.kept, [(step, name, value) for name, value in numbers.items()])

    def finish(self, exit_code: int) -> None:
        self.kept.states.append("FINISHED" if exit_code == 0 else "KILLED")


def wandb(service: Service) -> dict[str, ModuleType]:
    def init(*, name: str, resume: str | None, config: dict[str, Any], **others: Any) -> WandbRun:
        key = others["id"]
        assert (key is None) == (resume is None)
        return WandbRun(service, service.began(name, config) if key is None else service.runs[key])

    return {"wandb": module("wandb", init=init, Settings=lambda **_: None)}


class Metric(NamedTuple):
    key: str
    value: float
    timestamp: int
    step: int


class Param(NamedTuple):
    key: str
    value: str


def mlflow(service: Service) -> dict[str, ModuleType]:
    class MlflowClient:
        experiments: dict[str, str] = {}  # noqa: RUF012  of all clients

        def get_experiment_by_name(self, name: str) -> object:
            known = self.experiments.get(name)
            return None if known is None else SimpleNamespace(experiment_id=known)

        def create_experiment(self, name: str) -> str:
            return self.experiments.setdefault(name, "1")

        def create_run(self, place: str, run_name: str) -> object:
            return SimpleNamespace(info=SimpleNamespace(run_id=service.began(run_name, {}).id))

        def update_run(self, run: str, status: str) -> None:
            service.runs[run].states.append(status)

        def get_metric_history(self, run: str, name: str) -> list[Metric]:
            return [Metric(name, value, 0, step) for step, key, value in service.runs[run].points if key == name]

        def log_batch(self, run: str, metrics: Sequence[Metric] = (), params: Sequence[Param] = ()) -> None:
            assert len(metrics) <= 1000
            assert len(params) <= 100
            kept = service.runs[run]
            kept.config |= {param.key: param.value for param in params}
            kept.results |= {each.key: each.value for each in metrics if each.key.startswith("ladder/")}
            service.take(kept, [(m.step, m.key, m.value) for m in metrics if not m.key.startswith("ladder/")])

        def set_terminated(self, run: str, status: str) -> None:
            service.runs[run].states.append(status)

    entities = module("mlflow.entities", Metric=Metric, Param=Param)
    return {"mlflow": module("mlflow", MlflowClient=MlflowClient, entities=entities), "mlflow.entities": entities}


def module(name: str, **content: object) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = ModuleSpec(name, None)
    vars(made).update(content)
    return made


STAND_INS = {"wandb": wandb, "mlflow": mlflow}


def stand_in(monkeypatch: pytest.MonkeyPatch, name: str) -> Service:
    """The service behind a stand-in for the package, which is imported in its place."""
    service = Service()
    for path, made in STAND_INS[name](service).items():
        monkeypatch.setitem(sys.modules, path, made)
    return service
