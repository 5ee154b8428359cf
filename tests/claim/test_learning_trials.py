"""Trials of what happens to a kernel while a network learns, against what is known of it."""

from __future__ import annotations

import math

import pytest

from ntkexp.claim.trial import AfterKernel
from ntkexp.data import Circle, Digits
from ntkexp.init import NTK
from ntkexp.mistake import Mistake
from ntkexp.model import MLP
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
