"""Power laws: their fits, their intervals, and their sentences, which name margin, interval and seeds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.records.sweep import Expected, Fit
from ntkexp.report.analysis.laws import Fitted, law_in_words, summary
from ntkexp.report.analysis.power_law import power_law
from ntkexp.report.analysis.tables import draws
from ntkexp.report.run import Run
from tests.report.analysis.trials import WIDTHS

ONE = Expected(-1.0)


def fit_of(quantity: str, expected: Expected | None) -> Fit:
    known = {} if expected is None else {"exponent": expected.value, "margin": expected.margin, "bound": expected.bound}
    return Fit.model_validate({"quantity": quantity, "axis": "model.width", **known})


def law(exponents: Sequence[float], expected: Expected | None = ONE, lacking: int = 0, bend: float = 0.0) -> Fitted:
    """Return the fit of seeds with these exponents. The last `lacking` runs have no number."""
    x, log_x = np.tile(WIDTHS, len(exponents)), np.log(WIDTHS / 181)
    y = np.exp(np.outer(exponents, log_x) + bend * log_x**2 / 2).ravel()
    y[len(y) - lacking :] = np.nan
    fit = fit_of("kernel_change", expected)
    return Fitted(fit, {}, power_law(x, y, np.repeat(np.arange(len(exponents)), len(WIDTHS))))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            law([-0.99, -1.0, -1.01]),
            "The kernel change falls as width to the power −1 (−1.02 to −0.98, 95 % over 3 seeds); "
            "theory −1, margin 0.1: agrees",
        ),
        (law([-0.99, -1.0, -1.01], Expected(-0.5)), "theory −0.5, margin 0.1: smaller"),
        (law([-0.99, -1.0, -1.01], Expected(-0.5, bound="upper")), "theory ≤ −0.5, margin 0.1: agrees"),
        (law([-0.99, -1.0, -1.01], Expected(-0.5, 0.2, "lower")), "theory ≥ −0.5, margin 0.2: smaller"),
        (
            law([-0.9, -1.1]),
            "95 % over 2 seeds); theory −1, margin 0.1: undecided, 22 more seeds would probably settle it",
        ),
        (law([-0.5, -1.5, -1.0, -0.7]), "undecided, and more seeds would not settle it"),
        (law([-1.0]), "(1 seed, no interval); theory −1, margin 0.1: undecided"),
        (law([-0.9, 0.8], None), "goes as width to the power −0.05 (−10.85 to 10.75, 95 % over 2 seeds)"),
        (law([-0.99, -1.0, -1.01], lacking=2), "2 of 18 runs left out; theory −1, margin 0.1: agrees"),
        (law([-0.99, -1.0, -1.01], bend=0.5), "95 % over 3 seeds); it bends; theory"),
    ],
)
def test_a_sentence_describes_its_law(found: Fitted, words: str) -> None:
    assert found.law is not None
    assert words in law_in_words(found, found.law)


def test_all_laws_are_counted() -> None:
    rows = [
        law([-0.99, -1.0, -1.01]),
        law([-0.99, -1.0, -1.01], Expected(-0.5, margin=0.2)),
        law([-0.9, -1.1]),
        law([-0.9, -1.0], None),
        Fitted(fit_of("gauss.test", ONE), {}, None, "no run yields it"),
    ]
    assert summary(rows, "each drawing weights and data") == (
        "5 laws, with 95 % intervals over 2–3 seeds, each drawing weights and data; 1 not fitted. Theory predicts 3, "
        "with a margin of 0.1–0.2: 1 agrees, 1 smaller, 1 undecided. Each verdict is without correction for the "
        "number of laws."
    )
    assert summary(rows[-1:], "") == "1 law; 1 not fitted."
    assert "Theory" not in summary(rows[3:], "")
    assert summary([law([-1.0], None)], "x") == "1 law, without intervals over 1 seed, x."


@pytest.mark.parametrize(
    ("seeds", "words"),
    [
        ((None, None), "weights and data"),
        ((0, 0), "weights alone, on the same data"),
        ((0, None), "weights, and in some runs data"),
    ],
)
def test_the_sentence_states_what_a_seed_draws(seeds: tuple[int | None, ...], words: str) -> None:
    runs = [Run(Path(), {"data": {"seed": seed}}, None, ()) for seed in seeds]  # type: ignore[arg-type]
    assert draws(runs) == f"each drawing {words}"


# Power laws with known exponents are found, with the right intervals.


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
    """If all seeds have all points, the fit is the mean of the seeds' fits, so Student's interval is the oracle."""
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
    """A factor that the runs of a seed share cancels, even if some runs are missing."""
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
