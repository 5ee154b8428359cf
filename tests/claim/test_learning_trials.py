"""Trials of what happens to a kernel while a network learns, against what is known of it."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest
import torch

from ntkexp.claim.papers import AfterKernel, SilentAlignment
from ntkexp.claim.papers.lazy_and_rich import LearnedTask, ScaledNetwork, length
from ntkexp.data import Circle, Digits
from ntkexp.init import NTK
from ntkexp.mistake import Mistake
from ntkexp.model import MLP, DeepLinear
from ntkexp.model.functional import weights_of
from ntkexp.records.sweep import Level
from ntkexp.stream import stream
from tests.claim.test_wide_trials import number

INIT = NTK(W_std=2**0.5, b_std=0.1)
DIGITS = Digits(train=6, probe=0, test=20)


def test_what_is_linear_has_one_kernel_and_follows_it() -> None:
    trial = AfterKernel(model=MLP(width=8, depth=0), init=INIT, data=DIGITS, widths=(8,), trains=(6,), until=1e-6)
    network, before, after = trial.rows(0)
    assert after["loss"] == before["loss"]
    # What is missed, √(2·10⁻⁶), is magnified by modes that are learned last.
    assert number(network, "loss") == pytest.approx(number(after, "loss"), rel=0.1)
    assert [row["beyond"] for row in (network, before, after)] == [0.0, 0.0, 0.0]


def test_a_rich_kernel_is_another_one_after_training() -> None:
    rich, lazy = (
        AfterKernel(model=MLP(width=16, depth=1), init=INIT, data=DIGITS, widths=(16,), trains=(6,), alpha=alpha).rows(
            0
        )
        for alpha in (0.1, 1000.0)
    )
    apart = [abs(number(rows[1], "loss") - number(rows[2], "loss")) for rows in (rich, lazy)]
    assert apart[1] < 1e-4
    assert apart[0] > 1e-2


def test_a_network_that_has_not_learned_has_no_kernel_after_training() -> None:
    trial = AfterKernel(model=MLP(width=8), init=INIT, data=DIGITS, widths=(8,), trains=(6,), steps=1)
    assert all(math.isnan(number(row, name)) for row in trial.rows(0) for name in ("error", "beyond", "loss"))


def test_an_after_kernel_of_other_than_two_classes_is_refused() -> None:
    trial = AfterKernel(model=MLP(width=8), init=INIT, data=Circle(train=4, probe=0, test=2))
    with pytest.raises(Mistake, match="choose data of two classes"):
        trial.rows(0)


def silent(**changes: float) -> list[Mapping[str, Level]]:
    """The rows of a network without activations, at sizes that take a moment."""
    trial = SilentAlignment(
        names=("linear",),
        models=(DeepLinear(width=32, depth=1),),
        init=NTK(W_std=1, b_std=0),
        data=Digits(train=6, probe=0, test=5),
    )
    return list(trial.model_copy(update=changes).rows(0))


@pytest.mark.slow
def test_from_almost_nothing_the_kernel_of_a_linear_network_ends_as_one_direction_beside_white() -> None:
    """Of W and a that grow from zero as aβᵀ, K = ‖β‖ (X Xᵀ + X β̂ β̂ᵀXᵀ), whose alignment is 2/√(M − 1 + 4)."""
    found = silent(small=1e-5)[2]
    assert (found["inputs"], found["start"]) == ("whitened", "small")
    # Weights grow three hundredfold, so that the start is a share of 10⁻⁵ of the kernel; 1 % of the loss is left.
    assert number(found, "alignment_end") == pytest.approx(2 / math.sqrt(6 - 1 + 4), abs=1e-3)
    assert number(found, "turned") == pytest.approx(1, abs=0.02)


def test_whatever_is_linear_is_regression_with_its_last_kernel_in_the_span_of_the_examples() -> None:
    assert all(number(row, "gap") < 1e-9 for row in silent())  # 1e-12 of ridge, times the condition number


def test_what_has_not_come_to_its_end_has_no_turn() -> None:
    assert all(math.isnan(number(row, "turned")) for row in silent(steps=2))


def test_a_step_is_no_longer_than_its_stride() -> None:
    module = MLP(width=8, depth=1).module(INIT, (3,), 1, stream("weights", 0)).eval()
    x = torch.randn(5, 3, generator=stream("examples", 0), dtype=torch.float64)
    path = ScaledNetwork(module, 0.01).learn(weights_of(module), LearnedTask(x, x[:, 0]), 5, 0.4, 0.0, stride=0.02)
    moved = [
        float(length([step.after[name] - step.before[name] for name in step.before]) / length(step.before.values()))
        for step in path
    ]
    assert max(moved) == pytest.approx(0.02, rel=1e-9)  # a quotient of rounded sums


def test_a_linear_model_learns_alike_at_every_scale() -> None:
    """Its kernel does not move, and the scale cancels in every step."""
    x = torch.randn(5, 3, generator=stream("examples", 0), dtype=torch.float64)
    module = MLP(width=4, depth=0).module(INIT, (3,), 1, stream("weights", 0)).eval()

    def outputs(alpha: float) -> torch.Tensor:
        network = ScaledNetwork(module, alpha)
        *_, last = network.learn(network.start, LearnedTask(x, x[:, 0]), 25, 0.2, until=0.0)
        return network.outputs(last.after, x)

    torch.testing.assert_close(outputs(0.01), outputs(100.0), rtol=1e-10, atol=1e-10)  # differences of large outputs


def test_a_model_without_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="a name of its own"):
        SilentAlignment(names=("one", "two"), models=(MLP(),), init=INIT, data=DIGITS)
