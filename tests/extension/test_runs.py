"""Every part in training: the secant closes to rounding, and the ladder has a row for what was added."""

from __future__ import annotations

import pytest
import torch

from ntkexp.mistake import Mistake
from ntkexp.records.results import Result
from ntkexp.run.loop import run
from ntkexp.run.setting import prepare
from tests.extension.outside import Outside
from tests.run.small import Memory, Ran
from tests.run.test_exactness import exact

EPS = torch.finfo(torch.float64).eps


def ran(outside: Outside, *overrides: str) -> Ran:
    setting, memory = prepare(outside.experiment(*overrides)), Memory()
    return Ran(setting, run(setting, memory), memory)


@pytest.mark.sample(2)
@pytest.mark.parametrize("loss", ["doubled", "log_cosh"])
@pytest.mark.parametrize("optimizer", ["in_turn", "averaged"])
def test_new_losses_and_optimizers_close_by_a_new_rule(outside: Outside, loss: str, optimizer: str) -> None:
    found = ran(outside, f"loss={loss}", f"optimizer={optimizer}")
    assert {row.split for row in found.rows("thirds")} == {"train", "probe", "test"}
    for row in found.rows("thirds"):
        assert exact(row)
        assert row.detail == "thirds"


def test_a_rule_that_closes_is_not_the_secant(outside: Outside) -> None:
    """Their sums agree, and their parts do not: the step is cut elsewhere."""
    found = ran(outside, "path.rule=[thirds,secant]", "model.activation=tanh")
    (one, other), change = map(found.contributions, ("thirds", "secant")), found.change.norm()
    assert (one - other).norm() > 1e-6 * change
    assert (one - other).sum(2).norm() < 1e3 * EPS * change


def numbers(rows: list[Result]) -> list[float]:
    return [row.relative_error for row in rows if row.relative_error is not None]


@pytest.mark.parametrize("machine", ["frozen_start", "frozen_middle", "linearised"])
def test_a_new_quadratic_loss_has_closed_forms(outside: Outside, machine: str) -> None:
    """ℓ = ‖f − y‖² at a step η is ½‖f − y‖² at 2η, in training and in every machine."""
    doubled = ran(outside, "loss=doubled", "optimizer.step_size=0.05")
    squared = ran(outside, "loss=squared", "optimizer.step_size=0.1")
    assert [row.detail.startswith("flow") for row in doubled.rows("frozen_middle")] == [True] * 3
    found, expected = numbers(doubled.rows(machine)), numbers(squared.rows(machine))
    assert len(found) == 3
    assert found == pytest.approx(expected, rel=1e-9)  # eigenvalues of the kernels, amplified by what is left


def test_a_new_layer_is_trained_and_has_a_limit(outside: Outside) -> None:
    layers = "[{layer: Dense, features: 8}, {layer: Parabola}, {layer: Dense, features: 1}]"
    found = ran(outside, "model=layers", f"model.spec={layers}", "ladder.machine=[frozen_limit]")
    assert all(map(exact, found.rows("thirds")))
    assert len(numbers(found.rows("frozen_limit"))) == 3


def test_a_pointwise_layer_is_an_activation(outside: Outside) -> None:
    assert type(outside.experiment("model.activation=parabola").model).__name__ == "MLP"
    with pytest.raises(Mistake, match=r"'parabla' is no activation; choose from abs, .*did you mean 'parabola'"):
        outside.experiment("model.activation=parabla")
