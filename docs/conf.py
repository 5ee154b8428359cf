"""The documentation as a site, by Sphinx. It opens from the file system, search included, and loads nothing from
elsewhere.

pip install -c constraints.txt -e '.[docs]' && sphinx-build -W docs outputs/site
"""

from __future__ import annotations

import re
from pathlib import Path
from posixpath import normpath, relpath
from typing import TYPE_CHECKING, Any

from ntkexp import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project, author, release = "ntkexp", "the ntkexp authors", __version__
html_title = f"ntkexp {release}"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
html_theme = "furo"
html_copy_source = False
html_show_sourcelink = False
autodoc_member_order = "bysource"
default_role = "code"  # docstrings mark code as Markdown does
maximum_signature_line_length = 90
myst_heading_anchors = 4

ROOT = Path(__file__).parents[1]
PAGES = {"README.md": "index"} | {
    name: name[:-3].lower() for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
}
"""Files outside docs/ that are pages of the site, by their names there."""
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def fill_page(_: Sphinx, name: str, source: list[str]) -> None:
    """Give a page what its file holds, and let links of all pages stay on the site."""
    folder, text = str(Path("docs", name).parent), source[0]
    for file, page in PAGES.items():
        if name == page:
            source[0] = relinked((ROOT / file).read_text("utf-8"), "", folder) + text
            return
    source[0] = relinked(text, folder, folder)


def relinked(text: str, lies_in: str, shown_in: str) -> str:
    """A text with links to pages of the site; what is not one is shown without a link, if it is in the repository."""

    def instead(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        place = normpath(f"{lies_in}/{target}" if lies_in else target)
        if place in PAGES:
            place = f"docs/{PAGES[place]}.md"
        if place.startswith("docs/") and not (ROOT / place).is_dir():
            return f"[{label}]({relpath(place, shown_in)}{anchor})"
        return label if (ROOT / place).exists() else match[0]

    return LINK.sub(instead, text)


def escape_stars(_: Sphinx, *given: Any) -> None:
    """Axes such as *pixel are no emphasis."""
    lines: list[str] = given[-1]
    lines[:] = [re.sub(r"(?<![`\w*])\*(?=\w+[\],])", r"\\*", line) for line in lines]


def setup(app: Sphinx) -> None:
    app.connect("source-read", fill_page)
    app.connect("autodoc-process-docstring", escape_stars)
