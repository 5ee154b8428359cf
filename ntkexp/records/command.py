"""The command that stands beside results: given again in the same folder, it asks for the same experiment.

>>> command("train", ["data.path=my file.csv"], options(Path("outputs"), ["net.py"], Path("mine")))
"ntkexp train 'data.path=my file.csv' --trust=net.py --config-dir=mine"
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

OUTPUTS = Path("outputs")
"""Where results go if nobody says."""


def options(out: Path, trust: Sequence[str] = (), config_dir: Path | None = None) -> list[str]:
    """The options without which the words of a command mean something else, or its results lie elsewhere."""
    place = [f"--out={out}"] if out != OUTPUTS else []
    return [*place, *(f"--trust={entry}" for entry in trust), *([f"--config-dir={config_dir}"] if config_dir else [])]


def command(name: str, words: Sequence[str], options: Sequence[str] = ()) -> str:
    """A command line for a shell."""
    return shlex.join(["ntkexp", name, *words, *options])
