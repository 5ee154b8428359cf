"""Live logs of a run: Weights & Biases, MLflow or TensorBoard.

    metrics/<column>            the columns of metrics.csv, at each step
    ladder/<split>/<machine>    relative errors of kernel machines, at the last step

The events of a finished run (`events.py`) have the same names and steps.

The checkpoint stores the key of the log, so a resumed run continues its log. First, the
run sends the log all rows of metrics.csv before the checkpoint, and the log ignores
steps that it already has. So each step is logged exactly once, even if the run was
interrupted."""

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
NAME = "events.out.tfevents."  # TensorBoard needs `tfevents` in the name; a suffix distinguishes files
# the version of the file format, written in the first event
EVENT_VERSION = "brain.Event:2"

PROJECT = "ntkexp"
"""The default project (Weights & Biases) or experiment (MLflow)."""

Numbers: TypeAlias = Mapping[str, float]
Row: TypeAlias = Mapping[str, float | int | None]


def event_files(folder: Path) -> list[str]:
    """Return the relative paths of the event files that this package wrote
    in a run folder."""
    files = (
        path
        for path in (folder / PLACE).glob(f"{NAME}*")
        if re.fullmatch(EVENTS, path.name)
    )
    return [path.relative_to(folder).as_posix() for path in files]


def metric_name(column: str) -> str:
    return f"metrics/{column}"


def ladder_name(split: str, machine: str) -> str:
    return f"ladder/{split}/{machine}"


class AbstractLog(ABC):
    """A service or file that receives the measured numbers of a run.

    The methods are called in this order: `begin`, `write` for each step, `conclude`,
    `end`. Each may raise any error."""

    @abstractmethod
    def begin(self, folder: Path, config: Mapping[str, Any], key: str | None) -> str:
        """Create the log of a run, or continue an existing log if its `key` is given.
        Return the key of the log."""

    @abstractmethod
    def write(self, numbers: Numbers, step: int) -> None:
        """Log the numbers of a step.

        Steps arrive in order. A continued log may receive a step that it already has.
        """

    def conclude(self, numbers: Numbers, step: int) -> None:
        """Log the results of the run after its last step."""
        self.write(numbers, step)

    @abstractmethod
    def end(self, *, finished: bool) -> None:
        """Close the log. `finished` is False if the run was stopped."""


class Wandb(AbstractLog):
    """A run of Weights & Biases, named after the folder,
    with the results in its summary."""

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
        self.next = self.run.step  # wandb ignores lower steps, with a warning
        return str(self.run.id)

    def write(self, numbers: Numbers, step: int) -> None:
        if step >= self.next:
            self.run.log(dict(numbers), step=step)

    def conclude(self, numbers: Numbers, step: int) -> None:
        self.run.summary.update(dict(numbers))

    def end(self, *, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


class Mlflow(AbstractLog):
    """A run of MLflow, named after the folder.

    It uses an `MlflowClient`, which does not change the user's active run.
    """

    def begin(self, folder: Path, config: Mapping[str, Any], key: str | None) -> str:
        import pandas as pd  # noqa: PLC0415  slow to import
        from mlflow import MlflowClient  # noqa: PLC0415  an extra
        from mlflow.entities import Metric, Param  # noqa: PLC0415  an extra

        self.client = MlflowClient()
        self.metric = Metric
        self.next = 0
        self.waiting = list[Metric]()
        self.sent = time.monotonic()
        if key is not None:
            self.key = key
            self.client.update_run(key, status="RUNNING")
            known = [
                at.step
                for at in self.client.get_metric_history(key, metric_name("loss"))
            ]
            self.next = max(known, default=-1) + 1
            return key
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        experiment = self.client.get_experiment_by_name(name)
        place = (
            self.client.create_experiment(name)
            if experiment is None
            else experiment.experiment_id
        )
        self.key = str(self.client.create_run(place, run_name=folder.name).info.run_id)
        (row,) = pd.json_normalize(dict(config)).to_dict("records")
        params = [Param(str(name), str(value)) for name, value in row.items()]
        for first in range(0, len(params), MLFLOW_BATCH_PARAMS):
            self.client.log_batch(
                self.key, params=params[first : first + MLFLOW_BATCH_PARAMS]
            )
        return self.key

    def write(self, numbers: Numbers, step: int) -> None:
        if step >= self.next:
            self.add(numbers, step)
        if time.monotonic() - self.sent >= MLFLOW_WAIT_SECONDS:
            self.send()

    def conclude(self, numbers: Numbers, step: int) -> None:
        self.add(numbers, step)

    def add(self, numbers: Numbers, step: int) -> None:
        now = time.time_ns() // 1_000_000
        self.waiting += [
            self.metric(name, value, now, step) for name, value in numbers.items()
        ]

    def send(self) -> None:
        """Send all waiting numbers in batches, because one
        request takes longer than a small step."""
        while self.waiting:
            self.client.log_batch(self.key, metrics=self.waiting[:MLFLOW_BATCH_METRICS])
            del self.waiting[:MLFLOW_BATCH_METRICS]
        self.sent = time.monotonic()

    def end(self, *, finished: bool) -> None:
        self.send()
        self.client.set_terminated(self.key, "FINISHED" if finished else "KILLED")


# largest number of entries that MLflow accepts in one request
MLFLOW_BATCH_PARAMS = 100
MLFLOW_BATCH_METRICS = 1000

MLFLOW_WAIT_SECONDS = 1.0  # minimum time between two requests


class TensorBoard(AbstractLog):
    """An event file in the run folder. TensorBoard can read it during the run.

    A resumed run writes a new file with all steps. Earlier files are kept, because
    TensorBoard stops reading a run if an open file disappears."""

    def begin(self, folder: Path, config: Mapping[str, Any], key: str | None) -> str:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # noqa: PLC0415  an extra
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415  an extra
        from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415  an extra

        self.event, self.summary = Event, Summary
        place = folder / PLACE
        place.mkdir(exist_ok=True)
        if key is None:  # a new log replaces the logs of earlier runs in this folder
            for other in event_files(folder):
                (folder / other).unlink()
        # the name sorts after the names of earlier files
        path = place / f"{NAME}{time.time_ns()}"
        self.file = path.open("xb")
        self.records = RecordWriter(self.file)
        self.add(file_version=EVENT_VERSION)
        # a START event at step 0 makes TensorBoard discard all numbers of earlier files
        self.add(step=0, session_log=SessionLog(status=SessionLog.START))
        return path.name

    def add(self, **content: Any) -> None:  # `content`: fields of the Event message
        self.records.write(
            self.event(wall_time=time.time(), **content).SerializeToString()
        )

    def write(self, numbers: Numbers, step: int) -> None:
        values = [
            self.summary.Value(tag=name, simple_value=value)
            for name, value in numbers.items()
        ]
        self.add(step=step, summary=self.summary(value=values))
        self.file.flush()

    def end(self, *, finished: bool) -> None:
        self.file.close()


LOGS: Mapping[str, type[AbstractLog]] = {
    "wandb": Wandb,
    "mlflow": Mlflow,
    "tensorboard": TensorBoard,
}
"""The log classes by the names of their packages.
The packages are optional dependencies."""


def check_log(name: str) -> None:
    """Raise if no log has this name, or if the log's package is not installed.

    >>> check_log("wadnb")
    Traceback (most recent call last):
    ntkexp.mistake.WrongArgument: log=wadnb: it takes wandb, mlflow or tensorboard; did you mean 'wandb'?
    """
    if name not in LOGS:
        *most, last = LOGS
        raise WrongArgument(
            f"log={name}: it takes {', '.join(most)} or {last}{nearest(name, LOGS)}",
            "log",
        )
    if find_spec(name) is None:
        raise WrongArgument(
            f"log={name} needs {name}, which is not installed: pip install 'ntkexp[{name}]'",
            "log",
        )


@dataclass
class LiveLog:
    """The log of a run. If it fails, the run continues without it."""

    name: str
    log: AbstractLog
    progress: AbstractProgress
    key: str
    works: bool = True

    def write_row(self, row: Row) -> None:
        """Log the measured numbers of a step."""
        numbers = {
            metric_name(name): float(v)
            for name, v in row.items()
            if name != "step" and v is not None
        }
        step = int(row["step"] or 0)
        self.survive(f"at step {step}", lambda: self.log.write(numbers, step))

    def conclude(self, ladder: Iterable[Result], step: int) -> None:
        """Log the relative errors of all compared kernel machines."""
        errors = {
            ladder_name(row.split, row.machine): row.relative_error
            for row in ladder
            if row.relative_error is not None
        }
        self.survive("with the ladder", lambda: self.log.conclude(errors, step))

    def survive(self, when: str, act: Callable[[], None]) -> None:
        """Call `act`. If it raises an error, show a warning,
        and never use the log again."""
        try:
            if self.works:
                act()
        except Exception as error:  # libraries and servers may raise anything
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
    """Yield the log of a run.

    If there is a `key`, continue the log with that key. The log first receives the
    `earlier` rows of metrics.csv."""
    log = LOGS[name]()
    try:
        live = LiveLog(name, log, progress, log.begin(folder, config, key))
    except Exception as error:  # libraries and servers may raise anything
        raise WrongArgument(
            f"log={name} cannot begin: {first_line(error)}", "log"
        ) from error
    finished = False
    try:
        for row in earlier:
            live.write_row(row)
        yield live
        finished = True
    finally:
        live.survive("at its end", lambda: log.end(finished=finished))
