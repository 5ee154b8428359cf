"""Finished runs of every kind, each written at its first use."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.report.synthetic import Problem, digits, regression, write_run

STRANGE = (
    *(r"$x^{$", "$5-$10", "a_b % \\frac", "<b>&amp;\"'", "\x01\x1b[31m\x7f\ufffe", "\u202eevil שלום"),
    *("\U0001f600\u200d", "=cmd|'a'!A0", "", "n" * 10_000),
)
"""Odd names of classes."""

PROBLEMS: dict[str, Problem] = {
    "two classes": digits(),
    "ten classes": digits(tuple(range(10)), (30, 20, 20)),
    "strange names": replace(digits(tuple(range(10)), (30, 20, 20)), classes=STRANGE),
    "regression": regression(),
    "diverged": digits(stable_fraction=40.0, steps=300),
    "one step": digits(steps=1, snapshots=(0, 1)),
    "no queries": digits(counts=(40, 0, 30)),
    "training only": digits(read=("train",)),
    "first and last": digits(snapshots=(0, 60)),
    "nothing read in training": digits(read=("test",)),
}


@dataclass
class Finished(dict[str, Path]):
    """The folders of the runs, by their kind."""

    place: Path

    def __missing__(self, kind: str) -> Path:
        self[kind] = write_run(self.place / kind.replace(" ", "-"), PROBLEMS[kind])
        return self[kind]


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return Finished(tmp_path_factory.mktemp("runs"))
