"""Power laws with known exponents are found, and their intervals hold them as often as they say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.report.analysis.power_law import PowerLaw, power_law

Array = NDArray[np.float64]
WIDTHS = np.array([32.0, 64.0, 128.0, 256.0, 512.0, 1024.0])
TRIALS = 200
# of so many trials at 95 %, the share that is covered lies within four standard deviations of 95 %
NEAR = 4 * np.sqrt(0.95 * 0.05 / TRIALS)


def design(seeds: int) -> tuple[Array, NDArray[np.int64]]:
    """Every width with every seed."""
    return np.tile(WIDTHS, seeds), np.repeat(np.arange(seeds), len(WIDTHS))


def noisy(rng: np.random.Generator, seeds: int, exponent: float, bend: float = 0.0) -> PowerLaw:
    """A law with scatter between seeds, in height and in slope, and between the runs of a seed."""
    x, which = design(seeds)
    lifted, tilted = rng.normal(size=(2, seeds))
    log_x = np.log(x / 181)
    scatter = 0.3 * lifted[which] + 0.05 * tilted[which] * log_x + 0.1 * rng.normal(size=len(x))
    return power_law(x, np.exp(exponent * log_x + bend * log_x**2 / 2 + scatter), which)


@given(st.floats(-3, 3), st.floats(1e-6, 1e6), st.integers(1, 4))
def test_an_exact_law_is_found(exponent: float, prefactor: float, seeds: int) -> None:
    x, which = design(seeds)
    law = power_law(x, prefactor * x**exponent, which)
    # sums of a few dozen logarithms of at most 40, rounded
    assert law.exponent.value == pytest.approx(exponent, abs=1e-11)
    assert law.prefactor == pytest.approx(prefactor, rel=1e-9)
    assert not law.curved
    assert (law.start, law.stop, law.points, law.runs, law.seeds) == (32, 1024, 6, 6 * seeds, seeds)


@pytest.mark.parametrize("seeds", [2, 3, 5, 12])
def test_intervals_hold_the_exponent_as_often_as_they_say(seeds: int) -> None:
    rng = np.random.default_rng(seeds)
    laws = [noisy(rng, seeds, -0.5) for _ in range(TRIALS)]
    assert np.mean([law.exponent.covers(-0.5) for law in laws]) == pytest.approx(0.95, abs=NEAR)
    assert np.mean([law.curved for law in laws]) == pytest.approx(0.05, abs=NEAR)


def test_intervals_hold_it_where_points_have_seeds_of_their_own() -> None:
    rng, x = np.random.default_rng(0), np.repeat(WIDTHS, 5)
    laws = [power_law(x, x**-1.0 * np.exp(0.3 * rng.normal(size=30)), np.arange(30)) for _ in range(TRIALS)]
    assert np.mean([law.exponent.covers(-1.0) for law in laws]) == pytest.approx(0.95, abs=NEAR)


def test_a_law_that_bends_is_flagged() -> None:
    rng = np.random.default_rng(0)
    assert np.mean([noisy(rng, 5, -0.5, bend=0.3).curved for _ in range(50)]) > 0.9


def test_the_order_of_the_runs_does_not_matter_and_the_same_comes_out_each_time() -> None:
    x, which = design(4)
    y = x**-0.7 * np.exp(0.2 * np.random.default_rng(0).normal(size=len(x)))
    order = np.random.default_rng(1).permutation(len(x))
    law, again = power_law(x, y, which), power_law(x[order], y[order], which[order])
    assert law == power_law(x, y, which)
    # the same draws of the same seeds: sums in another order
    assert again.exponent.low == pytest.approx(law.exponent.low, rel=1e-12)


def test_the_interval_of_whole_seeds_is_that_of_their_own_exponents() -> None:
    """With all seeds at all points the fit is the mean of the seeds' own, so Student's interval is the oracle."""
    rng, (x, which) = np.random.default_rng(3), design(6)
    y = x**-0.5 * np.exp(0.3 * rng.normal(size=len(x)))
    own = [np.polyfit(np.log(x[which == s]), np.log(y[which == s]), 1)[0] for s in range(6)]
    reach = 2.570581835636314 * np.std(own, ddof=1) / np.sqrt(6)  # t of five degrees of freedom
    law = power_law(x, y, which)
    assert law.exponent.value == pytest.approx(np.mean(own))
    # 2,000 draws know a standard deviation to 1.6 %, and four times that is beyond chance
    assert law.exponent.high - law.exponent.value == pytest.approx(reach, rel=0.065)


def test_what_has_no_logarithm_is_left_out_and_counted() -> None:
    x, which = design(3)
    y = x**-1.0
    y[[0, 7]] = 0.0, np.nan
    law = power_law(x, y, which)
    assert (law.left_out, law.runs) == (2, 16)
    assert law.exponent.value == pytest.approx(-1)


def test_one_seed_has_no_interval_and_no_verdict() -> None:
    law = power_law(WIDTHS, WIDTHS**-0.5, np.zeros(6, dtype=np.int64))
    assert not law.exponent.known
    assert law.verdict(-0.5) == ""


def test_one_place_is_no_law() -> None:
    with pytest.raises(Mistake, match="two places"):
        power_law(np.ones(3), np.ones(3), np.arange(3))


def test_theory_is_judged_by_the_interval() -> None:
    law = noisy(np.random.default_rng(0), 10, -1.0)
    assert [law.verdict(theory) for theory in (-1.0, -0.5, -1.5, None)] == ["agrees", "smaller", "larger", ""]
