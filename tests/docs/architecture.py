"""The layers of the package, from the import contracts in pyproject.toml and the docstrings of the parts.

`python -m tests.docs.architecture` writes docs/architecture.md and docs/parts.svg, and a test compares them.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.docs.readme import ROOT


@dataclass(frozen=True)
class Part:
    """A folder, or a single file."""

    path: Path

    @property
    def file(self) -> Path:
        """The file with its docstring."""
        return self.path / "__init__.py" if self.path.is_dir() else self.path

    @property
    def sentence(self) -> str:
        """The first paragraph of its docstring."""
        text = ast.get_docstring(ast.parse(self.file.read_text(encoding="utf-8"))) or ""
        return " ".join(text.partition("\n\n")[0].split()).rstrip(".:;") + "."


def layers_of(contract: str) -> list[list[Part]]:
    """Return the layers of a contract, the lowest first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {fields["name"]: fields for fields in settings["tool"]["importlinter"]["contracts"]}
    (container,) = contracts[contract]["containers"]
    folder = ROOT / container.replace(".", "/")
    layers = [re.split(r"[|:]", layer) for layer in reversed(contracts[contract]["layers"])]
    return [[part(folder / name.strip()) for name in layer] for layer in layers]


def part(module: Path) -> Part:
    """Return the part of a module."""
    return Part(module if module.is_dir() else module.with_suffix(".py"))


# docs/parts.svg: a box for each part, with the highest layer on top. Files have dashed borders.


WIDTH, HEIGHT, GAP, MARGIN = 680, 26, 8, 12
LETTER = 7.4  # width of a letter
STYLE = """\
text { font: 12px ui-monospace, Menlo, Consolas, monospace; text-anchor: middle; fill: #222 }
.folder { fill: #e8f1f8; stroke: #0072b2 }
.file { fill: #fff; stroke: #888; stroke-dasharray: 3 2 }
path { stroke: #ccc }
"""


def picture(layers: list[list[Part]]) -> str:
    """Draw the layers, the lowest first."""
    rows = [(number, row) for number, layer in enumerate(reversed(layers)) for row in broken(layer)]
    height = 2 * MARGIN + len(rows) * (HEIGHT + GAP) - GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" role="img" '
        f'aria-label="The parts of ntkexp, layer above layer">\n<style>\n{STYLE}</style>\n'
        f'<rect width="100%" height="100%" fill="#fff"/>\n{"".join(drawn(rows))}</svg>\n'
    )


def broken(layer: list[Part]) -> list[list[Part]]:
    """Break a layer into rows that fit into the picture."""
    rows: list[list[Part]] = [[]]
    for part in layer:
        if sum(map(box_width, [*rows[-1], part])) > WIDTH - 2 * MARGIN:
            rows.append([])
        rows[-1].append(part)
    return rows


def box_width(part: Part) -> float:
    """Return the width of a box and its gap."""
    return LETTER * len(part.path.name) + 3 * GAP


def drawn(rows: list[tuple[int, list[Part]]]) -> Iterator[str]:
    """Draw rows, with a line between layers. Each row has the number of its layer."""
    above = 0
    for place, (layer, parts) in enumerate(rows):
        top = MARGIN + place * (HEIGHT + GAP)
        if layer != above:
            yield f'<path d="M{MARGIN} {top - GAP / 2:.1f}H{WIDTH - MARGIN}"/>\n'
        yield from boxes(parts, top)
        above = layer


def boxes(parts: list[Part], top: float) -> Iterator[str]:
    """Draw the centred boxes of a row."""
    left = (WIDTH - sum(map(box_width, parts)) + GAP) / 2
    for part in parts:
        width = box_width(part) - GAP
        kind = "folder" if part.path.is_dir() else "file"
        yield f'<rect class="{kind}" x="{left:.1f}" y="{top}" width="{width:.1f}" height="{HEIGHT}" rx="4"/>\n'
        yield f'<text x="{left + width / 2:.1f}" y="{top + 17}">{part.path.name}</text>\n'
        left += width + GAP


# docs/architecture.md.


PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "parts.svg"
ORDER = "Import order is story order"
SECTION = re.compile(r"(?<=<!-- contract: )(.*?)( -->\n\n).*?(?=\n<!-- end -->)", re.DOTALL)


def page() -> str:
    """Return the page with new tables."""
    text = PAGE.read_text(encoding="utf-8")
    return SECTION.sub(lambda found: f"{found[1]}{found[2]}{table(layers_of(found[1]))}", text)


def table(layers: list[list[Part]]) -> str:
    """Return the table of the parts, the lowest layer first."""
    rows = ["| layer | part | |", "|--:|---|---|"]
    for number, layer in enumerate(layers, start=1):
        rows += [f"| {number} | {link(part)} | {part.sentence} |" for part in layer]
    return "\n".join(rows) + "\n"


def link(part: Part) -> str:
    """Return the name of a part, linked to its file."""
    return f"[`{part.path.name}`](../{part.file.relative_to(ROOT)})"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    PICTURE.write_text(picture(layers_of(ORDER)), encoding="utf-8")
