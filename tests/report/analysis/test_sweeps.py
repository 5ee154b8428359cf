"""The tables of a sweep: a row for each run and each point, with the same bytes each time and in every folder."""

from __future__ import annotations

import shutil
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import Json, read_sealed, sealed_text
from ntkexp.records.sweep import DEFAULT_MARGIN, Expected, read_sweep
from ntkexp.report.analysis.estimate import compare as compare_estimates, mean_of
from ntkexp.report.analysis.power_law import power_law
from ntkexp.report.analysis.quantities import MEASURES, describe, quantities
from ntkexp.report.analysis.tables import Analysis, analyse, compare, write_tables
from ntkexp.report.loaded_run import load_run
from ntkexp.report.run import load_tables
from tests.report.analysis.trials import DESIGNS, SWEEPS, Laws, estimates, laws
from tests.report.synthetic import WIDTHS, law, write_small_run, write_sweep


def analysed(path: Path) -> Analysis:
    sweep = read_sweep(path)
    return analyse(sweep, {place.folder: load_tables(place.folder) for place in sweep.runs if place.folder.is_dir()})


def test_a_row_a_run_and_a_row_a_point(tmp_path: Path) -> None:
    runs, points, fits = (pd.read_csv(file) for file in write_tables(write_sweep(tmp_path)))
    assert runs["model.width"].tolist() == [width for width in WIDTHS for _ in range(3)]
    assert runs["seed"].tolist() == [0, 1, 2] * len(WIDTHS)
    drifts = [law(width, seed) for width in WIDTHS for seed in range(3)]
    assert runs["kernel_change"].tolist() == pytest.approx(drifts, rel=1e-15)  # pandas reads to the last place but one
    assert points["model.width"].tolist() == list(WIDTHS)
    for k, width in enumerate(WIDTHS):
        here = [law(width, seed) for seed in range(3)]
        assert points["kernel_change.mean"][k] == pytest.approx(np.mean(here))
        assert points["kernel_change.sd"][k] == pytest.approx(np.std(here, ddof=1))
        assert points["kernel_change.count"][k] == 3
        # Student's t of two degrees of freedom, on the scale of the logarithm
        reach = 4.302652729911275 * np.std(here, ddof=1) / 3**0.5 / np.mean(here)
        assert points["kernel_change.high"][k] == pytest.approx(np.mean(here) * np.exp(reach))
    assert fits["quantity"].tolist() == ["kernel_change", "frozen_start.test"]
    assert fits["low"][0] < -0.5 < fits["high"][0]
    assert (fits["verdict"][0], fits["from"][0], fits["to"][0], fits["runs"][0]) == ("agrees", 32, 256, 12)


def test_the_same_bytes_each_time_in_every_folder_and_order(tmp_path: Path) -> None:
    path = write_sweep(tmp_path / "one")
    first = [file.read_bytes() for file in write_tables(path)]
    record = read_sealed(path, path.name)
    copied = shutil.copytree(tmp_path / "one", tmp_path / "two") / "sweeps" / path.name
    path.write_text(sealed_text(record | {"runs": record["runs"][::-1]}, path.name))
    assert [file.read_bytes() for file in write_tables(path)] == first
    shutil.rmtree(tmp_path / "one")
    assert [file.read_bytes() for file in write_tables(copied)] == first


def test_failed_and_damaged_runs_keep_their_rows_and_are_not_counted(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, failed=[1])
    (next((tmp_path / "runs").glob("*-width0002")) / "results.csv").write_text("nonsense")
    runs, points, _ = (pd.read_csv(file) for file in write_tables(path))
    assert len(runs) == 3 * len(WIDTHS)
    assert runs["kernel_change"].isna().tolist()[:3] == [False, True, True]
    assert (runs["state"][1], runs["reason"][1]) == ("failed", "model.width is too large")
    assert points["kernel_change.count"].tolist() == [1, 3, 3, 3]
    assert np.isnan(points["kernel_change.low"][0])


def test_a_law_for_each_choice_of_the_other_axes(tmp_path: Path) -> None:
    found = analysed(write_sweep(tmp_path, axes={"model.activation": ["relu", "tanh"], "model.width": WIDTHS}))
    assert [law.others for law in found.laws] == [{"model.activation": kind} for kind in ("relu", "tanh")] * 2
    assert all(law.law is not None for law in found.laws)


def test_what_cannot_be_fitted_says_why(tmp_path: Path) -> None:
    path = write_sweep(tmp_path, axes={"model.activation": ["relu", "tanh"]})
    told = read_sealed(path, path.name)
    wanted = [
        ("kernel_change", "model.activation"),
        ("kernel_change", "model.depth"),
        ("gauss.test", "model.activation"),
    ]
    path.write_text(
        sealed_text(told | {"fits": [{"quantity": q, "axis": a, "exponent": None} for q, a in wanted]}, path.name)
    )
    reasons = ["not an axis of numbers", "model.depth is not an axis", "not an axis of numbers"]
    for found, reason in zip(analysed(path).laws, reasons, strict=True):
        assert found.law is None
        assert reason in found.reason


UNSEALED = '{"name": "width", "axes": {}, "runs": []}'
FIT: dict[str, Json] = {"quantity": "kernel_change", "axis": "model.width", "exponent": -1.0}
NONE: tuple[dict[str, Json], ...] = (
    {},
    {"name": 1, "axes": {"a": [1]}, "runs": [{"folder": "x"}]},
    {"name": "", "axes": {}, "runs": [], "fits": [FIT | {"margin": -1}]},
    {"name": "", "axes": {}, "runs": [], "fits": [FIT | {"bound": True}]},
)


@pytest.mark.parametrize("text", ["[]", "{}", "{", UNSEALED, *(sealed_text(told, "broken.json") for told in NONE)])
def test_a_damaged_sweep_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "broken.json").write_text(text)
    with pytest.raises(Mistake, match=rf"^[^\n]*{tmp_path / 'broken.json'}[^\n]*$"):
        read_sweep(tmp_path / "broken.json")


def test_pairs_cancel_what_seeds_share(tmp_path: Path) -> None:
    """If the kernel change doubles at every point and seed, the ratio is exactly two."""
    first = analysed(write_sweep(tmp_path, "width"))
    second = analysed(write_sweep(tmp_path, "doubled", factor=2.0))
    table = compare(first, second).set_index("quantity").loc["kernel_change"]
    assert table["pairs"].tolist() == [3] * len(WIDTHS) + [3 * len(WIDTHS)]
    for column in ("ratio", "ratio_low", "ratio_high"):
        np.testing.assert_allclose(table[column], 2.0, rtol=1e-12)  # logarithms, rounded
    own = [float(np.mean([law(width, seed) for width in WIDTHS])) for seed in range(3)]
    assert table["difference_high"].iloc[-1] == pytest.approx(mean_of(own).high)


def test_ratios_that_no_float_can_hold_end_no_comparison(tmp_path: Path) -> None:
    """The logarithms of the numbers are known. Their ratios are 0 or infinite."""
    first, second = analysed(write_sweep(tmp_path, "one")), analysed(write_sweep(tmp_path, "two"))
    first.runs["loss"], second.runs["loss"] = 1e200, 1e-200
    for pair, ratio in (((first, second), 0.0), ((second, first), np.inf)):
        table = compare(*pair).set_index("quantity").loc["loss"]
        assert (table[["ratio", "ratio_low", "ratio_high"]].to_numpy() == ratio).all()


def test_a_seed_without_a_pair_is_left_out_of_the_mean_over_points(tmp_path: Path) -> None:
    """The ratio differs between points, but not between seeds."""
    path, other = write_sweep(tmp_path, "width", failed=[1]), write_sweep(tmp_path, "wider")
    first, second = analysed(path), analysed(other)
    second.runs["kernel_change"] *= second.runs["model.width"]
    last = compare(first, second).set_index("quantity").loc["kernel_change"].iloc[-1]
    assert last["pairs"] == 2 * len(WIDTHS)
    middle = float(np.exp(np.mean(np.log(WIDTHS))))
    assert [last["ratio_low"], last["ratio_high"]] == pytest.approx([middle, middle], rel=1e-12)  # logarithms, rounded


def test_sweeps_along_different_axes_are_not_compared(tmp_path: Path) -> None:
    first = analysed(write_sweep(tmp_path, "width"))
    with pytest.raises(Mistake, match="same axes"):
        compare(first, analysed(write_sweep(tmp_path, "kind", axes={"model.activation": ["relu"]})))
    with pytest.raises(Mistake, match="no seed"):
        compare(first, analysed(write_sweep(tmp_path, "later", seeds=[7, 8])))


def test_every_number_of_a_run_has_a_name_in_words(finished: dict[str, Path]) -> None:
    found = quantities(load_run(finished["two classes"]))
    assert {"kernel_change", "loss", "weights_moved", "secant.train", "left.test"} <= found.keys()
    assert all(describe(name) for name in found)
    with pytest.raises(Mistake, match="did you mean 'kernel_change'"):
        describe("kernel_chnage")
    with pytest.raises(Mistake) as mistake:
        describe("nothing")
    assert all(name in str(mistake.value) for name in MEASURES)


def test_the_last_number_counts_and_a_diverged_run_has_none(finished: dict[str, Path], tmp_path: Path) -> None:
    assert quantities(load_tables(write_small_run(tmp_path / "run", 64, 0, 0.25)))["kernel_change"] == 0.25
    assert quantities(load_run(finished["diverged"])) == {}


# Correct intervals and false verdicts in 1,000 simulated sweeps. The share of correct 95 % intervals must be within
# 2 %, three standard deviations of a binomial.


SEEDS = (2, 3, 5)
ALONE = ("one point left", 2)  # only one seed has a slope: there is no interval
CASES = [case for case in product(DESIGNS, SEEDS) if case != ALONE]
CHANCE = 3 * np.sqrt(0.05 * 0.95 / SWEEPS)  # three standard deviations of a rate of 5 %


@cache
def tried(name: str, seeds: int) -> Laws:
    return laws(DESIGNS[name], seeds)


@pytest.mark.sample(8)
@pytest.mark.parametrize(("name", "seeds"), CASES)
def test_intervals_hold_the_exponent_as_often_as_they_say(name: str, seeds: int) -> None:
    assert 0.93 <= tried(name, seeds).coverage() <= 0.975


@pytest.mark.sample(10)
@pytest.mark.parametrize(("name", "seeds"), CASES)
def test_a_straight_law_is_seldom_called_curved(name: str, seeds: int) -> None:
    assert tried(name, seeds).bends() <= 0.05 + CHANCE


@pytest.mark.sample(16)
@pytest.mark.parametrize(("name", "seeds"), CASES)
@pytest.mark.parametrize("bound", [None, "upper"])
def test_verdicts_are_seldom_false(name: str, seeds: int, bound: None) -> None:
    """At the edge of the margin each verdict is false. Elsewhere false verdicts are rarer."""
    found, edge = tried(name, seeds), Expected(-DEFAULT_MARGIN, bound=bound)
    much, little = found.words(edge), found.words(edge, 0.01)
    assert max(much["agrees"], much["larger"], little["agrees"], little["larger"]) <= 0.05
    assert little["undecided"] >= 0.9


@pytest.mark.parametrize(("name", "seeds"), CASES)
def test_a_wrong_exponent_is_not_agreed_with(name: str, seeds: int) -> None:
    """Neither −1 for −½ nor −½ for −1."""
    assert tried(name, seeds).words(Expected(0.5))["agrees"] <= 0.01
    assert tried(name, seeds).words(Expected(-0.5, bound="upper"))["agrees"] <= 0.01


def test_what_is_true_is_found() -> None:
    found = tried("complete", 5)
    assert found.words(Expected(0.0), 0.5)["agrees"] > 0.95
    assert found.words(Expected(-0.5))["larger"] > 0.95
    assert found.words(Expected(0.5))["smaller"] > 0.95
    assert found.bends(0.3) > 0.95


def test_one_seed_that_can_be_asked_leaves_everything_undecided() -> None:
    assert tried(*ALONE).words(Expected(0.0))["undecided"] == 1


@pytest.mark.parametrize("value", [0.0, 0.06, 0.2])
def test_the_recommended_number_of_seeds_decides(value: float) -> None:
    """They decide at least 80 % of the trials with this value and spread. Half that number does not."""
    (first,) = estimates(np.array([[value - 0.1], [value + 0.1], [value - 0.1], [value + 0.1]]))
    more = compare_estimates(first, Expected(0.0)).more
    assert more is not None
    spread, total = first.error * 2, 4 + more
    decided = []
    for seeds in (total, max(total // 2, 2)):
        drawn = value + spread * np.random.default_rng(seeds).normal(size=(seeds, SWEEPS))
        decided.append(np.mean([compare_estimates(law, Expected(0.0)).where != "across" for law in estimates(drawn)]))
    assert decided[0] >= 0.8 - CHANCE
    assert decided[1] < 0.75


def test_an_edge_case_has_no_recommended_number_of_seeds() -> None:
    (edge,) = estimates(DEFAULT_MARGIN + np.array([[-1.0], [1.0], [0.001]]))
    assert compare_estimates(edge, Expected(0.0)).more is None


@pytest.mark.parametrize("name", ["a point missing", "a seed a run", "seeds alone at one width"])
def test_a_thousand_sweeps_at_once_are_a_thousand_power_laws(name: str) -> None:
    x, which = DESIGNS[name].runs(3)
    scatter = DESIGNS[name].scatter(np.random.default_rng([3, 11]), x, which, 2)
    found = laws(DESIGNS[name], 3, sweeps=2)
    for y, exponent, curvature in zip(np.exp(scatter.T), found.exponents, found.curvatures, strict=True):
        law = power_law(x, y, which)
        # the least squares of a few numbers, rounded
        assert (law.exponent.low, law.exponent.high) == pytest.approx((exponent.low, exponent.high), rel=1e-9)
        assert law.curvature.low == pytest.approx(curvature.low, rel=1e-9)
