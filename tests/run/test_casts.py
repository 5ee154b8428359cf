"""Runs whose networks cast to single precision inside, or have an operation without a rule; and what they say."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ntkexp.data.base import Data
from ntkexp.experiment import problem
from ntkexp.experiment.experiment import Experiment
from ntkexp.mistake import Mistake
from ntkexp.model.base import ScaledOutput
from tests.run.small import ran


class Through(nn.Module):
    """A network whose outputs pass through a function."""

    def __init__(self, network: nn.Module, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.network, self.function = network, function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.network(x))


def pass_through(function: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every network that is drawn from now on ends in this function."""
    usual = problem.draw_network

    def network(experiment: Experiment, data: Data, outputs: int, copies: float) -> ScaledOutput:
        return ScaledOutput(Through(usual(experiment, data, outputs, copies), function), 1.0)

    monkeypatch.setattr(problem, "draw_network", network)


@pytest.fixture
def _shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_through(lambda outputs: outputs.float().to(outputs.dtype), monkeypatch)


@pytest.fixture
def _running(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running products, of which there is no rule: kernels are read from plain Jacobians."""
    pass_through(lambda outputs: outputs.cumprod(1), monkeypatch)


@pytest.mark.usefixtures("_shortened")
def test_kept_casts_cost_their_rounding_and_the_run_says_so() -> None:
    run = ran("path.rule=[secant]", "path.casts=keep")
    assert 1e-12 < run.error("secant") < 100 * torch.finfo(torch.float32).eps
    assert "a secant closes to 1e-07 of its outputs; casts=ignore" in run.outcome.sentence


@pytest.mark.usefixtures("_shortened")
def test_without_casts_the_secant_is_exact_and_the_run_says_what_moved() -> None:
    run = ran("path.rule=[secant]", "path.casts=ignore")
    assert run.error("secant") <= 1e-12
    assert "read without its casts" in run.outcome.sentence


def test_a_network_without_casts_is_the_same_either_way() -> None:
    kept, ignored = (ran("path.rule=[secant]", f"path.casts={casts}") for casts in ("keep", "ignore"))
    assert torch.equal(kept.contributions("secant"), ignored.contributions("secant"))
    assert kept.outcome.sentence == ignored.outcome.sentence
    assert "cast" not in kept.outcome.sentence


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
