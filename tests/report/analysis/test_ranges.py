"""Intervals of quantities with a range stay inside it, and are right at least as often as Student's."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ntkexp.records.sweep import Bound, Expected, Level, Sweep, SweepRun
from ntkexp.report.analysis.estimate import POSITIVE, SHARE, Range, compare as compare_with_range, mean_of
from ntkexp.report.analysis.quantities import MEASURES, range_of
from ntkexp.report.analysis.tables import compare, points, write_tables
from ntkexp.report.material import tabulate_points
from tests.report.analysis.test_sweeps import analysed
from tests.report.synthetic import write_sweep

EPS = np.finfo(float).eps
SIZES = ("kernel_change", "weights_moved", "weights_moved.readout", "loss", "loss_query", "limit_distance", "trace")
ERRORS = ("left.test", "secant.query", "closure", "lambda_max", "stability")
SHARES = ("accuracy", "accuracy_query", "alignment", "limit_alignment", "label_alignment", "pattern_change")
TWO_SEEDS = (
    *product((*SIZES, *ERRORS), [(0.003, 0.068), (0.0, 0.1), (0.0, 0.0), (1e-16, 3e-15), (1e-150, 1e150)]),
    *product((*SHARES, "selectivity"), [(0.9, 1.0), (0.0, 0.1), (1.0, 1.0), (1 + 2 * EPS, 0.9), (1.0, 1 - EPS / 2)]),
    *product(("condition", "effective_rank"), [(1.0, 3.0), (1.0, 1.0), (1 + EPS, 1.0), (2.0, 1e18)]),
)


def sweep_of(quantity: str, figures: tuple[float, ...]) -> tuple[Sweep, pd.DataFrame]:
    """Return a sweep of one point whose seeds have these figures."""
    axes: dict[str, Level] = {"model.width": 8}
    seeds = tuple(range(len(figures)))
    runs = tuple(SweepRun(folder=Path(str(seed)), axes=axes, seed=seed, state="done") for seed in seeds)
    sweep = Sweep(
        path=Path("s.json"), name="s", command="", axes={"model.width": (8,)}, seeds=seeds, base=(), fits=(), runs=runs
    )
    return sweep, pd.DataFrame({"model.width": 8, "seed": seeds, "state": "done", quantity: figures})


@pytest.mark.parametrize(("quantity", "figures"), TWO_SEEDS)
def test_an_interval_lies_in_the_range_of_its_quantity(quantity: str, figures: tuple[float, float]) -> None:
    row = points(*sweep_of(quantity, figures)).iloc[0]
    least, largest = range_of(quantity)
    assert least <= row[f"{quantity}.low"] <= row[f"{quantity}.mean"] <= row[f"{quantity}.high"] <= largest
    assert row[f"{quantity}.mean"] == pytest.approx(np.mean(figures), rel=2 * EPS)
    if figures[0] != figures[1]:
        assert row[f"{quantity}.low"] < row[f"{quantity}.high"]


def test_one_seed_has_no_interval_and_losses_below_zero_have_students() -> None:
    row = points(*sweep_of("loss", (0.5,))).iloc[0]
    assert row["loss.mean"] == 0.5
    assert row[["loss.low", "loss.high"]].isna().all()
    row = points(*sweep_of("loss", (-0.5, 0.7))).iloc[0]
    assert row["loss.low"] < -1
    assert row["loss.high"] - 0.1 == pytest.approx(0.1 - row["loss.low"])


@pytest.mark.parametrize("value", [0.1, 0.7, 1 / 3])
@pytest.mark.parametrize("count", range(2, 12))
def test_equal_figures_at_the_edge_of_a_range_lie_inside(value: float, count: int) -> None:
    """The mean of equal numbers is this number, and its error is 0, although sums are rounded."""
    estimate = mean_of([value] * count)
    assert (estimate.value, estimate.error) == (value, 0.0)
    bounds: tuple[Bound, ...] = ("lower", "upper")
    for bound in bounds:
        assert compare_with_range(estimate, Expected(value, 0.0, bound)).where == "inside"


def test_every_number_of_a_run_has_a_range() -> None:
    ranges = {name: range_of(name) for name in MEASURES}
    assert all(low >= 0 for low, _ in ranges.values())
    assert {name for name, (_, high) in ranges.items() if high == 1} == {*SHARES, "selectivity"}


def test_tables_and_pages_have_the_same_ends(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, seeds=(0, 1))
    _, table, _ = (pd.read_csv(file) for file in write_tables(path))
    lows = table[[name for name in table if str(name).endswith(".low")]].to_numpy()
    assert (lows[np.isfinite(lows)] >= 0).all()
    shown = tabulate_points(analysed(path))
    assert not any("±" in str(name) for name in shown)
    assert not any("−" in cell or "-0" in cell for cell in shown["95 % of kernel_change"])


def test_the_difference_of_two_shares_lies_between_minus_one_and_one(tmp_path: Path) -> None:
    first, second = analysed(write_sweep(tmp_path, "one")), analysed(write_sweep(tmp_path, "two"))
    rng = np.random.default_rng(0)
    first.runs["accuracy"], second.runs["accuracy"] = rng.random((2, len(first.runs)))
    table = compare(first, second).set_index("quantity").loc["accuracy"]
    assert (table["difference_low"] > -1).all()
    assert (table["difference_high"] < 1).all()


@pytest.mark.parametrize("figures", [(0.1, 0.4), (0.02, 0.3, 0.9), (0.4, 0.5, 0.55, 0.6)])
def test_an_interval_does_not_depend_on_the_unit_or_on_which_share_is_counted(figures: tuple[float, ...]) -> None:
    """Doubled figures have doubled ends, up to the rounding of exp(log v ± reach), which is eps·|log|."""
    one, double = mean_of(figures, POSITIVE), mean_of([2 * figure for figure in figures], POSITIVE)
    assert (double.low, double.high) == pytest.approx((2 * one.low, 2 * one.high), rel=100 * EPS)
    share, rest = mean_of(figures, SHARE), mean_of([1 - figure for figure in figures], SHARE)
    assert (1 - rest.high, 1 - rest.low) == pytest.approx((share.low, share.high), rel=1e4 * EPS)


@pytest.mark.parametrize("figures", [(0.50001, 0.50002), (0.4999, 0.5, 0.5001)])
@pytest.mark.parametrize("within", [POSITIVE, SHARE])
def test_little_scatter_has_students_interval(figures: tuple[float, ...], within: Range) -> None:
    """The two differ by (reach/v)², the curvature of log v."""
    ranged, plain = mean_of(figures, within), mean_of(figures)
    assert ranged.high - ranged.value == pytest.approx(plain.reach, rel=2 * plain.reach / 0.5)
    assert ranged.value - ranged.low == pytest.approx(plain.reach, rel=2 * plain.reach / 0.5)


@pytest.mark.parametrize(("sigma", "seeds"), [(0.2, 2), (0.5, 3), (1.0, 3), (1.0, 5)])
def test_it_holds_the_mean_of_skewed_figures_more_often_than_students(sigma: float, seeds: int) -> None:
    draws = np.exp(sigma * np.random.default_rng(0).normal(size=(1000, seeds)))
    truth = math.exp(sigma**2 / 2)
    plain = np.mean([mean_of(figures).covers(truth) for figures in draws.tolist()])
    ranged = np.mean([mean_of(figures, POSITIVE).covers(truth) for figures in draws.tolist()])
    assert ranged >= plain
