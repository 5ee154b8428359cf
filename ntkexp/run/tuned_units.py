"""Whether units became tuned to one of the tasks that are learned in turn, at the points of each."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.diagnostics.selectivity import activity, selectivity
from ntkexp.model.functional import called
from ntkexp.run.setting import Setting
from ntkexp.shapes import Weights

SELECTIVITY = "selectivity"


def unit_selectivity(setting: Setting, weights: Weights) -> float | None:
    """The selectivity at probe points, or where there are none, at training examples; nothing of a single task."""
    phases = setting.problem.phases
    answers = [answer(setting, weights, place) for place in phases.get("probe") or phases.get("train", ())]
    known = [units for units in answers if units is not None]
    return selectivity(known) if len(known) == len(answers) else None


def answer(setting: Setting, weights: Weights, place: slice) -> Float[Tensor, " unit"] | None:
    """The deviation of each unit's activity over the points of a task, of which it takes two."""
    module, points = setting.problem.module, setting.points

    def heard(part: Tensor) -> Float[Tensor, "point unit"] | None:
        return activity(module.network, lambda: called(module, weights, (part,)))

    known = [heard(part) for part in torch.split(points.inputs[place], points.block)]
    units = [part for part in known if part is not None]
    return torch.cat(units).std(0) if units and place.stop - place.start > 1 else None
