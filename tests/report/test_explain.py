"""A prediction taken apart adds up again, and its parts are dated right."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from ntkexp.mistake import Mistake
from ntkexp.records.contributions import ContributionsByRule, write_contributions
from ntkexp.records.folder import RunFolder
from ntkexp.report.examples import half, halfway
from ntkexp.report.explain import explain, format_explanations, worst
from ntkexp.report.plots.examples import save
from ntkexp.report.run import Run, load_run, read_run
from tests.report.synthetic import digits, regression, write_run


@pytest.mark.parametrize("kind", ["two classes", "ten classes", "regression"])
@pytest.mark.parametrize("split", ["train", "probe", "test"])
def test_the_pieces_make_the_prediction(finished: dict[str, Path], kind: str, split: str) -> None:
    for found in explain(load_run(finished[kind]), split, [0, 3]):
        made = found.start + sum(part.added for part in found.parts) + found.decay + found.rest
        assert made == pytest.approx(found.prediction, rel=1e-12, abs=1e-12 * found.mass)
        assert abs(found.rest) <= 1e-12 * found.mass  # the secant is exact here
        sizes = [abs(part.added) for part in found.parts]
        assert sizes == sorted(sizes, reverse=True)
        assert len({part.example.index for part in found.parts}) == len(found.parts)


def test_the_sum_needs_no_row_of_the_ladder(finished: dict[str, Path]) -> None:
    whole = load_run(finished["regression"])
    bare, shrunk = replace(whole), replace(whole)
    for run in (bare, shrunk):  # as if read from a folder whose ladder was another
        vars(run)["predictions"] = whole.predictions.drop_sel(machine="secant")
    lost = xr.full_like(whole.parts("secant").isel(example=0, drop=True), -0.5)
    vars(shrunk)["contributions"] = whole.contributions.assign(decay=lost)
    (found,), (less,), (expected,) = (explain(run, "test", [0]) for run in (bare, shrunk, whole))
    assert (found.sum, found.rest, found.decay) == (expected.sum, expected.rest, 0.0)
    assert (less.sum, less.decay) == (expected.sum, -0.5)
    assert less.rest == pytest.approx(expected.rest + 0.5, rel=1e-12)


def test_the_worst_points_are_missed_most(finished: dict[str, Path]) -> None:
    run = load_run(finished["two classes"])
    missed = np.abs(run.predictions.sel(machine="f_T").to_numpy()[run.points["test"]] - run.data["test_targets"])[:, 0]
    assert worst(run, "test", 5) == np.argsort(-missed, kind="stable")[:5].tolist()


def test_the_worst_points_are_those_with_effects_where_there_are_any(finished: dict[str, Path]) -> None:
    run = load_run(finished["two classes"])
    place, order = run.points["test"], worst(run, "test", 25)
    effect = xr.full_like(run.parts("secant"), np.nan)
    effect[place.start + order[-1]] = 0.1
    vars(run)["contributions"] = run.contributions.assign(effect=effect)
    assert worst(run, "test", 5) == [order[-1]]
    assert worst(run, "probe", 1)  # none has an effect there


def test_a_constant_kernel_is_dated_by_its_residuals(tmp_path: Path) -> None:
    """Every step kept, and a kernel that learns nothing: an example's mass follows its residual."""
    problem = regression((12, 5, 5), growth=0.0, steps=40, snapshots=tuple(range(41)))
    run = load_run(write_run(tmp_path / "run", problem))
    residuals = np.abs(run.kernels["output_gradient"].to_numpy()[:, :, 0])
    for i, found in enumerate(halfway(run, "secant", 0, 0)):
        gathered = np.concatenate([[0], np.cumsum((residuals[1:, i] + residuals[:-1, i]) / 2)])
        assert found == pytest.approx(np.interp(gathered[-1] / 2, gathered, np.arange(41)) / 40)


def test_snapshots_at_logarithmic_steps_date_nearly_as_well(tmp_path: Path) -> None:
    every = load_run(write_run(tmp_path / "every", digits(steps=60, snapshots=tuple(range(61)))))
    few = load_run(write_run(tmp_path / "few", digits(steps=60)))
    # a tenth of the path: what eleven snapshots can tell
    assert np.nanmax(np.abs(halfway(every, "secant", 50, 0) - halfway(few, "secant", 50, 0))) < 0.1


def test_half_of_a_decay_is_its_half_life() -> None:
    times = np.linspace(0, 20, 20001)
    # the trapezoidal rule is off by a part in 10⁷ here
    assert half(times, np.exp(-times)) == pytest.approx(np.log(2) / 20, rel=1e-5)


def seal(folder: Path) -> None:
    """Declare a run finished as it is now."""
    RunFolder(folder).finish([file.name for file in folder.iterdir() if file.name != "DONE.json"])


def test_runs_that_kept_no_gradients_are_not_dated(finished: dict[str, Path], tmp_path: Path) -> None:
    copy = shutil.copytree(finished["two classes"], tmp_path / "old")
    shutil.rmtree(copy / "kernels.zarr" / "output_gradient")
    seal(copy)
    (found,) = explain(load_run(copy), "probe", [0])
    assert found.parts
    assert all(np.isnan(part.halfway) for part in found.parts)
    assert "–" in format_explanations([found], 3)


def test_the_table_shows_what_was_asked_for(finished: dict[str, Path]) -> None:
    (found,) = explain(load_run(finished["two classes"]), "probe", [2])
    lines = format_explanations([found], 4).splitlines()
    assert lines[0].startswith(f"probe 2 (#{found.point.index}, ")
    assert sum(line.startswith("#") for line in lines) == 4
    assert any(line.startswith("36 others") for line in lines)


@pytest.mark.parametrize("kind", ["two classes", "ten classes", "regression"])
def test_the_picture_is_the_same_each_time(finished: dict[str, Path], tmp_path: Path, kind: str) -> None:
    found = explain(load_run(finished[kind]), "probe", [0, 1])
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
    assert run.contributions["contribution"].sel(out=7).dims == ("probe", "example")
    for found in explain(run, "train", range(5)):
        ends = run.predictions.sel(machine="f_T").to_numpy()[found.number]
        assert found.out == max(outs, key=lambda out: ends[out])
        assert found.output == f"f for {run.data['classes'][found.out]}"
        parts = whole[found.number, found.out]
        assert found.decay == abs(parts[0])
        index = run.data["train_index"].tolist()
        for part in found.parts:
            assert part.added == parts[index.index(part.example.index)]
            assert part.halfway == abs(part.added)


def refused(run: Run, split: str, number: int) -> str:
    with pytest.raises(Mistake) as mistake:
        explain(run, split, [number])
    return str(mistake.value)


def test_points_that_are_not_there_are_refused(finished: dict[str, Path]) -> None:
    run = load_run(finished["two classes"])
    assert "points 0 to 23" in refused(run, "probe", 24)
    assert "did you mean 'probe'" in refused(run, "prob", 0)
    assert "read at train" in refused(load_run(finished["training only"]), "test", 0)


def test_what_a_memory_did_is_dated_by_what_the_second_pass_saw(finished: dict[str, Path], tmp_path: Path) -> None:
    """Never by the kernel of a moment: where the pass kept nothing, as of a run of old, nothing is said."""
    copy = shutil.copytree(finished["two classes"], tmp_path / "remembering")
    (copy / "retraced.csv").write_text("step\n")
    seal(copy)
    assert np.isnan(halfway(read_run(copy), "secant", 0, 0)).all()
    parts = read_run(copy).parts("secant").to_numpy()
    seen = np.linspace(0, 1, parts.size).reshape(parts.shape)
    by_rule = {"secant": ContributionsByRule(parts, half_by=seen)}
    write_contributions(copy / "contributions.zarr", by_rule, list(range(parts.shape[2])), range(parts.shape[1]))
    seal(copy)
    (found,) = explain(read_run(copy), "train", [2])
    place = {part.example.index: part.halfway for part in found.parts}
    np.testing.assert_array_equal([place[k] for k in range(parts.shape[2])], seen[2, 0])
