"""Trials about wide networks measure what is known of them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from ntkexp.claim.trial import FirstOutputs, Fluctuations, SummedOutputs
from ntkexp.data import Sphere
from ntkexp.init import NTK
from ntkexp.model import MLP
from ntkexp.records.sweep import Level

INIT = NTK(W_std=2**0.5, b_std=0.1)
DATA = Sphere(train=4, probe=0, test=4)


def number(row: Mapping[str, Level], name: str) -> float:
    """What a row says under a name."""
    found = row[name]
    assert isinstance(found, float)
    return found


def test_first_outputs_have_the_variance_of_the_limit_at_any_width() -> None:
    trial = FirstOutputs(model=MLP(width=4, depth=1), init=INIT, data=DATA, widths=(2, 16), networks=500, points=4)
    narrow, wide = trial.rows(0)
    for row in (narrow, wide):
        # Four standard errors of a variance: √((2 + excess)/500), of which the narrow network's excess is 7.5.
        assert row["variance_ratio"] == pytest.approx(1, abs=4 * ((2 + 7.5) / 500) ** 0.5)
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
