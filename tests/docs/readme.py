"""The README, taken apart."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)


LINES = [line for block in blocks("sh") for line in block.splitlines()]
COMMANDS = [line for line in LINES if line.startswith("ntkexp ")]
SETUPS = [line for line in LINES if not line.startswith("ntkexp ")]
PROSE = re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL)
QUOTED = [" ".join(words.split()) for words in re.findall(r"`([^`]+)`", PROSE)]
