"""The HTML table in a notebook: the examples with the largest contributions
to each query.

Names and texts come from the data, so all of them are escaped.
Pictures are drawn from pixel values."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.contributions import CONTRIBUTION, DIMS
from ntkexp.report.examples import Example, image_pixels, unit_range
from ntkexp.report.outputs import output_names
from ntkexp.report.parts import strongest_first
from ntkexp.report.tables import format_signed
from ntkexp.text import counted, fitting, numbered, printable

if TYPE_CHECKING:
    import xarray as xr

SHOWN_QUERIES = 5
SHOWN_EXAMPLES = 5  # examples per query
MAX_LETTERS = 90  # longer texts are shortened
PICTURE_PIXELS = 64  # maximum side of a picture; larger images are subsampled
RAISED_COLOUR = "#0060e0"  # blue and vermilion, as in the pictures of a run
LOWERED_COLOUR = "#b83820"

FindExample: TypeAlias = Callable[[str, int], Example | None]
"""A function (axis, index) → example at an index of the axis `query`
or `example`, or None."""


@dataclass(frozen=True, eq=False)
class TopExamples:
    """The examples with the largest contributions to one output of a query,
    the strongest first."""

    point: int
    out: str  # name of the output; empty for a single output
    places: tuple[int, ...]
    added: tuple[float, ...]


def top_examples_of(arrays: xr.Dataset) -> list[TopExamples]:
    """Rank the examples at each of the first attributed queries, by their contributions
    to one output: the output that all examples together changed most."""
    tops = list[TopExamples]()
    parts = arrays[CONTRIBUTION].transpose(*DIMS)
    names = output_names(arrays)
    for point in range(parts.sizes["query"]):
        # [out, example]; one query at a time, to save memory
        by_output = parts[point].to_numpy()
        if not np.isfinite(by_output).all():
            continue
        column = int(np.abs(by_output.sum(1)).argmax())
        places = strongest_first(by_output[column])[:SHOWN_EXAMPLES]
        added = by_output[column, places].tolist()
        out = str(names[column]) if len(names) > 1 else ""
        tops.append(TopExamples(point, out, tuple(places), tuple(added)))
        if len(tops) == SHOWN_QUERIES:
            break
    return tops


def html_table(arrays: xr.Dataset, find: FindExample) -> str:
    """Return an HTML table with a row for each query,
    and a cell for each of its top examples."""
    labels = arrays["example"].to_numpy().tolist()
    names = [numbered(place, str(label)) for place, label in enumerate(labels)]
    rows = list[str]()
    for top in top_examples_of(arrays):
        point = find("query", top.point)
        output = f"<br>output {text(top.out)}" if top.out else ""
        cells = [f"<th>{described(point, str(top.point))}{output}</th>"]
        for place, added in zip(top.places, top.added, strict=True):
            colour = RAISED_COLOUR if added > 0 else LOWERED_COLOUR
            example = described(find("example", place), names[place])
            cells.append(
                f'<td>{example}<br><b style="color:{colour}">{format_signed(added)}</b></td>'
            )
        rows.append(f"<tr>{''.join(cells)}</tr>")
    shown = len(rows)
    points = arrays.sizes["query"]
    which = (
        "" if shown == points else f" The first {shown} of {counted(points, 'point')}."
    )
    caption = f"Largest contributions: blue raised the output, red lowered it.{which}"
    return f'<table><caption style="text-align:left">{caption}</caption>{"".join(rows)}</table>'


def described(example: Example | None, name: str) -> str:
    """Return the picture, label and text of an example as HTML. If there is no example,
    return only `name`."""
    if example is None:
        return text(name)
    words = f"<br>{text(example.text)}" if example.text else ""
    return f"{picture(example.shown)}{text(example.label)}{words}"


def text(words: str) -> str:
    """Shorten and escape an untrusted text for HTML.

    >>> text("<b onload='x'>")
    '&lt;b onload=&#x27;x&#x27;&gt;'
    """
    return escape(printable(fitting(words, MAX_LETTERS)))


def picture(shown: NDArray[Any]) -> str:
    """Return an image as an HTML element with embedded pixels.

    Return "" if `shown` is not an image.
    """
    if shown.ndim < 2 or not shown.size:
        return ""
    from matplotlib.image import imsave  # noqa: PLC0415  slow to import, and only images need it

    pixels = image_pixels(shown)
    if pixels is None:
        return ""
    stride = -(-max(pixels.shape[:2]) // PICTURE_PIXELS)
    scaled = unit_range(np.nan_to_num(pixels[::stride, ::stride].astype(float)))
    file = BytesIO()
    imsave(file, scaled, cmap="gray_r", vmin=0, vmax=1, format="png")
    content = base64.b64encode(file.getvalue()).decode()
    size = f"width:{PICTURE_PIXELS}px;image-rendering:pixelated"
    return f'<img src="data:image/png;base64,{content}" alt="" style="{size}"><br>'
