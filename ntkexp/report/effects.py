"""What would change if an example were left out, where a run has computed that."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.contributions import RETRAINED
from ntkexp.records.leave_out import STORE, LeaveOut, read_leave_out
from ntkexp.report.leave_out import Agreement, held_against
from ntkexp.report.run import Run

Array: TypeAlias = NDArray[np.float64]

EFFECT = "effect"
NOT_COMPUTED = "not computed: path.effects=true"


def effects(run: Run) -> Array | None:
    """Read the predicted change of the outputs that were read if an example were left out, [probe, out, example]."""
    if EFFECT not in run.contributions:
        return None
    return np.asarray(run.contributions[EFFECT].to_numpy(), dtype=float)


@dataclass(frozen=True, eq=False)
class KnownEffects:
    """What would change if examples were left out, and whether that is to be believed."""

    predicted: Array  # [probe, out, example]
    outs: tuple[int, ...]  # which outputs these are
    check: LeaveOut | None
    agreement: Agreement | None
    is_actual: bool = False  # whether trainings found what is `predicted`

    def at(self, probe: int, out: int) -> tuple[Array, bool] | None:
        """Find the change of an output without each example, and whether it came of trainings; None: not known."""
        count, column = self.predicted.shape[2], self.outs.index(out)
        actual = None if self.check is None else self.check.alone(count)
        if self.check is not None and actual is not None and probe in self.check.probe:
            return actual[self.check.probe.index(probe), column], True
        found = self.predicted[probe, column]
        return (found, self.is_actual) if np.isfinite(found).all() else None

    @property
    def withheld(self) -> bool:
        """Whether predictions failed where they were checked."""
        return self.agreement is not None and not self.agreement.believed


def known_effects(run: Run) -> KnownEffects | None:
    """Read what a run knows of its effects."""
    predicted = effects(run)
    if predicted is None:
        return None
    facts = run.contributions[EFFECT].attrs
    is_actual = facts.get("kind") == RETRAINED
    if not (run.path / STORE).exists():
        return KnownEffects(predicted, run.outs, None, None, is_actual)
    check = read_leave_out(run.sealed(STORE))
    growth = 1.0 if is_actual else float(facts.get("growth") or inf)  # JSON knows no infinity
    return KnownEffects(predicted, run.outs, check, held_against(check, growth), is_actual)


def influence(parts: Array) -> Array:
    """How much each example matters to all that is known of the points, [example], given [probe, out, example].

    >>> influence(np.array([[[3.0, 0.0], [4.0, np.nan]]]))
    array([5., 0.])
    """
    return np.asarray(np.sqrt(np.nansum(np.square(parts), axis=(0, 1))))
