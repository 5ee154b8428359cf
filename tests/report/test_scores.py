"""Scores for other libraries are the arrays of the data set, with signs, names and a layout."""

from __future__ import annotations

import base64
import pickle
import re
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.offsetbox import AnnotationBbox, OffsetImage
from matplotlib.patches import Rectangle

import ntkexp
from ntkexp.mistake import WrongArgument
from ntkexp.records.contributions import DIMS
from ntkexp.report.examples import Example, named_example
from ntkexp.report.loaded_run import load_run
from ntkexp.report.scores import Attribution
from ntkexp.report.tables import format_signed
from tests.foreign_loop.loops import adamw, followed, loop, plain

NAMES = ["a", "b", "c"]


def attribution(outs: list[str] | None = None, **more: Any) -> Attribution:
    """Return scores of two queries and three examples, for one output or for named outputs."""
    random = np.random.default_rng(0)
    shape = (2, len(outs or ["f"]), len(NAMES))
    components = random.normal(size=(*shape, 2))
    arrays = {
        "contribution": (DIMS, components.sum(3)),
        "effect": (DIMS, random.normal(size=shape)),
        "half_by": (DIMS, random.uniform(size=shape)),
        "by_component": ((*DIMS, "component"), components),
    }
    names = {"example": NAMES, "component": ["first", "rest"]} | ({"out": outs} if outs else {})
    return Attribution(arrays, names, more)


def test_scores_have_a_layout_names_and_a_sign() -> None:
    """A positive score raises the output."""
    found = attribution(measure="margin")
    scores = found.to_scores("train,test")
    assert scores.dims == ("example", "query")
    assert scores["example"].to_numpy().tolist() == NAMES
    assert scores["query"].to_numpy().tolist() == [0, 1]
    np.testing.assert_array_equal(scores, found["contribution"][:, 0].T)
    np.testing.assert_array_equal(found.to_scores("test,train"), scores.T)
    assert scores.attrs["sign"] == "positive: the example raised the output"
    effect = found.to_scores(score="effect")
    np.testing.assert_array_equal(effect, -found["effect"][:, 0].T)
    assert effect.attrs == {"sign": "positive: the output would be lower without the example", "measure": "margin"}


def test_an_output_and_a_component_are_chosen_by_name() -> None:
    found = attribution(["loss", "margin"])
    np.testing.assert_array_equal(found.to_scores(out="margin"), found["contribution"].sel(out="margin").T)
    run = found.assign_coords(out=[0, 1], out_name=("out", ["loss", "margin"]))  # a run names its measure so
    assert isinstance(run, Attribution)
    for out in ("margin", 1):
        np.testing.assert_array_equal(run.to_scores(out=out), found.to_scores(out="margin"))
    parts = [found.to_scores(out="loss", component=name) for name in ("first", "rest")]
    np.testing.assert_allclose(parts[0] + parts[1], found.to_scores(out="loss"), rtol=0, atol=1e-15)


REFUSED: dict[str, dict[str, Any]] = {
    "there are 2 outputs, 'loss', 'margin'; name one, out='loss'": {},
    "out='margn': there is no such output; did you mean 'margin'?": {"out": "margn"},
    "layout='rows' is none of 'train,test', 'test,train'": {"layout": "rows"},
    "score='half_by': there are no such scores; there are contribution and effect": {"score": "half_by"},
    "component='firts': there is no such component; did you mean 'first'?": {"component": "firts"},
    "component='first': 'effect' is not known by component": {"component": "first", "score": "effect"},
}


@pytest.mark.parametrize("said", REFUSED)
def test_ambiguous_or_missing_scores_are_refused(said: str) -> None:
    with pytest.raises(WrongArgument) as refused:
        attribution(["loss", "margin"]).to_scores(**REFUSED[said])
    assert said in str(refused.value)


def test_scores_form_a_matrix_of_finite_numbers() -> None:
    found = attribution()
    with pytest.raises(WrongArgument, match=r"the axis query is missing; keep it by isel\(query=\[0\]\)"):
        found.isel(query=0).to_scores()
    found["contribution"][0, 0, 1] = np.nan
    with pytest.raises(WrongArgument, match="not a finite number for every example"):
        found.to_scores()


def test_points_that_were_not_attributed_are_left_out() -> None:
    found = attribution()
    found["contribution"][0] = found["effect"][0] = found["by_component"][0] = np.nan
    assert found.to_scores()["query"].to_numpy().tolist() == [1]
    assert set(frame_of(found)["query"]) == {1}


def frame_of(found: Attribution) -> pd.DataFrame:
    table = found.to_pandas()
    assert isinstance(table, pd.DataFrame)
    return table


def test_a_table_has_a_row_for_each_point_output_and_example() -> None:
    found = attribution(["loss", "margin"])
    table = frame_of(found)
    scores = ["contribution", "effect", "by_component.first", "by_component.rest"]
    assert list(table.columns) == [*DIMS, *scores]
    assert len(table) == 2 * 2 * 3
    for row in table.itertuples(index=False):
        here = found.sel(example=row.example, out=row.out).isel(query=row.query)
        assert (row.contribution, row.effect) == (float(here["contribution"]), float(here["effect"]))
        assert tuple(row[-2:]) == tuple(here["by_component"].to_numpy())


def test_it_behaves_like_a_data_set() -> None:
    """Selections keep the type, and arrays without scores become frames as in xarray."""
    found = attribution()
    assert isinstance(found.isel(example=[0, 2]), Attribution)
    assert found.isel(example=[0, 2]).to_scores().shape == (2, 2)
    xr.testing.assert_identical(pickle.loads(pickle.dumps(found)), found)
    assert found[["half_by"]].isel(query=0, out=0).to_pandas().shape == (3, 1)


def test_a_followed_loop_and_a_run_give_it(finished: dict[str, Path]) -> None:
    traced = followed(loop(adamw), plain).attribute(by="module", quiet=True)
    for found in (traced, load_run(finished["ten classes"]).contributions):
        assert isinstance(found, Attribution)
        scores = found.to_scores(out=2)
        expected = found["contribution"][:, found["out"].to_numpy().tolist().index(2)]
        np.testing.assert_array_equal(scores, expected.sel(query=scores["query"]).T)


def widths_of(axes: Axes) -> list[float]:
    return [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)]


def test_pictures_of_a_query_add_up_to_its_change(finished: dict[str, Path]) -> None:
    """A followed loop has bars of examples and components, and a line over the steps. A run has its own pictures."""
    traced = followed(loop(adamw), plain).attribute(by="module", quiet=True)
    parts = traced["contribution"].sel(out=2).isel(query=1)
    axes = traced.plot.contributions(1, out=2, top=parts.size)
    widths = widths_of(axes)
    assert widths == widths_of(traced.plot.contributions(np.int64(1), out=2, top=parts.size))
    assert widths == sorted(parts.to_numpy().tolist(), key=abs, reverse=True)
    whole = float(parts.sum() + traced["decay"].sel(out=2).isel(query=1))
    through = traced.plot.components(1, out=2)
    assert sum(widths_of(through)) == pytest.approx(whole, rel=1e-5)
    (line, *_) = traced.plot.timeline(1, out=2).get_lines()
    assert np.asarray(line.get_ydata())[-1] == pytest.approx(float(traced["by_step"].sel(out=2)[1].sum()), rel=1e-6)

    run = load_run(finished["ten classes"]).contributions
    assert run.plot.contributions(0, out=2).get_yticklabels()
    with pytest.raises(WrongArgument, match="no 'by_component' here to draw; attribute with by="):
        run.plot.components(0, out=2)
    wrong: list[Any] = [traced.sizes["query"], True, "first"]
    for query in wrong:
        with pytest.raises(WrongArgument, match="the index of a query"):
            traced.plot.contributions(query, out=2)
    assert callable(traced.plot.scatter)


@pytest.mark.parametrize("kind", ["contributions", "components", "timeline"])
def test_pictures_are_drawn_on_the_axes_of_the_user(kind: str) -> None:
    traced = followed(loop(adamw), plain).attribute(by="module", quiet=True)
    draw = getattr(traced.plot, kind)
    with rc_context({"axes.titlesize": 21.0}):  # a setting of the user
        ours = Figure().subplots()
        assert draw(1, out=2, ax=ours, title="Mine") is ours
    assert (ours.get_title(), ours.title.get_fontsize()) == ("Mine", 21.0)
    theirs = draw(1, out=2)
    assert theirs.figure is not ours.figure
    assert widths_of(ours) == widths_of(theirs)
    for one, other in zip(ours.get_lines(), theirs.get_lines(), strict=True):
        np.testing.assert_array_equal(np.asarray(one.get_ydata()), np.asarray(other.get_ydata()))


def test_examples_are_shown_as_images_or_texts_with_their_names() -> None:
    """A bar has the image or the text of its example; an example without either has its name or number."""
    parts = xr.DataArray(np.array([[[1.0, -2.0, 0.5]]]), dims=("query", "out", "example"))
    arrays = {"contribution": parts}
    names = ["0123456789abcdef", "ankle", "boot"]  # the first is a digest

    def find(axis: str, place: int) -> Example | None:
        rows = (np.eye(4), np.array([3, 1, 4]), np.array([0.5, 0.25]))
        words = (None, "a dog ran", None)
        return named_example(place, names[place], rows[place], words[place]) if axis == "example" else None

    found = Attribution(arrays, {"example": names, "query": [0]}).showing(find)
    axes = found.plot.contributions(0)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["ankle a dog ran", "#0", "boot"]
    boxes = [box for box in axes.artists if isinstance(box, AnnotationBbox)]
    assert [box.xy for box in boxes] == [(0, 1)]
    (image,) = (box.offsetbox for box in boxes)
    assert isinstance(image, OffsetImage)
    np.testing.assert_array_equal(image.get_data(), np.eye(4))


# The page in a notebook.


class Elements(HTMLParser):
    """The elements of a page, with their attributes and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found, self.words = list[tuple[str, dict[str, str | None]]](), ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words += data


EVIL = '<script>alert(1)</script><img src=x onerror=\'alert(2)\'>"><b onload="x">'


def kinds(page: str) -> set[tuple[str, str]]:
    """Return the elements and attributes of a page."""
    return {(tag, name) for tag, attributes in Elements(page).found for name in (*attributes, "")}


def test_names_and_texts_are_escaped() -> None:
    """Names of examples and outputs, a measure, and decoded texts."""

    def page(words: str) -> str:
        found = attribution(["loss", words], measure=words).assign_coords(example=[words, "b", "c"])
        found["contribution"][0, 1] = 9.0  # its output is shown
        return found.showing(lambda axis, place: Example(place, words, np.zeros(2), words))._repr_html_()

    assert kinds(page(EVIL)) == kinds(page("harmless"))
    assert EVIL in Elements(page(EVIL)).words


def test_the_largest_contributions_of_each_query_are_shown() -> None:
    """The page shows the output that moved most, and decoded texts."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Flatten(), torch.nn.Linear(12, 2)).double()
    x, words = (
        torch.arange(21).reshape(7, 3) % 9,
        ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight"],
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with ntkexp.follow(model, optimizer, queries=x[:2]) as trace:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), torch.arange(7) % 2).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    found = trace.attribute(decode=lambda tokens: " ".join(words[token] for token in tokens), quiet=True)
    shown = Elements(found._repr_html_().partition("<details>")[0]).words
    for query in range(2):
        parts = found["contribution"][query].to_numpy()
        moved = parts[abs(parts.sum(1)).argmax()]
        largest = int(abs(moved).argmax())
        assert f"query {query}" in shown
        assert f"{format_signed(moved[largest])}" in shown
        assert " ".join(words[token] for token in x[largest]) in shown
    with pytest.raises(IndexError):
        trace.attribute(decode=lambda tokens: words[99])


def test_images_are_shown_as_images(finished: dict[str, Path]) -> None:
    run = load_run(finished["ten classes"])
    page = run.contributions._repr_html_()
    pictures = [base64.b64decode(found) for found in re.findall(r"data:image/png;base64,([\w+/=]+)", page)]
    first = imread(BytesIO(pictures[0]))[..., 0]
    shown = run.data["train_shown"][0]  # the first point is a training example
    grey = (shown.max() - shown.squeeze()) / (shown.max() - shown.min())
    np.testing.assert_allclose(first, grey, rtol=0, atol=1 / 255)
    assert len(pictures) == 5 * (1 + 5)
