"""Which training examples made a prediction: signed contributions, and what else is in it.

    f_T(x) = f_0(x) + Σᵢ 𝒮(x, xᵢ) + decay + outside + rest

`decay` is what weight decay took away, `outside` what changed after the last step of a followed loop did, `rest` what
the rule misses. Where an output is that of a class, the one that the network gives the point is explained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import Mistake, WrongArgument, nearest
from ntkexp.records.contributions import DECAY, OUTSIDE, explained_rule
from ntkexp.records.json_file import Json
from ntkexp.report.effects import effects, known_effects
from ntkexp.report.examples import Example, example, output_name, phase_of, sharing
from ntkexp.report.half_time import halfway
from ntkexp.report.movement import Movement, movement
from ntkexp.report.run import Run, blocks

if TYPE_CHECKING:
    import xarray as xr

Array: TypeAlias = NDArray[np.float64]
Split: TypeAlias = Literal["train", "probe", "test"]


@dataclass(frozen=True)
class Part:
    """One training example added so much, and had added half of it at that time, as a share of the path."""

    example: Example
    added: float
    halfway: float
    left_out: float | None = None  # the change without it, where that is known

    @property
    def as_json(self) -> dict[str, Json]:
        """The part as plain data."""
        known: dict[str, Json] = {"index": self.example.index, "name": self.example.name, "added": self.added}
        return known | {"half_by": self.halfway, "if_left_out": self.left_out}


@dataclass(frozen=True)
class Explanation:
    """One output at one point is taken apart."""

    split: str
    number: int
    point: Example
    out: int
    output: str
    rule: str
    prediction: float
    start: float
    sum: float
    decay: float
    rest: float
    parts: tuple[Part, ...]  # the largest first
    outside: float = 0.0  # what no step that was followed did
    left_out_is_actual: bool = False  # whether trainings without them tell that, or their effects
    warning: str = ""  # why what they would change is withheld
    movement: Movement | None = None  # when training moved the output, where that is known
    sharing: str = ""  # what the output is for, where phases share it
    sketch: int | None = None  # to how many dimensions gradients were projected, where they were

    @property
    def pieces(self) -> dict[str, float]:
        """What the output is made of, in the words of a reader."""
        return {
            "start f_0": self.start,
            f"{len(self.parts)} examples by {self.rule}": self.sum,
            "decay": self.decay,
            **({"outside of all steps": self.outside} if self.outside else {}),
            "rest": self.rest,
        }

    @property
    def mass(self) -> float:
        """All contributions weigh Σᵢ |𝒮(x, xᵢ)|."""
        return sum(abs(part.added) for part in self.parts)

    def as_json(self, top: int) -> dict[str, Json]:
        """The explanation as plain data, with the examples that added or took most, and the sum of the others."""
        said: dict[str, Json] = {"split": self.split, "point": self.number, "index": self.point.index, "out": self.out}
        said |= {"output": self.output, "rule": self.rule, "prediction": self.prediction, "start": self.start}
        said |= {"sum": self.sum, "decay": self.decay, "rest": self.rest}
        if self.warning:
            said["warning"] = self.warning
        rest = self.parts[top:]
        return {
            **said,
            "examples": [part.as_json for part in self.parts[:top]],
            "others": {"count": len(rest), "added": sum(part.added for part in rest)},
        }


def explain(run: Run, split: str, numbers: Sequence[int]) -> list[Explanation]:
    """Explain these points of a split, by the first rule that was accumulated."""
    rule = explained_rule(run.rules)
    if rule is None:
        raise Mistake(f"{run.path} holds no contributions; run it with path.rule=[secant]")
    return [explain_one(run, split, number, rule) for number in numbers]


def worst(run: Run, split: str, count: int) -> list[int]:
    """Find the points whose targets the network misses most, of those that can be explained, and of these those whose
    effects are known, if any are; where the queries of a followed loop have no targets, those whose outputs training
    moved most.
    """
    place = place_of(run, split)
    outputs = outputs_of(run, "f_T")[place]
    targets = run.data.get(f"{split}_targets")
    aim = outputs_of(run, "f_0")[place] if targets is None else np.asarray(targets, dtype=float)
    missed = np.linalg.norm(outputs - aim, axis=1)
    rule = explained_rule(run.rules)
    explicable, predicted = np.isfinite(missed), effects(run)
    if rule:
        explicable &= where_read(run.parts(rule).isel(probe=place)).any(axis=1)
    if predicted is not None:
        both = explicable & read_at(predicted[place]).any(axis=1)
        explicable = both if both.any() else explicable
    known = np.flatnonzero(explicable)
    return [int(k) for k in known[np.argsort(-missed[known], kind="stable")][:count]]


def explain_one(run: Run, split: str, number: int, rule: str) -> Explanation:
    """Explain one point."""
    k = numbered(run, split, number)
    end = outputs_of(run, "f_T")[k]
    parts = np.asarray(run.parts(rule).isel(probe=k).to_numpy(), dtype=float)
    if not read_at(parts).any():
        raise Mistake(
            f"point {number} of {split} was not attributed: with this optimizer the first path.attributed points are"
        )
    column = largest_known(end[list(run.outs)], parts)
    out, contributions = run.outs[column], parts[column]
    start, total = float(outputs_of(run, "f_0")[k, out]), float(contributions.sum())
    decay, outside = (one_part(run, kind, rule, k, out) for kind in (DECAY, OUTSIDE))
    times, without = halfway(run, rule, k, out), left_out(run, k, out)
    order = np.argsort(-np.abs(contributions), kind="stable").tolist()
    return Explanation(
        split=split,
        number=number,
        point=example(run, split, number),
        out=out,
        output=output_name(run, out, len(end), phase_of(run, split, number)),
        rule=rule,
        prediction=float(end[out]),
        start=start,
        sum=total,
        decay=decay,
        outside=outside,
        rest=float(end[out]) - start - total - decay - outside,
        parts=tuple(
            Part(example(run, "train", i), float(contributions[i]), float(times[i]), without.changes.get(i))
            for i in order
        ),
        left_out_is_actual=without.is_actual,
        warning=without.warning,
        movement=movement(run, rule, k, out),
        sharing=sharing(run, out, len(end)),
        sketch=run.config.get("kernel", {}).get("sketch"),
    )


@dataclass(frozen=True)
class LeftOutChanges:
    """An output changes by so much without each example: in trainings, or by effects that are believed."""

    changes: Mapping[int, float]
    is_actual: bool = False
    warning: str = ""


def left_out(run: Run, k: int, out: int) -> LeftOutChanges:
    """Find what is known of leaving each example out."""
    known = known_effects(run)
    found = None if known is None else known.at(k, out)
    if known is None or found is None:
        return LeftOutChanges({})
    changes, is_actual = found
    if known.withheld and not is_actual and known.agreement is not None:
        return LeftOutChanges({}, warning=known.agreement.sentence)
    return LeftOutChanges(dict(enumerate(map(float, changes))), is_actual)


def numbered(run: Run, split: str, number: int) -> int:
    """Find where a point of a split lies among all points, if it has so many."""
    place = place_of(run, split)
    count = place.stop - place.start
    if not 0 <= number < count:
        raise WrongArgument(f"probe={number}: the split {split} of {run.name} has points 0 to {count - 1}", "probe")
    return int(place.start) + number


def read_at(parts: Array) -> NDArray[np.bool_]:
    """Find the outputs (of points) at which the path was integrated, from their contributions."""
    return np.asarray(np.isfinite(parts).all(axis=-1))


def where_read(parts: xr.DataArray) -> NDArray[np.bool_]:
    """Find the same for contributions that may be too many to be read at once."""
    return np.concatenate([read_at(block) for block in blocks(parts)])


def largest_known(outputs: Array, parts: Array) -> int:
    """Find the largest of the outputs that were read, whose contributions are known."""
    return int(np.where(read_at(parts), outputs, -np.inf).argmax())


def place_of(run: Run, split: str) -> slice:
    """Find where a split lies among the points."""
    if split not in run.points:
        known = f"{', '.join(run.points)}{nearest(split, run.points)}"
        raise WrongArgument(f"split={split}: {run.name} was read at {known}", "split")
    return run.points[split]


def outputs_of(run: Run, machine: str) -> Array:
    """Read what the network or a machine says at all points, [probe, out]."""
    if machine not in run.predictions["machine"]:
        raise Mistake(f"{run.path} is damaged: its predictions lack {machine}")
    return np.asarray(run.predictions.sel(machine=machine).to_numpy(), dtype=float)


def one_part(run: Run, kind: str, rule: str, point: int, out: int) -> float:
    """Read what was no example's of one output, such as what decay of the weights did; nothing where there was none."""
    found = run.by_rule(kind, rule)
    return 0.0 if found is None else float(found.isel(probe=point).sel(out=out))
