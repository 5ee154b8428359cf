"""Pictures: every kind of run can be drawn, with the same bytes each time and text that is text."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure

from ntkexp.records.sweep import Fit
from ntkexp.report.analysis.estimate import power_law
from ntkexp.report.analysis.laws import Fitted
from ntkexp.report.plots.examples import image, pixel_axes
from ntkexp.report.plots.figures.time_profile import profile
from ntkexp.report.plots.run_plots import gallery, save
from ntkexp.report.plots.style import NARROW, WIDE, house_style, spread
from ntkexp.report.plots.together.laws import draw_law
from ntkexp.report.run import load_run
from tests.report.conftest import PROBLEMS

PICTURES = dict(gallery())
ALL = set(PICTURES)
OF_A_NETWORK = {"predictions", "contributions", "ladder", "time_profile"}  # what a diverged run does not have

OF_PHASES = {"tasks"}  # which none of these runs has; tests/run/test_forgetting.py draws it

DRAWN = [  # every picture of two kinds, every kind in a picture or two, and both that do not apply
    pytest.param(name, kind, marks=() if (column - row) % len(PROBLEMS) in {3, 5} else pytest.mark.slow)
    for (row, name), (column, kind) in product(enumerate(PICTURES), enumerate(PROBLEMS))
]


@pytest.mark.sample(6)
@pytest.mark.parametrize(("name", "kind"), DRAWN)
def test_every_picture_fits_its_page_or_does_not_apply(finished: dict[str, Path], kind: str, name: str) -> None:
    with house_style():
        figure = PICTURES[name](load_run(finished[kind]))
        without = (
            OF_A_NETWORK if kind == "diverged" else {"path_kernel"} if kind == "nothing read in training" else set()
        )
        assert (figure is None) == (name in without | OF_PHASES)
        if figure is not None:
            assert figure.get_figwidth() in (NARROW, WIDE)
            assert_inside(figure)


def assert_inside(figure: Figure) -> None:
    """No text is cut off by the edge of the picture."""
    figure.draw_without_rendering()
    page = figure.get_window_extent()
    tight = figure.get_tightbbox().transformed(figure.dpi_scale_trans)
    # text may be measured a pixel wider than it is drawn
    assert tight.x0 >= page.x0 - 1
    assert tight.x1 <= page.x1 + 1
    assert tight.y0 >= page.y0 - 1
    assert tight.y1 <= page.y1 + 1


@pytest.mark.slow
def test_the_same_bytes_each_time(finished: dict[str, Path], tmp_path: Path) -> None:
    run, again = load_run(finished["ten classes"]), load_run(finished["ten classes"])
    written = save(run, tmp_path / "one")
    save(again, tmp_path / "two")
    assert {path.name for path in written} == {f"{name}.{kind}" for name in ALL - OF_PHASES for kind in ("svg", "csv")}
    for path in written:
        assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes()
        assert path.stat().st_size < 500_000
    for path in (tmp_path / "one").glob("*.csv"):
        assert len(path.read_text().splitlines()) > 1
    svg = (tmp_path / "one" / "ladder.svg").read_text()
    assert "relative error" in svg
    assert "<dc:date>" not in svg


def test_the_picture_of_a_law_has_room_for_its_words() -> None:
    x = np.array([8.0, 16.0, 8.0, 16.0])
    table = pd.DataFrame({"model.width": x, "seed": [0, 0, 1, 1], "limit_distance_start": x**-0.5 * [1, 2, 3, 4]})
    law = power_law(x, table["limit_distance_start"].to_numpy(), table["seed"].to_numpy())
    found = Fitted(Fit(quantity="limit_distance_start", axis="model.width", exponent=-0.5, bound="upper"), {}, law)
    with house_style():
        figure = draw_law(found, law, table)
        assert_inside(figure)
        label = figure.axes[0].yaxis.label.get_window_extent()
    assert label.height <= figure.axes[0].get_window_extent().height


PLACES = st.lists(st.floats(0, 1), min_size=1, max_size=6).map(np.array)


@given(PLACES)
def test_labels_keep_their_order_and_their_distance(places: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    order = np.argsort(places, kind="stable")
    found = spread(places, 0.1)[order]
    assert (np.diff(found) >= 0.1 - 1e-9).all()  # sums of a few tenths, rounded
    assert found.min() >= 0
    assert found.max() <= 1 + 1e-9


@given(PLACES)
def test_labels_that_have_room_stay(places: np.ndarray[tuple[int], np.dtype[np.float64]]) -> None:
    apart = spread(places, 0.1)
    np.testing.assert_allclose(spread(apart, 0.1), apart, atol=1e-9)


@given(st.lists(st.tuples(st.floats(1e-3, 1), st.floats(1e-3, 1)), min_size=1, max_size=20))
def test_tenths_make_a_whole(steps: list[tuple[float, float]]) -> None:
    length, mass = np.array(steps).T
    assert profile(length, mass).sum() == pytest.approx(1)
    np.testing.assert_allclose(profile(length, length), 0.1)  # what is made evenly is found evenly


@pytest.mark.parametrize("shape", [(1, 8, 8), (1, 28, 28), (3, 32, 32), (1, 5, 9), (1, 200, 200)])
def test_images_stand_on_whole_pixels(shape: tuple[int, int, int]) -> None:
    with house_style():
        figure = Figure(figsize=(WIDE, 2))
        box = image(pixel_axes(figure), np.zeros(shape), 12, 20).get_window_extent()
    _, tall, wide = shape
    times = round(box.width / wide)
    assert times >= 1
    # positions are fractions of the figure: rounded a few times at the size of the figure in pixels
    np.testing.assert_allclose([box.x0, box.y0, box.width, box.height], [12, 20, times * wide, times * tall], atol=1e-9)
