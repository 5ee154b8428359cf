"""The options that stand beside results, with the words of the command: what repeats them.

>>> options(Path("outputs"), ["net.py"], Path("mine")), options(Path("there"))
(['--trust=net.py', '--config-dir=mine'], ['--out=there'])
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

OUTPUTS = Path("outputs")
"""Where results go if nobody says."""


def trusted(entries: Sequence[str]) -> tuple[str, ...]:
    """What is trusted, as it is spelled in any folder."""
    return tuple(str(Path(entry).expanduser().absolute()) if entry.endswith(".py") else entry for entry in entries)


def options(out: Path = OUTPUTS, trust: Sequence[str] = (), config_dir: Path | None = None) -> list[str]:
    """The options without which the words of a command mean something else, or its results lie elsewhere."""
    place = [f"--out={out}"] if out != OUTPUTS else []
    return [*place, *(f"--trust={entry}" for entry in trust), *([f"--config-dir={config_dir}"] if config_dir else [])]
