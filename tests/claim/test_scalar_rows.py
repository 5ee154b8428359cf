"""Trials of scalar functions, against what is known of them by hand."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from ntkexp.claim.papers import FiniteSteps, ScalarCurve
from ntkexp.data.synthetic import Integers
from ntkexp.init import Standard
from ntkexp.mistake import Mistake
from ntkexp.model.scalar import LookupTable, RadialBasis, ScalarLinear


def curve(**fields: Any) -> pd.DataFrame:
    return pd.DataFrame(ScalarCurve(**fields).rows(0)).set_index(["start", "ascended", "x"])


def test_a_step_on_a_table() -> None:
    rows = curve(model=LookupTable(), delta=1.0)
    here = [rows[name]["given", 0, 10] for name in ("before", "after", "kernel")]
    assert here == [32.0, pytest.approx(35.6), 1.0]
    elsewhere = rows[rows["place"] == "elsewhere"]
    assert (elsewhere[["moved", "kernel"]].to_numpy() == 0).all()


def test_a_wrong_formula_has_an_error() -> None:
    """Of a line, k(10, 10) = 101, and the formula without its constant is off by 1 everywhere."""
    errors = curve(model=ScalarLinear(), product=1.0)["error"]
    assert [errors.min(), errors.max()] == pytest.approx([1 / 101, 1 / 101])


def test_what_is_drawn_is_another_start() -> None:
    rows = curve(model=ScalarLinear())
    assert rows.loc[("given", 0, 0), "before"] == 1.0
    assert rows.loc[("drawn", 0, 0), "before"] != 1.0


def test_ascent_is_counted() -> None:
    """A line whose f(10) rises by k(10, 10) = 101 a step."""
    rows = curve(model=ScalarLinear(), ascended=(0, 3))["before"]
    assert rows["given", 3, 10] - rows["given", 0, 10] == pytest.approx(303)


def test_an_observation_elsewhere_is_refused() -> None:
    with pytest.raises(Mistake, match=r"trial\.observed=30 is not in -10 … 20"):
        curve(model=ScalarLinear(), observed=30)


@pytest.mark.parametrize(("column", "order"), [("error", 1), ("centred_error", 2)])
def test_orders_of_finite_steps(column: str, order: int) -> None:
    """Halving the step divides an error by 2^order, up to the next order, which is a share of the step."""
    trial = FiniteSteps(
        model=RadialBasis(),
        init=Standard(W_std=1.0, b_std=0.0),
        data=Integers(),
        step_sizes=(0.02, 0.01),
        points=31,
        observed=1,
        scatter=0.1,
    )
    errors = pd.DataFrame(trial.rows(0))[column]
    assert errors[0] / errors[1] == pytest.approx(2**order, rel=0.02)
