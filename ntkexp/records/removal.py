"""removal/KEY.zarr beside a finished run: what leaving out a group of examples changed, and how that splits over them.

    actual     [probe, out]            the change of the output, trained again without the group
    shares     [probe, out, example]   of each example of the group; they add up to `actual`
    by_step    [probe, out, step]      of each step; they add up to it as well
    probe, out, example                which points, outputs and training examples these are

KEY tells group and points; KEY.json, written last, seals the store and holds what else is known. DONE.json does not
speak of it: a run is the same run whatever is asked of it later. But it is sealed for that run and this key: what was
found of another run, or of another group, is not read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.records.folder import RunFolder
from ntkexp.records.json_file import Json
from ntkexp.records.seal import broken, sealed
from ntkexp.records.store import create_store, get_array, open_store, put_array

FOLDER = "removal"
NUMBERS = {"actual": ("probe", "out"), "shares": ("probe", "out", "example"), "by_step": ("probe", "out", "step")}
PLACES = ("probe", "out", "example")
FACTS = ("growth", "repeated", "emptied")


@dataclass(frozen=True, eq=False, kw_only=True)
class Removal:
    """A group was left out, and this is what that changed at some points."""

    probe: tuple[int, ...]  # along the axis of this name in contributions.zarr
    out: tuple[int, ...]
    example: tuple[int, ...]  # who was left out, by place among the training examples
    actual: NDArray[np.float64]
    shares: NDArray[np.float64]
    by_step: NDArray[np.float64]
    growth: float  # of the sweep backwards
    repeated: float  # how far the training without a removal was from the run, relative to what the removal changed
    emptied: int  # steps of whose batch nothing was left

    @property
    def closure(self) -> float:
        """How far the shares are from adding up, relative to what they add up to."""
        size = float(np.linalg.norm(self.actual))
        missed = float(np.linalg.norm(self.shares.sum(2) - self.actual))
        return missed / size if size else missed

    @property
    def cancellation(self) -> NDArray[np.float64]:
        """How many times larger shares are than their sum, Σ|s|/|Σs|: where that is much, a share means little."""
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.asarray(np.abs(self.shares).sum(2) / np.abs(self.shares.sum(2)))


def key(example: Sequence[int], probe: Sequence[int]) -> str:
    """Name the removal of these examples, looked at from these points.

    >>> key([3, 17], [0]) == key([17, 3], [0]), key([3], [0]) == key([3], [1])
    (True, False)
    """
    return sha256(json.dumps([sorted(example), list(probe)]).encode()).hexdigest()[:12]


def write_removal(run: Path, found: Removal) -> None:
    """Keep what was found beside the run, whole or not at all."""
    folder, name = run / FOLDER, key(found.example, found.probe)
    folder.mkdir(exist_ok=True)
    store = create_store(folder / f"{name}.zarr")
    for part, dims in NUMBERS.items():
        put_array(store, part, np.asarray(getattr(found, part), dtype=np.float64), dims, {})
    for part in PLACES:
        put_array(store, part, np.array(getattr(found, part), dtype=np.int64), (part,), {})
    known: dict[str, Json] = {part: getattr(found, part) for part in FACTS}
    known["seals"] = sealed(folder, [f"{name}.zarr"])
    RunFolder(run).write_sealed(f"{FOLDER}/{name}.json", known)


def read_removal(run: Path, example: Sequence[int], probe: Sequence[int]) -> Removal | None:
    """What was found of this group at these points, if it was and is as it was written."""
    folder, name = run / FOLDER, key(example, probe)
    try:
        known = RunFolder(run).read_sealed(f"{FOLDER}/{name}.json")
    except Mistake:
        return None
    if broken(folder, known.pop("seals")):
        return None
    store = open_store(folder / f"{name}.zarr")
    found: dict[str, Any] = {part: np.asarray(get_array(store, part)[...]) for part in NUMBERS}
    found |= {part: tuple(np.asarray(get_array(store, part)[...]).tolist()) for part in PLACES}
    return Removal(**found, **known)
