"""What is said of laws, of tables made to contradict it: every row counts, and margin, interval and seeds are named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from ntkexp.records.sweep import Expected, Fit
from ntkexp.report.analysis.estimate import power_law
from ntkexp.report.analysis.laws import Fitted, law_in_words, summary
from ntkexp.report.analysis.tables import draws
from ntkexp.report.run import Run
from tests.report.analysis.trials import WIDTHS

ONE = Expected(-1.0)


def fit_of(quantity: str, expected: Expected | None) -> Fit:
    known = {} if expected is None else {"exponent": expected.value, "margin": expected.margin, "bound": expected.bound}
    return Fit.model_validate({"quantity": quantity, "axis": "model.width", **known})


def law(exponents: Sequence[float], expected: Expected | None = ONE, lacking: int = 0, bend: float = 0.0) -> Fitted:
    """Seeds with these exponents; from the end, some of their runs yield no number."""
    x, log_x = np.tile(WIDTHS, len(exponents)), np.log(WIDTHS / 181)
    y = np.exp(np.outer(exponents, log_x) + bend * log_x**2 / 2).ravel()
    y[len(y) - lacking :] = np.nan
    fit = fit_of("drift", expected)
    return Fitted(fit, {}, power_law(x, y, np.repeat(np.arange(len(exponents)), len(WIDTHS))))


def said(found: Fitted) -> str:
    assert found.law is not None
    return law_in_words(found, found.law)


def test_a_law_that_agrees_names_interval_seeds_and_margin() -> None:
    assert said(law([-0.99, -1.0, -1.01])) == (
        "The movement of the kernel falls as width to the power −1 (−1.02 to −0.98, 95 % over 3 seeds); "
        "theory −1, margin 0.1: agrees"
    )


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (law([-0.99, -1.0, -1.01], Expected(-0.5)), "theory −0.5, margin 0.1: smaller"),
        (law([-0.99, -1.0, -1.01], Expected(-0.5, bound="upper")), "theory ≤ −0.5, margin 0.1: agrees"),
        (law([-0.99, -1.0, -1.01], Expected(-0.5, 0.2, "lower")), "theory ≥ −0.5, margin 0.2: smaller"),
        (
            law([-0.9, -1.1]),
            "95 % over 2 seeds); theory −1, margin 0.1: undecided, 22 more seeds would probably decide",
        ),
        (law([-0.5, -1.5, -1.0, -0.7]), "undecided, and more seeds would hardly decide"),
        (law([-1.0]), "(1 seed, no interval); theory −1, margin 0.1: undecided"),
        (law([-0.9, 0.8], None), "goes as width to the power −0.05 (−10.85 to 10.75, 95 % over 2 seeds)"),
        (law([-0.99, -1.0, -1.01], lacking=2), "2 of 18 runs left out; theory −1, margin 0.1: agrees"),
        (law([-0.99, -1.0, -1.01], bend=0.5), "95 % over 3 seeds); it bends; theory"),
    ],
)
def test_every_law_says_what_is_so(found: Fitted, words: str) -> None:
    assert words in said(found)


def test_all_laws_are_counted() -> None:
    rows = [
        law([-0.99, -1.0, -1.01]),
        law([-0.99, -1.0, -1.01], Expected(-0.5, margin=0.2)),
        law([-0.9, -1.1]),
        law([-0.9, -1.0], None),
        Fitted(fit_of("gauss.test", ONE), {}, None, "no run yields it"),
    ]
    assert summary(rows, "each drawing weights and data") == (
        "5 laws, with 95 % intervals over 2–3 seeds, each drawing weights and data; 1 of them not fitted. Theory "
        "speaks of 3, with a margin of 0.1–0.2: 1 agrees, 1 smaller, 1 undecided. Each is judged by itself."
    )
    assert summary(rows[-1:], "") == "1 law; 1 of them not fitted."
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
def test_what_a_seed_draws_is_told_by_all_runs(seeds: tuple[int | None, ...], words: str) -> None:
    told_by = [Run(Path(), {"data": {"seed": seed}}, None, ()) for seed in seeds]  # type: ignore[arg-type]  # unread
    assert draws(told_by) == f"each drawing {words}"
