"""What the runner trains, and the same loop written by hand and followed, have the same parts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import ntkexp
from ntkexp.foreign_loop.again import LoopAgain
from ntkexp.foreign_loop.example_names import SeenCall
from ntkexp.foreign_loop.loop_ledger import loop_without
from ntkexp.foreign_loop.trace import Trace, find_trace
from ntkexp.progress import Silent
from ntkexp.removal.rerun import RerunAt, again
from ntkexp.removal.retraining import changes
from tests.removal.problems import BATCH, CLIP, DECAY, GROUP, split
from tests.run.small import Ran, ran

DATA = ("data.classes=[0,1,2]", "data.train=12", "loss=cross_entropy", "model.activation=tanh", "model.width=8")
WORDS = (*DATA, BATCH, "optimizer.step_size=0.05", "steps=6", "path.rule=[secant]", "path.attributed=3")
Maker = Callable[[Iterable[nn.Parameter]], Optimizer]
CASES: dict[str, tuple[str, str, Maker]] = {
    "sgd": ("sgd", DECAY, lambda p: SGD(p, lr=0.05, weight_decay=0.05)),
    "momentum": ("momentum", "optimizer.dampening=0.3", lambda p: SGD(p, lr=0.05, momentum=0.9, dampening=0.3)),
    "nesterov": ("nesterov", DECAY, lambda p: SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.05)),
    "clipped": ("momentum", CLIP, lambda p: SGD(p, lr=0.05, momentum=0.9)),
    "adam": ("adam", DECAY, lambda p: Adam(p, lr=0.05, weight_decay=0.05)),
    "amsgrad": ("adam", "optimizer.amsgrad=true", lambda p: Adam(p, lr=0.05, amsgrad=True)),
    "adamw": ("adamw", DECAY, lambda p: AdamW(p, lr=0.05, weight_decay=0.05)),
}
CLOSE = 1e-12  # of the largest part: six steps of some hundred roundings each, and by Adam quotients of small numbers


def by_hand(run: Ran, case: str, to: Path | None = None) -> Trace:
    """The run's training as its user would write it, followed."""
    problem, optimizer = deepcopy(run.setting.problem), CASES[case][2]
    model, targets = problem.module, problem.targets[: problem.train]

    def loss(outputs: Tensor, call: SeenCall) -> Tensor:
        return -(outputs.log_softmax(1) * targets[[int(name) for name in call.ids]]).sum(1)

    steps, rows = optimizer(model.parameters()), run.setting.experiment.optimizer.batch_indices
    drawn = [rows(step, problem.train, run.setting.experiment.seed) for step in range(6)]
    batches = [batch for batch in drawn if batch is not None]
    queries = problem.inputs[run.setting.domain.attributed]
    assert len(batches) == 6
    with ntkexp.follow(model, steps, queries=queries, loss=loss, ids=lambda _: batch.tolist(), to=to) as trace:
        for batch in batches:
            steps.zero_grad()
            losses = -(model(problem.inputs[batch]).log_softmax(1) * targets[batch]).sum(1)
            losses.mean().backward()
            if case == "clipped":
                nn.utils.clip_grad_norm_(model.parameters(), 0.2)
            steps.step()
    return trace


def apart(found: Tensor, expected: Tensor) -> float:
    """How far both are apart, relative to the largest."""
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "adamw" else pytest.mark.slow) for case in CASES]
)
def test_contributions_effects_and_a_removal_are_the_runners(case: str, tmp_path: Path) -> None:
    option, word, _ = CASES[case]
    run = ran(f"optimizer={option}", *WORDS, word, "path.effects=derivative", "ladder.machine=[secant]")
    domain, effects = run.setting.domain, run.outcome.effects
    found = by_hand(run, case).attribute(effects="derivative")
    order = [found["example"].to_numpy().tolist().index(str(k)) for k in range(12)]
    parts = torch.from_numpy(found["contribution"].to_numpy()[:, :, order])
    assert apart(parts, run.contributions("secant")[domain.rows]) <= CLOSE
    assert effects is not None
    asked = ~effects.values[domain.attributed].isnan()
    derivative = torch.from_numpy(found["effect"].to_numpy()[:, :, order])
    assert asked.any()
    assert apart(derivative[asked], effects.values[domain.attributed][asked]) <= CLOSE

    train = partial(by_hand, run, case, tmp_path / "loop")
    trace, group = train(), [[3], GROUP]
    training = again(run.setting.experiment, run.setting.problem, run.setting.descent.step_size, 6)
    points = run.setting.problem.inputs[domain.attributed]
    places = [[trace.examples[str(k)] for k in each] for each in group]
    expected, _ = changes(RerunAt(training, points), group)
    assert apart(changes(LoopAgain(train, trace, "renormalised"), places)[0], expected) <= CLOSE

    theirs = loop_without(find_trace(tmp_path / "loop"), train, "renormalised", places[1], [0, 1, 2], Silent())
    ours = split(training, points, training.everyone, training.without(GROUP))
    assert apart(torch.from_numpy(theirs.shares).flatten(0, 1), ours.shares[:, GROUP]) <= CLOSE
