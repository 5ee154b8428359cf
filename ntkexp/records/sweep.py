"""sweeps/<name>.json: the definition of a sweep, the state of its runs, and the power
laws that it fits."""

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

# --- Power laws that a sweep fits, and the exponents that theory predicts.
#
# A prediction is either a value with a margin, or an upper or lower bound
# (`ntkexp.report.analysis.estimate`).


Bound: TypeAlias = Literal["upper", "lower"]

DEFAULT_MARGIN = 0.1
"""The default margin of an exponent. (The exponents of competing theories differ by
0.5.)"""


@dataclass(frozen=True)
class Expected:
    """A predicted exponent, with a margin. If `bound` is set, `value` is only an upper
    or lower bound.

    >>> Expected(-0.5, bound="upper").low, Expected(-0.5, margin=0.25).high
    (-inf, -0.25)
    """

    value: float
    margin: float = DEFAULT_MARGIN
    bound: Bound | None = None

    @property
    def low(self) -> float:
        return -math.inf if self.bound == "upper" else self.value - self.margin

    @property
    def high(self) -> float:
        return math.inf if self.bound == "lower" else self.value + self.margin

    @property
    def edges(self) -> tuple[float, ...]:
        """The finite ends of the range."""
        return tuple(end for end in (self.low, self.high) if math.isfinite(end))


class Fit(Component):
    """A power law: a quantity of each run, such as `kernel_change` or `left.test`, is
    fitted as a power of an axis.

    >>> Fit(quantity="kernel_change", axis="model.width", exponent=-0.5).expected
    Expected(value=-0.5, margin=0.1, bound=None)
    """

    quantity: str
    axis: str
    exponent: float | None = None
    margin: float = Field(DEFAULT_MARGIN, gt=0)
    bound: Bound | None = None

    @property
    def expected(self) -> Expected | None:
        return (
            None
            if self.exponent is None
            else Expected(self.exponent, self.margin, self.bound)
        )


# --- sweeps/<name>.json: the definition of a sweep and the state of its runs,
# as input of analyses.
#
#     {"name": …, "command": …, "axes": {KEY: [VALUE, …]}, "seeds": [SEED, …],
#      "base": [KEY=VALUE, …],
#      "fits": [{"quantity": …, "axis": KEY, "exponent": NUMBER or null, "margin": NUMBER,
#                "bound": …}, …],
#      "runs": [{"folder": NAME under runs/, "axes": {KEY: VALUE}, "seed": SEED, "state": …,
#                "reason": …}, …],
#      "seal": the seal of all other keys}
#
# The state of a run is `done`, `failed` (it would fail again), `running` (in another
# process), or `unfinished` (the command of the sweep continues it). The content of the
# file does not depend on interruptions of the sweep.


Level: TypeAlias = float | int | str | bool | None
"""A value on an axis. Lists are converted to text."""


@dataclass(frozen=True, kw_only=True)
class SweepRun:
    """One run of a sweep: its folder, its values on the axes, and its state."""

    folder: Path
    axes: Mapping[str, Level]
    seed: int
    state: str
    reason: str = ""

    @property
    def status(self) -> str:
        """A sentence about the state of an unfinished run."""
        verb = "" if self.state == "failed" else "is "
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.folder.name} {verb}{self.state}{reason}"

    @property
    def point(self) -> tuple[Level, ...]:
        return tuple(self.axes.values())

    @property
    def fields(self) -> dict[str, Json]:
        status: dict[str, Json] = {
            "seed": self.seed,
            "state": self.state,
            "reason": self.reason,
        }
        return {"folder": self.folder.name, "axes": dict(self.axes), **status}


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A sweep and its runs, sorted by their values on the axes, then by seed."""

    path: Path
    name: str
    command: str  # the command that repeats the sweep
    axes: Mapping[str, tuple[Level, ...]]
    seeds: tuple[int, ...]
    base: tuple[str, ...]  # settings common to all runs
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
    """Return the definition of a sweep as plain data."""
    return {
        "axes": {key: list(values) for key, values in axes.items()},
        "seeds": list(seeds),
        "base": list(base),
        "fits": [fit.model_dump(mode="json") for fit in fits],
    }


def write_sweep(sweep: Sweep) -> None:
    """Write the file of a sweep atomically. If the content is unchanged,
    do not write."""
    content = sealed_text(sweep.fields, sweep.path.name).encode()
    if not sweep.path.is_file() or sweep.path.read_bytes() != content:
        write_atomically(sweep.path, content)


def read_sweep(path: Path) -> Sweep:
    fields = checked(read_sealed(path, path.name), SweepRecord, path)
    try:
        axes = {
            str(key): tuple(map(level, values))
            for key, values in fields["axes"].items()
        }
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
        # sort by the values on the axes, then by seed
        runs.sort(
            key=lambda run: (
                [values.index(run.axes[key]) for key, values in axes.items()],
                run.seed,
            )
        )
        return Sweep(
            path=path,
            name=str(fields["name"]),
            command=own_command(fields["command"])
            or command("sweep", [fields["name"]]),
            axes=axes,
            seeds=tuple(map(int, fields.get("seeds", ()))),
            base=tuple(map(str, fields.get("base", ()))),
            fits=tuple(map(Fit.model_validate, fields.get("fits", ()))),
            runs=tuple(runs),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise Mistake(
            f"{path} is damaged: it does not describe a sweep ({reason})"
        ) from error


def folder_of(folder: Path, path: Path) -> Path:
    """Return the path of a run's folder. Look for it near the sweep's file `path`, so
    that it is also found if the outputs were copied elsewhere."""
    outputs = path.parent.parent if path.parent.name else path.absolute().parent.parent
    candidates = (outputs / folder, outputs / "runs" / folder.name)
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    return folder if folder.is_absolute() else candidates[1]


def level(value: object) -> Level:
    """Return a value on an axis. Lists are converted to text."""
    return (
        value
        if value is None or isinstance(value, bool | int | float | str)
        else str(value)
    )
