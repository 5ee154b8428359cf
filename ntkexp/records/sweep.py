"""sweeps/<name>.json: a sweep as it was resolved, where each of its runs stands, and the power laws it looks for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import Field

from ntkexp.component import Component
from ntkexp.mistake import Mistake, first_line
from ntkexp.records.atomic import Json, read_sealed, sealed_text, write_atomically
from ntkexp.records.folder import command, own_command
from ntkexp.records.schema import SweepRecord, checked

# --- A power law that a sweep looks for, and what theory says of its exponent.
#
# An exponent is met to within a margin, or bounded: from above, or from below
# (`ntkexp.report.analysis.estimate`).


Bound: TypeAlias = Literal["upper", "lower"]

MARGIN = 0.1
"""How far an exponent may be from theory's, if nothing else is said: exponents in dispute are half a unit apart."""


@dataclass(frozen=True)
class Expected:
    """What theory says of a number, and how closely it is to be met.

    >>> Expected(-0.5, bound="upper").low, Expected(-0.5, margin=0.25).high
    (-inf, -0.25)
    """

    value: float
    margin: float = MARGIN
    bound: Bound | None = None

    @property
    def low(self) -> float:
        return -math.inf if self.bound == "upper" else self.value - self.margin

    @property
    def high(self) -> float:
        return math.inf if self.bound == "lower" else self.value + self.margin


class Fit(Component):
    """A number of each run (`drift`, `left.test`, …) as a power of an axis, and theory's exponent, where there is one.

    >>> Fit(quantity="drift", axis="model.width", exponent=-0.5).expected
    Expected(value=-0.5, margin=0.1, bound=None)
    """

    quantity: str
    axis: str
    exponent: float | None = None
    margin: float = Field(MARGIN, gt=0)
    bound: Bound | None = None

    @property
    def expected(self) -> Expected | None:
        return None if self.exponent is None else Expected(self.exponent, self.margin, self.bound)


# --- sweeps/<name>.json: a sweep as it was resolved, and where each of its runs stands. What analyses it starts from
# here.
#
#     {"name": …, "command": …, "axes": {KEY: [VALUE, …]}, "seeds": [SEED, …], "base": [KEY=VALUE, …],
#      "fits": [{"quantity": …, "axis": KEY, "exponent": NUMBER or null, "margin": NUMBER, "bound": …}, …],
#      "runs": [{"folder": NAME under runs/, "axes": {KEY: VALUE}, "seed": SEED, "state": …, "reason": …}, …],
#      "seal": of all this}
#
# A run is `done`, `failed` (it would fail again), `running` (another process is at it), or `unfinished`: the same
# command goes on with it. Nothing here depends on how often the sweep was interrupted.


Level: TypeAlias = float | int | str | bool | None
"""What an axis is set to, as it is read: a list goes by its text."""


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """One run of a sweep: where it lies in it, and what became of it."""

    folder: Path
    axes: Mapping[str, Level]
    seed: int
    state: str
    reason: str = ""

    @property
    def standing(self) -> str:
        """Where a run stands that is not done, in words."""
        return f"{self.folder.name} {'is ' * (self.state != 'failed')}{self.state}{self.reason and f': {self.reason}'}"

    @property
    def point(self) -> tuple[Level, ...]:
        return tuple(self.axes.values())

    @property
    def fields(self) -> dict[str, Json]:
        standing: dict[str, Json] = {"seed": self.seed, "state": self.state, "reason": self.reason}
        return {"folder": self.folder.name, "axes": dict(self.axes), **standing}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep and its runs, point by point and seed by seed."""

    path: Path
    name: str
    command: str  # what repeats it
    axes: Mapping[str, tuple[Level, ...]]
    seeds: tuple[int, ...]
    base: tuple[str, ...]  # what all runs have in common
    fits: tuple[Fit, ...]
    runs: tuple[SweepRun, ...]

    @property
    def fields(self) -> dict[str, Json]:
        definition = resolved(self.axes, self.seeds, self.base, self.fits)
        return {
            "name": self.name,
            "command": self.command,
            **definition,
            "runs": [run.fields for run in self.runs],
        }


def resolved(
    axes: Mapping[str, Sequence[Any]],
    seeds: Sequence[int],
    base: Sequence[str],
    fits: Sequence[Fit],
) -> dict[str, Json]:
    """What a sweep asks for as plain data, every range written out."""
    return {
        "axes": {key: list(values) for key, values in axes.items()},
        "seeds": list(seeds),
        "base": list(base),
        "fits": [fit.model_dump(mode="json") for fit in fits],
    }


def write_sweep(sweep: Sweep) -> None:
    """Write the record whole, or not at all; one that says the same already is left alone."""
    content = sealed_text(sweep.fields, sweep.path.name).encode()
    if not sweep.path.is_file() or sweep.path.read_bytes() != content:
        write_atomically(sweep.path, content)


def read_sweep(path: Path) -> Sweep:
    fields = checked(read_sealed(path, path.name), SweepRecord, path)
    try:
        axes = {str(key): tuple(map(level, values)) for key, values in fields["axes"].items()}
        runs = [
            SweepRun(
                folder=folder_of(Path(row["folder"]), path),
                axes={key: level(row["axes"][key]) for key in axes},
                seed=int(row["seed"]),
                state=str(row["state"]),
                reason=str(row.get("reason") or ""),
            )
            for row in fields["runs"]
        ]
        # point by point along each axis, and seed by seed
        runs.sort(
            key=lambda run: (
                [values.index(run.axes[key]) for key, values in axes.items()],
                run.seed,
            )
        )
        return Sweep(
            path=path,
            name=str(fields["name"]),
            command=own_command(fields["command"]) or command("sweep", [fields["name"]]),
            axes=axes,
            seeds=tuple(map(int, fields.get("seeds", ()))),
            base=tuple(map(str, fields.get("base", ()))),
            fits=tuple(map(Fit.model_validate, fields.get("fits", ()))),
            runs=tuple(runs),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise Mistake(f"{path} is damaged: it does not tell of a sweep ({reason})") from error


def folder_of(folder: Path, path: Path) -> Path:
    """Find where a run lies: as the record says, or beside it, if the outputs were copied elsewhere."""
    outputs = path.parent.parent if path.parent.name else path.absolute().parent.parent
    tried = (outputs / folder, outputs / "runs" / folder.name)
    return next(
        (there for there in tried if there.is_dir()), folder if folder.is_absolute() else tried[1]
    )


def level(value: object) -> Level:
    """Take a value on an axis; lists and the like go by their text."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
