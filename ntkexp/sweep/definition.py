"""What a sweep is: a YAML file in `configs/sweep/`, or what the command line says.

    axes:                  each KEY with its values (`ntkexp.sweep.axis_values`); runs are made at all combinations
      model.width: {from: 32, to: 1024, count: 6, scale: log}
    seeds: 5               at each point: a count, or a list
    base: [steps=300]      what all runs have in common
    fits:                  which number is a power of which axis, with the theory's exponent, or null
      - {quantity: drift, axis: model.width, exponent: -1.0, margin: 0.1}      to be met within the margin
      - {quantity: drift, axis: model.width, exponent: -0.5, bound: upper}     at most this, and the margin

Nothing here knows where it was written: `ntkexp.sweep.parse` reads both.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from itertools import product

from ntkexp.config.as_text import spelled
from ntkexp.config.override import split
from ntkexp.records.command import command
from ntkexp.records.fit import Fit
from ntkexp.records.folder import CIRCUMSTANCES
from ntkexp.records.sweep import resolved
from ntkexp.sweep.axis_values import Value


@dataclass(frozen=True)
class Point:
    """A combination of values, and a seed."""

    values: Mapping[str, Value]
    seed: int


@dataclass(frozen=True)
class Definition:
    """A sweep as it was asked for."""

    name: str
    axes: Mapping[str, tuple[Value, ...]]
    seeds: tuple[int, ...]
    base: tuple[str, ...]
    fits: tuple[Fit, ...]
    words: tuple[str, ...] = ()
    options: tuple[str, ...] = ()  # that repeat it, as they repeat a run of it

    @property
    def command(self) -> str:
        """The command that asks for it again."""
        return command("sweep", self.words, self.options)

    @property
    def points(self) -> tuple[Point, ...]:
        """Every combination with every seed; the last axis varies faster than the first, seeds fastest."""
        combined = [dict(zip(self.axes, chosen, strict=True)) for chosen in product(*self.axes.values())]
        return tuple(Point(chosen, seed) for chosen in combined for seed in self.seeds)

    def overrides(self, point: Point) -> tuple[str, ...]:
        """The run at a point, as `ntkexp train` takes it."""
        return (*self.base, *(f"{key}={spelled(value)}" for key, value in point.values.items()), f"seed={point.seed}")

    @property
    def digest(self) -> str:
        """8 hexadecimal digits of what decides the results."""
        counting = [text for text in self.base if split(text).key not in CIRCUMSTANCES]
        asked = resolved(self.axes, self.seeds, counting, self.fits)
        return sha256(json.dumps(asked).encode()).hexdigest()[:8]
