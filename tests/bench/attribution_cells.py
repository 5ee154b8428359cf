"""What the attribution bench keeps: a cell is what a score says of a training, or a truth, as soon as it is known.

Its file is named by all that it depends on, as far as that can be told: words, sizes, seed, versions of other programs.
Whoever changes what a score or a truth computes raises `VERSION`, or begins another folder.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.bench.attribution_case import Case
from tests.bench.peers import PACKAGES

VERSION = 1
PEERS = {"dattri": ("TracIn", "infl.", "TRAK"), "traker": ("TRAK",)}
"""Other programs, and the scores that they are asked for."""


class Told(NamedTuple):
    """What is kept, the seconds of a processor that it took, and those of a clock."""

    found: Any
    seconds: float
    took: float


@dataclass(frozen=True)
class Cells:
    """The cells in a folder."""

    folder: Path

    def path(self, case: Case, name: str) -> Path:
        """The file of a cell."""
        made_by = (VERSION, torch.__version__, {program: PACKAGES[program][-1] for program in PEERS})
        digest = sha256(repr((made_by, case, name)).encode()).hexdigest()[:16]
        return self.folder / f"{name.replace(' ', '_')}-{digest}.pt"

    def read(self, case: Case, name: str) -> Told | None:
        """A cell, if it is there."""
        path = self.path(case, name)
        return Told(**torch.load(path)) if path.exists() else None

    def whole(self, case: Case, names: tuple[str, ...]) -> Mapping[str, Told] | None:
        """All of these cells of a training, if all are there."""
        found = {name: told for name in names if (told := self.read(case, name)) is not None}
        return found if len(found) == len(names) else None

    def keep(self, case: Case, name: str, told: Told) -> None:
        """Write a cell; whoever is killed meanwhile leaves none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.path(case, name)
        part = path.with_suffix(".part")
        torch.save(told._asdict(), part)
        os.replace(part, path)
