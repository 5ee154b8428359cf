"""Steps in, integrals out: whoever took the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from ntkexp.path.accumulate.base import AbstractAccumulator
from ntkexp.path.accumulate.integrals import Integrals
from ntkexp.path.step import Step
from ntkexp.shapes import Weights


def integrate(
    steps: Iterable[Step], accumulator: AbstractAccumulator, due: Callable[[int], bool] = lambda index: False
) -> Mapping[str, Integrals]:
    """𝒦, 𝒮 and 𝒟 by rule, of all steps from the first to the last; `due` says at which of them a snapshot is taken."""
    sizes: list[float] = []
    end: Weights | None = None
    for step in steps:
        accumulator.add(step, due=due(step.index))
        sizes.append(step.step_size)
        end = step.end
    if end is not None:
        for _ in accumulator.steps_back(end, sizes):
            continue
    return accumulator.integrals
