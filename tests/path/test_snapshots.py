"""Snapshots: the written-out sum with hat functions, the path of every step, and what they say of their own error."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from ntkexp.mistake import Mistake
from ntkexp.path.points import StepBlock
from ntkexp.run.setting import Setting, prepare
from tests.run.small import Ran, ran, small

CASES = (
    ("optimizer=gd", "data.classes=[3,8]"),
    ("optimizer=sgd", "optimizer.batch=7", "data.classes=all", "loss=cross_entropy", "schedule=cosine"),
    ("optimizer=gd", "optimizer.weight_decay=0.05", "optimizer.clip_norm=0.5", "path.probes=[probe]"),
)
SCHEDULES = ("path.schedule=6", "path.schedule=[3,4,11]", "path.schedule=adaptive")
SHORT = ("path.every=snapshots", "path.count=6", "path.rule=[secant,left]", "ladder.machine=[secant]")
ROUNDING = 1e-13  # 20 steps, each adding some tens of eps

case = pytest.mark.parametrize("case", CASES, ids=lambda overrides: overrides[-1])


def written_out(taken: list[int], rule: str, *overrides: str) -> Tensor:
    """−Σ_s K(t_s) η_s ℓ′(s), with K linear in time between the steps at which it was taken."""
    setting = prepare(small(*overrides))
    steps = list(setting.descent.walk(setting.problem.weights))
    times = np.concatenate([[0.0], np.cumsum([step.step_size for step in steps])])
    found = []
    for node in taken:
        height = np.zeros(len(taken))
        height[taken.index(node)] = 1.0
        hat = np.interp(times[:-1], times[taken], height)
        pull = sum(float(h) * step.step_size * step.output_gradient for h, step in zip(hat, steps, strict=True))
        found.append(-torch.einsum("qcnd,nd->qcn", kernel(setting, steps[node], rule), pull))
    return torch.stack(found).sum(0)[setting.domain.read]


def kernel(setting: Setting, step: Any, rule: str) -> Tensor:
    block = StepBlock(setting.points, step.segment, slice(0, len(setting.points.inputs)))
    (chosen,) = (each for each in setting.experiment.path.rule if each.option == rule)
    return block.kernel(setting.experiment.path.quadrature(chosen), step.side)[0]


def nodes(found: Ran) -> list[int]:
    """The steps of the snapshots."""
    return sorted({*(step for step in found.memory.kernels if step < 20), 19})


@pytest.mark.sample(1)
@pytest.mark.parametrize(("case", "schedule"), list(zip(CASES, SCHEDULES, strict=True)))
def test_it_is_the_sum_with_hat_functions(case: tuple[str, ...], schedule: str) -> None:
    found = ran(*SHORT, *case, schedule)
    for rule in ("secant", "left"):
        expected = written_out(nodes(found), rule, *case)
        assert (found.contributions(rule) - expected).norm() < ROUNDING * expected.norm()
        assert found.outcome.by_step[rule].until(20) == (0, *(node + 1 for node in nodes(found)))


@pytest.mark.sample(1)
@case
def test_a_snapshot_at_every_step_is_the_path_of_every_step(case: tuple[str, ...]) -> None:
    found, every = ran(*SHORT, *case, "path.schedule=1"), ran(*SHORT, *case, "path.every=1")
    for rule, path in found.outcome.evidence.paths.items():
        other = every.outcome.evidence.paths[rule]
        steps = found.by_step(rule), every.by_step(rule)
        for ours, theirs in ((path.kernel, other.kernel), (path.decay, other.decay), steps):
            missed = (ours - theirs)[found.setting.domain.read]
            assert missed.norm() <= ROUNDING * theirs[found.setting.domain.read].norm()
    assert found.error("left") == pytest.approx(every.error("left"), rel=1e-9)


@pytest.mark.parametrize("ending", [pytest.param("stop_at_loss=1e-9", marks=pytest.mark.slow), "stop_at_loss=0.2"])
def test_a_kernel_that_does_not_move_needs_two(ending: str) -> None:
    found = ran(*SHORT, "model.depth=0", "path.schedule=100", ending)
    assert found.error("secant") < ROUNDING
    assert found.outcome.steps == (20 if ending == "stop_at_loss=1e-9" else len(found.memory.rows) - 1)


def test_a_run_that_ends_sooner_is_closed_at_its_end() -> None:
    found = ran(*SHORT, "model.activation=tanh", "steps=200", "path.count=12", "stop_at_loss=0.1")
    assert 0 < found.outcome.steps < 199
    assert found.error("secant") < 0.05  # the open interval alone is most of the path
    assert found.outcome.by_step["secant"].edges[-1] == found.outcome.steps


LONG = (*SHORT, "model.activation=tanh", "steps=200", "path.probes=[probe]", "path.rule=[secant]")


@cache
def every_step() -> Tensor:
    """The parts of a long run, from every step."""
    return ran(*LONG, "path.every=1").contributions("secant")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["log", pytest.param("adaptive", marks=pytest.mark.slow)])
def test_the_estimate_of_its_error_is_right(schedule: str) -> None:
    found = ran(*LONG, f"path.schedule={schedule}", "path.count=10")
    true = float((found.contributions("secant") - every_step()).norm() / every_step().norm())
    assert true / 3 < found.error_bar < 3 * true


def test_what_remembers_is_refused() -> None:
    with pytest.raises(
        Mistake, match=r"path\.every=snapshots: optimizer=adam carries past gradients .* use path\.every=1"
    ):
        small("path.every=snapshots", "optimizer=adam")
