"""What is said of laws, of tables made to contradict it: every row counts, and margin, interval and seeds are named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import Json, read_sealed, sealed_text
from ntkexp.records.data import write_data
from ntkexp.records.folder import RunFolder
from ntkexp.records.kernels import create_kernels, write_snapshot
from ntkexp.records.sweep import Expected, Fit, read_sweep
from ntkexp.report.analysis.estimate import power_law
from ntkexp.report.analysis.laws import Fitted, dependence, law_in_words, nearest_first, spread, summary
from ntkexp.report.analysis.quantities import START_VARIANCE
from ntkexp.report.analysis.tables import Analysis, analyse, draws
from ntkexp.report.run import Run, load_tables
from tests.report.analysis.trials import (
    AMOUNTS,
    WIDTHS,
    exponents,
    farthest_last,
    fluctuating,
    from_the_mean,
    variances,
)
from tests.report.synthetic import WIDTHS as SWEEP_WIDTHS
from tests.report.synthetic import write_sweep

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
            "95 % over 2 seeds); theory −1, margin 0.1: undecided, 22 more seeds would probably settle it",
        ),
        (law([-0.5, -1.5, -1.0, -0.7]), "undecided, and more seeds would not settle it"),
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


# Power laws with known exponents are found, and their intervals hold them as often as they say.


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


# The variance of the first kernel over seeds: the textbook's, with intervals that hold its exponent.


def kernel(width: int, seed: int) -> Array:
    """K_0 of three points with two training examples; its variance falls as 1/width."""
    chance = np.random.default_rng([width, seed]).normal(size=(3, 1, 2, 1))
    return np.asarray(1 + chance / np.sqrt(width))


def swept(outputs: Path, *, seeds: int = 4, own_data: bool = False) -> Analysis:
    """A sweep whose runs kept their first kernel."""
    path = write_sweep(outputs, seeds=range(seeds))
    fits: list[Json] = [{"quantity": START_VARIANCE, "axis": "model.width", "exponent": -1.0, "margin": 5.0}]
    path.write_text(sealed_text(read_sealed(path, path.name) | {"fits": fits}, path.name))
    sweep = read_sweep(path)
    for place in sweep.runs:
        create_kernels(place.folder / "kernels.zarr", 3, 1, 2, 1)
        start = kernel(int(str(place.axes["model.width"])), place.seed)
        write_snapshot(place.folder / "kernels.zarr", 0, 0, start, np.zeros((2, 1)))
        write_data(place.folder / "data.npz", {"train_inputs": np.full((2, 3), place.seed if own_data else 0)})
        names = ["config.json", "metrics.csv", "results.csv", "data.npz", "kernels.zarr"]
        RunFolder(place.folder).finish(names, outcome="trained for 10 steps", diverged=False)
    return analyse(sweep, {place.folder: load_tables(place.folder) for place in sweep.runs})


def test_it_is_the_variance_over_seeds_among_the_training_examples(tmp_path: Path) -> None:
    found = swept(tmp_path)
    for k, width in enumerate(SWEEP_WIDTHS):
        drawn = np.stack([kernel(width, seed)[:2] for seed in range(4)])
        oracle = drawn.var(axis=0, ddof=1).sum() / (drawn.mean(axis=0) ** 2).sum()
        assert found.points[f"{START_VARIANCE}.mean"][k] == pytest.approx(oracle, rel=1e-12)
        assert found.points[f"{START_VARIANCE}.high"].isna().all()  # a mean of three squares
    numbers = found.runs.groupby("seed")[START_VARIANCE].count().sort_values().tolist()
    assert numbers == [
        0,
        len(SWEEP_WIDTHS),
        len(SWEEP_WIDTHS),
        len(SWEEP_WIDTHS),
    ]  # one seed begins, the same at every width
    (law,) = found.laws
    assert law.law is not None
    assert (law.law.runs, law.law.seeds, law.law.units, law.law.left_out) == (4 * len(SWEEP_WIDTHS), 4, 3, 0)
    assert law.law.exponent.covers(-1.0)
    assert law.comparison is not None


def test_kernels_of_different_data_are_not_compared(tmp_path: Path) -> None:
    (law,) = swept(tmp_path, own_data=True).laws
    assert law.law is None
    assert "data.seed=0" in law.reason


def test_two_seeds_have_one_number_in_common_and_no_interval(tmp_path: Path) -> None:
    found = swept(tmp_path, seeds=2)
    (law,) = found.laws
    assert law.law is not None
    assert np.isfinite(law.law.exponent.value)
    assert not law.law.exponent.known
    assert not law.law.curvature.known
    assert found.points[f"{START_VARIANCE}.high"].isna().all()


def test_a_damaged_kernel_has_no_say(tmp_path: Path) -> None:
    found = swept(tmp_path)
    sweep = found.sweep
    runs = {place.folder: load_tables(place.folder) for place in sweep.runs}  # of large files, it checks the sizes
    place = sweep.runs[0].folder
    (chunk,) = (place / "kernels.zarr" / "tangent").rglob("c/0/0/0/0/0")
    chunk.write_bytes(chunk.read_bytes()[:-1] + b"x")
    again = analyse(sweep, runs)
    assert again.runs[START_VARIANCE].isna().sum() == 1 + len(SWEEP_WIDTHS)  # and a seed at each width that begins
    assert np.isnan(again.runs[START_VARIANCE][0])
    (law,) = again.laws
    assert law.law is not None
    assert law.law.left_out == 1


@pytest.mark.sample(16)
@pytest.mark.parametrize("seeds", [3, 5])
@pytest.mark.parametrize("modes", [1, 4, 30])
@pytest.mark.parametrize("shared", [0.0, 0.5])
@pytest.mark.parametrize("amounts", AMOUNTS)
def test_intervals_hold_the_exponent_as_often_as_they_say(seeds: int, modes: int, shared: float, amounts: str) -> None:
    """However many modes of the kernel vary, whether or not a seed's kernels resemble each other along the axis, and
    however much more some seeds vary than others."""
    found = variances(fluctuating(seeds, modes, shared, amounts))
    held = np.mean([law.widened(dependence(seeds)).covers(-1.0) is True for law in found])
    assert 0.93 <= held <= 0.995  # of 1000 sweeps, so that 0.94 may look like 0.93


@pytest.mark.parametrize("seeds", [3, 4, 5])
def test_distances_from_the_mean_of_all_would_not(seeds: int) -> None:
    """A seed that is far off moves the mean, and so every distance from it: the law above has teeth."""
    found = exponents(from_the_mean(fluctuating(seeds, 30, 0.0, "one far")))
    as_if_alike = ((seeds - 1) / (seeds - 2)) ** 0.5
    assert np.mean([law.widened(as_if_alike).covers(-1.0) is True for law in found]) < 0.91


@pytest.mark.parametrize("amounts", AMOUNTS)
def test_seeds_are_ordered_as_in_these_trials(amounts: str) -> None:
    kernels = fluctuating(5, 4, 0.0, amounts)
    for sweep in range(20):
        places = np.moveaxis(kernels[..., sweep], 1, 0)  # [place, seed, mode]
        squares = ((places[:, :, None] - places[:, None]) ** 2).sum(3)
        found = nearest_first([(range(5), each) for each in squares])
        expected = farthest_last(kernels)[:, sweep].tolist()
        assert {*found[:2]} == {*expected[:2]}  # of two, both are as far from their mean
        assert found[2:] == expected[2:]


def test_numbers_are_distances_from_the_mean_of_those_before() -> None:
    kernels = list(np.random.default_rng(0).normal(1.0, 0.1, size=(4, 5)))
    size = (np.mean(kernels, axis=0) ** 2).sum()
    found = spread(kernels)
    expected = [k / (k + 1) * ((kernels[k] - np.mean(kernels[:k], axis=0)) ** 2).sum() / size for k in (1, 2, 3)]
    assert found == pytest.approx(expected)
    assert np.mean(found) == pytest.approx(np.var(kernels, axis=0, ddof=1).sum() / size)
    assert np.mean(spread(kernels[::-1])) == pytest.approx(np.mean(found))
