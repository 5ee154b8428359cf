"""Which components of the network carried a prediction: what examples and decay did through the parameters of each."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ntkexp.records.contributions import (
    BY_COMPONENT,
    BY_COMPONENT_STEP,
    COMPONENT,
    DECAY_BY_COMPONENT,
    LAST_STEP,
)
from ntkexp.report.examples import Movement
from ntkexp.report.run import Run
from ntkexp.report.tables import Column, Table, format_signed
from ntkexp.text import MISSING, percent


@dataclass(frozen=True, eq=False)
class ComponentPart:
    """What was done to an output through the parameters of a component."""

    name: str
    added: float  # by all examples, Σᵢ 𝒮(x, xᵢ; component)
    mass: float  # Σᵢ |𝒮(x, xᵢ; component)|
    decay: float
    movement: Movement  # the same and decay, by the steps in which it came

    @property
    def together(self) -> float:
        """Its part of f_T − f_0."""
        return self.added + self.decay


def component_parts(run: Run, rule: str, point: int, out: int) -> tuple[ComponentPart, ...]:
    """What each component did to an output, in the order of the run; nothing, where they were not told apart."""
    by_component, by_step = run.by_rule(BY_COMPONENT, rule), run.by_rule(BY_COMPONENT_STEP, rule)
    if by_component is None or by_step is None:
        return ()
    parts, steps = (
        one.isel(probe=point).sel(out=out).to_numpy().astype(float)
        for one in (by_component, by_step)
    )
    decay, found = np.zeros(parts.shape[1]), run.by_rule(DECAY_BY_COMPONENT, rule)
    if found is not None:
        decay = found.isel(probe=point).sel(out=out).to_numpy().astype(float)
    last_step: NDArray[np.int64] = run.contributions[LAST_STEP].to_numpy()
    return tuple(
        ComponentPart(
            name=str(name),
            added=float(parts[:, k].sum()),
            mass=float(np.abs(parts[:, k]).sum()),
            decay=float(decay[k]),
            movement=Movement(steps[:, k], last_step),
        )
        for k, name in enumerate(run.contributions[COMPONENT].to_numpy())
    )


def tabulate_components(parts: tuple[ComponentPart, ...]) -> Table:
    """Give what was done through each component, those first that moved the output most; the rows add up to what all
    examples and decay did.
    """
    mass = sum(part.mass for part in parts) or 1.0
    columns = (
        Column("component", number=False),
        Column("added", spell=format_signed, adds=True),
        Column("decay", spell=format_signed, adds=True),
        Column("in all", spell=format_signed, adds=True),
        Column("of all parts", spell=percent, adds=True),
        Column("most by step", others=MISSING),
    )
    rows = [
        (part.name, part.added, part.decay, part.together, part.mass / mass, part.movement.most_by)
        for part in sorted(parts, key=lambda part: -abs(part.together))
    ]
    return Table(columns, tuple(rows))
