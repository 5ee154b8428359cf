"""The examples that did most to each point, as a table that a notebook shows: texts and pictures, with what each added.

Names and texts come from data, and may hold anything: each is escaped, and pictures are drawn anew from their numbers.
"""

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
from ntkexp.report.examples import Example, image_pixels
from ntkexp.report.outputs import output_names
from ntkexp.report.tables import format_signed
from ntkexp.text import counted, printable

if TYPE_CHECKING:
    import xarray as xr

POINTS, TOP = 5, 5  # points that are shown, and examples of each
LONGEST = 90  # letters of a text
PIXELS = 64  # of the longer side of a picture; of a larger one, every second, third, … is shown
RAISED, LOWERED = "#0072b2", "#d55e00"  # as in the pictures of a run

FindExample: TypeAlias = Callable[[str, int], Example | None]
"""The axis, `probe` or `example`, and a place along it ↦ what is there, as far as it is known."""


@dataclass(frozen=True, eq=False)
class TopExamples:
    """The examples that did most to an output at a point, the largest contribution first."""

    point: int
    out: str  # its name, if there are several
    places: tuple[int, ...]
    added: tuple[float, ...]


def top_examples_of(found: xr.Dataset) -> list[TopExamples]:
    """Rank the examples at the first points that were attributed, each at the output that contributions moved most."""
    tops = list[TopExamples]()
    parts = found[CONTRIBUTION].transpose(*DIMS)
    names = output_names(found)
    for point in range(parts.sizes["probe"]):
        here = parts[point].to_numpy()  # [out, example]; a run may keep more than the memory holds
        if not np.isfinite(here).all():
            continue
        column = int(np.abs(here.sum(1)).argmax())
        places = np.argsort(-np.abs(here[column]), kind="stable")[:TOP]
        out = str(names[column]) if len(names) > 1 else ""
        tops.append(
            TopExamples(point, out, tuple(places.tolist()), tuple(here[column, places].tolist()))
        )
        if len(tops) == POINTS:
            break
    return tops


def html_table(found: xr.Dataset, find: FindExample) -> str:
    """A row for each point: what it is, and what the top examples added to it."""
    names = [str(name) for name in found["example"].to_numpy().tolist()]
    rows = list[str]()
    for top in top_examples_of(found):
        point = find("probe", top.point)
        output = f"<br>output {text(top.out)}" if top.out else ""
        cells = [f"<th>{described(point, str(top.point))}{output}</th>"]
        for place, added in zip(top.places, top.added, strict=True):
            colour = RAISED if added > 0 else LOWERED
            example = described(find("example", place), names[place])
            cells.append(
                f'<td>{example}<br><b style="color:{colour}">{format_signed(added)}</b></td>'
            )
        rows.append(f"<tr>{''.join(cells)}</tr>")
    shown, points = len(rows), found.sizes["probe"]
    which = "" if shown == points else f" The first {shown} of {counted(points, 'point')}."
    caption = f"Largest contributions: blue raised the output, orange lowered it.{which}"
    return f'<table><caption style="text-align:left">{caption}</caption>{"".join(rows)}</table>'


def described(example: Example | None, name: str) -> str:
    """An example as a person looks at it: a picture or a text, and its name; or the name alone."""
    if example is None:
        return text(name)
    words = f"<br>{text(example.text)}" if example.text else ""
    return f"{picture(example.shown)}{text(example.label)}{words}"


def text(words: str) -> str:
    """Some words of unknown origin, shortened, for HTML.

    >>> text("<b onload='x'>")
    '&lt;b onload=&#x27;x&#x27;&gt;'
    """
    return escape(printable(words if len(words) <= LONGEST else f"{words[: LONGEST - 1]}…"))


def picture(shown: NDArray[Any]) -> str:
    """An image as an element of HTML with all its pixels in it; nothing, if this is no image."""
    if shown.ndim < 2 or not shown.size:
        return ""
    from matplotlib.image import imsave  # noqa: PLC0415  slow, and most examples are no images

    pixels = image_pixels(shown)
    if pixels is None:
        return ""
    every = -(-max(pixels.shape[:2]) // PIXELS)
    pixels = np.nan_to_num(pixels[::every, ::every].astype(float))
    low, high = float(pixels.min()), float(pixels.max())
    file = BytesIO()
    imsave(file, (pixels - low) / (high - low or 1.0), cmap="gray_r", vmin=0, vmax=1, format="png")
    content = base64.b64encode(file.getvalue()).decode()
    size = f"width:{PIXELS}px;image-rendering:pixelated"
    return f'<img src="data:image/png;base64,{content}" alt="" style="{size}"><br>'
