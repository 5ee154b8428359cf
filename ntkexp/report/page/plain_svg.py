"""Check that an SVG is a plain picture.

Pictures come from run folders and published claims, which may be untrusted. So only
elements, attributes and values that plots need are allowed. Scripts, links, forms,
animations and references to other files are rejected.

>>> refuse_other('<svg><g id="a"><path d="M 0 1" style="fill: #ff0000; clip-path: url(#a)"/></g></svg>')
>>> refuse_other("<svg><a href='https://elsewhere'/></svg>")
Traceback (most recent call last):
ntkexp.mistake.Mistake: it is not a plain picture: it has <a>
"""

from __future__ import annotations

import re
from xml.parsers import expat

from ntkexp.mistake import Mistake

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
            f"it is not a plain picture: it has what no XML has, {reason}"
        ) from None


# --- Whole files. Before the drawing, matplotlib writes a declaration of XML, metadata and
# a style sheet that is always the same.


NAMESPACES = (
    r'xmlns:dc="http://purl\.org/dc/elements/1\.1/"',
    r'xmlns:cc="http://creativecommons\.org/ns#"',
    r'xmlns:rdf="http://www\.w3\.org/1999/02/22-rdf-syntax-ns#"',
)
FACT = r'rdf:(?:about|resource)="[\w:/.#-]*"'
TAG = rf"</?(?:rdf|cc|dc):\w+(?:\s+(?:{'|'.join(NAMESPACES)}|{FACT}))*\s*/?>"
METADATA = rf"<metadata>(?:{TAG}|[\w\s:/+.-])*+</metadata>"
DECLARATION = (
    r'\A<\?xml version="1\.0" encoding="utf-8" standalone="no"\?>\s*'
    r'<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1\.1//EN"\s*'
    r'"http://www\.w3\.org/Graphics/SVG/1\.1/DTD/svg11\.dtd">'
)
SHEET = (
    r'<style type="text/css">\*\{stroke-linejoin: round; stroke-linecap: butt\}</style>'
)
BY_MATPLOTLIB = re.compile("|".join((DECLARATION, METADATA, SHEET)))


def refuse_other_file(content: bytes) -> None:
    """Raise if an SVG file is not a plain picture as matplotlib writes it.

    >>> refuse_other_file(b"<svg><style>@import url(https://elsewhere);</style></svg>")
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: it is not a plain picture: it has <style>
    """
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise Mistake("it is not a plain picture: it is not in UTF-8") from None
    refuse_other(BY_MATPLOTLIB.sub(" ", text).strip())
