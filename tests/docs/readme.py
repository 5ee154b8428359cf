"""The blocks, commands and prose of the README and the guide."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
GUIDE = (ROOT / "docs" / "guide.md").read_text(encoding="utf-8")
"""The continuation of the README."""
PEERS = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")
"""Computations in other libraries, in blocks `py`, and in ntkexp, in blocks `python`."""


def blocks(language: str, text: str = TEXT) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)


LINES = [line for block in blocks("sh") for line in block.splitlines()]
COMMANDS = [line for line in LINES if line.startswith("ntkexp ")]
MORE_COMMANDS = [line for block in blocks("sh", GUIDE) for line in block.splitlines()]
SETUPS = [line for line in LINES if not line.startswith("ntkexp ")]
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
QUOTED = [" ".join(words.split()) for words in re.findall(r"`([^`]+)`", PROSE)]
