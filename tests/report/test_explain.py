"""The parts of a prediction add up to it, and have the right dates."""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, strategies as st

from ntkexp.mistake import Mistake
from ntkexp.records.contributions import ContributionsByRule, write_contributions
from ntkexp.records.folder import RunFolder
from ntkexp.records.results import Result
from ntkexp.report.comparison import combined
from ntkexp.report.explain import explain, format_explanations, heading_of, worst_points
from ntkexp.report.loaded_run import load_run
from ntkexp.report.parts import OutputParts, half, halfway
from ntkexp.report.plots.examples import save
from ntkexp.report.run import load_tables, outputs_of, read_run
from ntkexp.report.sentence import (
    Likeness,
    exact_machines,
    format_errors,
    format_ladder,
    ladder_sentence,
    likeness,
)
from ntkexp.report.tables import format_text, table_of_frame
from ntkexp.text import aligned, short
from tests.report.synthetic import digits, regression, write_run


@pytest.mark.parametrize("kind", ["two classes", "ten classes", "regression"])
@pytest.mark.parametrize("split", ["train", "query", "test"])
def test_the_pieces_make_the_prediction(finished: dict[str, Path], kind: str, split: str) -> None:
    for found in explain(load_run(finished[kind]), split, [0, 3]):
        made = found.start + sum(part.added for part in found.parts) + found.no_example["decay"] + found.rest
        assert made == pytest.approx(found.prediction, rel=1e-12, abs=1e-12 * found.mass)
        assert abs(found.rest) <= 1e-12 * found.mass  # the secant is exact here
        sizes = [abs(part.added) for part in found.parts]
        assert sizes == sorted(sizes, reverse=True)
        assert len({part.example.index for part in found.parts}) == len(found.parts)


def test_the_sum_needs_no_row_of_the_ladder(finished: dict[str, Path]) -> None:
    whole = load_run(finished["regression"])
    bare, shrunk = replace(whole), replace(whole)
    for run in (bare, shrunk):  # a folder with fewer kernel machines
        vars(run)["predictions"] = whole.predictions.drop_sel(machine="secant")
    lost = xr.full_like(whole.parts("secant").isel(example=0, drop=True), -0.5)
    vars(shrunk)["contributions"] = whole.contributions.assign(decay=lost)
    (found,), (less,), (expected,) = (explain(run, "test", [0]) for run in (bare, shrunk, whole))
    assert (found.sum, found.rest, found.no_example["decay"]) == (expected.sum, expected.rest, 0.0)
    assert (less.sum, less.no_example["decay"]) == (expected.sum, -0.5)
    assert less.rest == pytest.approx(expected.rest + 0.5, rel=1e-12)


def test_the_worst_points_are_missed_most(finished: dict[str, Path]) -> None:
    run = load_run(finished["two classes"])
    missed = np.abs(run.predictions.sel(machine="f_T").to_numpy()[run.points["test"]] - run.data["test_targets"])[:, 0]
    assert worst_points(run, "test", 5) == np.argsort(-missed, kind="stable")[:5].tolist()


def test_the_worst_points_have_effects_if_any_point_has(finished: dict[str, Path]) -> None:
    run = load_run(finished["two classes"])
    place, order = run.points["test"], worst_points(run, "test", 25)
    effect = xr.full_like(run.parts("secant"), np.nan)
    effect[place.start + order[-1]] = 0.1
    vars(run)["contributions"] = run.contributions.assign(effect=effect)
    assert worst_points(run, "test", 5) == [order[-1]]
    assert worst_points(run, "query", 1)  # none has an effect there


def test_a_constant_kernel_is_dated_by_its_residuals(tmp_path: Path) -> None:
    """If every step is kept and the kernel is constant, the mass of an example follows its residual."""
    problem = regression((12, 5, 5), growth=0.0, steps=40, snapshots=tuple(range(41)))
    run = load_run(write_run(tmp_path / "run", problem))
    residuals = np.abs(run.kernels["output_gradient"].to_numpy()[:, :, 0])
    for i, found in enumerate(halfway(run, OutputParts(run.contributions, 0, 0))):
        gathered = np.concatenate([[0], np.cumsum((residuals[1:, i] + residuals[:-1, i]) / 2)])
        assert found == pytest.approx(np.interp(gathered[-1] / 2, gathered, np.arange(41)) / 40)


def test_snapshots_at_logarithmic_steps_date_nearly_as_well(tmp_path: Path) -> None:
    every = load_run(write_run(tmp_path / "every", digits(steps=60, snapshots=tuple(range(61)))))
    few = load_run(write_run(tmp_path / "few", digits(steps=60)))
    # eleven snapshots resolve a tenth of the path
    assert (
        np.nanmax(np.abs(np.subtract(*(halfway(run, OutputParts(run.contributions, 50, 0)) for run in (every, few)))))
        < 0.1
    )


def test_half_of_a_decay_is_its_half_life() -> None:
    times = np.linspace(0, 20, 20001)
    for start in (0.0, 7.0):
        # the trapezoidal rule is off by a part in 10⁷ here
        assert half(start + times, np.exp(-times)) == pytest.approx(np.log(2) / 20, rel=1e-5)


def seal(folder: Path) -> None:
    """Seal a run."""
    RunFolder(folder).finish([file.name for file in folder.iterdir() if file.name != "DONE.json"])


def test_runs_that_kept_no_gradients_are_not_dated(finished: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(finished["two classes"], tmp_path / "old")
    shutil.rmtree(copy / "kernels.zarr" / "output_gradient")
    seal(copy)
    (found,) = explain(load_run(copy), "query", [0])
    assert found.parts
    assert all(np.isnan(part.halfway) for part in found.parts)
    assert "–" in format_explanations([found], 3)


@pytest.mark.parametrize("kind", ["two classes", "ten classes"])
def test_the_predicted_class_is_that_of_the_outputs(finished: dict[str, Path], kind: str) -> None:
    run = load_run(finished[kind])
    outputs = outputs_of(run, "f_T")[run.points["query"]]
    classes = [str(name) for name in run.data["classes"]]
    verdicts = set()
    for number, row in enumerate(outputs):
        (found,) = explain(run, "query", [number])
        expected = classes[int(row.argmax() if len(row) > 1 else row[0] > 0)]
        true = classes[run.data["query_target"][number]]
        assert (found.predicted, found.point.name) == (expected, true)
        verdicts.add("right" in heading_of(found))
        assert ("right" in heading_of(found)) == (expected == true)
    assert True in verdicts


def test_the_table_lists_the_largest_parts_and_the_rest(finished: dict[str, Path]) -> None:
    (found,) = explain(load_run(finished["two classes"]), "query", [2])
    lines = format_explanations([found], 4).splitlines()
    verdict = "which is right" if found.predicted == found.point.name else f"but it is {found.point.name}"
    assert lines[0].startswith(f"query 2 (#{found.point.index}): predicted {found.predicted}, {verdict}; f = ")
    assert sum(line.startswith("#") for line in lines) == 4
    assert any(line.startswith("36 others") for line in lines)


@pytest.mark.parametrize("kind", ["two classes", "ten classes", "regression"])
def test_the_picture_is_the_same_each_time(finished: dict[str, Path], tmp_path: Path, kind: str) -> None:
    found = explain(load_run(finished[kind]), "query", [0, 1])
    for name in ("one.svg", "two.svg"):
        save(found, tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_outputs_that_were_read_keep_their_names(finished: dict[str, Path], tmp_path: Path) -> None:
    copy, outs = shutil.copytree(finished["ten classes"], tmp_path / "some"), (2, 7)
    whole = read_run(copy).parts("secant").to_numpy()
    read = whole[:, list(outs)]
    said = ContributionsByRule(read, decay=np.abs(read[..., 0]), half_by=np.abs(read))
    write_contributions(copy / "contributions.zarr", {"secant": said}, list(range(whole.shape[2])), outs)
    seal(copy)
    run = load_run(copy)
    assert run.contributions["contribution"].sel(out=7).dims == ("query", "example")
    for found in explain(run, "train", range(5)):
        ends = run.predictions.sel(machine="f_T").to_numpy()[found.number]
        assert found.out == max(outs, key=lambda out: ends[out])
        assert found.output == f"f for {run.data['classes'][found.out]}"
        parts = whole[found.number, found.out]
        assert found.no_example["decay"] == abs(parts[0])
        index = run.data["train_index"].tolist()
        for part in found.parts:
            assert part.added == parts[index.index(part.example.index)]
            assert part.halfway == abs(part.added)


@pytest.mark.parametrize(
    ("kind", "split", "number", "message"),
    [
        ("two classes", "query", 24, "points 0 to 23"),
        ("two classes", "quer", 0, "did you mean 'query'"),
        ("training only", "test", 0, "read at train"),
    ],
)
def test_points_that_do_not_exist_are_refused(
    finished: dict[str, Path], kind: str, split: str, number: int, message: str
) -> None:
    with pytest.raises(Mistake, match=message):
        explain(load_run(finished[kind]), split, [number])


def test_momentum_is_dated_by_the_second_pass(finished: dict[str, Path], tmp_path: Path) -> None:
    """Not by the kernel at one step. Without the second pass, as in old runs, there are no dates."""
    copy = shutil.copytree(finished["two classes"], tmp_path / "remembering")
    (copy / "retraced.csv").write_text("step\n")
    seal(copy)
    run = read_run(copy)
    assert np.isnan(halfway(run, OutputParts(run.contributions, 0, 0))).all()
    parts = read_run(copy).parts("secant").to_numpy()
    seen = np.linspace(0, 1, parts.size).reshape(parts.shape)
    by_rule = {"secant": ContributionsByRule(parts, half_by=seen)}
    write_contributions(copy / "contributions.zarr", by_rule, list(range(parts.shape[2])), range(parts.shape[1]))
    seal(copy)
    (found,) = explain(read_run(copy), "train", [2])
    place = {part.example.index: part.halfway for part in found.parts}
    np.testing.assert_array_equal([place[k] for k in range(parts.shape[2])], seen[2, 0])


# The sentence agrees with the numbers in every case.


def on(split: str, errors: Mapping[str, float | None], floor: float = 1e-13, note: str = "") -> list[Result]:
    return [Result(split, name, "", error, floor, error, note=note) for name, error in errors.items()]


EXACT = "The secant kernel machine reproduces the trained network to rounding"
UNMOVED = "Training moved the network by no more than rounding, so there is nothing to reproduce."


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        (
            {"secant": 4e-15, "left": 0.12, "frozen_start": 0.3},
            f"{EXACT} (4e-15); the textbook sum misses by 12 %, the frozen kernel by 30 %.",
        ),
        ({"secant": 4e-15}, f"{EXACT} (4e-15)."),
        (
            {"left": 0.12, "frozen_start": 0.3},
            "The textbook sum misses the trained network by 12 %, the frozen kernel by 30 %.",
        ),
        (
            {"secant": 2e-9, "left": 0.12},
            "The secant kernel machine misses the trained network by 2e-9, the textbook sum by 12 %; "
            "rounding explains no more than 1e-12 of the secant's miss.",
        ),
        (
            {"secant": 4e-15, "left": 3e-14, "frozen_start": 40.0},
            "The secant kernel machine and the textbook sum reproduce the trained network to rounding (4e-15, 3e-14); "
            "the frozen kernel misses by 40 times what was learned.",
        ),
        (
            {"secant": 4e-15, "left": math.inf, "frozen_start": None},
            f"{EXACT} (4e-15); the textbook sum is not finite.",
        ),
        ({"secant": math.nan, "left": math.nan}, "The secant kernel machine and the textbook sum are not finite."),
        ({}, "No kernel machine was compared with the trained network."),
    ],
)
def test_a_sentence_states_the_errors(errors: dict[str, float | None], expected: str) -> None:
    assert ladder_sentence(on("query", errors)) == expected


@pytest.mark.parametrize(
    ("ladder", "expected"),
    [
        (
            on("query", {"secant": math.nan, "left": math.nan}, floor=math.nan),
            "The trained network is not finite, so no kernel machine can be compared with it.",
        ),
        ([Result("query", "secant", max_error=0.0)], UNMOVED),
        (on("query", {"secant": 0.2}, floor=3.0), UNMOVED),
        (
            [Result("query", "left", note="path.rule lists no rule")],
            "No kernel machine was compared with the trained network: path.rule lists no rule.",
        ),
        (on("query", {"secant": 3e-6}, floor=2e-5), f"{EXACT} (3e-6)."),  # single precision
    ],
)
def test_a_sentence_accounts_for_the_floor(ladder: list[Result], expected: str) -> None:
    assert ladder_sentence(ladder) == expected


GOOD = {"secant": 4e-15, "left": 0.1}


SECANT = "the secant kernel machine reproduces the trained network to rounding"


@pytest.mark.parametrize(
    ("ladder", "expected"),
    [
        (
            on("train", GOOD) + on("test", {"secant": 5e-15, "left": 0.05}),
            f"On both splits {SECANT} (5e-15); the textbook sum misses by up to 10 %.",
        ),
        (
            on("train", GOOD) + on("query", GOOD | {"secant": math.nan}) + on("test", GOOD),
            f"On train and test {SECANT} (4e-15); on all 3 splits the textbook sum misses by up to 10 %; "
            "the secant kernel machine is not finite on query.",
        ),
        (
            on("train", GOOD) + on("test", {"left": 0.2}),
            f"On train {SECANT} (4e-15); on both splits the textbook sum misses by up to 20 %.",
        ),
        (
            on("train", {"secant": 1e-3}, floor=1e-2) + on("test", {"secant": 1e-9}, floor=1e-13),
            "On both splits the secant kernel machine misses the trained network by up to 0.1 %; "
            "rounding explains no more than 1e-12 of the secant's miss on test (1e-9).",
        ),
        (
            on("train", GOOD, note="at 22 of 128 points") + on("test", GOOD | {"frozen_start": 0.3}),
            f"On both splits, on 1 of them at 22 of 128 points, {SECANT} (4e-15); "
            "the textbook sum misses by up to 10 %; on test the frozen kernel misses by 30 %.",
        ),
        (
            on("query", {"secant": 4e-15}, note="at 22 of 128 points") + on("query", {"frozen_start": 0.3}),
            f"At 22 of 128 points {SECANT} (4e-15); at all points the frozen kernel misses by 30 %.",
        ),
        (
            on("train", GOOD) + on("test", dict.fromkeys(GOOD, math.nan), floor=math.nan),
            f"On train {SECANT} (4e-15); the textbook sum misses by 10 %; the trained network is not finite on test.",
        ),
        (
            on("train", {"secant": None}) + on("test", {"secant": 4e-15, "rbf_identity": 1e-15}),
            f"On test {SECANT} (4e-15).",
        ),
    ],
)
def test_a_sentence_covers_every_split(ladder: list[Result], expected: str) -> None:
    assert ladder_sentence(ladder) == expected


ROWS = st.builds(
    Result,
    st.sampled_from(["train", "query", "test"]),
    st.sampled_from(["secant", "left", "rbf_identity"]),
    relative_error=st.sampled_from([None, 0.0, 4e-15, 3e-4, 0.3, math.inf, math.nan]),
    floor=st.sampled_from([1e-13, 1e-3, 5.0, math.nan]),
    max_error=st.sampled_from([0.0, math.nan]),
)


@given(st.lists(ROWS, max_size=9, unique_by=lambda row: (row.split, row.machine)))
def test_the_sentence_agrees_with_the_table(ladder: list[Result]) -> None:
    """The sentence calls a machine exact on every split only if all its rows are exact."""
    said, splits = ladder_sentence(ladder), {row.split for row in ladder}
    rows = {row.split: likeness(row) for row in ladder if row.machine == "secant"}
    all_exact = bool(rows) and set(rows.values()) == {Likeness.EXACT} and rows.keys() == splits
    everywhere = {1: "The", 2: "On both splits the", 3: "On all 3 splits the"}.get(len(splits), "nowhere")
    claim = re.match(f"{everywhere} secant kernel machine( and the textbook sum)? reproduces? the trained", said)
    assert bool(claim) == all_exact
    assert Likeness.BROKEN not in rows.values() or "not finite" in said


# Tables are aligned.


WORD = st.text("abc μ", min_size=1, max_size=9).map(str.strip).filter(bool)


@given(st.lists(st.tuples(WORD, WORD), max_size=5))
def test_columns_begin_and_end_together(rows: list[tuple[str, str]]) -> None:
    lines = aligned(("name", "number"), rows, (False, True)).split("\n")
    assert len({len(line) for line in lines}) == 1
    for line, (name, number) in zip(lines[1:], rows, strict=True):
        assert line.startswith(name)
        assert line.endswith("  " + number)


@given(st.floats(-1e300, 1e300), st.floats(1e-3, 9999))
def test_short_numbers_are_near(number: float, ordinary: float) -> None:
    # half a unit of the only digit is at most 50 % of 1; a number below the least normal one has no digits to keep
    assert float(short(number)) == pytest.approx(number, rel=0.5, abs=3e-308)
    assert float(short(ordinary)) == pytest.approx(ordinary, rel=0.0051)  # three digits


def test_the_table_of_kernel_machines_has_notes_below_and_seconds_if_known() -> None:
    errors = {"secant": 4e-15, "left": 0.12}
    rows = [
        Result(split, name, "n=1" if name == "secant" else "", errors[name], agreement=1.0)
        for split, name in product(("train", "query", "test"), errors)
    ]
    rows += [Result(split, "nngp", note="no limit") for split in ("train", "query", "test")]
    assert format_ladder(rows).split("\n") == [
        "machine  detail  train  query   test  agreement (query)  R²",
        "secant   n=1     4e-15  4e-15  4e-15                  1   –",
        "left              0.12   0.12   0.12                  1   –",
        "",
        "nngp: no limit",
    ]
    ends = [line.split()[-1] for line in format_ladder(rows, {"secant": 1.5}).split("\n")[:3]]
    assert ends == ["seconds", "1.5", "–"]


def test_the_short_table_fits_80_columns_and_names_what_is_missing() -> None:
    errors = {"secant": 4e-15, "left": 0.00123, "fixed_coefficients": 0.0123, "rbf_identity": 1e-15}
    rows = [
        Result(split, name, "detail", error, 1e-13, agreement=0.123)
        for split, (name, error) in product(("train", "query", "test"), errors.items())
    ]
    rows += [Result(split, name, note="no") for split in ("train", "query") for name in ("nngp", "gauss")]
    lines = format_errors(rows).split("\n")
    assert lines[0].split() == ["kernel", "machine", "train", "query", "test", "agreement", "(query)"]
    assert [line.split()[0] for line in lines[1:5]] == list(errors)
    assert lines[5:] == ["", "not compared: nngp, gauss"]
    assert max(map(len, lines)) <= 80
    assert exact_machines(rows) == ["secant", "rbf_identity"]


def test_machines_of_one_name_are_told_apart_in_the_short_table() -> None:
    rows = [Result("test", "rbf_regression", detail, 0.1) for detail in ("h=1", "h=2")]
    assert [line.split("  ")[0] for line in format_errors(rows).split("\n")[1:]] == [
        "rbf_regression, h=1",
        "rbf_regression, h=2",
    ]


@pytest.mark.parametrize("rows", [[], [Result("train", "secant", relative_error=math.nan)]])
def test_a_ladder_with_nothing_in_it_is_still_a_table(rows: list[Result]) -> None:
    assert len(format_ladder(rows).split("\n")) == 1 + len(rows)


def test_runs_side_by_side_name_what_differs(finished: dict[str, Path]) -> None:
    table = combined([load_tables(finished[name]) for name in ("two classes", "one step", "no queries")])
    assert list(table["steps"]) == [60, 1, 60]
    assert list(table["split"]) == ["query", "query", "test"]
    assert "seed" not in table
    assert "nngp" not in table
    assert (table["secant"] < 1e-12).all()
    assert len(format_text(table_of_frame(table)).split("\n")) == 4


def test_one_run_alone_differs_in_nothing(finished: dict[str, Path]) -> None:
    table = combined([load_tables(finished["two classes"])])
    assert list(table.columns)[:3] == ["run", "split", "secant"]
