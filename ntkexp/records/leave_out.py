"""leave_out.zarr: predicted changes of outputs held against those of trainings that really left examples out.

predicted, actual    [removal, probe, out]   at the outputs of contributions.zarr
example              [place]                 who was left out, one removal after another
count, influential   [removal]               how many, and whether the most influential ones or random ones
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.store import create_store, get_array, open_store, put_array

STORE = "leave_out.zarr"
CHANGES = ("removal", "probe", "out")


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """One group was left out: the most influential examples, or random ones."""

    influential: bool
    examples: tuple[int, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class LeaveOut:
    """Several groups were left out, one at a time."""

    removals: tuple[LeftOut, ...]
    probe: tuple[int, ...]
    predicted: NDArray[np.float64]
    actual: NDArray[np.float64]

    def alone(self, examples: int) -> NDArray[np.float64] | None:
        """The actual changes when each example is left out by itself, [probe, out, example], if all of them were."""
        singles = {each.examples[0]: k for k, each in enumerate(self.removals) if len(each.examples) == 1}
        if len(singles) < examples:
            return None
        return np.moveaxis(self.actual[[singles[k] for k in range(examples)]], 0, -1)


def write_leave_out(path: Path, found: LeaveOut) -> None:
    """Write what was predicted and what came of it."""
    store = create_store(path)
    put_array(store, "predicted", np.asarray(found.predicted, dtype=np.float64), CHANGES, {})
    put_array(store, "actual", np.asarray(found.actual, dtype=np.float64), CHANGES, {})
    put_array(store, "probe", np.array(found.probe, dtype=np.int64), ("probe",), {})
    everyone = np.array([k for each in found.removals for k in each.examples], dtype=np.int64)
    put_array(store, "example", everyone, ("place",), {})
    counts = np.array([len(each.examples) for each in found.removals], dtype=np.int64)
    put_array(store, "count", counts, ("removal",), {})
    put_array(store, "influential", np.array([each.influential for each in found.removals]), ("removal",), {})


def read_leave_out(path: Path) -> LeaveOut:
    """Read it as it was written."""
    store = open_store(path)
    parts = ("example", "count", "influential", "probe", "predicted", "actual")
    everyone, counts, kinds, probe, predicted, actual = (np.asarray(get_array(store, part)[...]) for part in parts)
    groups = np.split(everyone, np.cumsum(counts)[:-1])
    removals = tuple(
        LeftOut(influential=bool(kind), examples=tuple(group.tolist()))
        for kind, group in zip(kinds, groups, strict=True)
    )
    return LeaveOut(removals=removals, probe=tuple(probe.tolist()), predicted=predicted, actual=actual)
