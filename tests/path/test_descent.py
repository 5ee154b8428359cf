"""The weights walk where a plain autograd loop with `torch.optim.SGD` would take them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle

import pytest
import torch
from torch import Tensor

from ntkexp.run.setting import prepare
from tests.run.small import Ran, ran, small

LOSSES = ("squared", "cross_entropy", "logistic", "hinge")
SCHEDULES = (
    ("schedule=constant", "schedule.warm_up=3"),
    ("schedule=cosine", "schedule.last=0.1"),
    ("schedule=step", "schedule.every=4", "schedule.decay=0.5"),
    ("schedule=list", "schedule.factors=[1,0.2,0.7]"),
)
BATCHES = (
    ("optimizer=gd",),
    ("optimizer=sgd", "optimizer.batch=10"),
    ("optimizer=sgd", "optimizer.batch=40", "optimizer.replacement=true"),
)
ROUNDING = 1e-13  # 20 steps, each adding some tens of eps, which training below the edge of stability does not amplify
QUICK = ("ladder.machine=[]", "path.rule=[secant]", "path.probes=[probe]")


def by_autograd(*overrides: str) -> Iterator[dict[str, Tensor]]:
    """The weights after each step of the plain loop, on the same batches with the same step sizes."""
    setting = prepare(small(*overrides))
    experiment, module, descent = setting.experiment, setting.problem.module, setting.descent
    train, targets, inputs = setting.points.train, descent.targets, setting.points.inputs
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    for step in range(experiment.steps):
        batch = experiment.optimizer.batch_indices(step, train, experiment.seed)
        chosen = torch.arange(train) if batch is None else batch
        values = experiment.loss.value(module(inputs[chosen]), targets[chosen])
        objective = values.mean() if experiment.loss.reduction == "mean" else values.sum()
        optimizer.zero_grad()
        torch.autograd.backward(objective * descent.scale)
        optimizer.param_groups[0]["lr"] = descent.step_size * experiment.schedule.factor(step, experiment.steps)
        optimizer.step()
        yield {name: weight.detach().clone() for name, weight in module.named_parameters()}


def farthest(run: Ran, *overrides: str) -> float:
    """The largest distance between the two walks, relative to the weights."""
    pairs = zip(run.memory.weights, by_autograd(*overrides), strict=True)
    return max(distance(ours, theirs) for ours, theirs in pairs)


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest over the parameters that are trained."""
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in ours)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("batch", "loss"), list(zip(cycle(BATCHES), LOSSES)))
def test_the_walk_is_that_of_autograd(batch: tuple[str, ...], loss: str) -> None:
    chosen = (*QUICK, *batch, f"loss={loss}", "data.classes=all")
    assert farthest(ran(*chosen), *chosen) < ROUNDING


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda overrides: overrides[0])
def test_schedules_change_the_step_sizes(schedule: tuple[str, ...]) -> None:
    chosen = (*QUICK, *schedule)
    run = ran(*chosen)
    assert farthest(run, *chosen) < ROUNDING
    assert len({row["step_size"] for row in run.memory.rows[:-1]}) > 1


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("reading", "reduction"),
    [
        ("init.antisymmetric=true", "mean"),
        ("init.centred=true", "sum"),
        ("init.alpha=7", "mean"),
        ("init.alpha=7", "sum"),
    ],
)
def test_readings_and_reductions(reading: str, reduction: str) -> None:
    chosen = (*QUICK, reading, f"loss.reduction={reduction}", "optimizer=sgd", "optimizer.batch=7")
    assert farthest(ran(*chosen), *chosen) < ROUNDING


def test_every_example_is_seen_once_in_an_epoch() -> None:
    optimizer = small("optimizer=sgd", "optimizer.batch=10").optimizer
    for epoch in range(3):
        turns = [optimizer.batch_indices(3 * epoch + turn, 24, seed=1) for turn in range(3)]
        drawn = torch.cat([batch for batch in turns if batch is not None])
        assert sorted(drawn.tolist()) == list(range(24))


def test_batches_depend_on_seed_and_step_alone() -> None:
    optimizer = small("optimizer=sgd", "optimizer.batch=10").optimizer
    first, again = (optimizer.batch_indices(5, 24, seed=1) for _ in range(2))
    other = optimizer.batch_indices(5, 24, seed=2)
    assert first is not None
    assert again is not None
    assert other is not None
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
