"""A run whose network has an operation without a rule: kernels are read from plain Jacobians, and it is said."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from ntkexp.data.base import Data
from ntkexp.experiment import problem
from ntkexp.experiment.experiment import Experiment
from ntkexp.mistake import Mistake
from ntkexp.model.base import ScaledOutput
from tests.run.small import ran


class Running(nn.Module):
    """A network whose outputs pass through running products."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.network(x)
        return outputs.cumprod(1)


@pytest.fixture
def _running(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = problem.draw_network

    def network(experiment: Experiment, data: Data, outputs: int, copies: float) -> ScaledOutput:
        return ScaledOutput(Running(usual(experiment, data, outputs, copies)), 1.0)

    monkeypatch.setattr(problem, "draw_network", network)


@pytest.mark.usefixtures("_running")
def test_a_run_without_secants_says_how_its_kernels_are_read() -> None:
    sentence = ran("path.rule=[left]", "steps=2").outcome.sentence
    assert "no difference rule for the operation aten.cumprod.default: the tangent is read from plain" in sentence


@pytest.mark.usefixtures("_running")
@pytest.mark.parametrize("optimizer", ["gd", "momentum"])
def test_a_secant_is_refused_before_training(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the path is integrated after it, from the end."""
    monkeypatch.setattr("tests.run.small.run", never)
    with pytest.raises(Mistake, match=r"no difference rule for the operation aten\.cumprod.*path\.rule=\[gauss,left\]"):
        ran("path.rule=[secant]", f"optimizer={optimizer}")


def never(*_: object) -> None:
    raise AssertionError("training begins")
