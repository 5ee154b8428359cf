"""The documentation as a site, by Sphinx. It opens from the file system, search included, and loads nothing from
elsewhere.

pip install -c constraints.txt -e '.[docs]' && sphinx-build -W docs outputs/site
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from posixpath import normpath, relpath
from typing import TYPE_CHECKING

from docutils import nodes

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ntkexp import __version__  # noqa: E402  both are in ROOT
from tests.docs import api  # noqa: E402

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project, author, release = "ntkexp", "the ntkexp authors", __version__
html_title = f"ntkexp {release}"
extensions = ["myst_nb", "sphinx_copybutton"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
nb_execution_mode = "off"  # the stored outputs are shown; CI executes the notebooks by nbmake
myst_enable_extensions = ["alert"]
copybutton_exclude = ".linenos, .gp, .go"  # prompts and outputs of doctests
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False
default_role = "code"  # docstrings mark code as Markdown does
myst_heading_anchors = 4

PAGES = {"README.md": "index"} | {
    name: name[:-3].lower() for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
}
"""Files outside docs/ that are pages of the site, by their names there."""
BELOW = {"reference": "reference/*", "notebooks/README": "*"}
"""The pages below a page in the navigation. GitHub would show a table of contents in their files as code."""
SEARCHED = re.compile(r"^<!-- search: (.*) -->$", re.MULTILINE)
"""Words by which users search for a section. They become entries of the index, which the search shows first."""
LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s#:]+)(#[^)\s]*)?\)")


def fill_page(_: Sphinx, name: str, source: list[str]) -> None:
    """Give a page what its file holds, and let links of all pages stay on the site."""
    folder, text = str(Path("docs", name).parent), source[0]
    for file, page in PAGES.items():
        if name == page:
            source[0] = relinked((ROOT / file).read_text("utf-8"), "", folder) + text
            return
    text = SEARCHED.sub(lambda match: entries(match[1].split("; ")), text)
    source[0] = relinked(api.with_objects(text) if name == "api" else text, folder, folder)
    if name in BELOW:
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{BELOW[name]}\n```\n"


def entries(words: list[str]) -> str:
    """Return a directive with an entry of the index for each of the words."""
    return "\n".join(["```{eval-rst}", ".. index::", *(f"   ! {each}" for each in words), "```"])


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


def widen_meanings(_: Sphinx, doctree: nodes.document, name: str) -> None:
    """Mark the tables of keys, whose last column is the widest."""
    for table in doctree.findall(nodes.table):
        if name.startswith("reference"):
            table["classes"].append("meanings")


def setup(app: Sphinx) -> None:
    app.connect("doctree-resolved", widen_meanings)
    app.connect("source-read", fill_page)
