"""Trials of tasks that are learned in turn, against what is known of them."""

from __future__ import annotations

import pytest
import torch

from ntkexp.claim.trial import Interference, SelectiveUnits
from ntkexp.claim.trial.task_by_task import LearnedTask, ScaledNetwork
from ntkexp.data import Circle, Digits
from ntkexp.init import NTK
from ntkexp.mistake import Mistake
from ntkexp.model import MLP
from ntkexp.stream import stream
from tests.claim.test_wide_trials import number

INIT = NTK(W_std=2**0.5, b_std=0.1)
FIRST = Digits(train=6, probe=5, test=0)
THEN = Digits(train=6, probe=0, test=0, classes=(1, 7))


def test_contributions_add_up_to_what_the_second_task_did() -> None:
    (row,) = Interference(model=MLP(width=8, depth=1), init=INIT, first=FIRST, then=THEN, steps=4).rows(0)
    assert 0 < number(row, "closure") < 1e-13  # four steps of a few rounded sums each
    assert number(row, "switch") > number(row, "shuffled")


def test_the_kernel_of_a_linear_model_foretells_all_of_it() -> None:
    (row,) = Interference(model=MLP(width=8, depth=0), init=INIT, first=FIRST, then=THEN, steps=4).rows(0)
    assert row["switch"] == 1.0


def test_data_without_two_classes_are_refused() -> None:
    trial = Interference(model=MLP(width=8), init=INIT, first=Circle(train=4, probe=2, test=1), then=THEN)
    with pytest.raises(Mistake, match="choose data of two classes"):
        trial.rows(0)


def test_a_linear_model_learns_alike_at_every_scale() -> None:
    """Its kernel does not move, and the scale cancels in every step."""
    x = torch.randn(5, 3, generator=stream("examples", 0), dtype=torch.float64)
    module = MLP(width=4, depth=0).module(INIT, (3,), 1, stream("weights", 0)).eval()

    def outputs(alpha: float) -> torch.Tensor:
        network = ScaledNetwork(module, alpha)
        return network.outputs(network.learned(network.start, LearnedTask(x, x[:, 0]), 25, 0.2, until=0.0), x)

    torch.testing.assert_close(outputs(0.01), outputs(100.0), rtol=1e-10, atol=1e-10)  # differences of large outputs


def test_units_that_hear_no_cue_are_tuned_to_no_task() -> None:
    trial = SelectiveUnits(model=MLP(width=6, depth=1), init=INIT, train=8, new=8, steps=10, cue=0.0)
    assert [row["selectivity"] for row in trial.rows(0)] == [0.0, 0.0]


def test_at_large_scale_units_stay_as_they_were() -> None:
    trial = SelectiveUnits(model=MLP(width=6, depth=1), init=INIT, train=8, new=8, steps=30, alphas=(0.1, 1000.0))
    rich, lazy = (abs(number(row, "gained")) for row in trial.rows(0))
    assert lazy < 1e-4 < rich
