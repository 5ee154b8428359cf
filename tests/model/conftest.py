"""Python files of a user, each with a different name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from textwrap import dedent

import pytest

NUMBERS = count()
HEAD = "import torch\nfrom torch import nn\nfrom torch.nn import functional as F\n"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Return a function that writes a module with this text, which begins at line 4."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def write(text: str) -> Path:
        file = tmp_path / f"written_net_{next(NUMBERS)}.py"
        file.write_text(HEAD + dedent(text).lstrip("\n"))
        return file

    return write
