"""A sweep as its file tells it: which runs there were to be, along which axes, and what was to be fitted.

outputs/sweeps/<name>.json   {name, axes: {key: [values]}, seeds: [...], base: [overrides],
                              fits: [{quantity, axis, exponent or null, margin, bound: null, upper or lower}],
                              runs: [{folder, axes: {key: value}, seed, state, reason}], seal}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, get_args

from ntkexp.mistake import Mistake
from ntkexp.records.seal import read_sealed
from ntkexp.report.analysis.verdict import MARGIN, Bound, Expected

Level: TypeAlias = float | int | str | bool | None
"""What an axis is set to."""


@dataclass(frozen=True)
class Fit:
    """A quantity to be fitted against an axis, and what theory says of the exponent."""

    quantity: str
    axis: str
    expected: Expected | None = None


@dataclass(frozen=True)
class Place:
    """One run of a sweep: where it lies in it, and what became of it."""

    folder: Path
    axes: Mapping[str, Level]
    seed: int
    state: str
    reason: str = ""

    @property
    def stands(self) -> str:
        """Where a run stands that is not done."""
        return f"{self.folder.name} {'is ' * (self.state != 'failed')}{self.state}{self.reason and f': {self.reason}'}"

    @property
    def point(self) -> tuple[Level, ...]:
        """The values of the axes."""
        return tuple(self.axes.values())


@dataclass(frozen=True)
class Sweep:
    """A sweep and its runs, point by point and seed by seed."""

    path: Path
    name: str
    command: str  # what repeats it
    axes: Mapping[str, tuple[Level, ...]]
    base: tuple[str, ...]
    fits: tuple[Fit, ...]
    places: tuple[Place, ...]


def read_sweep(path: Path) -> Sweep:
    """A sweep's file; one that is damaged is a mistake."""
    told = read_sealed(path)
    try:
        axes = {str(key): tuple(map(level, values)) for key, values in told["axes"].items()}
        places = tuple(place(row, axes, path) for row in told["runs"])
        return Sweep(
            path=path,
            name=str(told["name"]),
            command=str(told.get("command") or f"ntkexp sweep {told['name']}"),
            axes=axes,
            base=tuple(map(str, told.get("base", ()))),
            fits=tuple(map(fit, told.get("fits", ()))),
            places=tuple(sorted(places, key=lambda run: (order(run, axes), run.seed))),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise Mistake(f"{path} is damaged: it does not tell of a sweep ({type(error).__name__}: {error})") from error


def fit(row: Mapping[str, Any]) -> Fit:
    """A fit as the file tells it; sweeps of old said nothing of margins."""
    if row.get("exponent") is None:
        return Fit(row["quantity"], row["axis"])
    margin, bound = float(row.get("margin", MARGIN)), row.get("bound")
    if not 0 < margin < math.inf or bound not in (None, *get_args(Bound)):
        raise ValueError(f"a fit has margin={margin} and bound={bound}")
    return Fit(row["quantity"], row["axis"], Expected(float(row["exponent"]), margin, bound))


def place(row: Mapping[str, Any], axes: Mapping[str, Any], path: Path) -> Place:
    """A run as the file tells it."""
    return Place(
        folder=found(Path(row["folder"]), path),
        axes={key: level(row["axes"][key]) for key in axes},
        seed=int(row["seed"]),
        state=str(row["state"]),
        reason=str(row.get("reason") or ""),
    )


def found(folder: Path, path: Path) -> Path:
    """Where the run lies: as the file says, or beside it, if the outputs were copied elsewhere."""
    outputs = path.parent.parent if path.parent.name else path.absolute().parent.parent
    tried = (outputs / folder, outputs / "runs" / folder.name)
    return next((there for there in tried if there.is_dir()), folder if folder.is_absolute() else tried[1])


def order(run: Place, axes: Mapping[str, tuple[Level, ...]]) -> list[int]:
    """Where a run stands along each axis."""
    return [values.index(run.axes[key]) for key, values in axes.items()]


def level(value: object) -> Level:
    """A value on an axis; lists and the like go by their text."""
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
