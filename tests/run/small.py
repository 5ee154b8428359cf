"""Small experiments without files. A listener keeps their results in lists."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from ntkexp.config.compose import compose, composer
from ntkexp.experiment.experiment import Experiment
from ntkexp.experiment.identity import folder_name
from ntkexp.loss import Squared
from ntkexp.path.recording import Recording, row_length
from ntkexp.progress import AbstractProgress, Silent
from ntkexp.records.data import Trajectory
from ntkexp.records.folder import RunFolder, command
from ntkexp.records.results import Result
from ntkexp.run.execute import execute
from ntkexp.run.folder_listener import RunRequest
from ntkexp.run.loop import AbstractListener, run
from ntkexp.run.metrics import Row
from ntkexp.run.outcome import Outcome
from ntkexp.run.setting import Setting, prepare
from ntkexp.run.state import RunState

COMPOSER = composer()
SMALL = ("data.train=24", "data.query=12", "data.test=12", "model.width=16", "steps=20", "path.error_samples=0")


def execute_in(
    out: Path,
    experiment: Experiment,
    overrides: Sequence[str],
    progress: AbstractProgress | None = None,
    most_threads: int | None = None,
    log: str | None = None,
    *,
    pictures: bool = False,
) -> Path:
    """Execute a run in a folder of outputs."""
    request = RunRequest(
        experiment=experiment,
        folder=RunFolder(out / "runs" / folder_name(experiment)),
        overrides=overrides,
        repeat=command("train", overrides),
        progress=progress or Silent(),
        pictures=pictures,
        most_threads=most_threads,
        log=log,
    )
    return execute(request)


class Twice(Squared):
    """A user's loss, ℓ = ‖f − y‖²."""

    curvature: ClassVar[float] = 2.0

    def value(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 2 * super().value(outputs, targets)

    def output_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return 2 * super().output_gradient(outputs, targets)


@dataclass(eq=False)
class Memory(AbstractListener):
    """A listener that keeps rows, kernels and weights in lists."""

    dtype: str = "float64"
    rows: list[Row] = field(default_factory=list)
    kernels: dict[int, Float[Tensor, "point out train out_"]] = field(default_factory=dict)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    shares: list[Row] = field(default_factory=list)

    def on_row(self, row: Row) -> None:
        self.rows.append(row)

    def on_snapshot(
        self, step: int, kernel: Float[Tensor, "point kept train kept_"], output_gradient: Float[Tensor, "train out_"]
    ) -> None:
        self.kernels[step] = kernel

    @property
    def scratch(self) -> Path:
        return self.folder

    def trajectory(self, rows: int, size: int) -> Trajectory:
        made = Trajectory(self.folder / "trajectory.bin", rows, size, self.dtype)
        made.allocate()
        return made

    @cached_property
    def folder(self) -> Path:
        """A folder that is deleted with the listener."""
        made = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, made)
        return Path(made)

    def on_step(self, state: RunState, loss: float) -> None:
        self.weights.append(state.weights)

    def on_late_rows(self, rows: Sequence[Row]) -> None:
        self.shares = list(rows)


@dataclass(frozen=True)
class Ran:
    """A finished run."""

    setting: Setting
    outcome: Outcome
    memory: Memory

    @property
    def table(self) -> dict[tuple[str, str], Result]:
        """The ladder, by machine and split."""
        return {(row.machine, row.split): row for row in self.outcome.results}

    def rows(self, machine: str) -> list[Result]:
        """Return the results of one machine on every split. Raise if the run lacks the machine."""
        results = [row for (name, _), row in self.table.items() if name == machine]
        assert results, machine
        return results

    def contributions(self, rule: str) -> Float[Tensor, "point out train"]:
        """Return 𝒮 by one rule, at the attributed points."""
        return self.outcome.matrices.paths[rule].contributions

    def by_step(self, rule: str) -> Float[Tensor, "point out step"]:
        """Return the change by each step by one rule, at the attributed points."""
        return self.outcome.by_step[rule].stacked().movedim(0, 2)

    @property
    def change(self) -> Float[Tensor, "point out"]:
        """f_T − f_0 at the attributed points."""
        evidence = self.outcome.matrices
        return (evidence.end - evidence.start)[self.setting.domain.summed_points]

    def error(self, rule: str) -> float:
        """Return ‖Σ𝒮 − (f_T − f_0)‖/‖f_T − f_0‖ over the attributed points."""
        return float((self.contributions(rule).sum(2) - self.change).norm() / self.change.norm())

    @property
    def error_bar(self) -> float:
        """The error bar of the secant parts, relative to ‖𝒮‖."""
        return self.outcome.matrices.paths["secant"].facts["error_bar"]


def recorded_steps(setting: Setting, path: Path, more: Sequence[str] = ()) -> tuple[Recording, list[float]]:
    """Descend, and record every step and `more` of its values. Return the recording and the step sizes."""
    weights, pull = setting.problem.weights, setting.domain.zero_output_gradient()
    records = (*setting.experiment.optimizer.records, *more)
    size = row_length(weights, records, pull)
    rows = Trajectory(path, setting.experiment.steps + 1, size, setting.experiment.dtype)
    rows.allocate()
    recording, sizes, end = Recording(rows=rows, like=weights, records=records, output_gradient_like=pull), [], weights
    for step in setting.descent.steps_from(weights):
        recording.write(step)
        sizes.append(step.step_size)
        end = step.end
    recording.close(len(sizes), end)
    return recording, sizes


def small(*overrides: str, trust: Sequence[str] = ()) -> Experiment:
    """Compose a small experiment. Of overrides with the same key, the last counts."""
    chosen = [*SMALL, *overrides]
    return compose(chosen, trust=trust) if trust else COMPOSER.resolve(chosen).experiment()


def ran(*overrides: str, trust: Sequence[str] = ()) -> Ran:
    """Run a small experiment."""
    setting = prepare(small(*overrides, trust=trust))
    memory = Memory(setting.experiment.dtype)
    return Ran(setting, run(setting, memory), memory)
