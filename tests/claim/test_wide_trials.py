"""Trials about wide networks measure what is known of them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ntkexp.claim.papers import (
    FirstKernels,
    FirstOutputs,
    Fluctuations,
    KernelMovement,
    SummedOutputs,
    TrainingBesideKernels,
)
from ntkexp.data import Digits, Sphere
from ntkexp.init import NTK
from ntkexp.mistake import Mistake
from ntkexp.model import MLP
from ntkexp.records.sweep import Level

INIT = NTK(W_std=2**0.5, b_std=0.1)
DATA = Sphere(train=4, probe=0, test=4)


def number(row: Mapping[str, Level], name: str) -> float:
    """What a row says under a name."""
    found = row[name]
    assert isinstance(found, float)
    return found


def test_first_outputs_have_the_covariance_of_the_limit_at_any_width() -> None:
    trial = FirstOutputs(model=MLP(width=4, depth=1), init=INIT, data=DATA, widths=(2, 16), networks=500, points=4)
    narrow, wide = trial.rows(0)
    for row in (narrow, wide):
        # Four standard errors of a variance: √((2 + excess)/500), of which the narrow network's excess is 7.5.
        assert row["variance_ratio"] == pytest.approx(1, abs=4 * ((2 + 7.5) / 500) ** 0.5)
        assert row["covariance_ratio"] == pytest.approx(1, abs=4 * ((2 + 7.5) / 500) ** 0.5)  # a mean over pairs
    assert number(narrow, "excess_kurtosis") > 2 * number(wide, "excess_kurtosis")


def test_one_output_is_its_own_sum() -> None:
    trial = SummedOutputs(model=MLP(width=4, depth=1), init=INIT, data=DATA, widths=(4, 8), outputs=1, points=3)
    assert [row["error"] for row in trial.rows(0)] == [0.0, 0.0]


def test_the_wider_the_less_first_steps_from_zero_differ() -> None:
    """Antisymmetric networks start at zero, and one step moves each by its own kernel."""
    init = INIT.model_copy(update={"antisymmetric": True})
    trial = Fluctuations(model=MLP(width=4, depth=1), init=init, data=DATA, widths=(4, 64), networks=4, steps=1)
    narrow, wide = trial.rows(0)
    assert number(narrow, "fluctuation") > number(wide, "fluctuation") > 0


def test_first_kernels_of_linear_units_vary_as_they_should() -> None:
    """With f = v·Wx/√(h d), K(x, x) = a (|v|²/h + |Wx|²/(h |x|²)): both terms have mean a and variance 2a²/h."""
    plain = NTK(W_std=1.0, b_std=0.0)
    model = MLP.model_validate({"width": 1, "depth": 1, "activation": "linear"})
    trial = FirstKernels(model=model, init=plain, data=DATA, widths=(16, 64), networks=80, points=1)
    for row in trial.rows(0):
        width = int(str(row["width"]))
        # Four standard errors of a sample variance: √((2 + excess)/80), the excess of a sum of h squares being 12/h.
        assert number(row, "variance") * width == pytest.approx(1, abs=4 * ((2 + 12 / width) / 80) ** 0.5)
        assert number(row, "distance") ** 2 >= number(row, "variance") * (1 - 1 / 80) * (1 - 1e-12)


def test_what_is_linear_in_its_weights_trains_as_its_kernels_say_and_moves_none() -> None:
    flat = MLP(width=1, depth=0)
    beside = TrainingBesideKernels(model=flat, init=INIT, data=DATA, widths=(1, 2), networks=2, steps=7)
    assert {row["kernel"] for row in beside.rows(0)} == {"start", "limit"}
    assert max(number(row, "gap") for row in beside.rows(0)) < 1e-13  # sums of a few numbers, rounded
    moving = KernelMovement(model=flat, init=INIT, data=DATA, widths=(1,), alphas=(1.0, 2.0), networks=2, steps=7)
    assert [row["movement"] for row in moving.rows(0)] == [0.0, 0.0]


def test_what_has_several_outputs_is_refused() -> None:
    three = Digits(train=4, probe=0, test=2, classes=(0, 1, 2))
    trial = TrainingBesideKernels(model=MLP(depth=0), init=INIT, data=three, widths=(1, 2), networks=1, steps=1)
    with pytest.raises(Mistake, match="drawn of one output, and the data has 3"):
        trial.rows(0)


def test_smooth_kernels_of_scaled_outputs_move_as_one_over_the_scale() -> None:
    init = INIT.model_copy(update={"centred": True})
    smooth = MLP.model_validate({"width": 4, "depth": 1, "activation": "tanh"})
    trial = KernelMovement(model=smooth, init=init, data=DATA, widths=(4,), alphas=(1e3, 2e3), networks=2, steps=5)
    near, far = (number(row, "movement") for row in trial.rows(0))
    assert near / far == pytest.approx(2, rel=0.05)  # up to terms of the order 1/α, with their factors
