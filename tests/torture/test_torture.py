"""A sample of the torture: a case of every kind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.docs.readme import ROOT
from tests.torture.loop.search import search

COMMAND = [sys.executable, "-m", "tests.torture"]


@pytest.mark.slow
def test_a_case_of_every_kind() -> None:
    ended = subprocess.run([*COMMAND, "--count=1", "--seed=1"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.slow
def test_the_same_number_is_the_same_case() -> None:
    """It does not depend on other kinds, or on the workers."""
    told = [
        subprocess.run([*COMMAND, *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
        for words in (("sweeps", "--only=1"), ("sweeps", "--count=2", "--workers=1"), ("sweeps", "--count=2"))
    ]
    assert told[1][-1].split()[:5] == told[2][-1].split()[:5]
    assert told[0][-1].split()[:2] == ["sweeps", "1"]


# Nothing that is planted in a loop is recorded as something else, and no plain loop is refused.


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch, about what is planted
def test_what_is_planted_is_recorded_truly_or_refused() -> None:
    said: list[str] = []
    planted, plain = search(0, 30, said.append)
    assert not planted["wrong"], said
    assert not plain["wrong"], said
    assert 20 * plain["refused"] <= plain.total(), said  # one number, under a scale of 1000, that is not clipped once
    assert planted["refused"] > planted["recorded"] > 0
