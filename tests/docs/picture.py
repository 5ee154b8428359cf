"""The picture of the package, docs/chapters.svg: a box for each part, the highest layer on top; files are dashed."""

from __future__ import annotations

from collections.abc import Iterator

from tests.docs.chapters import Chapter

WIDTH, HEIGHT, GAP, MARGIN = 680, 26, 8, 12
LETTER = 7.4  # the width of a letter, with some room
STYLE = """\
text { font: 12px ui-monospace, Menlo, Consolas, monospace; text-anchor: middle; fill: #222 }
.folder { fill: #e8f1f8; stroke: #0072b2 }
.file { fill: #fff; stroke: #888; stroke-dasharray: 3 2 }
path { stroke: #ccc }
"""


def picture(house: list[list[Chapter]]) -> str:
    """The whole picture, from floors of which the lowest is the first."""
    rows = [(number, row) for number, floor in enumerate(reversed(house)) for row in broken(floor)]
    height = 2 * MARGIN + len(rows) * (HEIGHT + GAP) - GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" '
        f'aria-label="The parts of ntkexp, layer above layer">\n<style>\n{STYLE}</style>\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{"".join(drawn(rows))}</svg>\n'
    )


def broken(floor: list[Chapter]) -> list[list[Chapter]]:
    """The chapters of a floor in rows that are no wider than the picture."""
    rows: list[list[Chapter]] = [[]]
    for chapter in floor:
        if sum(map(room, [*rows[-1], chapter])) > WIDTH - 2 * MARGIN:
            rows.append([])
        rows[-1].append(chapter)
    return rows


def room(chapter: Chapter) -> float:
    """The width of a box and of the gap beside it."""
    return LETTER * len(chapter.path.name) + 2 * GAP + GAP


def drawn(rows: list[tuple[int, list[Chapter]]]) -> Iterator[str]:
    """The rows, each with the number of its floor, with a line where a floor ends."""
    above = 0
    for place, (floor, chapters) in enumerate(rows):
        top = MARGIN + place * (HEIGHT + GAP)
        if floor != above:
            yield f'<path d="M{MARGIN} {top - GAP / 2:.1f}H{WIDTH - MARGIN}"/>\n'
        yield from boxes(chapters, top)
        above = floor


def boxes(chapters: list[Chapter], top: float) -> Iterator[str]:
    """Boxes side by side, in the middle of the picture."""
    left = (WIDTH - sum(map(room, chapters)) + GAP) / 2
    for chapter in chapters:
        width = room(chapter) - GAP
        kind = "folder" if chapter.path.is_dir() else "file"
        yield f'<rect class="{kind}" x="{left:.1f}" y="{top}" width="{width:.1f}" height="{HEIGHT}" rx="4"/>\n'
        yield f'<text x="{left + width / 2:.1f}" y="{top + 17}">{chapter.path.name}</text>\n'
        left += width + GAP
