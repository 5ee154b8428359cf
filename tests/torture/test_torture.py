"""A sample of the torture: a case of every kind that tests/run/test_killed.py does not draw."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docs.readme import ROOT
from tests.torture.crew import known

COMMAND = [sys.executable, "-m", "tests.torture"]
DRAWN_ELSEWHERE = {"kills", "damages", "kernel_files", "journals"}


@pytest.mark.slow
def test_a_case_of_every_other_kind() -> None:
    command = [*COMMAND, *sorted({*known()} - DRAWN_ELSEWHERE), "--count=1", "--seed=1"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
