"""Pictures: every kind of run can be drawn, with the same bytes each time, and titles that agree with the numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, pairwise, product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, strategies as st
from matplotlib import colormaps, rc_context, rcParams, rcParamsDefault
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.offsetbox import AnnotationBbox

from ntkexp.cli.ensemble import describe_comparison as of_ensemble
from ntkexp.config.compose import compose
from ntkexp.ensemble import Comparison
from ntkexp.mistake import Mistake, WrongArgument
from ntkexp.records.results import MACHINE, Result, Seconds, at_points, write_timings
from ntkexp.records.sweep import Fit, Level, Sweep, SweepRun, read_sweep
from ntkexp.report.analysis.laws import Fitted
from ntkexp.report.analysis.power_law import power_law
from ntkexp.report.analysis.tables import Analysis, analyse
from ntkexp.report.loaded_run import load_run
from ntkexp.report.material import sweep_extent, tabulate_points
from ntkexp.report.page.picture import inline
from ntkexp.report.plots.attribution_plots import draw_thumbnails
from ntkexp.report.plots.canvas import Canvas
from ntkexp.report.plots.examples import image, pixel_axes
from ntkexp.report.plots.figures import cost, eigenvalues, loss_and_kernel_change, path_kernel, spectrum
from ntkexp.report.plots.figures.predictions import scatter
from ntkexp.report.plots.figures.time_profile import profile
from ntkexp.report.plots.rendering import svg
from ntkexp.report.plots.run_plots import all_files_of, exhibition, figure_of, gallery
from ntkexp.report.plots.style import (
    END_LABEL,
    LONGEST_TITLE,
    NARROW,
    PALE,
    WIDE,
    colour,
    house_style,
    luminance,
    spread,
)
from ntkexp.report.plots.together import heat_map
from ntkexp.report.plots.together.errors import errors_title
from ntkexp.report.plots.together.laws import draw_law
from ntkexp.report.plots.together.over_steps import courses_title
from ntkexp.report.run import Run, load_tables
from ntkexp.report.sentence import format_ladder, ladder_notes
from ntkexp.text import percent, short, spoken
from tests.report.conftest import PROBLEMS
from tests.report.drawn import caption_of
from tests.report.synthetic import write_sweep

PICTURES = dict(gallery())
ALL = set(PICTURES)
OF_A_NETWORK = {"predictions", "contributions", "ladder", "time_profile"}  # a diverged run lacks them

OF_TRAINING = {"path_kernel", "gradients"}  # a run that reads no training examples lacks them
OF_OTHERS = {"tasks", "diagnostics", "cost"}  # these runs have no phases, no diagnostics and no timings

DRAWN = [  # each picture for four kinds, two of them fast, including pictures that do not apply
    pytest.param(name, kind, marks=() if (column - row) % len(PROBLEMS) in {3, 5} else pytest.mark.slow)
    for (row, name), (column, kind) in product(enumerate(PICTURES), enumerate(PROBLEMS))
    if (column - row) % len(PROBLEMS) in {0, 3, 5, 8}
]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("name", "kind"), DRAWN)
def test_every_picture_fits_its_page_or_does_not_apply(finished: dict[str, Path], kind: str, name: str) -> None:
    with house_style():
        figure = figure_of(load_run(finished[kind]), PICTURES[name])
        without = OF_A_NETWORK if kind == "diverged" else OF_TRAINING if kind == "nothing read in training" else set()
        assert (figure is None) == (name in without | OF_OTHERS)
        if figure is not None:
            assert figure.get_figwidth() in (NARROW, WIDE)
            assert_inside(figure)
            assert_readable(figure, longest_axis=math.inf if kind == "diverged" else 1e10)


def assert_readable(figure: Figure, longest_axis: float = 1e10) -> None:
    """Assert that the title is short, that log axes have two labelled ticks, and that end labels do not overlap."""
    assert len(figure.get_suptitle().replace("\n", " ")) <= LONGEST_TITLE
    for axes in figure.axes:
        place = axes.get_subplotspec()
        shown = [axes.yaxis, *([axes.xaxis] if place is None or place.is_last_row() else [])]
        for axis in shown:
            if axis.get_scale() == "log" and len(axis.get_majorticklocs()):  # the strip of exact errors has no ticks
                low, high = sorted(axis.get_view_interval())
                ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
                labelled = {tick.get_loc() for tick in ticks if tick.label1.get_text() or tick.label2.get_text()}
                assert sum(low <= place <= high for place in labelled) >= 2
                assert high / low < longest_axis
        boxes = [text.get_window_extent() for text in axes.texts if text.get_gid() == END_LABEL]
        for box, other in combinations(boxes, 2):
            assert box.y1 <= other.y0 + 1 or other.y1 <= box.y0 + 1  # a pixel of 1/200 inch


def assert_inside(figure: Figure) -> None:
    """Assert that the edge of the picture cuts no text and no image off."""
    figure.draw_without_rendering()
    page = figure.get_window_extent()
    tight = figure.get_tightbbox().transformed(figure.dpi_scale_trans)
    # text may be measured a pixel wider than it is drawn
    assert tight.x0 >= page.x0 - 1
    assert tight.x1 <= page.x1 + 1
    assert tight.y0 >= page.y0 - 1
    assert tight.y1 <= page.y1 + 1
    for axes in figure.axes:  # the box of all axes is clipped, so it does not count images outside
        for drawn in axes.images:
            (left, bottom), (right, top) = axes.transAxes.inverted().transform(drawn.get_window_extent())
            assert -0.01 <= left < right <= 1.01
            assert -0.01 <= bottom < top <= 1.01


def test_predictions_beyond_the_axes_are_counted() -> None:
    """The axes cover the network's outputs. A kernel machine has dots above and below, and one point without output."""
    axes = Figure().subplots()
    outputs = np.array([[0.5, 0.7, 1.0, 9.0, -3.0, np.nan]]).T
    scatter(axes, np.linspace(0, 1, 6)[:, None], outputs, slice(0, 2), "black")
    assert [text.get_text() for text in axes.texts] == ["2 outside"]


def test_thumbnails_lie_between_the_bars_and_their_names() -> None:
    figure = Figure(dpi=200)
    axes = figure.subplots()
    axes.barh(range(2), [1.0, 2.0])
    axes.set_yticks(range(2), ["first", "second"])
    draw_thumbnails(axes, [np.eye(8), np.ones((4, 8))])
    figure.draw_without_rendering()
    names = [label.get_window_extent() for label in axes.get_yticklabels()]
    thumbnails = [each.get_window_extent() for each in axes.artists if isinstance(each, AnnotationBbox)]
    assert len(thumbnails) == 2
    for name, thumbnail in zip(names, thumbnails, strict=True):
        assert name.x1 <= thumbnail.x0 < thumbnail.x1 <= axes.get_window_extent().x0


def test_thumbnails_of_low_rows_do_not_overlap() -> None:
    figure = Figure(figsize=(3, 1.5))
    axes = figure.subplots()
    axes.barh(range(9), range(9))
    draw_thumbnails(axes, [np.eye(8)] * 9)
    figure.draw_without_rendering()
    thumbnails = [each.get_window_extent() for each in axes.artists if isinstance(each, AnnotationBbox)]
    assert all(upper.y0 >= lower.y1 for lower, upper in pairwise(thumbnails))


def test_a_run_gives_the_axes_of_its_pictures(finished: dict[str, Path]) -> None:
    """The axes of its pictures, with their numbers. Another name, or nothing to draw, is one line."""
    run = load_run(finished["two classes"])
    ladder = run.plot.ladder()
    assert not isinstance(ladder, list)  # the log axis; the strip of exact errors is a part of its figure
    lines = [line for axes in ladder.figure.axes for line in axes.lines]
    drawn = {float(x) for line in lines for x in np.atleast_1d(np.asarray(line.get_xdata()))}
    assert {row.relative_error for row in run.ladder if row.machine == "left"} <= drawn
    assert {path.stem for path in (run.path / "plots").glob("*.svg")} <= {*dir(run.plot)}
    assert "left" in run._repr_html_()
    with pytest.raises(AttributeError, match="did you mean 'ladder'"):
        run.plot.laddr()
    with pytest.raises(Mistake, match="no data for the picture 'tasks'"):
        run.plot.tasks()


@pytest.mark.parametrize("name", ["ladder", "spectrum", "loss_and_kernel_change", "contributions", "predictions"])
def test_a_picture_is_drawn_where_and_how_the_user_says(finished: dict[str, Path], name: str) -> None:
    """A picture is drawn on the user's axes or replaces them by panels, with the user's title and style."""
    draw = getattr(load_run(finished["two classes"]).plot, name)
    figure = Figure()
    other, ours = figure.subplots(1, 2)
    drawn = draw(ax=ours, title="Mine")
    panels = drawn if isinstance(drawn, list) else [drawn]
    place = panels[0].get_figure(root=False)
    assert (ours.get_title() if drawn is ours else place.get_suptitle()) == "Mine"
    assert {axes.get_figure(root=True) for axes in panels} == {figure}
    assert drawn is ours or len(figure.axes) > 2
    assert not other.lines
    assert name in draw.__doc__
    styled = draw(style={"font.size": 21.0})
    assert (styled[0] if isinstance(styled, list) else styled).title.get_fontsize() == 21.0
    with rc_context({"font.size": 11.0, "text.color": "#ff0000"}):
        theirs = draw()
        first = theirs[0] if isinstance(theirs, list) else theirs
    assert first.title.get_fontsize() == 11.0
    assert first.title.get_color() == "#ff0000"
    assert rcParams["font.size"] == rcParamsDefault["font.size"]


def test_pictures_with_panels_refuse_axes_without_a_place_in_a_grid(finished: dict[str, Path]) -> None:
    plots = load_run(finished["two classes"]).plot
    with pytest.raises(WrongArgument, match=r"divides axes of `plt\.subplots` only"):
        plots.loss_and_kernel_change(ax=Figure().add_axes((0, 0, 1, 1)))


def test_points_and_bars_have_tooltips() -> None:
    """The tooltip has the names of ticks, or the labels of axes. Curves without dots have no tooltip."""
    figure = Figure(layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot([1, 2], [0.5, 0.25], "o-")
    above.plot([1, 2], [3.0, 4.0])
    above.set_ylabel("loss")
    below.barh([0, 1], [1.5, -2.0])
    below.set(xlabel="step")
    below.set_yticks([0, 1], ["<cat>", "dog"])
    drawing = svg(figure)
    assert re.findall("<title>(.*?)</title>", drawing) == [
        *("step 1, loss 0.5", "step 2, loss 0.25"),
        *("step 1.5, &lt;cat&gt;", "step -2, dog"),
    ]
    inline(drawing, "a", "title")  # a page accepts it


@pytest.mark.slow
def test_the_same_bytes_each_time(finished: dict[str, Path]) -> None:
    run, again = load_run(finished["ten classes"]), load_run(finished["ten classes"])
    files = dict(all_files_of(run))
    assert files == dict(all_files_of(again))
    assert files.keys() == {f"{name}.{kind}" for name in ALL - OF_OTHERS for kind in ("svg", "csv")}
    for name, content in files.items():
        assert len(content.encode()) < 500_000
        assert len(content.splitlines()) > 1, name
    svg = files["ladder.svg"]
    assert "relative error" in svg
    assert "<dc:date>" not in svg


def test_the_picture_of_a_law_has_room_for_its_words() -> None:
    x = np.array([8.0, 16.0, 8.0, 16.0])
    table = pd.DataFrame({"model.width": x, "seed": [0, 0, 1, 1], "limit_distance_start": x**-0.5 * [1, 2, 3, 4]})
    law = power_law(x, table["limit_distance_start"].to_numpy(), table["seed"].to_numpy())
    found = Fitted(Fit(quantity="limit_distance_start", axis="model.width", exponent=-0.5, bound="upper"), {}, law)
    with house_style():
        figure = draw_law(found, law, table, Canvas())
        assert_inside(figure)
        label = figure.axes[0].yaxis.label.get_window_extent()
    assert label.height <= figure.axes[0].get_window_extent().height


@given(st.lists(st.floats(0, 1), min_size=1, max_size=6).map(np.array))
def test_labels_keep_their_order_and_their_distance(places: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    apart = spread(places, 0.1)
    found = apart[np.argsort(places, kind="stable")]
    assert (np.diff(found) >= 0.1 - 1e-9).all()  # sums of a few tenths, rounded
    assert found.min() >= 0
    assert found.max() <= 1 + 1e-9
    np.testing.assert_allclose(spread(apart, 0.1), apart, atol=1e-9)  # labels that do not overlap stay


@given(st.lists(st.tuples(st.floats(1e-3, 1), st.floats(1e-3, 1)), min_size=1, max_size=20))
def test_tenths_make_a_whole(steps: list[tuple[float, float]]) -> None:
    length, mass = np.array(steps).T
    assert profile(length, mass).sum() == pytest.approx(1)
    np.testing.assert_allclose(profile(length, length), 0.1)  # an even mass is found even


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (1, 5, 9), (1, 200, 200)])
def test_images_stand_on_whole_pixels(shape: tuple[int, int, int]) -> None:
    with house_style():
        box = image(pixel_axes(Canvas(), 400), np.zeros(shape), 12, 20).get_window_extent()
    _, tall, wide = shape
    times = round(box.width / wide)
    assert times >= 1
    # positions are fractions of the figure: rounded a few times at the size of the figure in pixels
    np.testing.assert_allclose([box.x0, box.y0, box.width, box.height], [12, 20, times * wide, times * tall], atol=1e-9)


# Titles of pictures and notes of tables.


def run(**metrics: Sequence[float]) -> Run:
    steps = range(len(next(iter(metrics.values()))))
    return Run(Path("run"), {}, pd.DataFrame({"step": steps, **metrics}), ())


NAN = math.nan
LEVELS = pd.DataFrame({"width": [64, 8, 8, 16], "left.test": [NAN, 0.4, 0.1, 0.5]})
LEFT = LEVELS, "width", {"left": "left.test"}, [64, 8, 16]
COURSES = {
    "width 8": run(kernel_change=[0, 0.5]),
    "width 16": run(kernel_change=[0, 0.2]),
    "width 32": run(kernel_change=[0.1, NAN]),
}
WIDTHS = {9: "done", 1: "done", 0: "failed"}
UNSORTED = Sweep(
    path=Path(),
    name="width",
    command="",
    axes={"width": (9, 1, 20)},
    seeds=(0,),
    base=(),
    fits=(),
    runs=tuple(SweepRun(folder=Path("run"), axes={"width": w}, seed=0, state=WIDTHS[w]) for w in WIDTHS),
)


@pytest.mark.parametrize(
    ("title", "expected"),
    [
        (
            loss_and_kernel_change.answer(run(loss=[1.0, 0.5], kernel_change=[0.0, 0.1])),
            "The kernel changes by 10 %; the loss falls 2-fold",
        ),
        (
            loss_and_kernel_change.caption(run(loss=[1.0, 0.5, 0.5], kernel_change=[0.0, 0.1, NAN])),
            "The kernel is last a number at step 1.",
        ),
        (
            loss_and_kernel_change.answer(run(loss=[1.0, NAN, 0.5], kernel_change=[0.0, 0.0, 0.0])),
            "Training diverges: the loss is not a number at step 1",
        ),
        (spectrum.answer(np.array([1.0, 9.0, 1.0])), "goes from 1 to 1, through 9"),
        (": ".join(courses_title(COURSES)), "from 50 % to 20 %: "),
        (courses_title(COURSES)[1], "at width 8 and at width 16. 1 of 3 runs end in no number."),
        (": ".join(errors_title(*LEFT)), "The error of left goes from 0.25 to 0.5: "),
        (errors_title(*LEFT)[1], "left from width=8 to 16 (3 of 4 runs). Lines are arithmetic means"),
        (sweep_extent(UNSORTED), "width 3 values from 1 to 20; 2 of 3 runs done"),
    ],
)
def test_titles_agree_with_numbers_that_contradict_the_usual_ones(title: str, expected: str) -> None:
    assert expected in title


NOTED = [Result("query", "left", "", NAN, 1e-13, NAN, note="odd"), Result("test", "left", note="none here")]
AT_SOME = [Result(split, "left", note=at_points(2, 9)) for split in ("train", "test")]


def test_notes_of_a_table_distinguish_nan_from_missing_and_add_up_points() -> None:
    assert "nan     –" in format_ladder(NOTED)
    assert ladder_notes(NOTED) == ["left (query): odd", "left (test): none here"]
    assert ladder_notes(AT_SOME) == ["left: at 4 of 18 points"]


def row(networks: str, process: str, mean: float, chance: float) -> Comparison:
    """Return a comparison of networks with a process."""
    return Comparison(networks, process, 9, mean, 1.0, 3.0, 5, 8, 1.5, chance)


NTK, NNGP = "the NTK process", "the NNGP process"


@pytest.mark.parametrize(
    ("chances", "expected"),
    [
        ((0.3, 0.01), f"could be draws of {NTK} (off) and are no draws of {NNGP} (off)"),
        ((0.01, 0.3), f"could be draws of {NNGP} (off) and are no draws of {NTK} (off)"),
        ((0.3, 0.3), f"could be draws of {NTK} (off) or {NNGP} (off)"),
        ((0.01, 0.01), f"are no draws of {NTK} (off) or {NNGP} (off)"),
        ((NAN, 0.3), f"could be draws of {NNGP} (off) and have no distance to {NTK} (it or"),
        (
            (NAN, NAN),
            f"have no distance to {NTK} (it or networks are not finite, or it has no spread) or {NNGP} (it or",
        ),
    ],
)
def test_an_ensemble_follows_the_process_it_could_be_drawn_from(chances: tuple[float, float], expected: str) -> None:
    one, other = zip(("ntk", "nngp"), chances, strict=True)
    kinds = {"all layers": (one, other), "readout": (("nngp", 0.5), ("ntk", 0.5))}
    table = [row(name, process, 0.81, chance) for name, rows in kinds.items() for process, chance in rows]
    said = of_ensemble(table, compose(["data=circle"])).replace("mean off by 0.81, covariance by 1.50", "off")
    assert said.startswith("9 networks of width 512 after 300 steps: where all layers learn, they " + expected)
    assert f"; where the readout alone learns, they could be draws of {NNGP} (off) or {NTK} (off)" in said


def test_a_mean_has_its_number_of_runs(tmp_path: Path) -> None:
    """A run of the first point failed, and a run of the second has no kernel change."""
    record = write_sweep(tmp_path, failed=[0])
    metrics = sorted((tmp_path / "runs").glob("mlp-w64-*"))[0] / "metrics.csv"
    sweep, runs = read_sweep(record), {}
    for place in sweep.runs:
        if place.state == "done":
            runs[place.folder] = load_tables(place.folder)
    (found,) = (run for run in runs.values() if run.path == metrics.parent)
    runs[found.path] = replace(found, metrics=found.metrics.drop(columns="kernel_change"))
    assert tabulate_points(analyse(sweep, runs))["runs"].tolist() == ["2", "2 to 3", "3", "3"]


# Pictures of a sweep.


def analysis_of(record: Path) -> tuple[Analysis, dict[Path, Run]]:
    sweep = read_sweep(record)
    runs = {place.folder: load_tables(place.folder) for place in sweep.runs if place.state == "done"}
    return analyse(sweep, runs), runs


def heights(figure: Figure) -> list[list[float]]:
    """Return the y values of all lines of a picture."""
    return [np.asarray(line.get_ydata()).tolist() for axes in figure.axes for line in axes.get_lines()]


def test_files_pages_and_pictures_have_one_mean(tmp_path: Path) -> None:
    """The CSV of the sweep, the table of its page and its pictures have the arithmetic mean over seeds."""
    analysis, runs = analysis_of(write_sweep(tmp_path))
    means = analysis.runs.groupby("model.width", sort=False).mean(numeric_only=True)
    page, pictures = tabulate_points(analysis), {shown.name: shown for shown in exhibition(analysis, runs)}
    for name in analysis.quantities:
        np.testing.assert_allclose(analysis.points[f"{name}.mean"], means[name], rtol=1e-12)
    (split,) = {name.rpartition("-")[2] for name in pictures if name.startswith("errors")}
    drawn = heights(pictures[f"errors-{split}"].figure)
    hidden = caption_of(pictures[f"errors-{split}"].figure).partition("Exact to rounding in all runs")[2]
    for name in [name for name in map(str, page) if name.endswith(f".{split}") and "95 %" not in name]:
        np.testing.assert_allclose(page[name], means[name], rtol=1e-12)
        machine = name.partition(".")[0]
        assert any(line == pytest.approx(means[name].tolist()) for line in drawn) != (spoken(machine) in hidden)
    for rank, fitted in enumerate(analysis.laws, start=1):
        dots = means[fitted.fit.quantity].tolist()
        assert any(line == pytest.approx(dots) for line in heights(pictures[f"laws-{rank}"].figure))
    for picture in pictures.values():
        with house_style():
            assert_inside(picture.figure)
            assert_readable(picture.figure)


TWO_KEYS: dict[str, Sequence[int | str]] = {"model.width": (16, 64), "model.activation": ("relu", "tanh", "linear")}


def test_a_heat_map_has_the_mean_of_each_cell_and_marks_runs_that_did_not_train(tmp_path: Path) -> None:
    analysis, runs = analysis_of(write_sweep(tmp_path, axes=TWO_KEYS, failed=[0]))
    stuck = analysis.sweep.runs[-1].folder
    runs[stuck] = replace(runs[stuck], metrics=runs[stuck].metrics.assign(loss=1.0))
    (picture,) = (shown for shown in exhibition(analysis, runs) if shown.name == "heat_map")
    cells = picture.table.set_index(["model.width", "model.activation"])
    means = analysis.runs.groupby(["model.width", "model.activation"])["kernel_change"].mean()
    np.testing.assert_allclose(cells["kernel_change"], means[cells.index], rtol=1e-12)
    untrained = {cell: count for cell, count in cells["untrained"].items() if count}
    assert {(16, "relu"): 1, (64, "linear"): 1}.items() <= untrained.items()
    texts = [text.get_text() for text in picture.figure.axes[0].texts]
    assert sum("×" in text for text in texts) == len(untrained)
    assert f"× in {len(untrained)} of 6 cells" in caption_of(picture.figure)


def with_none(path: Path, key: str, value: Level) -> tuple[Analysis, dict[Path, Run]]:
    """Return a written sweep in which a value of a key is None."""
    _, runs = analysis_of(path)
    sweep = read_sweep(path)
    axes = {**sweep.axes, key: tuple(None if level == value else level for level in sweep.axes[key])}
    places = [
        replace(run, axes={**run.axes, key: None if run.axes[key] == value else run.axes[key]}) for run in sweep.runs
    ]
    return analyse(replace(sweep, axes=axes, runs=tuple(places)), runs), runs


@pytest.mark.parametrize("value", [32, 256])
def test_runs_at_none_are_drawn(tmp_path: Path, value: int) -> None:
    analysis, runs = with_none(write_sweep(tmp_path), "model.width", value)
    (picture,) = (shown for shown in exhibition(analysis, runs) if shown.name.startswith("errors"))
    levels = analysis.sweep.axes["model.width"]
    axes = picture.figure.axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == [str(level) for level in levels]
    column = analysis.runs[picture.name.replace("errors-", "left.")]
    dots = [line for line in axes.get_lines() if line.get_marker() == "o" and line.get_color() == colour("left")]
    np.testing.assert_array_equal(
        dots[0].get_xdata(), [levels.index(run.axes["model.width"]) for run in analysis.sweep.runs]
    )
    np.testing.assert_array_equal(dots[0].get_ydata(), column)
    means = analysis.points["frozen_start.query.mean"].tolist()
    title = f"The error of frozen start goes from {short(means[0])} to {short(means[-1])}"
    assert picture.figure.get_suptitle() == title


def test_a_law_at_none_has_the_dots_of_its_runs(tmp_path: Path) -> None:
    axes: dict[str, Sequence[int | str]] = {"model.width": (16, 32, 64), "model.activation": ("relu", "tanh")}
    analysis, runs = with_none(write_sweep(tmp_path, axes=axes), "model.activation", "relu")
    (picture,) = (shown for shown in exhibition(analysis, runs) if shown.name == "laws-1")
    at_none = analysis.runs[analysis.runs["model.activation"].isna()]
    means = at_none.groupby("model.width")["kernel_change"].mean()
    assert any(line == pytest.approx(means.tolist()) for line in heights(picture.figure))


def test_swept_numbers_are_drawn_in_ascending_order(tmp_path: Path) -> None:
    """Titles and heat maps follow the axes, in whatever order the sweep gives its numbers."""
    widths: dict[str, Sequence[int | str]] = {"model.width": (64, 16, 32), "model.activation": ("tanh", "relu")}
    analysis, runs = analysis_of(write_sweep(tmp_path, axes=widths))
    pictures = {shown.name: shown.figure for shown in exhibition(analysis, runs)}
    means = analysis.runs.groupby("model.width")["frozen_start.query"].mean()
    title = f"The error of frozen start goes from {short(means[16])} to {short(means[64])}"
    assert pictures["errors-query"].get_suptitle() == title
    assert "from model.width=16 to 64" in caption_of(pictures["errors-query"])
    panel = pictures["heat_map"].axes[0]
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["16", "32", "64"]
    assert [tick.get_text() for tick in panel.get_yticklabels()] == ["tanh", "relu"]
    cells = analysis.runs.groupby(["model.activation", "model.width"], sort=False)["kernel_change"].mean()
    drawn = [cells[kind, width] for kind in ("tanh", "relu") for width in (16, 32, 64)]
    assert [text.get_text().removesuffix(" ×") for text in panel.texts] == [short(value) for value in drawn]


def test_a_heat_map_names_the_keys_over_which_it_averages(tmp_path: Path) -> None:
    axes: dict[str, Sequence[int | str]] = {**TWO_KEYS, "model.depth": (1, 2)}
    analysis, runs = analysis_of(write_sweep(tmp_path, axes=axes, seeds=(0,)))
    (picture,) = (shown for shown in exhibition(analysis, runs) if shown.name == "heat_map")
    assert "means over runs, with all values of model.depth" in caption_of(picture.figure)


def test_a_diverged_run_does_not_give_the_title_of_the_courses(finished: dict[str, Path], tmp_path: Path) -> None:
    analysis, runs = analysis_of(write_sweep(tmp_path, seeds=(0,)))
    last = analysis.sweep.runs[-1].folder
    runs[last] = replace(runs[last], path=finished["diverged"])
    (picture,) = (shown for shown in exhibition(analysis, runs) if shown.name == "over_steps")
    ends = [percent(runs[analysis.sweep.runs[k].folder].metrics["kernel_change"].iloc[-1]) for k in (0, -2)]
    title = picture.figure.get_suptitle().replace("\N{NO-BREAK SPACE}", " ")
    assert title == f"The kernel change goes from {ends[0]} to {ends[1]}"
    assert "1 of 4 runs diverged" in caption_of(picture.figure)


def test_text_on_a_cell_of_a_heat_map_has_a_contrast_of_4_5() -> None:
    for cell in (*colormaps["viridis"](np.linspace(0, 1, 256))[:, :3], to_rgb(PALE)):
        low, high = sorted((luminance(tuple(cell)), luminance(to_rgb(heat_map.ink_on(tuple(cell))))))
        assert (high + 0.05) / (low + 0.05) >= 4.5


def test_the_columns_of_the_path_kernel_have_the_indices_of_their_examples(finished: dict[str, Path]) -> None:
    found = load_run(finished["two classes"])
    table = path_kernel.table(found)
    index = found.data["train_index"].tolist()
    kernel = found.kernels["path_secant"].isel(query=found.points["train"]).to_numpy()[:, 0, :, 0]
    for row, one in enumerate(table.columns):
        for other in table.columns:
            assert table.loc[row, other] == kernel[index.index(one), index.index(other)]
    assert sorted(table.columns) == sorted(index)


def test_the_spectrum_has_the_eigenvalues_of_the_metrics(finished: dict[str, Path]) -> None:
    """The ten largest eigenvalues of a snapshot are in metrics.csv too."""
    run = load_run(finished["two classes"])
    spectra = eigenvalues.table(run)
    assert spectra["step"].nunique() > 1
    metrics = run.metrics.set_index("step")
    for step, values in spectra.groupby("step"):
        row = metrics.loc[int(str(step))]
        for rank, value in zip(values["rank"][:10], values["eigenvalue"], strict=False):
            assert value == pytest.approx(row[f"eigenvalue_{rank}"], rel=1e-8)


def test_the_front_of_error_and_time_has_every_machine_that_none_dominates(finished: dict[str, Path]) -> None:
    run = load_run(finished["two classes"])
    names = [row.machine for row in run.ladder if row.split == "query"]
    seconds = {name: 1.0 + (7 * k) % 5 for k, name in enumerate(names)}
    write_timings(run.path / "timings.csv", {f"{MACHINE}{name}": Seconds(time) for name, time in seconds.items()})
    try:
        machines = cost.table(run)
        figure = figure_of(run, cost.draw)
    finally:
        (run.path / "timings.csv").unlink()
    assert figure is not None
    assert_inside(figure)
    assert_readable(figure)
    assert machines["seconds"].tolist() == [seconds[name] for name in machines["machine"]]
    for row in machines.itertuples():
        better = machines["exact"] | (~machines["exact"] & (machines["relative_error"] <= row.relative_error))
        if row.exact:
            better = machines["exact"]
        dominated = bool((better & (machines["seconds"] < row.seconds)).any())
        assert row.on_front != dominated
    assert figure_of(run, cost.draw) is None  # without timings
