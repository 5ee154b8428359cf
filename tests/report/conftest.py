"""Finished runs of every kind, written once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.synthetic import Problem, digits, regression, write_run

PROBLEMS: dict[str, Problem] = {
    "two classes": digits(),
    "ten classes": digits(tuple(range(10)), (30, 20, 20)),
    "regression": regression(),
    "diverged": digits(stable_fraction=40.0, steps=300),
    "one step": digits(steps=1, snapshots=(0, 1)),
    "no probes": digits(counts=(40, 0, 30)),
    "training only": digits(read=("train",)),
    "first and last": digits(snapshots=(0, 60)),
    "nothing read in training": digits(read=("test",)),
}


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return {name: write_run(folder / name.replace(" ", "-"), problem) for name, problem in PROBLEMS.items()}
