"""A reading of the path sees steps and nothing of who took them: a descent, a recording, or a loop of plain PyTorch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path

import pytest
import torch

from ntkexp.optimizer.base import Memory as Remembered
from ntkexp.path.forward_sum import AbstractAccumulator
from ntkexp.path.integrals import Integrals
from ntkexp.path.points import NetworkView
from ntkexp.path.recording import Playback, Recording, row_length
from ntkexp.path.step import Step
from ntkexp.records.data import Trajectory
from ntkexp.run.setting import Setting
from tests.run.small import Ran, ran

TINY = ("data.train=10", "data.probe=5", "data.test=4", "model.width=8", "steps=5", "ladder.machine=[]")
WAYS = (
    ("optimizer=sgd", "optimizer.batch=4", "optimizer.clip_norm=0.2", "optimizer.weight_decay=0.1", "path.rule=[left]"),
    ("optimizer=sgd", "optimizer.layers={network.1: 0.25}", "path.every=snapshots", "path.schedule=2"),
    ("optimizer=adamw", "optimizer.step_size=0.05", "path.attributed=1000"),
)
ROUNDING = 1e-12  # five steps of autograd, which adds up the gradient in another order


def begin(setting: Setting, folder: Path) -> AbstractAccumulator:
    """What takes in the steps of this setting, with nothing taken in."""
    return setting.experiment.integration.begin(
        setting.domain, setting.problem.weights, lambda rows, size: trajectory(folder / "second.bin", rows, size)
    )


def trajectory(path: Path, rows: int, size: int) -> Trajectory:
    made = Trajectory(path, rows, size, "float64")
    made.take_room()
    return made


def recorded(setting: Setting, folder: Path) -> Playback:
    """The steps of the descent, written down and read again."""
    weights, pull = setting.problem.weights, setting.domain.no_pull()
    records = setting.experiment.optimizer.records
    rows = trajectory(folder / "first.bin", setting.experiment.steps + 1, row_length(weights, records, pull))
    recording, sizes, end = Recording(rows=rows, like=weights, records=records, pull=pull), [], weights
    for step in setting.descent.walk(weights):
        recording.write(step)
        sizes.append(step.step_size)
        end = step.end
    recording.close(len(sizes), end)
    return Playback(
        recording=recording,
        points=setting.points,
        step_sizes=sizes,
        factors=setting.descent.factors,
        weight_decay=setting.experiment.optimizer.weight_decay,
    )


def integrate(
    steps: Iterable[Step], accumulator: AbstractAccumulator, due: Collection[int] = ()
) -> Mapping[str, Integrals]:
    """The integrals of all steps from the first to the last; at those that are due a snapshot is taken."""
    taken = []
    for step in steps:
        accumulator.add(step, due=step.index in due)
        taken.append(step)
    for _ in accumulator.steps_back(taken[-1].end, [step.step_size for step in taken]):
        continue
    return accumulator.integrals


def same_bits(found: Ran, steps: Playback | list[Step], folder: Path) -> None:
    """The integrals of these steps are those of the run."""
    due = set(found.memory.kernels)
    integrals = integrate(steps, begin(found.setting, folder), due)
    assert list(integrals) == list(found.outcome.evidence.paths)
    for rule, path in found.outcome.evidence.paths.items():
        ours = integrals[rule]
        for one, other in ((ours.kernel, path.kernel), (ours.contributions, path.contributions)):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(ours.decay, path.decay, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0])
def test_a_recorded_trajectory_gives_the_bits_of_the_run(way: tuple[str, ...], tmp_path: Path) -> None:
    found = ran(*TINY, *way)
    same_bits(found, recorded(found.setting, tmp_path), tmp_path)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way[0])
def test_steps_are_plain_values(way: tuple[str, ...], tmp_path: Path) -> None:
    """Weights before and after, ℓ′, sizes and the memory say all, whatever else the descent knew."""
    found = ran(*TINY, *way)
    told = [copied(step) for step in found.setting.descent.walk(found.setting.problem.weights)]
    same_bits(found, told, tmp_path)


def copied(step: Step) -> Step:
    """The step as a stranger would tell it."""
    memory: Remembered = {part: {k: w.clone() for k, w in weights.items()} for part, weights in step.memory.items()}
    return Step(
        index=step.index,
        view=NetworkView(step.view.points, {name: weight.clone() for name, weight in step.view.weights.items()}),
        end={name: weight.clone() for name, weight in step.end.items()},
        output_gradient=step.output_gradient.clone(),
        step_size=step.step_size,
        factors=dict(step.factors),
        weight_decay=step.weight_decay,
        memory=memory,
    )


def plain_loop(setting: Setting, size: float) -> Iterator[Step]:
    """The loop that everyone writes: the weights before and after each step, and the gradient at the outputs."""
    module, train = deepcopy(setting.problem.module), setting.problem.train
    inputs, targets = setting.problem.inputs[:train], setting.problem.targets[:train]
    optimizer = torch.optim.SGD(module.parameters(), lr=size)
    for index in range(setting.experiment.steps):
        batch = setting.experiment.optimizer.batch_indices(index, train, setting.experiment.seed)
        chosen = torch.arange(train) if batch is None else batch
        before = {name: weight.detach().clone() for name, weight in module.named_parameters()}
        outputs = module(inputs)
        outputs.retain_grad()
        optimizer.zero_grad()
        torch.autograd.backward((outputs - targets)[chosen].square().sum() / (2 * len(chosen)))
        optimizer.step()
        after = {name: weight.detach().clone() for name, weight in module.named_parameters()}
        assert outputs.grad is not None
        view = NetworkView(setting.points, before)
        yield Step(index=index, view=view, end=after, output_gradient=outputs.grad, step_size=size)


def test_a_loop_of_plain_torch_gives_the_bits_of_the_run(tmp_path: Path) -> None:
    """Where nothing is summed up, there is no order of sums: one example a step, one output, one hidden layer."""
    alone = ("optimizer=sgd", "optimizer.batch=1", "optimizer.step_size=0.02", "model.depth=1", "init=standard")
    found = ran(*TINY, *alone, "path.rule=[secant,left]")
    assert found.setting.start.outputs.shape[1] == 1
    same_bits(found, list(plain_loop(found.setting, 0.02)), tmp_path)


def test_a_loop_of_plain_torch_is_read_as_the_run_is(tmp_path: Path) -> None:
    """Its path closes to rounding, and its parts are those of the runner's own steps of the same training."""
    found = ran(*TINY, "optimizer.step_size=0.2", "path.rule=[secant,left]")
    setting = found.setting
    steps = list(plain_loop(setting, 0.2))
    integrals = integrate(steps, begin(setting, tmp_path))
    change = NetworkView(setting.points, steps[-1].end).outputs - setting.start.outputs
    assert (integrals["secant"].contributions.sum(2) - change).norm() < ROUNDING * change.norm()
    for rule, path in found.outcome.evidence.paths.items():
        for one, other in ((integrals[rule].kernel, path.kernel), (integrals[rule].contributions, path.contributions)):
            assert (one - other).norm() < ROUNDING * other.norm()
