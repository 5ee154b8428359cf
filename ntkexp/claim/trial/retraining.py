"""Trainings repeated with other weights of their examples, and what removals change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor
from torch.func import jacrev

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.component import Count
from ntkexp.config.compose import compose
from ntkexp.effects.sweep import MEANS, sweep_from
from ntkexp.library import tangent_kernel
from ntkexp.mistake import Mistake
from ntkexp.path.recording import RecordedTraining, Recording, row_length
from ntkexp.records.data import Trajectory
from ntkexp.records.sweep import Level
from ntkexp.removal.group import changes
from ntkexp.removal.rerun import WEIGHTS, Rerun, again, retrain, trained
from ntkexp.run.loop import AbstractListener
from ntkexp.run.loop import run as run_loop
from ntkexp.run.metrics import Row
from ntkexp.run.outcome import Outcome
from ntkexp.run.setting import Setting, prepare
from ntkexp.run.state import RunState
from ntkexp.stream import stream


@dataclass(frozen=True)
class Retraining:
    """A training that a trial repeats in memory: as it was, and with other weights of its examples.

    The training as it was, and what carries it out again.
    """

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
        outcome = run_loop(setting, Unheard(Path(folder)))
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


# --- What would change if an example were left out: its effect, by a sweep back over a training recorded for it.


def would_change(found: Retraining, *, one_step: bool = False) -> Float[Tensor, "point train"]:
    """The effects at the points that are no training examples."""

    def outputs(vector: Tensor) -> Float[Tensor, " point"]:
        return found.rerun.outputs(vector, found.others)[:, 0]

    mean = MEANS[found.setting.experiment.path.mean]
    with TemporaryDirectory() as folder:
        training = recorded(found, Path(folder))
        sweep = sweep_from(training, jacrev(outputs)(training.end), mean, one_step=one_step)
        for _ in sweep.steps_back():
            pass
        return sweep.effects


def recorded(found: Retraining, folder: Path) -> RecordedTraining:
    """Take the steps of a training once more, and keep them in a folder."""
    setting, steps, optimizer = found.setting, found.outcome.steps, found.setting.experiment.optimizer
    descent, start, pull = setting.descent, setting.problem.weights, setting.domain.no_pull()
    records = (*optimizer.records, *optimizer.differentiated)
    room = steps + 1, row_length(start, records, pull)
    rows = Trajectory(folder / "trajectory.bin", *room, setting.experiment.dtype)
    rows.take_room()
    recording, sizes, end = Recording(rows=rows, like=start, records=records, pull=pull), [], start
    for step in islice(descent.walk(start), steps):
        recording.write(step)
        sizes.append(step.step_size)
        end = step.end
    recording.close(len(sizes), end)
    return RecordedTraining(recording=recording, descent=descent, step_sizes=sizes)


class LeftOutKernel(AbstractTrial):
    """How much the path kernel depends on the data: training is repeated without one example, and without half of
    them.

    A training, in the words of `ntkexp train`, is repeated so often without one example and without half.

        change = ‖𝒦′ − 𝒦‖/‖𝒦‖,    𝒦(x, x′) = mean over steps s of K_s(x, x′)

    between points that were in no training set, by the kernels at the beginnings of every `every`-th step.
    `left_out` is `one`, averaged over several examples, or `half`, over several halves.
    """

    base: tuple[str, ...]
    times: Count = 6
    every: Count = 5

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        found = retraining([*self.base, "path.rule=[left]", "path.error_samples=0", "ladder.machine=[]"], seed)
        times = min(self.times, found.train)
        everyone = torch.ones(1, found.train, dtype=torch.float64)
        ones = everyone - torch.eye(found.train, dtype=torch.float64)[:times]
        halves = groups_of(found.train // 2, times, found.train, seed)
        kernels = self.path_kernels(found, torch.cat([everyone, ones, halves]))
        change = (kernels - kernels[0]).flatten(1).norm(dim=1) / kernels[0].norm()
        one, half = change[1 : 1 + times].mean(), change[1 + times :].mean()
        return [{"left_out": "one", "change": one.item()}, {"left_out": "half", "change": half.item()}]

    def path_kernels(self, found: Retraining, weight: Float[Tensor, "run train"]) -> Float[Tensor, "run point point_"]:
        """𝒦 of trainings with these weights of the examples."""
        module, flat = found.setting.problem.module, found.rerun.flat
        totals = [torch.zeros(()) for _ in weight]
        taken = [step for step in retrain(found.rerun, weight) if step.step % self.every == 0]
        for step in taken:
            for run, vector in enumerate(step.found[WEIGHTS]):
                here = tangent_kernel(module, found.others, weights=flat.weights(vector))[:, 0, :, 0]
                totals[run] = totals[run] + here / len(taken)
        return torch.stack(totals)


class AddedRemovals(AbstractTrial):
    """Whether what removals of single examples change adds up to what the removal of all of them together changes:

    A training, in the words of `ntkexp train`, is repeated without groups, with each of these activations.

        miss    ‖Σ_{i ∈ G} τᵢ − Δ_G‖/‖Δ_G‖        over points, and over groups G of one size

    Δ_G is what the output changes by when G is left out of the same training: the same start, order and step
    sizes. What is added up is said by `single`: Δ of each example alone (`retrained`), what a sweep back over the
    training says of it (`effect`), or Δ of the examples of another group (`others`).
    """

    base: tuple[str, ...]
    activations: tuple[str, ...] = Field(("tanh", "relu"), min_length=1)
    sizes: tuple[Count, ...] = Field((2, 5, 10, 20, 50), min_length=1)
    groups: int = Field(32, ge=2, le=1000)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        found: list[Mapping[str, Level]] = []
        for activation in self.activations:
            words = ["path.rule=[left]", "path.error_samples=0", "ladder.machine=[]", f"model.activation={activation}"]
            trained = retraining([*self.base, *words], seed)
            found += [{"activation": activation, **row} for row in self.misses(trained, seed)]
        return found

    def misses(self, trained: Retraining, seed: int) -> Sequence[Mapping[str, Level]]:
        """How far every sum is from what groups of every size change."""
        if max(self.sizes) >= trained.train:
            raise Mistake(f"trial.sizes: of {trained.train} examples some must be left; lower the last")
        alone = trained.changes_without(torch.eye(trained.train, dtype=torch.float64))
        effect, rows = would_change(trained).t(), list[Mapping[str, Level]]()
        for size in self.sizes:
            left = groups_of(size, self.groups, trained.train, seed)
            together = trained.changes_without(left)
            sums = {"retrained": left @ alone, "effect": left @ effect, "others": left.roll(1, 0) @ alone}
            rows += [{"size": size, "single": single, "miss": miss(told, together)} for single, told in sums.items()]
        return rows


def miss(told: Float[Tensor, "group point"], actual: Float[Tensor, "group point"]) -> float:
    """How far apart both are, as a share of the actual.

    >>> miss(torch.tensor([[4.0, 2.0]]), torch.tensor([[4.0, 0.0]]))
    0.5
    """
    return float((told - actual).norm() / actual.norm())
