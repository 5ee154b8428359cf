"""A run whose network casts to single precision inside: kept or left out, and said."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ntkexp.data.base import Data
from ntkexp.experiment import problem
from ntkexp.experiment.experiment import Experiment
from ntkexp.model.base import ScaledOutput
from tests.run.small import ran


class Shortened(nn.Module):
    """A network whose outputs pass through single precision."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.network(x)
        return outputs.float().to(outputs.dtype)


@pytest.fixture
def _shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = problem.draw_network

    def network(experiment: Experiment, data: Data, outputs: int, copies: float) -> ScaledOutput:
        return ScaledOutput(Shortened(usual(experiment, data, outputs, copies)), 1.0)

    monkeypatch.setattr(problem, "draw_network", network)


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
