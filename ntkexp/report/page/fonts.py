"""The fonts of the PDF files that a page writes. They contain only the letters of the
page.

matplotlib draws with DejaVu Sans and contains the files of this font. The browser
cannot read these files, so the page itself contains the letters that it needs."""

from __future__ import annotations

import base64
import io
import string

from fontTools import subset
from matplotlib.font_manager import FontProperties, findfont

ALWAYS = string.printable.strip() + " −"
"""Letters that the page may lack, but that pictures drawn by the browser may contain:
these pictures show numbers and names of runs."""
WEIGHTS = ("normal", "bold")
DROPPED_TABLES = (
    "FFTM",
    "GSUB",
    "GPOS",
    "GDEF",
    "MATH",
    "kern",
    "name",
    "OS/2",
    "post",
)
PLACE = '<template id="fonts">'


def with_fonts(page: str) -> str:
    """Insert the fonts with all letters of a page."""
    letters = "".join(sorted(set(page + ALWAYS)))
    return page.replace(
        PLACE, PLACE + "".join(cut(weight, letters) for weight in WEIGHTS)
    )


def cut(weight: str, text: str) -> str:
    """Return an element with the letters of a text. The element contains a TrueType
    font in base64, and "code:glyph:advance" for each letter, with 1000 units per em."""
    options = subset.Options(
        hinting=False, layout_features=[], notdef_outline=True, recalc_timestamp=False
    )
    options.drop_tables += DROPPED_TABLES
    path = findfont(FontProperties(family="DejaVu Sans", weight=weight))
    file = io.BytesIO()
    entries = []
    with subset.load_font(path, options) as font:
        subsetter = subset.Subsetter(options)
        subsetter.populate(text=text)
        subsetter.subset(font)
        font.save(file, reorderTables=False)
        em = font["head"].unitsPerEm
        for code, name in sorted(font.getBestCmap().items()):
            advance = round(1000 * font["hmtx"].metrics[name][0] / em)
            entries.append(f"{code}:{font.getGlyphID(name)}:{advance}")
    data = base64.b64encode(file.getvalue()).decode()
    glyphs = ",".join(entries)
    return f'<data value="{data}" data-weight="{weight}" data-glyphs="{glyphs}"></data>'
