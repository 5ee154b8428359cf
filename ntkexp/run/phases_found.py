"""What happened in each phase of a run: how the outputs changed, and what each training example added to that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.path.accumulate.mark import Sums, by_phase, mark_of
from ntkexp.run.state import RunState


@dataclass(frozen=True, kw_only=True)
class PhasesFound:
    """Every array begins with an axis of phases, and has the outputs at which the path was integrated; a phase that was
    not reached changed nothing.
    """

    sums: Mapping[str, Sums]  # by rule
    change: Float[Tensor, "phase point out"]


def phases_found(state: RunState, outputs: Float[Tensor, "point out"]) -> PhasesFound | None:
    """What happened until the outputs are these, if the data come in phases."""
    count = len(state.setting.problem.data.phases)
    if not count:
        return None
    outs = state.setting.domain.integrated
    end, marks = mark_of(state.accumulator.integrals), state.accumulator.marks
    ends = [state.setting.start.outputs, *state.turns, outputs]
    ends += [outputs] * (count + 1 - len(ends))
    return PhasesFound(
        sums={rule: by_phase(marks, end, rule, count) for rule in end},
        change=torch.stack([after - before for before, after in pairwise(ends)])[..., list(outs)],
    )
