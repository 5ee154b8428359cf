"""The leave-out effects of a run. The effects were predicted from the training, or
measured by retraining without each example."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.contributions import (
    EFFECT,
    RETRAINED,
    STORE,
    LeaveOut,
    read_leave_out,
    refuse_odd_leave_out,
)
from ntkexp.report.leave_out import Agreement, agreement_of
from ntkexp.report.run import Run

Array: TypeAlias = NDArray[np.float64]


def effects_of_run(run: Run) -> Array | None:
    """Return the leave-out effects, [query, out, example],
    or None if the run has none."""
    if EFFECT not in run.contributions:
        return None
    return np.asarray(run.contributions[EFFECT].to_numpy(), dtype=float)


@dataclass(frozen=True, eq=False)
class KnownEffects:
    """The leave-out effects of a run. `check` contains retrainings without examples,
    and `agreement` compares the effects with these retrainings."""

    predicted: Array  # [query, out, example]
    outs: tuple[int, ...]  # labels of the axis `out`
    check: LeaveOut | None
    agreement: Agreement | None
    # True if `predicted` was measured by retraining without each example
    is_actual: bool = False

    def at(self, query: int, out: int) -> tuple[Array, bool] | None:
        """Return the effects on one output, [example], and whether retraining measured
        them.

        Return None if the effects are unknown.
        """
        column = self.outs.index(out)
        if self.check is not None and query in self.check.query:
            actual = self.check.alone(self.predicted.shape[2])
            if actual is not None:
                return actual[self.check.query.index(query), column], True
        effects = self.predicted[query, column]
        if np.isfinite(effects).all():
            return (effects, self.is_actual)
        return None

    def credible_at(self, query: int, out: int) -> tuple[Array | None, bool, str]:
        """Return the effects on one output, whether retraining measured them, and a
        warning.

        If the run's retrainings contradict the predicted effects, return None instead
        of the effects."""
        known = self.at(query, out)
        if known is None:
            return None, False, ""
        effects, is_actual = known
        if not is_actual and self.agreement is not None and not self.agreement.believed:
            return None, False, self.agreement.sentence
        return effects, is_actual, ""


def known_effects(run: Run) -> KnownEffects | None:
    """Read the leave-out effects of a run and the retrainings that check them.

    Return None if the run has no leave-out effects.
    """
    predicted = effects_of_run(run)
    if predicted is None:
        return None
    facts = run.contributions[EFFECT].attrs
    is_actual = facts.get("kind") == RETRAINED
    if not (run.path / STORE).exists():
        return KnownEffects(predicted, run.outs, None, None, is_actual)
    path = run.sealed(STORE)
    refuse_odd_leave_out(path, run.axes.lengths, len(run.outs))
    check = read_leave_out(path)
    # an infinite growth is stored as null, because JSON has no infinity
    growth = 1.0 if is_actual else float(facts.get("growth") or inf)
    return KnownEffects(
        predicted, run.outs, check, agreement_of(check, growth), is_actual
    )


def influence(parts: Array) -> Array:
    """Return the norm of each example's effects, [example]. `parts` are the effects
    [query, out, example].

    >>> influence(np.array([[[3.0, 0.0], [4.0, np.nan]]]))
    array([5., 0.])
    """
    return np.asarray(np.sqrt(np.nansum(np.square(parts), axis=(0, 1))))
