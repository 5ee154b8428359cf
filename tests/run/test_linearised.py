"""Rungs that train with a fixed kernel are what they say of the network: oracles that hold the whole Jacobian."""

from __future__ import annotations

from itertools import cycle
from typing import cast

import pytest
import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import functional_call, jacrev

from ntkexp.machine.base import Prediction
from ntkexp.optimizer.base import Memory
from ntkexp.run.setting import Setting, prepare
from tests.run.small import Ran, ran, small

BATCHES = (
    ("optimizer=gd", "optimizer.clip_norm=0.1"),
    ("optimizer=sgd", "optimizer.batch=10"),
    ("optimizer=sgd", "optimizer.batch=40", "optimizer.replacement=true"),
)
REMEMBERING = (
    ("optimizer=momentum", "optimizer.dampening=0.2", "optimizer.weight_decay=0.1"),
    ("optimizer=nesterov", "optimizer.batch=10", "optimizer.weight_decay=0.1"),
)
EACH = list(zip(BATCHES + REMEMBERING, cycle(("squared", "cross_entropy", "logistic"))))  # both enter by themselves
ROUNDING = 1e-12  # 20 steps through a kernel of 24 rows


def jacobian(setting: Setting) -> dict[str, Tensor]:
    """J(θ_0; x) at every point, [point, out, *weight], multiplied out."""

    def network(weights: dict[str, Tensor]) -> Tensor:
        outputs: Tensor = functional_call(setting.problem.module, weights, (setting.points.inputs,))
        return outputs

    found: dict[str, Tensor] = jacrev(network)(setting.problem.weights)
    return found


def trained(clippings: list[float], *overrides: str) -> Float[Tensor, "point out"]:
    """f_0 + J(θ_0)(θ − θ_0) after training θ on it, step by step, with the clipping of the run."""
    setting = prepare(small(*overrides))
    descent, train, dense = setting.descent, setting.points.train, jacobian(setting)
    weights, outputs, memory = setting.problem.weights, setting.start.outputs, cast("Memory", {})
    for step in range(setting.experiment.steps):
        pull = descent.output_gradient(step, outputs[:train]) * clippings[step]
        gradient = {name: torch.tensordot(pull, rows[:train], dims=2) for name, rows in dense.items()}
        sizes = dict.fromkeys(weights, descent.size(step))
        weights, memory = descent.optimizer.update(step, weights, gradient, sizes, memory)
        moved = {name: weights[name] - setting.problem.weights[name] for name in weights}
        changes = [rows.flatten(2) @ moved[name].flatten() for name, rows in dense.items()]
        outputs = setting.start.outputs + torch.stack(changes).sum(0)
    return outputs


def predicted(run: Ran, machine: str) -> Float[Tensor, "point out"]:
    """f̂ of one rung."""
    outcome = next(rung.outcome for rung in run.outcome.rungs if rung.name == machine)
    assert isinstance(outcome, Prediction), str(outcome)
    return outcome.outputs


@pytest.mark.sample(2)
@pytest.mark.parametrize(("batch", "loss"), EACH)
def test_the_linearised_machine_is_the_linear_model_trained_with_the_same_steps(
    batch: tuple[str, ...], loss: str
) -> None:
    chosen = (*batch, f"loss={loss}", "data.classes=all", "path.rule=[left]", "ladder.machine=[linearised]")
    run = ran(*chosen)
    oracle = trained([float(row["clipping"] or 1) for row in run.memory.rows[:-1]], *chosen)
    assert (predicted(run, "linearised") - oracle).norm() < ROUNDING * run.change.norm()


@pytest.mark.parametrize("at", ["start", "end"])
def test_the_frozen_kernel_is_the_closed_form(at: str) -> None:
    run = ran("path.rule=[left]", f"ladder.machine=[frozen_{at}]")
    evidence, train = run.outcome.evidence, run.setting.points.train
    theta = (evidence.kernel_start if at == "start" else evidence.kernel_end)[:, 0, :, 0]
    decay = torch.linalg.matrix_exp(-evidence.training.time / train * theta[:train])
    start, missing = evidence.start, evidence.start[:train] - evidence.targets
    expected = start - theta @ torch.linalg.solve(theta[:train], missing - decay @ missing)
    # solving with the kernel loses its condition number, some thousands
    assert (predicted(run, f"frozen_{at}") - expected).norm() < 1e-10 * run.change.norm()


def test_the_linearised_machine_is_exact_for_a_linear_model() -> None:
    run = ran("model.depth=0", "path.rule=[left,secant]", "ladder.machine=[linearised,left,secant]")
    for row in run.table.values():
        assert row.exact, row


@pytest.mark.parametrize("batch", BATCHES, ids=lambda overrides: overrides[-1])
def test_fixed_coefficients_are_those_of_the_path(batch: tuple[str, ...]) -> None:
    run = ran(*batch, "path.rule=[secant]", "ladder.machine=[fixed_coefficients]")
    pulls, time = torch.zeros(24, 1, dtype=torch.float64), 0.0
    for step in run.setting.descent.walk(run.setting.problem.weights):
        pulls += step.step_size * step.output_gradient
        time += step.step_size
    path = run.outcome.evidence.path.kernel
    expected = run.outcome.evidence.start - torch.einsum("qcnd,nd->qc", path, pulls / time)
    assert (predicted(run, "fixed_coefficients") - expected).norm() < 1e-13 * run.change.norm()
