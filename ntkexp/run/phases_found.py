"""What happened in each phase of a run: how the outputs changed, and what each training example added to that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.path.accumulate.mark import Share, Sums, by_phase
from ntkexp.run.state import RunState


@dataclass(frozen=True, kw_only=True)
class PhasesFound:
    """Every phase has the outputs at which the path was integrated; one that was not reached changed nothing."""

    shares: Mapping[str, Sequence[Share]]  # by rule, one for each phase
    change: Float[Tensor, "phase point out"]


def phases_found(state: RunState, outputs: Float[Tensor, "point out"]) -> PhasesFound | None:
    """What happened until the outputs are these, if the data come in phases."""
    count = len(state.setting.problem.data.phases)
    if not count:
        return None
    outs = state.setting.domain.integrated
    end = {rule: Sums(found.contributions, found.decay) for rule, found in state.accumulator.integrals.items()}
    ends = [state.setting.start.outputs, *state.turns, outputs]
    ends += [outputs] * (count + 1 - len(ends))
    return PhasesFound(
        shares={rule: by_phase(state.accumulator.marks, end, rule, count) for rule in end},
        change=torch.stack([after - before for before, after in pairwise(ends)])[..., list(outs)],
    )
