"""The numbers of a run, sent to Weights & Biases, MLflow or TensorBoard while it runs.

    metrics/<column>            what metrics.csv has of a step, at that step
    ladder/<split>/<machine>    relative errors, at the last step

A finished run's events (`events.py`) have the same names and steps. A run that goes on from its checkpoint continues
its log, whose key the checkpoint holds. The log then gets the steps until the checkpoint from metrics.csv, and leaves
out those that it has: so each step is there once, however the run was interrupted, and whenever the log began.
"""

from __future__ import annotations

import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

from ntkexp.mistake import WrongArgument, first_line, nearest
from ntkexp.progress import AbstractProgress
from ntkexp.records.folder import EVENTS
from ntkexp.records.results import Result

PLACE = Path("tensorboard")
NAME = "events.out.tfevents."  # TensorBoard looks for `tfevents` in the name; what follows tells files apart
FORMAT = "brain.Event:2"  # what the first event says

PROJECT = "ntkexp"
"""The project or experiment to which runs go, if the environment names no other."""

Numbers: TypeAlias = Mapping[str, float]
Row: TypeAlias = Mapping[str, float | int | None]


def event_files(folder: Path) -> list[str]:
    """List our files of events in a run folder, by their places there. Other writers give other names."""
    files = (path for path in (folder / PLACE).glob(f"{NAME}*") if re.fullmatch(EVENTS, path.name))
    return [path.relative_to(folder).as_posix() for path in files]


def metric_name(column: str) -> str:
    return f"metrics/{column}"


def ladder_name(split: str, machine: str) -> str:
    return f"ladder/{split}/{machine}"


class AbstractLog(ABC):
    """A place to which numbers go: `begin`, any number of `write`s, `conclude`, `end`. It may raise anything."""

    @abstractmethod
    def begin(self, folder: Path, config: Mapping[str, Any], key: str | None) -> str:
        """Begin the log of a run, or continue the one of this key; the key by which this log is continued."""

    @abstractmethod
    def write(self, numbers: Numbers, step: int) -> None:
        """The numbers of a step; steps come in order, and those of a continued log may have come before."""

    @abstractmethod
    def conclude(self, numbers: Numbers, step: int) -> None:
        """The results, after the last step."""

    @abstractmethod
    def end(self, *, finished: bool) -> None:
        """The run is finished, or was broken off."""


class Wandb(AbstractLog):
    """A run of Weights & Biases, named after the folder; results stand in its summary."""

    def begin(self, folder: Path, config: Mapping[str, Any], key: str | None) -> str:
        import wandb  # noqa: PLC0415  an extra

        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=folder.name,
            id=key,
            resume="allow" if key else None,
            config=dict(config),
            settings=wandb.Settings(console="off", silent=True),
        )
        self.next = (
            self.run.step
        )  # a step that is lower is taken again, and would be ignored with a warning
        return str(self.run.id)

    def write(self, numbers: Numbers, step: int) -> None:
        if step >= self.next:
            self.run.log(dict(numbers), step=step)

    def conclude(self, numbers: Numbers, step: int) -> None:
        self.run.summary.update(dict(numbers))

    def end(self, *, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


class Mlflow(AbstractLog):
    """A run of MLflow, named after the folder, by a client: a run that the user has open stays as it is."""

    def begin(self, folder: Path, config: Mapping[str, Any], key: str | None) -> str:
        from mlflow import MlflowClient  # noqa: PLC0415  an extra
        from mlflow.entities import Metric, Param  # noqa: PLC0415  the same

        self.client, self.metric, self.next = MlflowClient(), Metric, 0
        self.waiting, self.sent = list[Metric](), time.monotonic()
        if key is not None:
            self.key = key
            self.client.update_run(key, status="RUNNING")
            known = [at.step for at in self.client.get_metric_history(key, metric_name("loss"))]
            self.next = max(known, default=-1) + 1
            return key
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self.client.get_experiment_by_name(name)
        place = (
            self.client.create_experiment(name) if experiment is None else experiment.experiment_id
        )
        self.key = str(self.client.create_run(place, run_name=folder.name).info.run_id)
        params = [Param(name, str(value)) for name, value in flattened(config).items()]
        for first in range(0, len(params), MOST_PARAMS):
            self.client.log_batch(self.key, params=params[first : first + MOST_PARAMS])
        return self.key

    def write(self, numbers: Numbers, step: int) -> None:
        if step >= self.next:
            self.add(numbers, step)
        if time.monotonic() - self.sent >= SECONDS:
            self.send()

    def conclude(self, numbers: Numbers, step: int) -> None:
        self.add(numbers, step)

    def add(self, numbers: Numbers, step: int) -> None:
        now = time.time_ns() // 1_000_000
        self.waiting += [self.metric(name, value, now, step) for name, value in numbers.items()]

    def send(self) -> None:
        """Send what waits: a request takes long compared with a small step."""
        while self.waiting:
            self.client.log_batch(self.key, metrics=self.waiting[:MOST_METRICS])
            del self.waiting[:MOST_METRICS]
        self.sent = time.monotonic()

    def end(self, *, finished: bool) -> None:
        self.send()
        self.client.set_terminated(self.key, "FINISHED" if finished else "KILLED")


MOST_PARAMS, MOST_METRICS = 100, 1000
"""How many of them MLflow takes at once."""

SECONDS = 1.0
"""How long numbers may wait, for MLflow, until they are sent."""


def flattened(config: Mapping[str, Any], under: str = "") -> dict[str, Any]:
    """Nested keys as one, as on the command line.

    >>> flattened({"model": {"width": 64}, "seed": 0})
    {'model.width': 64, 'seed': 0}
    """
    found = dict[str, Any]()
    for name, value in config.items():
        found |= (
            flattened(value, f"{under}{name}.")
            if isinstance(value, Mapping)
            else {f"{under}{name}": value}
        )
    return found


class TensorBoard(AbstractLog):
    """A file of events in the run folder, which TensorBoard may read meanwhile. Each attempt writes a file from the
    first step on; earlier files stay, because a TensorBoard that loses the file it reads goes no further."""

    def begin(self, folder: Path, config: Mapping[str, Any], key: str | None) -> str:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # noqa: PLC0415  an extra
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415  the same
        from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415  the same

        self.event, self.summary = Event, Summary
        place = folder / PLACE
        place.mkdir(exist_ok=True)
        for other in event_files(folder) if key is None else ():  # of a log that is not continued
            (folder / other).unlink()
        path = place / f"{NAME}{time.time_ns()}"  # read after earlier ones
        self.file = path.open("xb")
        self.records = RecordWriter(self.file)
        self.add(file_version=FORMAT)
        # a TensorBoard that has read an earlier attempt drops its numbers from this step on
        self.add(step=0, session_log=SessionLog(status=SessionLog.START))
        return path.name

    def add(self, **content: Any) -> None:  # fields of an event
        self.records.write(self.event(wall_time=time.time(), **content).SerializeToString())

    def write(self, numbers: Numbers, step: int) -> None:
        values = [
            self.summary.Value(tag=name, simple_value=value) for name, value in numbers.items()
        ]
        self.add(step=step, summary=self.summary(value=values))
        self.file.flush()

    def conclude(self, numbers: Numbers, step: int) -> None:
        self.write(numbers, step)

    def end(self, *, finished: bool) -> None:
        self.file.close()


LOGS: Mapping[str, type[AbstractLog]] = {
    "wandb": Wandb,
    "mlflow": Mlflow,
    "tensorboard": TensorBoard,
}
"""The logs by the packages that they need, which are extras of these names."""


def check_log(name: str) -> None:
    """Refuse a log that there is not, or whose package is not installed, before anything runs.

    >>> check_log("wadnb")
    Traceback (most recent call last):
    ntkexp.mistake.WrongArgument: log=wadnb: it takes wandb, mlflow or tensorboard; did you mean 'wandb'?
    """
    if name not in LOGS:
        *most, last = LOGS
        raise WrongArgument(
            f"log={name}: it takes {', '.join(most)} or {last}{nearest(name, LOGS)}", "log"
        )
    if find_spec(name) is None:
        raise WrongArgument(
            f"log={name} needs {name}, which is not installed: pip install 'ntkexp[{name}]'", "log"
        )


@dataclass
class LiveLog:
    """The log of a run, which goes on without it if it fails."""

    name: str
    log: AbstractLog
    progress: AbstractProgress
    key: str
    works: bool = True

    def write_row(self, row: Row) -> None:
        """The numbers of a step that were measured."""
        numbers = {
            metric_name(name): float(v)
            for name, v in row.items()
            if name != "step" and v is not None
        }
        step = int(row["step"] or 0)
        self.survive(f"at step {step}", lambda: self.log.write(numbers, step))

    def conclude(self, ladder: Iterable[Result], step: int) -> None:
        """The relative errors of the ladder that are known."""
        errors = {
            ladder_name(row.split, row.machine): row.relative_error
            for row in ladder
            if row.relative_error is not None
        }
        self.survive("with the ladder", lambda: self.log.conclude(errors, step))

    def survive(self, when: str, act: Callable[[], None]) -> None:
        """Act on a log that works; its failure is reported, and nothing more is sent to it."""
        try:
            if self.works:
                act()
        except Exception as error:  # whatever a library or a server raises
            self.works = False
            self.progress.warn(
                f"log={self.name} failed {when} ({first_line(error)}); the run goes on without it"
            )


@contextmanager
def open_log(
    name: str,
    folder: Path,
    config: Mapping[str, Any],
    key: str | None,
    earlier: Iterable[Row],
    progress: AbstractProgress,
) -> Iterator[LiveLog]:
    """The log of a run, continued where it has this `key`; it gets the `earlier` rows first."""
    log = LOGS[name]()
    try:
        live = LiveLog(name, log, progress, log.begin(folder, config, key))
    except Exception as error:  # whatever a library or a server raises
        raise WrongArgument(f"log={name} cannot begin: {first_line(error)}", "log") from error
    finished = False
    try:
        for row in earlier:
            live.write_row(row)
        yield live
        finished = True
    finally:
        live.survive("at its end", lambda: log.end(finished=finished))
