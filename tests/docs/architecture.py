"""docs/architecture.md and its picture, as far as they say what the import contracts and the docstrings say.

python -m tests.docs.architecture     writes both; a test asserts that they are as they would be written
"""

from __future__ import annotations

import re

from tests.docs.chapters import Chapter, floors
from tests.docs.picture import picture
from tests.docs.readme import ROOT

PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "chapters.svg"
HOUSE = "Import order is story order"
SECTION = re.compile(r"(?<=<!-- contract: )(.*?)( -->\n\n).*?(?=\n<!-- end -->)", re.DOTALL)


def page() -> str:
    """The page, with its generated tables."""
    text = PAGE.read_text(encoding="utf-8")
    return SECTION.sub(lambda found: f"{found[1]}{found[2]}{table(floors(found[1]))}", text)


def table(house: list[list[Chapter]]) -> str:
    """The parts of the package, the lowest layer first."""
    rows = ["| layer | part | |", "|--:|---|---|"]
    for number, floor in enumerate(house, start=1):
        rows += [f"| {number} | {link(chapter)} | {chapter.sentence} |" for chapter in floor]
    return "\n".join(rows) + "\n"


def link(chapter: Chapter) -> str:
    """A chapter's name, which leads to the file that has its docstring."""
    return f"[`{chapter.path.name}`](../{chapter.file.relative_to(ROOT)})"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    PICTURE.write_text(picture(floors(HOUSE)), encoding="utf-8")
