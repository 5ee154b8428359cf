"""Power laws with known exponents are found, and their intervals hold them as often as they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.report.analysis.estimate import power_law
from tests.report.analysis.trials import WIDTHS

Array = NDArray[np.float64]


def design(seeds: int) -> tuple[Array, NDArray[np.int64]]:
    return np.tile(WIDTHS, seeds), np.repeat(np.arange(seeds), len(WIDTHS))


@given(st.floats(-3, 3), st.floats(1e-6, 1e6), st.integers(1, 4))
def test_an_exact_law_is_found(exponent: float, prefactor: float, seeds: int) -> None:
    x, which = design(seeds)
    law = power_law(x, prefactor * x**exponent, which)
    # sums of a few dozen logarithms of at most 40, rounded
    assert law.exponent.value == pytest.approx(exponent, abs=1e-11)
    assert law.prefactor == pytest.approx(prefactor, rel=1e-9)
    assert not law.curved
    assert (law.start, law.stop, law.points, law.runs, law.seeds) == (32, 1024, 6, 6 * seeds, seeds)


def test_the_order_of_the_runs_does_not_matter_and_the_same_comes_out_each_time() -> None:
    x, which = design(4)
    y = x**-0.7 * np.exp(0.2 * np.random.default_rng(0).normal(size=len(x)))
    order = np.random.default_rng(1).permutation(len(x))
    law, again = power_law(x, y, which), power_law(x[order], y[order], which[order])
    assert law == power_law(x, y, which)
    assert again.exponent.low == pytest.approx(law.exponent.low, rel=1e-12)  # sums in another order


def test_the_interval_of_whole_seeds_is_that_of_their_own_exponents() -> None:
    """With all seeds at all points the fit is the mean of the seeds' own, so Student's interval is the oracle."""
    rng, (x, which) = np.random.default_rng(3), design(6)
    y = x**-0.5 * np.exp(0.3 * rng.normal(size=len(x)))
    own = [np.polyfit(np.log(x[which == s]), np.log(y[which == s]), 1)[0] for s in range(6)]
    reach = 2.570581835636314 * np.std(own, ddof=1) / np.sqrt(6)  # t of five degrees of freedom
    law = power_law(x, y, which)
    assert law.exponent.value == pytest.approx(np.mean(own))
    assert law.exponent.reach == pytest.approx(reach, rel=1e-9)


def test_what_has_no_logarithm_is_left_out_and_counted() -> None:
    x, which = design(3)
    y = x**-1.0
    y[[0, 7]] = 0.0, np.nan
    law = power_law(x, y, which)
    assert (law.left_out, law.runs) == (2, 16)
    assert law.exponent.value == pytest.approx(-1)


def test_one_seed_has_no_interval() -> None:
    assert not power_law(WIDTHS, WIDTHS**-0.5, np.zeros(6, dtype=np.int64)).exponent.known


def test_a_seed_that_lacks_a_point_is_still_one_draw() -> None:
    """What the runs of a seed share, here a factor of its own, cancels whichever of them are missing."""
    x, which = design(3)
    y = x**-0.5 * np.array([1.0, 3.0, 10.0])[which]
    law = power_law(x[:-2], y[:-2], which[:-2])
    assert law.exponent.value == pytest.approx(-0.5, abs=1e-12)
    assert law.exponent.reach == pytest.approx(0, abs=1e-12)
    assert (law.seeds, law.units, law.left_out) == (3, 3, 0)


def test_seeds_that_know_of_no_change_are_left_out_and_counted() -> None:
    x, which = np.append(design(3)[0], [32.0, 64.0]), np.append(design(3)[1], [3, 4])
    law = power_law(x, np.append(design(3)[0] ** -0.5, [9.0, 1.0]), which)
    assert law.exponent.value == pytest.approx(-0.5)
    assert (law.seeds, law.runs, law.left_out) == (3, 18, 2)


def test_one_place_is_no_law() -> None:
    with pytest.raises(Mistake, match="two places"):
        power_law(np.ones(3), np.ones(3), np.arange(3))
