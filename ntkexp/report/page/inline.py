"""A picture's SVG as a part of the page: names that no other picture uses, the page's colours, its text still text.

What is not a plain picture, such as one with a script in it, is refused (`report.page.plain`).
"""

from __future__ import annotations

import re
from html import escape

from markupsafe import Markup

from ntkexp.mistake import Mistake
from ntkexp.report.page.plain import refuse_other

DROPPED = re.compile(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", re.S)
REFERRED = re.compile(r"(?:url\(|href=\")#([\w.-]+)")
NAMED = re.compile(r' id="([^"]*)"')
COLOURED = re.compile(r"(fill|stroke): #([0-9a-f]{6})")
STYLED = re.compile(r'style="[^"]*"')
LONG = re.compile(r'="[^":]*\.\d{3}[^":]*"')  # coordinates; values with a colon are styles
DIGITS = re.compile(r"(\.\d\d)\d+")
FONT = "font-family: 'DejaVu Sans'"

PALETTE = frozenset({
    *("000000", "808080", "d9d9d9", "ffffff", "0072b2", "56b4e9", "009e73", "e69f00"),
    *("d55e00", "cc79a7", "66c5ab", "8a5f00", "f0c566", "b3a800", "999999", "666666"),
})  # fmt: skip
"""Colours that have a counterpart on a dark page: style.css names them."""


def inline(svg: str, prefix: str, title: str) -> Markup:
    """Put the picture inline, with its title for those who cannot see it."""
    start, end = svg.find("<svg"), svg.rfind("</svg>")
    if start < 0 or end < 0 or svg.count("<svg") > 1:
        raise Mistake("it is no plain picture: it has no single <svg>")
    text = DROPPED.sub("", svg[start : end + len("</svg>")])
    refuse_other(text)
    referred = set(REFERRED.findall(text))
    text = NAMED.sub(lambda found: f' id="{prefix}-{found[1]}"' if found[1] in referred else "", text)
    text = text.replace("url(#", f"url(#{prefix}-").replace('href="#', f'href="#{prefix}-')
    text = STYLED.sub(themed, text).replace(FONT, "font-family: var(--plot-font)")
    text = LONG.sub(lambda found: DIGITS.sub(r"\1", found[0]), text)
    head, _, body = text.partition(">")
    return Markup(f"{opened(head, title)}>{body}")


def themed(found: re.Match[str]) -> str:
    """Call colours of the palette by their names on the page; others, of a scale, are mixed so that they stand out from
    it.
    """
    written = "font-size" in found[0]
    return COLOURED.sub(lambda colour: f"{colour[1]}: {on_page(colour[2], colour[1], written)}", found[0])


def on_page(colour: str, use: str, written: bool) -> str:
    """Find the page's colour for letters, lines or areas."""
    if colour in PALETTE:
        return f"var(--c{colour}, #{colour})"
    if written:
        return f"color-mix(in srgb, #{colour}, var(--c000000) 60%)"
    return f"color-mix(in srgb, #{colour}, #fff var(--lift))" if use == "stroke" else f"#{colour}"


def opened(head: str, title: str) -> str:
    """Write the first tag: as wide as there is room, up to four thirds of its size in print."""
    width = re.search(r'width="([\d.]+)pt"', head)
    points = float(width[1]) if width else 480.0
    sized = re.sub(r' (width|height)="[^"]*"', "", head)
    wide = " wide" if points > 300 else ""
    return f'{sized} role="img" aria-label="{escape(title)}" class="plot{wide}" style="max-width: {points * 1.5:.0f}px"'


def slug(name: str) -> str:
    """Make a name that can be an anchor.

    >>> slug("mlp-w512 <b>")
    'mlp-w512--b-'
    """
    return re.sub(r"[^\w-]", "-", name)
