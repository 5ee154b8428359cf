"""The scores of the bench are what their formulas say."""

from __future__ import annotations

import pytest
import torch

from ntkexp.run.loop import go
from ntkexp.run.state import begin
from tests.bench.attribution import QUICK
from tests.bench.attribution_case import Case
from tests.bench.attribution_scores import features, influence, last_product, loss_gradients, tracin
from tests.bench.backward import Deaf

SGD = ("optimizer=sgd", "optimizer.step_size=0.1", "model.activation=tanh", "model.width=4")
SMALL = 1e-12  # a step size that leaves the weights where they were
ROUNDING = 1e-9  # of numbers near 1, after a solve whose condition is at most 1/damping times the examples


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def case() -> Case:
    """A training of three steps."""
    return Case(SGD, QUICK, seed=0)


def test_tracin_is_the_first_order_of_contributions(case: Case) -> None:
    setting = case.setting("path.rule=[left]")
    state = begin(setting, Deaf("").trajectory)  # SGD has no second pass, so nothing is written
    go(state, Deaf(""))
    expected = -state.accumulator.integrals["left"].parts[1][case.size.train :, 0]
    torch.testing.assert_close(tracin(case.rerun, case.read), expected, rtol=ROUNDING, atol=ROUNDING)


def test_the_influence_function_solves_with_the_gauss_newton_matrix(case: Case) -> None:
    rerun, end = case.rerun, torch.cat([case.setting().problem.weights[name].flatten() for name in case.rerun.start])
    still = Case((*SGD, f"optimizer.step_size={SMALL}"), QUICK, seed=0).rerun  # so that the end is the start
    jacobian, every = features(rerun, end, rerun.inputs), torch.arange(rerun.examples)
    matrix = jacobian.t() @ jacobian / rerun.examples
    damped = matrix + 0.1 * matrix.trace() / rerun.examples * torch.eye(len(matrix))
    right = torch.linalg.solve(damped, loss_gradients(rerun, end, every).t())
    expected = features(rerun, end, case.read) @ right / rerun.examples
    torch.testing.assert_close(influence(still, case.read, 0.1), expected, rtol=1e-8, atol=1e-8)


def test_tracin_of_a_single_small_step_is_the_last_product() -> None:
    case = Case((*SGD, f"optimizer.step_size={SMALL}"), QUICK._replace(steps=1), seed=0)  # whose batch is everyone
    expected = SMALL / case.size.train * last_product(case.rerun, case.read)
    torch.testing.assert_close(tracin(case.rerun, case.read), expected, rtol=ROUNDING, atol=0.0)


def test_taking_a_single_step_without_an_example_is_training_without_it() -> None:
    case = Case((*SGD, "optimizer.step_size=1e-6"), QUICK._replace(steps=1), seed=1)
    actual = case.changes(torch.eye(case.size.train).double()).t()
    assert (actual != 0).any()
    torch.testing.assert_close(case.effects("one_step"), actual, rtol=1e-4, atol=1e-12)  # of first order in 1e-6
