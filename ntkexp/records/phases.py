"""What contributions.zarr holds beside contributions where data come in phases, the axis `phase` counted from 1:

    by_phase        [phase, probe, out, example]   what each training example added while each phase was learned; their
                                                   sum over phases is `contribution`
    decay_by_phase  [phase, probe, out]            what decay of the weights took away then, where they decay
    change          [phase, probe, out]            how the outputs changed then: the sum of both over examples
    example_phase   [example]                      the phase in which each example is learned
    point_phase     [probe]                        the phase that each point is of
    phase_name      [phase]                        what it is called

What an example adds outside its own phase it does by what an optimizer remembers of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.contributions import called, explained_rule
from ntkexp.records.store import ManyRows, open_store, put_array, put_stacked

BY_PHASE, DECAY_BY_PHASE, CHANGE = "by_phase", "decay_by_phase", "change"
EXAMPLE_PHASE, POINT_PHASE = "example_phase", "point_phase"
PHASES = "phases"
"""The attribute of the store that holds the names."""


@dataclass(frozen=True, kw_only=True)
class ContributionsByPhase:
    """What each rule says of every phase; phases of examples and points are counted from 1."""

    names: tuple[str, ...]
    examples: NDArray[np.int64]
    points: NDArray[np.int64]
    change: NDArray[np.float64]
    parts: Mapping[str, Sequence[ManyRows]]  # an array for each phase
    decay: Mapping[str, NDArray[np.float64]]


def add_phases(path: Path, found: ContributionsByPhase) -> None:
    """Write what happened in each phase, beside contributions that are written."""
    store, first = open_store(path, write=True), explained_rule(found.parts)
    store.attrs[PHASES] = list(found.names)
    put_array(store, CHANGE, np.asarray(found.change, dtype=np.float64), ("phase", "probe", "out"), {})
    put_array(store, EXAMPLE_PHASE, found.examples, ("example",), {})
    put_array(store, POINT_PHASE, found.points, ("probe",), {})
    for rule, parts in found.parts.items():
        put_stacked(store, called(BY_PHASE, rule, first or rule), parts, ("phase", "probe", "out", "example"))
    for rule, decay in found.decay.items():
        put_array(store, called(DECAY_BY_PHASE, rule, first or rule), decay, ("phase", "probe", "out"), {})
