"""Whether an SVG is a plain picture: elements, attributes and values that plots are drawn with, and nothing else.

A run folder may come from anywhere, and the page shows its pictures as a part of itself. What is not listed here is
refused: scripts, links, forms, a base for other links, what acts by itself, and whatever is to be loaded.

>>> refuse_other('<svg><g id="a"><path d="M 0 1" style="fill: #ff0000; clip-path: url(#a)"/></g></svg>')
>>> refuse_other("<svg><a href='https://elsewhere'/></svg>")
Traceback (most recent call last):
ntkexp.mistake.Mistake: it is no plain picture: it has <a>
"""

from __future__ import annotations

import re
from xml.parsers import expat

from ntkexp.mistake import Mistake

ELEMENTS = frozenset({
    *("svg", "g", "defs", "clipPath", "use", "image", "text", "tspan"),
    *("path", "rect", "circle", "ellipse", "line", "polyline", "polygon"),
})  # fmt: skip
REFERENCE = r"url\(#[\w.-]+\)"
PROPERTY = r"(?:fill|stroke|font)[a-z-]*|opacity|clip-path|text-anchor|(?:shape|image)-rendering|white-space"
STYLE = rf"\s*+(?:(?:{PROPERTY})\s*+:\s*+(?:{REFERENCE}\s*+|[\w\s#.,%'+-]++)(?:;\s*+|$))*+"
NUMBERS = r"(?!.*url)[\w\s.,%#()+-]*+"
GEOMETRY = (
    "x",
    "y",
    "x1",
    "x2",
    "y1",
    "y2",
    "cx",
    "cy",
    "r",
    "rx",
    "ry",
    "d",
    "points",
    "transform",
    "width",
    "height",
)
SAID = ("viewBox", "version", "preserveAspectRatio", "xml:space", "text-anchor", "opacity", "fill", "stroke")
ATTRIBUTES = {name: re.compile(NUMBERS, re.I | re.S) for name in (*GEOMETRY, *SAID)} | {
    "id": re.compile(r"[\w.-]+"),
    "style": re.compile(STYLE),
    "clip-path": re.compile(REFERENCE),
    "href": re.compile(r"#[\w.-]+"),
    "xlink:href": re.compile(r"#[\w.-]+"),
    "xmlns": re.compile(r"http://www\.w3\.org/2000/svg"),
    "xmlns:xlink": re.compile(r"http://www\.w3\.org/1999/xlink"),
}
"""Each attribute with the values that it may have."""

PIXELS = re.compile(r"data:image/png;base64,[\w+/=\s]*")


def refuse_other(svg: str) -> None:
    """Refuse text that is not well-formed or has a part that is not listed; nothing is expanded, since nothing can be
    declared.
    """
    if "<!" in svg or "<?" in svg:
        raise other("a declaration")
    parser = expat.ParserCreate()
    parser.StartElementHandler = refuse_element
    try:
        parser.Parse(svg, True)
    except expat.ExpatError as error:
        raise other(f"what no XML has, {expat.errors.messages[error.code]}") from None


def refuse_element(name: str, attributes: dict[str, str]) -> None:
    """Refuse an element with other attributes than those listed."""
    if name not in ELEMENTS:
        raise other(f"<{name}>")
    for key, value in attributes.items():
        allowed = PIXELS if name == "image" and key.endswith("href") else ATTRIBUTES.get(key)
        if allowed is None or not allowed.fullmatch(value):
            raise other(f"{key}={value[:40]!r}")


def other(what: str) -> Mistake:
    """Make the refusal."""
    return Mistake(f"it is no plain picture: it has {what}")
