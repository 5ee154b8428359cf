"""Training with a fixed kernel, against its closed forms: MATH 8 for one kernel after another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import exp

import pytest
import torch
from torch import Tensor

from ntkexp.machine.base import AbstractMachine, DoesNotApply, Evidence, LimitKernels
from ntkexp.machine.machines import (
    NNGP,
    FixedCoefficients,
    FrozenEnd,
    FrozenLimit,
    FrozenStart,
    Linearised,
    descent,
    flow,
)
from tests.machine.evidence import OTHERS, POINTS, STEP_SIZE, STEPS, TRAIN, evidence, kernel_of, random, stepping

TIME = STEPS * STEP_SIZE / TRAIN  # w Σ η
IDENTITY = torch.cat([torch.eye(TRAIN), torch.zeros(OTHERS, TRAIN)]).double()  # no example says anything of another
RTOL, ATOL = 1e-12, 1e-13  # some thousand eps: forty steps, or an eigendecomposition of five


def missing(found: Evidence) -> Tensor:
    return found.start[:TRAIN] - found.targets


Process = Callable[[Tensor, Evidence], Tensor]
Decay = Callable[[float], float]
PROCESSES = [
    pytest.param(flow, lambda mode: exp(-TIME * mode), id="flow"),
    pytest.param(descent, lambda mode: (1 - STEP_SIZE * mode / TRAIN) ** STEPS, id="descent"),
]


@pytest.mark.parametrize(("process", "decay"), PROCESSES)
@pytest.mark.parametrize("outputs", [1, 3])
def test_under_the_identity_every_example_decays_alone(outputs: int, process: Process, decay: Decay) -> None:
    found = evidence(kernel_of(IDENTITY, outputs))
    after = process(found.kernel_start, found)
    torch.testing.assert_close(after[:TRAIN], found.targets + decay(1.0) * missing(found), rtol=RTOL, atol=ATOL)
    torch.testing.assert_close(after[TRAIN:], found.start[TRAIN:], rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize(("process", "decay"), PROCESSES)
def test_a_kernel_of_rank_one_moves_along_its_feature(process: Process, decay: Decay) -> None:
    feature = random(POINTS, 1, seed=7)
    found = evidence(kernel_of(feature))
    size = float(feature[:TRAIN].square().sum())
    along = feature @ feature[:TRAIN].t() @ missing(found) / size
    expected = found.start - (1 - decay(size)) * along
    torch.testing.assert_close(process(found.kernel_start, found), expected, rtol=RTOL, atol=ATOL)


def test_flow_is_the_matrix_exponential() -> None:
    found = evidence(kernel_of(random(POINTS, 9, seed=7)))
    theta = found.kernel_start[:, 0, :, 0]
    decay = torch.linalg.matrix_exp(-TIME * theta[:TRAIN])
    expected = found.targets + decay @ missing(found)
    torch.testing.assert_close(flow(found.kernel_start, found)[:TRAIN], expected, rtol=RTOL, atol=ATOL)
    moved = torch.linalg.solve(theta[:TRAIN], expected - found.start[:TRAIN])
    # solving with the kernel loses its condition number, about a thousand
    torch.testing.assert_close(
        flow(found.kernel_start, found)[TRAIN:], found.start[TRAIN:] + theta[TRAIN:] @ moved, rtol=1e-9, atol=1e-10
    )


def test_descent_with_tiny_steps_is_flow() -> None:
    found = evidence(kernel_of(random(POINTS, 9, seed=7)))
    gaps = []
    for times in (40, 80):
        finer = stepping(found, (STEP_SIZE / times,) * (STEPS * times))
        gaps.append(float((descent(found.kernel_start, finer) - flow(found.kernel_start, found)).norm()))
    assert gaps[0] / gaps[1] == pytest.approx(2, abs=0.1)  # Euler's method is of order one
    assert gaps[1] < 1e-2


def test_frozen_takes_the_kernel_of_its_end() -> None:
    first, last = (kernel_of(random(POINTS, 9, seed=seed)) for seed in (7, 8))
    found = replace(evidence(first), kernel_end=last)
    for machine, kernel in ((FrozenStart(), first), (FrozenEnd(), last)):
        torch.testing.assert_close(machine.predict(found).outputs, flow(kernel, found), rtol=0, atol=0)
    other = replace(found, training=replace(found.training, is_quadratic=False))
    torch.testing.assert_close(FrozenEnd().predict(other).outputs, descent(last, other), rtol=0, atol=0)


def test_linearised_takes_the_same_steps() -> None:
    found = evidence(kernel_of(random(POINTS, 9, seed=7)))
    uneven = stepping(found, (0.5, 0.1))
    outputs, theta = found.start, found.kernel_start[:, 0, :, 0]
    for size in (0.5, 0.1):
        outputs = outputs - size * theta @ (outputs[:TRAIN] - found.targets) / TRAIN
    torch.testing.assert_close(Linearised().predict(uneven).outputs, outputs, rtol=RTOL, atol=ATOL)


def test_fixed_coefficients_are_means_over_the_path() -> None:
    found = evidence(kernel_of(random(POINTS, 9, seed=7), outputs=2))
    mean = found.training.mean_coefficients
    expected = found.start + torch.einsum("qcnd,nd->qc", found.kernel_start, mean)
    torch.testing.assert_close(FixedCoefficients().predict(found).outputs, expected, rtol=RTOL, atol=ATOL)


def test_coefficients_that_are_no_means_are_fitted_to_the_training_points_alone() -> None:
    """They know nothing of the contributions elsewhere, which they are to predict."""
    found = evidence(kernel_of(random(POINTS, 9, seed=7), outputs=2))
    true = random(TRAIN, 2, seed=8)
    learned = torch.einsum("qcnd,nd->qcn", found.path.kernel, true)
    parts = torch.cat([learned[:TRAIN], found.path.contributions[TRAIN:]])
    remembering = replace(found.training, mean_coefficients=None)
    there = replace(found, training=remembering, paths={"secant": replace(found.path, contributions=parts)})
    outputs = FixedCoefficients().predict(there).outputs
    torch.testing.assert_close(outputs, found.start + learned.sum(2), rtol=RTOL, atol=ATOL)


def test_frozen_at_the_limit_takes_it_for_every_output() -> None:
    found = evidence(kernel_of(random(POINTS, 9, seed=7), outputs=3))
    theta = found.kernel_start[:, 0, :, 0]
    wide = replace(
        found, kernel_start=torch.zeros_like(found.kernel_start), limit=LimitKernels(start=theta, tangent=theta)
    )
    torch.testing.assert_close(
        FrozenLimit().predict(wide).outputs, FrozenStart().predict(found).outputs, rtol=0, atol=0
    )


def test_the_posterior_interpolates_and_solves() -> None:
    found = evidence(kernel_of(random(POINTS, 9, seed=7), outputs=2))
    prior = found.kernel_start[:, 0, :, 0]
    outputs = NNGP().predict(replace(found, limit=LimitKernels(start=prior, tangent=prior))).outputs
    expected = prior @ torch.linalg.solve(prior[:TRAIN], found.targets)
    torch.testing.assert_close(outputs, expected, rtol=1e-9, atol=1e-10)  # solving loses the condition number


@pytest.mark.parametrize("machine", [FrozenLimit(), NNGP()])
def test_without_a_limit_its_machines_do_not_apply(machine: AbstractMachine) -> None:
    with pytest.raises(DoesNotApply, match="made by hand"):
        machine.predict(evidence(kernel_of(IDENTITY)))


def test_a_singular_prior_or_another_loss_has_no_posterior() -> None:
    singular = kernel_of(random(POINTS, 2, seed=7))[:, 0, :, 0]
    found = replace(evidence(kernel_of(IDENTITY)), limit=LimitKernels(start=singular, tangent=singular))
    with pytest.raises(DoesNotApply, match="the kernel is singular"):
        NNGP().predict(found)
    with pytest.raises(DoesNotApply, match="squared loss"):
        NNGP().predict(replace(found, training=replace(found.training, is_quadratic=False)))
