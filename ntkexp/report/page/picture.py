"""The pictures of a page: inline SVG with links to their data.

A run folder may come from an untrusted source, and its pictures become part of the
page. So only elements, attributes and values that plots need are allowed. Scripts,
links, forms, animations and references to other files are rejected.

>>> refuse_other('<svg><g id="a"><path d="M 0 1" style="fill: #ff0000; clip-path: url(#a)"/></g></svg>')
>>> refuse_other("<svg><a href='https://elsewhere'/></svg>")
Traceback (most recent call last):
ntkexp.mistake.Mistake: it is not a plain picture: it has <a>
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from urllib.parse import quote
from xml.parsers import expat

from markupsafe import Markup

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import write_atomically
from ntkexp.records.folder import RunFolder, own_command
from ntkexp.report.plots.rendering import Picture, svg
from ntkexp.report.plots.style import ON_DARK, ON_LIGHT, PALE
from ntkexp.report.run import Run
from ntkexp.report.tables import format_csv

ELEMENTS = frozenset({
    *("svg", "g", "defs", "clipPath", "use", "image", "text", "tspan", "title"),
    *("path", "rect", "circle", "ellipse", "line", "polyline", "polygon"),
})  # fmt: skip
REFERENCE = r"url\(#[\w.-]+\)"
PROPERTY = r"(?:fill|stroke|font)[a-z-]*|opacity|clip-path|text-anchor|(?:shape|image)-rendering|white-space"
STYLE = (
    rf"\s*+(?:(?:{PROPERTY})\s*+:\s*+(?:{REFERENCE}\s*+|[\w\s#.,%'+-]++)(?:;\s*+|$))*+"
)
NUMBERS = r"(?!.*url)[\w\s.,%#()+-]*+"
GEOMETRY = (
    *("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "rx", "ry"),
    *("d", "points", "transform", "width", "height"),
)
PRESENTATION = (
    "viewBox",
    "version",
    "preserveAspectRatio",
    "xml:space",
    "text-anchor",
    "opacity",
    "fill",
    "stroke",
)
ATTRIBUTES = {
    name: re.compile(NUMBERS, re.I | re.S) for name in (*GEOMETRY, *PRESENTATION)
} | {
    "id": re.compile(r"[\w.-]+"),
    "style": re.compile(STYLE),
    "clip-path": re.compile(REFERENCE),
    "href": re.compile(r"#[\w.-]+"),
    "xlink:href": re.compile(r"#[\w.-]+"),
    "xmlns": re.compile(r"http://www\.w3\.org/2000/svg"),
    "xmlns:xlink": re.compile(r"http://www\.w3\.org/1999/xlink"),
}
"""A regular expression for the allowed values of each allowed attribute."""

PIXELS = re.compile(r"data:image/png;base64,[\w+/=\s]*")


def refuse_other(svg: str) -> None:
    """Raise if an SVG is not well-formed, or contains something that is not allowed."""

    def refuse_element(name: str, attributes: dict[str, str]) -> None:
        if name not in ELEMENTS:
            raise Mistake(f"it is not a plain picture: it has <{name}>")
        for key, value in attributes.items():
            allowed = (
                PIXELS
                if name == "image" and key.endswith("href")
                else ATTRIBUTES.get(key)
            )
            if allowed is None or not allowed.fullmatch(value):
                raise Mistake(f"it is not a plain picture: it has {key}={value[:40]!r}")

    if "<!" in svg or "<?" in svg:
        raise Mistake("it is not a plain picture: it has a declaration")
    parser = expat.ParserCreate()
    parser.StartElementHandler = refuse_element
    try:
        parser.Parse(svg, True)
    except expat.ExpatError as error:
        reason = expat.errors.messages[error.code]
        raise Mistake(
            f"it is not a plain picture: it is not valid XML, {reason}"
        ) from None


# --- Inline SVG: make ids unique, and use the colours and font of the page.


DROPPED = re.compile(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", re.S)
REFERRED = re.compile(r"(?:url\(|href=\")#([\w.-]+)")
ID_ATTRIBUTE = re.compile(r' id="([^"]*)"')
COLOURED = re.compile(r"(fill|stroke): #([0-9a-f]{6})")
STYLED = re.compile(r'style="[^"]*"')
# an attribute with many decimals; attributes with a colon are styles, not coordinates
LONG = re.compile(r'="[^":]*\.\d{3}[^":]*"')
DIGITS = re.compile(r"(\.\d\d)\d+")
INDENTED = re.compile(r"\n\s+")
# a group that contains only markers, such as the dots of a scatter plot
MARKERS = re.compile(
    r"<g(?P<group>(?: clip-path=\"[^\"]*\")?)>(?P<markers>\s*(?:<use [^>]*(?:/>|><title>[^<]*</title></use>)\s*)+)</g>"
)
NOT_INHERITED = re.compile(r"[\"\s](?:opacity|clip-path)\s*:")
FONT = "font-family: 'DejaVu Sans'"
# number of hexadecimal digits of a digest; two of a thousand pictures have equal
# digests with probability 5e-7
PREFIX_LETTERS = 10

PALETTE = frozenset({
    *("000000", "808080", "d9d9d9", "ffffff", "0072b2", "56b4e9", "009e73", "e69f00"),
    *("d55e00", "cc79a7", "66c5ab", "8a5f00", "f0c566", "b3a800", "999999", "666666"),
})  # fmt: skip
"""Colours that style.css replaces in dark mode."""

VISIBLE_HUES = frozenset({"0060e0", "0898f8", "209850", "d07808", "b83820", "c038b0"})
"""Colours of `report.plots.style` with a contrast of 3 on light and on dark pages. This
suffices for lines; text needs a contrast of 4.5."""


def inline(svg: str, prefix: str, title: str) -> Markup:
    """Convert an SVG file to an inline element, with a title for screen readers.

    Raise if the SVG contains elements that are not allowed.

    `prefix` makes ids unique on the page.
    """
    start = svg.find("<svg")
    end = svg.rfind("</svg>")
    if start < 0 or end < 0 or svg.count("<svg") > 1:
        raise Mistake("it is not a plain picture: it has no single <svg>")
    text = DROPPED.sub("", svg[start : end + len("</svg>")])
    refuse_other(text)
    text = unique_ids(text, prefix)
    # use the colours and the font of the page, and round coordinates to 0.01 pt
    text = STYLED.sub(themed, text).replace(FONT, "font-family: var(--plot-font)")
    text = LONG.sub(lambda match: DIGITS.sub(r"\1", match[0]), text)
    text = MARKERS.sub(share_style, INDENTED.sub("\n", text))
    # scale to the width of the page, up to 1.5 px per pt
    head, _, body = text.partition(">")
    width = re.search(r'width="([\d.]+)pt"', head)
    points = float(width[1]) if width else 480.0
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    css_class = "plot wide" if points > 300 else "plot"
    style = f"max-width: {points * 1.5:.0f}px"
    label = escape(title)
    return Markup(
        f'{head} role="img" aria-label="{label}" class="{css_class}" style="{style}">{body}'
    )


def unique_ids(text: str, prefix: str) -> str:
    """Replace each id that is referenced. The new id consists of a digest of `prefix`
    and a number. Remove all other ids."""
    digest = hashlib.sha256(prefix.encode()).hexdigest()[:PREFIX_LETTERS]
    names = dict.fromkeys(REFERRED.findall(text))
    short = {name: f"i{digest}-{k}" for k, name in enumerate(names)}

    def renamed(match: re.Match[str]) -> str:
        if match[1] in short:
            return f' id="{short[match[1]]}"'
        return ""

    text = ID_ATTRIBUTE.sub(renamed, text)
    return REFERRED.sub(
        lambda match: match[0].replace(f"#{match[1]}", f"#{short[match[1]]}"), text
    )


def share_style(match: re.Match[str]) -> str:
    """Move the style of markers to their group, if all markers have the same style and
    can inherit it."""
    markers = match["markers"]
    styles = set(STYLED.findall(markers))
    if len(styles) != 1 or markers.count("style=") != markers.count("<use "):
        return match[0]
    style = styles.pop()
    if NOT_INHERITED.search(style):
        return match[0]
    return f"<g{match['group']} {style}>{markers.replace(f' {style}', '')}</g>"


def themed(match: re.Match[str]) -> str:
    """Replace colours of the palette by CSS variables.

    Mix other colours so that text and lines stay visible.
    """
    is_text = "font-size" in match[0]

    def on_page(colour: re.Match[str]) -> str:
        use = colour[1]
        code = colour[2]
        if use == "fill" and f"#{code}" == PALE:
            # an area behind dots, which is paler than a line
            return f"{use}: var(--area, #{code})"
        if code in PALETTE:
            return f"{use}: var(--c{code}, #{code})"
        is_kept = f"#{code}" in (ON_DARK, ON_LIGHT) or (
            code in VISIBLE_HUES and not is_text
        )
        if is_kept:
            return f"{use}: #{code}"
        if is_text:
            share = 35 if code in VISIBLE_HUES else 60
            return f"{use}: color-mix(in srgb, #{code}, var(--c000000) {share}%)"
        if use == "stroke":
            return f"{use}: color-mix(in srgb, #{code}, #fff var(--lift))"
        return f"{use}: #{code}"

    return COLOURED.sub(on_page, match[0])


def slug(name: str) -> str:
    """Convert a name to an anchor.

    >>> slug("mlp-w512 <b>")
    'mlp-w512--b-'
    """
    return re.sub(r"[^\w-]", "-", name)


# --- The pictures of a page, each with its data and its command.


SOURCES = {
    "ladder": "results.csv",
    "loss_and_kernel_change": "metrics.csv",
    "spectrum": "metrics.csv",
    "time_profile": "metrics.csv",
}
"""The file that contains the data of a picture, for pictures without their own CSV
file."""


# maximum total size of the embedded pictures of runs; all other pictures are linked
MAX_PICTURE_BYTES = 4_000_000
# a compressed picture is assumed to have at least this fraction of the size of its file
LEAST_COMPRESSION = 0.3


@dataclass(frozen=True)
class Shown:
    """A picture on a page. `name` is the name of its files, without a suffix. `csv` is
    the link to its data."""

    name: str
    title: str
    svg: Markup
    csv: str
    csv_name: str


def show(picture: Picture, prefix: str, folder: Path | None = None) -> Shown:
    """Prepare a picture for a page.

    If there is a `folder`, also write the picture and its data there.
    """
    name = f"{prefix}.{picture.name}"
    drawing = svg(picture.figure)
    numbers = format_csv(picture.table)
    if folder is not None:
        write_atomically(folder / f"{name}.svg", drawing)
        write_atomically(folder / f"{name}.csv", numbers)
    title = picture.figure.get_suptitle().replace("\n", " ") or name
    link = f"data:text/csv;base64,{base64.b64encode(numbers.encode()).decode()}"
    return Shown(name, title, inline(drawing, name, title), link, f"{name}.csv")


def pictures_of_runs(
    runs: Sequence[Run], anchors: Mapping[Path, str], folder: Path
) -> dict[Path, tuple[Shown, ...]]:
    """Return the pictures in the folders of runs, by run, up to `MAX_PICTURE_BYTES`.

    First take the smallest picture of each run, then the second smallest of each run,
    and so on. So every run has some pictures before any run has all."""
    candidates = []
    for order, run in enumerate(runs):
        by_size = sorted(
            drawings_of(run), key=lambda path: (path.stat().st_size, path.name)
        )
        candidates += [(rank, order, path) for rank, path in enumerate(by_size)]
    free_bytes = MAX_PICTURE_BYTES
    shown: dict[Path, dict[str, Shown]] = {run.path: {} for run in runs}
    for _, order, path in sorted(candidates):
        run = runs[order]
        if path.stat().st_size * LEAST_COMPRESSION > free_bytes:
            continue
        picture = picture_of_run(run, path, anchors[run.path], folder)
        if picture is not None and len(picture.svg) <= free_bytes:
            shown[run.path][path.stem] = picture
            free_bytes -= len(picture.svg)
    return {
        path: tuple(
            of_run[stem]
            for stem in sorted(of_run, key=lambda stem: (stem != "ladder", stem))
        )
        for path, of_run in shown.items()
    }


def picture_of_run(run: Run, path: Path, anchor: str, folder: Path) -> Shown | None:
    """Return a picture in a run folder, or None if it is not allowed."""
    title = f"{path.stem.replace('_', ' ')} of {run.name}"
    numbers = path.with_suffix(".csv")
    if not numbers.is_file():
        numbers = run.path / SOURCES.get(path.stem, "results.csv")
    name = f"{run.name}.{path.stem}"
    return show_file(path, name, f"{anchor}-{path.stem}", title, numbers, folder)


def show_file(
    path: Path, name: str, prefix: str, title: str, numbers: Path, folder: Path
) -> Shown | None:
    """Return the picture in an SVG file. Return None if the file is missing, or contains
    elements that are not allowed."""
    try:
        drawing = inline(path.read_text(encoding="utf-8"), prefix, title)
    except (Mistake, OSError, UnicodeDecodeError):
        return None
    return Shown(name, title, drawing, link(numbers, folder), numbers.name)


def drawings_of(run: Run) -> list[Path]:
    """Return the picture files in a run folder."""
    return [path for path in (run.path / "plots").glob("*.svg") if path.is_file()]


def link(path: Path, folder: Path) -> str:
    """Return the relative link from the folder of a page to a file."""
    return quote(Path(os.path.relpath(path.absolute(), folder.absolute())).as_posix())


def command_of(run: Run) -> str:
    try:
        return own_command(RunFolder(run.path).provenance["command"])
    except Mistake:
        return ""
