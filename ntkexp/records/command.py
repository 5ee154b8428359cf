"""The command that stands beside results: given again in the same folder, it asks for the same experiment.

>>> command("train", ["data.path=my file.csv"])
"ntkexp train 'data.path=my file.csv'"
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence


def command(name: str, words: Sequence[str], options: Sequence[str] = ()) -> str:
    """Write a command line for a shell."""
    return shlex.join(["ntkexp", name, *words, *options])
