"""A training that a trial repeats in memory: as it was, and with other weights of its examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.config.compose import compose
from ntkexp.mistake import Mistake
from ntkexp.records.trajectory import Trajectory
from ntkexp.removal.again import again
from ntkexp.removal.check import changes
from ntkexp.removal.rerun import Rerun
from ntkexp.removal.train import trained
from ntkexp.run.listener import AbstractListener
from ntkexp.run.loop import run
from ntkexp.run.outcome import Outcome
from ntkexp.run.row import Row
from ntkexp.run.setting import Setting, prepare
from ntkexp.run.state import RunState
from ntkexp.stream import stream


@dataclass(frozen=True)
class Retraining:
    """The training as it was, and what carries it out again."""

    setting: Setting
    outcome: Outcome
    rerun: Rerun

    @property
    def train(self) -> int:
        """How many training examples there are."""
        return self.setting.problem.train

    @property
    def others(self) -> Float[Tensor, "point *shape"]:
        """The points that are no training examples."""
        return self.setting.problem.inputs[self.train :]

    def outputs_without(self, left: Float[Tensor, "run train"]) -> Float[Tensor, "run point out"]:
        """The outputs at those points after training with these weights of the examples."""
        vectors = trained(self.rerun, left)
        with torch.no_grad():
            return torch.stack([self.rerun.outputs(vector, self.others) for vector in vectors])

    def changes_without(self, left: Float[Tensor, "group train"]) -> Float[Tensor, "group point"]:
        """What the output at those points changes by when the groups that are marked by 1 are left out."""
        removals = [group.nonzero().flatten().tolist() for group in left]
        return changes(self.rerun, removals, self.others)[:, :, 0]


def retraining(base: Sequence[str], seed: int) -> Retraining:
    """Train as these words say, with one thread and one output."""
    experiment = compose([*base, f"seed={seed}", "threads=1"])
    setting = prepare(experiment)
    if setting.problem.outputs != 1 or not len(setting.problem.inputs[setting.problem.train :]):
        raise Mistake(
            "trial.base: choose data of one output, and points to read it at, such as data=moons data.probe=20"
        )
    with TemporaryDirectory() as folder:
        outcome = run(setting, Unheard(Path(folder)))
    return Retraining(setting, outcome, again(experiment, setting.problem, setting.descent.step_size, outcome.steps))


def groups_of(size: int, groups: int, train: int, seed: int) -> Float[Tensor, "group train"]:
    """Draw so many groups of that size: 1 marks the examples that are in a group, 0 the others.

    >>> groups_of(5, groups=3, train=10, seed=0).sum(1).tolist()
    [5.0, 5.0, 5.0]
    """
    generator = stream("left out", seed)
    drawn = torch.rand(groups, train, generator=generator, dtype=torch.float64)
    return (drawn.argsort(1).argsort(1) < size).double()


class Unheard(AbstractListener):
    """Nobody listens, and nothing is kept but a trajectory, in this folder, while there is one to go back over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_row(self, row: Row) -> None:
        """Nothing."""

    def on_snapshot(
        self, step: int, kernel: Float[Tensor, "point out train out_"], output_gradient: Float[Tensor, "train out_"]
    ) -> None:
        """Nothing."""

    def on_step(self, state: RunState, loss: float) -> None:
        """Nothing."""

    def on_step_back(self, state: RunState, done: int, whole: int) -> None:
        """Nothing."""

    def on_late_rows(self, rows: Sequence[Row]) -> None:
        """Nothing."""

    def on_sweep(self, state: RunState, done: int, whole: int) -> None:
        """Nothing."""

    def on_remark(self, text: str) -> None:
        """Nothing."""

    def on_end(self) -> None:
        """Nothing."""

    @property
    def scratch(self) -> Path:
        return self.folder

    def trajectory(self, rows: int, size: int) -> Trajectory:
        made = Trajectory(self.folder / "trajectory.bin", rows, size, "float64")
        made.take_room()
        return made
