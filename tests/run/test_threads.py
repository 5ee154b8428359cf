"""A run takes as many threads as it is told, else by what a step takes; its folder says how many it took."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import ntkexp.kernel.read.plan
import ntkexp.run.execute
from ntkexp.progress import Silent
from ntkexp.records.folder import PROVENANCE, RunFolder
from ntkexp.run.execute import execute
from tests.run.small import small

WORDS = ("steps=2", "path.rule=[left]", "ladder.machine=[]", "path.error_samples=0")
CORES = 3


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of three cores, whatever the tests run on."""
    monkeypatch.setattr(ntkexp.run.execute, "all_threads", lambda: CORES)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def threads(place: Path, given: int | None, most: int | None = None) -> int:
    """How many a run took, by its folder."""
    experiment = small(*WORDS).model_copy(update={"threads": given})
    folder = execute(experiment, WORDS, place, False, Silent(), pictures=False, most_threads=most)
    assert RunFolder(folder).whole
    taken: int = RunFolder(folder).read_sealed(PROVENANCE)["threads"]
    assert torch.get_num_threads() == taken
    return taken


def test_a_small_run_takes_one_thread_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    assert threads(tmp_path / "by size", None) == 1
    assert threads(tmp_path / "told", 2) == 2


def test_a_large_run_takes_all_that_there_are_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ntkexp.kernel.read.plan, "FEW", 0.0)
    assert threads(tmp_path / "by size", None) == CORES
    assert threads(tmp_path / "of a worker", None, most=2) == 2
    assert threads(tmp_path / "told", 1, most=2) == 1
