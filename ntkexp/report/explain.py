"""Which training examples made a prediction and what would change without them, as numbers and as lines of text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ntkexp.mistake import Mistake, WrongArgument, nearest
from ntkexp.records.atomic import Json
from ntkexp.records.contributions import (
    COUPLING,
    DECAY,
    OUTSIDE,
    RETRAINED,
    ROUNDING,
    STATISTICS,
    STORE,
    LeaveOut,
    explained_rule,
    read_leave_out,
    refuse_odd_leave_out,
)
from ntkexp.records.data import OUT_NAME
from ntkexp.report.components import ComponentPart, component_parts, tabulate_components
from ntkexp.report.examples import (
    Example,
    Movement,
    example,
    halfway,
    movement,
    output_name,
    phase_of,
    sharing,
)
from ntkexp.report.leave_out import Agreement, agreement_of
from ntkexp.report.positions import PositionPart, position_parts, tabulate_positions
from ntkexp.report.run import Run, blocks
from ntkexp.report.tables import Column, Table, format_signed, format_text, json_rows
from ntkexp.text import MISSING, percent, short

if TYPE_CHECKING:
    import xarray as xr


# --- What would change if an example were left out, where a run has computed that.


Array: TypeAlias = NDArray[np.float64]

EFFECT = "effect"
NOT_COMPUTED = "not computed: path.effects=true"


def effects_of_run(run: Run) -> Array | None:
    """Read the predicted change of the outputs that were read if an example were left out, [probe, out, example]."""
    if EFFECT not in run.contributions:
        return None
    return np.asarray(run.contributions[EFFECT].to_numpy(), dtype=float)


@dataclass(frozen=True, eq=False)
class KnownEffects:
    """What would change if examples were left out, and whether that is to be believed."""

    predicted: Array  # [probe, out, example]
    outs: tuple[int, ...]  # which outputs these are
    check: LeaveOut | None
    agreement: Agreement | None
    is_actual: bool = False  # whether trainings found what is `predicted`

    def at(self, probe: int, out: int) -> tuple[Array, bool] | None:
        """Find the change of an output without each example, and whether it came of trainings; None: not known."""
        count, column = self.predicted.shape[2], self.outs.index(out)
        actual = None if self.check is None else self.check.alone(count)
        if self.check is not None and actual is not None and probe in self.check.probe:
            return actual[self.check.probe.index(probe), column], True
        effects = self.predicted[probe, column]
        return (effects, self.is_actual) if np.isfinite(effects).all() else None


def known_effects(run: Run) -> KnownEffects | None:
    predicted = effects_of_run(run)
    if predicted is None:
        return None
    facts = run.contributions[EFFECT].attrs
    is_actual = facts.get("kind") == RETRAINED
    if not (run.path / STORE).exists():
        return KnownEffects(predicted, run.outs, None, None, is_actual)
    path = run.sealed(STORE)
    refuse_odd_leave_out(path, run.axes.lengths, len(run.outs))
    check = read_leave_out(path)
    growth = 1.0 if is_actual else float(facts.get("growth") or inf)  # JSON knows no infinity
    return KnownEffects(predicted, run.outs, check, agreement_of(check, growth), is_actual)


def influence(parts: Array) -> Array:
    """How much each example matters to all that is known of the points, [example], given [probe, out, example].

    >>> influence(np.array([[[3.0, 0.0], [4.0, np.nan]]]))
    array([5., 0.])
    """
    return np.asarray(np.sqrt(np.nansum(np.square(parts), axis=(0, 1))))


# --- Which training examples made a prediction: signed contributions, and what else is in it.
#
#     f_T(x) = f_0(x) + Σᵢ 𝒮(x, xᵢ) + decay + outside + statistics + coupling + rounding + rest
#
# `decay` is what weight decay took away, `outside` what changed after the last step of a followed loop did,
# `statistics` what running statistics of BatchNorm did, `coupling` what examples did to one another through those of
# a batch, `rounding` what gradients did that are rounding alone, `rest` what the rule misses. Where an output is that
# of a class, the one that the network gives the point is explained.


Split: TypeAlias = Literal["train", "probe", "test"]


@dataclass(frozen=True)
class Part:
    """One training example added so much, and had added half of it at that time, as a share of the path."""

    example: Example
    added: float
    halfway: float
    left_out: float | None = None  # the change without it, where that is known


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
    statistics: float = 0.0  # what running statistics did
    coupling: float = 0.0  # what examples did to one another through batch statistics
    rounding: float = 0.0  # the movement by gradients that are rounding
    left_out_is_actual: bool = False  # whether trainings without them tell that, or their effects
    warning: str = ""  # why what they would change is withheld
    movement: Movement | None = None  # when training moved the output, where that is known
    sharing: str = ""  # what the output is for, where phases share it
    components: tuple[
        ComponentPart, ...
    ] = ()  # through which parameters it came, where these were told apart
    positions: tuple[
        PositionPart, ...
    ] = ()  # at which positions of texts, where these were told apart

    @property
    def pieces(self) -> dict[str, float]:
        """What the output is made of, in the words of a reader."""
        return {
            "start f_0": self.start,
            f"{len(self.parts)} examples by {self.rule}": self.sum,
            "decay": self.decay,
            **({"outside of all steps": self.outside} if self.outside else {}),
            **({"running statistics": self.statistics} if self.statistics else {}),
            **({"examples through batch statistics": self.coupling} if self.coupling else {}),
            **({"rounding": self.rounding} if self.rounding else {}),
            "rest": self.rest,
        }

    @property
    def mass(self) -> float:
        """All contributions weigh Σᵢ |𝒮(x, xᵢ)|."""
        return sum(abs(part.added) for part in self.parts)

    def as_json(self, top: int) -> dict[str, Json]:
        """The explanation as plain data, with the examples that added or took most, and the sum of the others."""
        fields: dict[str, Json] = {
            "split": self.split,
            "point": self.number,
            "index": self.point.index,
            "out": self.out,
        }
        fields |= {
            "output": self.output,
            "rule": self.rule,
            "prediction": self.prediction,
            "start": self.start,
        }
        fields |= {"sum": self.sum, "decay": self.decay, "outside": self.outside}
        fields |= {
            "statistics": self.statistics,
            "coupling": self.coupling,
            "rounding": self.rounding,
        }
        fields["rest"] = self.rest
        if self.warning:
            fields["warning"] = self.warning
        if self.components:
            fields["components"] = list(json_rows(tabulate_components(self.components)))
        if self.positions:
            fields["positions"] = list(json_rows(tabulate_positions(self.positions)))[:top]
        rest, examples = self.parts[top:], tabulate_examples(self)
        return {
            **fields,
            "examples": json_rows(
                examples.select("index", "name", "added", "half by", "if left out")
            )[:top],
            "others": {"count": len(rest), "added": sum(part.added for part in rest)},
        }


def explain(run: Run, split: str, numbers: Sequence[int]) -> list[Explanation]:
    """Explain these points of a split, by the first rule that was accumulated."""
    rule = explained_rule(run.rules)
    if rule is None:
        raise Mistake(f"{run.path} holds no contributions; run it with path.rule=[secant]")
    return [explain_one(run, split, number, rule) for number in numbers]


def worst_points(run: Run, split: str, count: int) -> list[int]:
    """Find the points whose targets the network misses most, of those that can be explained, and of these those whose
    effects are known, if any are; where the queries of a followed loop have no targets, or a measure is explained in
    place of outputs, those that training moved most.
    """
    points = slice_of_split(run, split)
    outputs = outputs_of(run, "f_T")[points]
    targets = None if OUT_NAME in run.data else run.data.get(f"{split}_targets")
    aim = outputs_of(run, "f_0")[points] if targets is None else np.asarray(targets, dtype=float)
    missed = np.linalg.norm(outputs - aim, axis=1)
    rule = explained_rule(run.rules)
    explicable, predicted = np.isfinite(missed), effects_of_run(run)
    if rule:
        explicable &= where_read(run.parts(rule).isel(probe=points)).any(axis=1)
    if predicted is not None:
        both = explicable & read_at(predicted[points]).any(axis=1)
        explicable = both if both.any() else explicable
    candidates = np.flatnonzero(explicable)
    return [int(k) for k in candidates[np.argsort(-missed[candidates], kind="stable")][:count]]


def explain_one(run: Run, split: str, number: int, rule: str) -> Explanation:
    k = point_index(run, split, number)
    end = outputs_of(run, "f_T")[k]
    parts = np.asarray(run.parts(rule).isel(probe=k).to_numpy(), dtype=float)
    if not read_at(parts).any():
        raise Mistake(
            f"point {number} of {split} was not attributed: with this optimizer the first path.attributed points are"
        )
    # f_T = f_0 + Σᵢ 𝒮ᵢ + 𝒟 + what was done from outside + the rest, at the largest output that is explained
    column = largest_explained(end[list(run.outs)], parts)
    out, contributions = run.outs[column], parts[column]
    start, total = float(outputs_of(run, "f_0")[k, out]), float(contributions.sum())
    beside = {
        kind: one_part(run, kind, rule, k, out)
        for kind in (DECAY, OUTSIDE, STATISTICS, COUPLING, ROUNDING)
    }
    times, (changes, is_actual, warning) = halfway(run, rule, k, out), changes_without(run, k, out)
    # examples, the one that added or took away most first
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
        **beside,
        rest=float(end[out]) - start - total - sum(beside.values()),
        parts=tuple(
            Part(example(run, "train", i), float(contributions[i]), float(times[i]), changes.get(i))
            for i in order
        ),
        left_out_is_actual=is_actual,
        warning=warning,
        movement=movement(run, rule, k, out),
        sharing=sharing(run, out, len(end)),
        components=component_parts(run, rule, k, out),
        positions=position_parts(run, rule, k, out),
    )


def changes_without(run: Run, k: int, out: int) -> tuple[Mapping[int, float], bool, str]:
    """Find by how much an output changes without each example, whether trainings have found it, and why it is withheld
    where it is: effects that failed when they were checked are.
    """
    effects_known = known_effects(run)
    effects = None if effects_known is None else effects_known.at(k, out)
    if effects_known is None or effects is None:
        return {}, False, ""
    changes, is_actual = effects
    if (
        not is_actual
        and effects_known.agreement is not None
        and not effects_known.agreement.believed
    ):
        return {}, False, effects_known.agreement.sentence
    return dict(enumerate(map(float, changes))), is_actual, ""


def point_index(run: Run, split: str, number: int) -> int:
    """The index of a split's point among all points, if the split has that point."""
    points = slice_of_split(run, split)
    count = points.stop - points.start
    if not 0 <= number < count:
        raise WrongArgument(
            f"probe={number}: the split {split} of {run.name} has points 0 to {count - 1}", "probe"
        )
    return int(points.start) + number


def read_at(parts: Array) -> NDArray[np.bool_]:
    """Find the outputs (of points) at which the path was integrated, from their contributions."""
    return np.asarray(np.isfinite(parts).all(axis=-1))


def where_read(parts: xr.DataArray) -> NDArray[np.bool_]:
    """Find the same for contributions that may be too many to be read at once."""
    return np.concatenate([read_at(block) for block in blocks(parts)])


def largest_explained(outputs: Array, parts: Array) -> int:
    """Find the largest of the outputs that were read, whose contributions are known."""
    return int(np.where(read_at(parts), outputs, -np.inf).argmax())


def slice_of_split(run: Run, split: str) -> slice:
    """Find where a split lies among the points."""
    if split not in run.points:
        splits = f"{', '.join(run.points)}{nearest(split, run.points)}"
        raise WrongArgument(f"split={split}: {run.name} was read at {splits}", "split")
    return run.points[split]


def outputs_of(run: Run, machine: str) -> Array:
    """Read what the network or a machine says at all points, [probe, out]."""
    if machine not in run.predictions["machine"]:
        raise Mistake(f"{run.path} is damaged: its predictions lack {machine}")
    return np.asarray(run.predictions.sel(machine=machine).to_numpy(), dtype=float)


def one_part(run: Run, kind: str, rule: str, point: int, out: int) -> float:
    """Read what was no example's of one output, such as what decay of the weights did; nothing where there was none."""
    contributions = run.by_rule(kind, rule)
    return 0.0 if contributions is None else float(contributions.isel(probe=point).sel(out=out))


# --- Explanations as a reader sees them: two tables, and lines on a terminal.


LONGEST = 60  # letters of an example's text on a line


def tabulate_pieces(explanation: Explanation) -> Table:
    """Give what the output is made of; the rows add up to it."""
    columns = (Column("made of", number=False), Column("value", heading="", spell=format_signed))
    return Table(columns, tuple(explanation.pieces.items()))


def tabulate_examples(explanation: Explanation) -> Table:
    """Give all that is known of each training example, those first that added or took most."""
    mass, texts = explanation.mass or 1.0, [part.example.text for part in explanation.parts]
    named = "holds" if any(texts) else "target" if None in texts[:1] else "name"
    columns = (
        Column("index"),
        Column("name", number=False),
        Column("example", number=False),
        Column("holds", number=False),
        Column("on a line", heading=named, number=False),  # what it holds, shortened
        Column("phase"),
        Column("added", spell=format_signed, adds=True),
        Column("of all parts", spell=percent, adds=True),
        Column("half by", spell=percent, others=MISSING),
        Column("if left out", spell=format_signed, others=MISSING),
    )
    rows = [
        (
            part.example.index,
            part.example.name,
            part.example.name if part.example.text else f"#{part.example.index}",
            part.example.text or part.example.name,
            fitting(part.example.text or "") if any(texts) else part.example.name,
            part.example.phase,
            part.added,
            abs(part.added) / mass,
            part.halfway if math.isfinite(part.halfway) else None,
            part.left_out,
        )
        for part in explanation.parts
    ]
    return Table(columns, tuple(rows))


def format_explanation(explanation: Explanation, top: int) -> str:
    """Write one point for a terminal: what its prediction is made of, and a line for each example that made most."""
    head = (
        f"{explanation.split} {explanation.number} (#{explanation.point.index}, {explanation.point.label}): "
        f"{explanation.output} = {short(explanation.prediction)}"
    )
    phase = ["phase"] if explanation.point.phase is not None else []
    changes = [] if all(part.left_out is None for part in explanation.parts) else ["if left out"]
    names = ("example", "on a line", *phase, "added", "of all parts", "half by", *changes)
    examples = tabulate_examples(explanation).select(*names).shortened(top)
    tables = [format_text(tabulate_pieces(explanation)), format_text(examples)]
    if explanation.components:
        tables.append(format_text(tabulate_components(explanation.components).shortened(top)))
    if explanation.positions:
        tables.append(format_text(tabulate_positions(explanation.positions).shortened(top)))
    return "\n\n".join([head, *tables, *notes(explanation)])


def format_explanations(explanations: Sequence[Explanation], top: int) -> str:
    return "\n\n".join(format_explanation(explanation, top) for explanation in explanations) + "\n"


def notes(explanation: Explanation) -> list[str]:
    """Say what the output is for and when it moved, and what columns mean that might be taken for one another."""
    when = "" if explanation.movement is None else explanation.movement.sentence
    columns = ""
    if explanation.warning:
        columns = f"if left out: withheld; {explanation.warning}"
    elif any(part.left_out is not None for part in explanation.parts):
        how = (
            "found by training without it"
            if explanation.left_out_is_actual
            else "predicted by its effect"
        )
        columns = (
            "added: on the way, in this training; "
            f"if left out: how much the output would change without it, {how}"
        )
    through = ""
    if explanation.components:
        through = "component: through which parameters it came; not what would be without them"
    where = ""
    if explanation.positions:
        where = (
            "position: where in a training text the loss was that added it; of a language model, the loss there is "
            "mostly that of the next token"
        )
    return [note for note in (explanation.sharing, when, columns, through, where) if note]


def fitting(text: str) -> str:
    """Shorten a text so that it stays on its line.

    >>> fitting("one\\ntwo")
    'one two'
    """
    words = " ".join(text.split())
    return words if len(words) <= LONGEST else f"{words[: LONGEST - 1]}…"
