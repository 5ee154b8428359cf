"""Classifiers that fit before they generalise, against what is known of them."""

from __future__ import annotations

import math

import pytest
import torch

from ntkexp.claim.papers import LateGeneralising
from ntkexp.claim.papers.lazy_and_rich import FollowedMode, LearningStep, ScaledDescent, ScaledFunction, top_mode
from ntkexp.data import Circle, ModularAddition
from ntkexp.init import NTK
from ntkexp.layer import Polynomial
from ntkexp.library import tangent_kernel
from ntkexp.mistake import Mistake
from ntkexp.model import MLP
from ntkexp.model.functional import function_of, weights_of
from ntkexp.shapes import Inputs, Weights
from ntkexp.stream import stream
from tests.claim.test_wide_trials import number

INIT = NTK(W_std=1, b_std=0)
SQUARES = MLP(width=12, depth=1, activation=Polynomial(powers=(0, 0, 1)))
SUMS = ModularAddition(modulus=5, train=16, probe=0, encoding="one_hot")


def learning(model: MLP, alpha: float) -> ScaledDescent:
    """A network that is to learn sums."""
    data = SUMS.split(0)
    module = model.module(INIT, (2, 5), 5, stream("weights", 0)).eval()
    targets = torch.nn.functional.one_hot(data.train.target, 5).double()
    scaled = ScaledFunction(function_of(module), weights_of(module), alpha)
    followed = FollowedMode(scaled.function, data.train.inputs, targets)
    return ScaledDescent(scaled, data.train.inputs, targets, followed.largest, fraction=0.4)


def path(descent: ScaledDescent, steps: int) -> list[LearningStep]:
    return list(descent.path(descent.scaled.start, steps))


def test_powers_find_the_largest_eigenvalue_of_the_kernel() -> None:
    data, module = SUMS.split(0), SQUARES.module(INIT, (2, 5), 5, stream("weights", 0)).eval()
    begun = torch.randn(16, 5, generator=stream("examples", 0), dtype=torch.float64)
    found = top_mode(function_of(module), weights_of(module), data.train.inputs, begun, powers=100)[1]
    kernel = tangent_kernel(module, data.train.inputs).flatten(2).flatten(0, 1)
    # What is left of other modes counts by the square, (λ₂/λ₁)²⁰⁰.
    assert found == pytest.approx(float(torch.linalg.eigvalsh(kernel)[-1]), rel=1e-4)


def test_many_outputs_and_one_descend_alike() -> None:
    """One output, and the same over √2 twice, have the same loss, the same kernel and so the same path."""
    module = MLP(width=6, depth=1).module(INIT, (3,), 1, stream("weights", 0)).eval()
    x = torch.randn(4, 3, generator=stream("examples", 0), dtype=torch.float64)
    y, one = x[:, :1], ScaledFunction(function_of(module), weights_of(module), 0.5)

    def twice(weights: Weights, given: Inputs) -> torch.Tensor:
        return one.function(weights, given).expand(-1, 2) / 2**0.5

    both = ScaledFunction(twice, one.start, one.alpha)
    pairs = (one, y), (both, y.expand(-1, 2) / 2**0.5)
    first, second = (path(ScaledDescent(scaled, x, given, lambda _: 10.0, 0.4), 9)[-1] for scaled, given in pairs)
    assert first.loss == pytest.approx(second.loss, rel=1e-13)
    for name, weight in first.after.items():
        torch.testing.assert_close(weight, second.after[name], rtol=1e-12, atol=1e-13)


def test_outputs_of_what_is_linear_move_alike_at_every_scale() -> None:
    """Its kernel does not move, and the scale cancels in every step; no stride shortens any."""
    rich, lazy = (path(learning(MLP(depth=0), alpha), 20) for alpha in (0.01, 100.0))
    assert [step.size for step in rich] == pytest.approx([step.size for step in lazy], rel=1e-12)
    torch.testing.assert_close(rich[-1].outputs, lazy[-1].outputs, rtol=1e-10, atol=1e-10)  # differences of large ones


def test_a_step_follows_the_kernel_where_training_is_lazy() -> None:
    lazy = learning(SQUARES, alpha=1e6)
    before, after = path(lazy, 2)
    kernel = tangent_kernel(SQUARES.module(INIT, (2, 5), 5, stream("weights", 0)).eval(), lazy.inputs)
    moved = torch.einsum("xcyd,yd->xc", kernel, lazy.targets) * before.size / len(lazy.targets)
    # Weights move by a millionth, the kernel with them; outputs are differences of a million times larger ones.
    torch.testing.assert_close(after.outputs, moved, rtol=1e-4, atol=1e-6)


def test_the_lazier_the_less_the_kernel_has_moved_when_examples_are_fitted() -> None:
    trial = LateGeneralising(model=SQUARES, init=INIT, data=SUMS, alphas=(0.05, 1.0, 1e4), steps=100, points=8)
    drifts = [number(row, "drift") for row in trial.rows(0) if row["station"] == "fitted"]
    assert drifts[0] > drifts[1] > drifts[2] > 0
    assert drifts[2] < 1e-3  # 1/α, times what the examples ask for


def test_what_is_not_reached_has_no_time() -> None:
    trial = LateGeneralising(model=SQUARES, init=INIT, data=SUMS, alphas=(1.0, 2.0), steps=1, points=4)
    fitted, generalised, end = trial.rows(0)[:3]
    assert all(math.isnan(number(row, name)) for row in (fitted, generalised) for name in ("time", "wait", "drift"))
    assert end["time"] == end["drift"] == 0
    assert math.isnan(number(end, "accuracy"))


def test_real_targets_are_refused() -> None:
    trial = LateGeneralising(model=SQUARES, init=INIT, data=Circle(train=4, probe=0, test=2), alphas=(1.0, 2.0))
    with pytest.raises(Mistake, match="choose data of classes"):
        trial.rows(0)
