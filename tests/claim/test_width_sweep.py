"""Networks that are trained to the end, width by width, against least squares."""

from __future__ import annotations

import pytest
import torch

from ntkexp.claim.papers import WidthSweep
from ntkexp.data import Digits, Teacher
from ntkexp.init import NTK
from ntkexp.mistake import Mistake
from ntkexp.model import MLP
from tests.claim.test_wide_trials import number

INIT = NTK(W_std=1.5, b_std=0.1)


def test_what_is_linear_ends_in_least_squares() -> None:
    source = Teacher(train=12, probe=0, test=6, dimension=3)
    row = WidthSweep(model=MLP(width=1, depth=0), init=INIT, data=source, widths=(1, 2, 3)).rows(0)[0]
    data = source.split(0)
    x = torch.cat([data.train.inputs, torch.ones(12, 1, dtype=torch.float64)], 1)
    missed = x @ torch.linalg.lstsq(x, data.train.target).solution - data.train.target
    expected = missed.square().mean() / data.test.target.var(correction=0)
    assert row["parameters"] == 4
    # The last damping is 1e-12 of a problem whose eigenvalues are about one.
    assert number(row, "train_error") == pytest.approx(float(expected), rel=1e-9)


def test_more_parameters_than_targets_leave_nothing() -> None:
    source = Teacher(train=6, probe=0, test=4, dimension=2)
    rows = WidthSweep(model=MLP(width=1, depth=1, activation="tanh"), init=INIT, data=source, widths=(1, 4, 8)).rows(0)
    assert number(rows[2], "train_error") < 1e-12 < number(rows[0], "train_error")
    assert number(rows[0], "condition") == 1e12 > number(rows[2], "condition")


def test_classes_are_refused() -> None:
    trial = WidthSweep(model=MLP(width=1, depth=1), init=INIT, data=Digits(train=4, probe=0, test=2), widths=(1, 2, 3))
    with pytest.raises(Mistake, match="choose data of one real value"):
        trial.rows(0)
