"""The contracts between the chapters hold: import order is story order."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.docs.readme import ROOT


def test_the_contracts_hold() -> None:
    linter = Path(sys.executable).with_name("lint-imports")
    ended = subprocess.run([linter, "--no-cache"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout
