"""The pages in docs/, taken apart block by block, and carried out in order in a folder.

    python, yaml with a name in its first line    is written to a file of this name
    python                                        runs; where a text follows, it is what was printed
    sh                                            each line runs in a shell
    text                                          is shown only

Sweeps that come with the package would take minutes: they are given `SHORTER` as well.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from tests.docs.process import printed
from tests.docs.readme import ROOT

PAGES = sorted(path for path in (ROOT / "docs").glob("*.md") if path.name != "reference.md")  # which has its own test
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ([\w/]+\.(?:py|yaml))\n")
SMALL = "data.train=12 data.probe=6 data.test=6 steps=20 threads=1"
SHORTER = {
    "ntkexp sweep width": f"model.width=8,16,32 seed=0..1 {SMALL}",
    "ntkexp sweep bottleneck": f"model.narrow=2,4 seed=0 {SMALL}",
}


@dataclass(frozen=True)
class Block:
    """A piece of code, and what is shown below it."""

    language: str
    text: str
    below: str = ""

    @property
    def file(self) -> str | None:
        """The name in its first line."""
        named = FILE.match(self.text)
        return named[1] if named and self.language in {"python", "yaml"} else None

    @property
    def commands(self) -> list[str]:
        """The lines of a shell block."""
        return self.text.splitlines() if self.language == "sh" else []

    def run(self, folder: Path) -> None:
        """A program prints what is shown below it."""
        if self.language == "python" and not self.file:
            assert printed([sys.executable, "-c", self.text], folder) == self.below


@dataclass(frozen=True)
class Page:
    path: Path

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @property
    def prose(self) -> str:
        """All but the code."""
        return BLOCK.sub("", self.text)

    @cached_property
    def blocks(self) -> list[Block]:
        """The code, in order."""
        found = [Block(*pair) for pair in BLOCK.findall(self.text)]
        below = [block.text if block.language == "text" else "" for block in [*found[1:], Block("", "")]]
        return [Block(block.language, block.text, text) for block, text in zip(found, below, strict=False)]

    @property
    def commands(self) -> list[str]:
        """Every line for the shell."""
        return [line for block in self.blocks for line in block.commands]

    def files(self, folder: Path) -> None:
        """Write what the page says should be in files."""
        for block in self.blocks:
            if block.file:
                (folder / block.file).parent.mkdir(parents=True, exist_ok=True)
                (folder / block.file).write_text(block.text, encoding="utf-8")

    def carry_out(self, folder: Path) -> None:
        """Do all that the page does."""
        self.files(folder)
        for block in self.blocks:
            for line in block.commands:
                printed(["bash", "-c", shortened(line)], folder)
            block.run(folder)


def shortened(line: str) -> str:
    """The same command for less time."""
    return " ".join([line, *(words for start, words in SHORTER.items() if line.startswith(start))])
