"""Explanations: contributions of training examples to a prediction,
and leave-out effects.

    f_T(x) = f_0(x) + Σᵢ 𝒮(x, xᵢ) + the parts that no example caused + rest

`parts.NO_EXAMPLE` lists the parts that no example caused, such as weight decay. `rest`
is the error of the attribution rule. If there are several outputs, explain the largest
output at the query."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ntkexp.mistake import Mistake
from ntkexp.records.atomic import Json
from ntkexp.records.contributions import DECAY, explained_rule
from ntkexp.records.data import OUT_NAME
from ntkexp.report.examples import (
    Example,
    example,
    output_name,
    phase_of,
    predicted_class,
    sharing,
)
from ntkexp.report.known_effects import effects_of_run, known_effects
from ntkexp.report.parts import (
    NO_EXAMPLE,
    Array,
    ComponentPart,
    Movement,
    OutputParts,
    PositionPart,
    attributed,
    attributed_in_blocks,
    component_parts,
    halfway,
    largest_attributed,
    movement,
    position_parts,
    strongest_first,
    tabulate_components,
    tabulate_positions,
)
from ntkexp.report.run import Run, outputs_of, point_index, slice_of_split
from ntkexp.report.tables import (
    Column,
    Table,
    format_signed,
    format_text,
    json_rows,
    signed_column,
    text_column,
)
from ntkexp.text import MISSING, fitting, percent, short

TOP = 10  # number of rows that tables show by default


@dataclass(frozen=True)
class Part:
    """The contribution `added` of one training example,
    and its leave-out effect, if known."""

    example: Example
    added: float
    # fraction of the path time after which half of the contribution was added
    halfway: float
    left_out: float | None = None


@dataclass(frozen=True, repr=False)
class Explanation:
    """One output at one query, and the terms that add up to it. Its
    repr is a text with tables."""

    split: str
    number: int
    point: Example
    out: int
    output: str
    rule: str
    prediction: float
    start: float
    sum: float
    # parts that no example caused, by the keys of `NO_EXAMPLE`
    no_example: Mapping[str, float]
    rest: float
    parts: tuple[Part, ...]  # the strongest first
    # True if retraining measured `left_out`, False if it is a prediction
    left_out_is_actual: bool = False
    warning: str = ""  # reason not to show the leave-out effects
    movement: Movement | None = None
    predicted: str = ""  # the predicted class; empty if there are no classes
    # a sentence on the classes that share the output, if its name does not contain them
    sharing: str = ""
    components: tuple[ComponentPart, ...] = ()
    positions: tuple[PositionPart, ...] = ()

    @property
    def pieces(self) -> dict[str, float]:
        """The terms of the output, by the names that tables show."""
        others = {NO_EXAMPLE[kind]: value for kind, value in self.no_example.items()}
        return {
            "start f_0": self.start,
            f"{len(self.parts)} examples by {self.rule}": self.sum,
            **others,
            "rest": self.rest,
        }

    @property
    def has_effects(self) -> bool:
        return any(part.left_out is not None for part in self.parts)

    @property
    def mass(self) -> float:
        """The sum of the magnitudes of all contributions, Σᵢ |𝒮(x, xᵢ)|."""
        return sum(abs(part.added) for part in self.parts)

    def __repr__(self) -> str:
        return format_explanation(self, TOP)

    def as_json(self, top: int) -> dict[str, Json]:
        """Return the explanation with the `top` strongest examples,
        and the sum of the others."""
        fields: dict[str, Json] = {
            "split": self.split,
            "point": self.number,
            "index": self.point.index,
            "out": self.out,
            "output": self.output,
            "predicted": self.predicted,
            "class": self.point.name if self.predicted else "",
            "rule": self.rule,
            "prediction": self.prediction,
            "start": self.start,
            "sum": self.sum,
            **dict.fromkeys(NO_EXAMPLE, 0.0),
            **self.no_example,
            "rest": self.rest,
        }
        if self.warning:
            fields["warning"] = self.warning
        if self.components:
            fields["components"] = list(json_rows(tabulate_components(self.components)))
        if self.positions:
            fields["positions"] = list(json_rows(tabulate_positions(self.positions)))[
                :top
            ]
        columns = ("index", "name", "added", "half by", "if left out")
        fields["examples"] = json_rows(tabulate_examples(self).select(*columns))[:top]
        others = self.parts[top:]
        fields["others"] = {
            "count": len(others),
            "added": sum(part.added for part in others),
        }
        return fields


def explain(run: Run, split: str, numbers: Sequence[int]) -> list[Explanation]:
    """Explain the examples `numbers` of a split by the run's best attribution rule.

    Raises:
        Mistake: The run has no contributions, or a query was not attributed.
    """
    rule = explained_rule(run.rules)
    if rule is None:
        raise Mistake(
            f"{run.path} holds no contributions; run it with path.rule=[secant]"
        )
    return [explain_one(run, split, number, rule) for number in numbers]


def explain_one(run: Run, split: str, number: int, rule: str) -> Explanation:
    query = point_index(run, split, number)
    end = outputs_of(run, "f_T")[query]
    by_output = np.asarray(run.parts(rule).isel(query=query).to_numpy(), dtype=float)
    if not attributed(by_output).any():
        raise Mistake(
            f"point {number} of {split} was not attributed: "
            "with this optimizer the first path.attributed points are"
        )
    column = largest_attributed(end[list(run.outs)], by_output)
    out = run.outs[column]
    parts = OutputParts(run.contributions, query, column)

    contributions = by_output[column]
    known = known_effects(run)
    effects, is_actual, warning = (None, False, "")
    if known is not None:
        effects, is_actual, warning = known.credible_at(query, out)

    times = halfway(run, parts)
    shown = partial(example, run, "train")
    return explanation_of(
        parts,
        contributions,
        start=float(outputs_of(run, "f_0")[query, out]),
        end=float(end[out]),
        split=split,
        number=number,
        point=example(run, split, number),
        out=out,
        output=output_name(run, out, len(end), phase_of(run, split, number)),
        rule=rule,
        parts=parts_of_examples(contributions, times, effects, shown),
        left_out_is_actual=is_actual,
        warning=warning,
        predicted=predicted_class(run, end, phase_of(run, split, number)),
        sharing=sharing(run, out, len(end)),
        positions=position_parts(parts, shown),
    )


def explanation_of(
    terms: OutputParts,
    contributions: Array,
    *,
    start: float,
    end: float,
    **facts: Any,
) -> Explanation:
    """Return the explanation of an output that training changed from `start` to `end`.
    `facts` are the fields that do not follow from these numbers."""
    # f_T = f_0 + Σᵢ 𝒮(x, xᵢ) + Σ parts of no example + rest
    total = float(contributions.sum())
    no_example = parts_of_no_example(terms, end)
    return Explanation(
        prediction=end,
        start=start,
        sum=total,
        no_example=no_example,
        rest=end - start - total - sum(no_example.values()),
        movement=movement(terms),
        components=component_parts(terms),
        **facts,
    )


def parts_of_examples(
    contributions: Array,
    times: Array,
    effects: Array | None,
    shown: Callable[[int], Example],
) -> tuple[Part, ...]:
    """Return the part of each training example, the strongest first.

    Args:
        contributions: The contribution of each example.
        times: For each example, the fraction of the path time after which half of its
            contribution was added; NaN if unknown.
        effects: The leave-out effect of each example, if known.
        shown: A function from the index of an example to the example.
    """
    return tuple(
        Part(
            example=shown(place),
            added=float(contributions[place]),
            halfway=float(times[place]),
            left_out=None if effects is None else float(effects[place]),
        )
        for place in strongest_first(contributions)
    )


def parts_of_no_example(parts: OutputParts, end: float) -> dict[str, float]:
    """Return the parts of the change that no example caused.

    Omit parts below the rounding error of the output `end`,
    but always include weight decay."""
    totals = {kind: parts.total(kind) for kind in NO_EXAMPLE}
    least = float(np.finfo(float).eps) * abs(end)
    return {
        kind: total
        for kind, total in totals.items()
        if abs(total) > least or kind == DECAY
    }


def worst_points(run: Run, split: str, count: int) -> list[int]:
    """Return the indices of the `count` queries with the largest errors, among the
    attributed queries of a split.

    The largest error comes first. If there are no targets, or if the run attributes a
    measure instead of the outputs, rank by the size of the change of the outputs. If
    leave-out effects are known at some queries only, choose from these queries."""
    points = slice_of_split(run, split)
    outputs = outputs_of(run, "f_T")[points]
    targets = None if OUT_NAME in run.data else run.data.get(f"{split}_targets")
    if targets is None:
        targets = outputs_of(run, "f_0")[points]
    error_size = np.linalg.norm(outputs - np.asarray(targets, dtype=float), axis=1)
    explicable = np.isfinite(error_size)
    rule = explained_rule(run.rules)
    if rule:
        explicable &= attributed_in_blocks(run.parts(rule).isel(query=points)).any(
            axis=1
        )
    effects = effects_of_run(run)
    if effects is not None:
        with_effects = explicable & attributed(effects[points]).any(axis=1)
        explicable = with_effects if with_effects.any() else explicable
    candidates = np.flatnonzero(explicable)
    order = np.argsort(-error_size[candidates], kind="stable")
    return [int(k) for k in candidates[order][:count]]


# --- Explanations as tables, and as text for a terminal.


MAX_SHOWN_LETTERS = 60  # longer texts of examples are shortened


def tabulate_pieces(explanation: Explanation) -> Table:
    """Return a row for each term of the output. The rows add up to the output."""
    columns = (text_column("made of"), Column("value", heading="", spell=format_signed))
    return Table(columns, tuple(explanation.pieces.items()))


def tabulate_examples(explanation: Explanation) -> Table:
    """Return a row for each training example, the strongest first."""
    mass = explanation.mass or 1.0
    has_texts = any(part.example.text for part in explanation.parts)
    heading = "holds" if has_texts else "target"
    columns = (
        Column("index"),
        text_column("name"),
        text_column("example"),
        text_column("holds"),
        # the column `holds`, shortened to one line
        text_column("on a line", heading=heading),
        Column("phase"),
        signed_column("added"),
        Column("of all parts", spell=percent, adds=True),
        Column("half by", spell=percent, others=MISSING),
        Column("if left out", spell=format_signed, others=MISSING),
    )
    rows = []
    for part in explanation.parts:
        index, name, text = part.example.index, part.example.name, part.example.text
        # an example without a text is shown by its target, which is its name
        holds = text or name
        on_a_line = on_one_line(text or "") if has_texts else name
        rows.append(
            (
                index,
                name,
                f"#{index}" if text is None else name,
                holds,
                on_a_line,
                part.example.phase,
                part.added,
                abs(part.added) / mass,
                part.halfway if math.isfinite(part.halfway) else None,
                part.left_out,
            )
        )
    return Table(columns, tuple(rows))


def describes_examples(explanation: Explanation) -> bool:
    """Return True if any example has a text or a target in addition to a name.

    Images of a followed loop have neither.
    """
    return any(part.example.text != "" for part in explanation.parts)


def format_explanations(explanations: Sequence[Explanation], top: int) -> str:
    return (
        "\n\n".join(
            format_explanation(explanation, top) for explanation in explanations
        )
        + "\n"
    )


def format_explanation(explanation: Explanation, top: int) -> str:
    """Format one explanation as text: all terms of the output, and the first `top` rows
    of each other table."""
    point = explanation.point
    columns = ["example", "added", "of all parts", "half by"]
    if describes_examples(explanation):
        columns.insert(1, "on a line")
    if point.phase is not None:
        columns.insert(2, "phase")
    if explanation.has_effects:
        columns.append("if left out")
    tables = [
        tabulate_pieces(explanation),
        tabulate_examples(explanation).select(*columns).shortened(top),
    ]
    if explanation.components:
        tables.append(tabulate_components(explanation.components).shortened(top))
    if explanation.positions:
        tables.append(tabulate_positions(explanation.positions).shortened(top))
    return "\n\n".join(
        [heading_of(explanation), *map(format_text, tables), *notes(explanation)]
    )


def heading_of(explanation: Explanation) -> str:
    """Return the heading: the query, whether the predicted class is right, and the
    explained output."""
    point = explanation.point
    name = f"{explanation.split} {explanation.number}"
    output = f"{explanation.output} = {short(explanation.prediction)}"
    if point.name == name:  # some queries of followed loops have no other name
        return f"{name}: {output}"
    if not explanation.predicted:
        return f"{name} (#{point.index}, {point.label}): {output}"
    verdict = f"predicted {explanation.predicted}, which is right"
    if explanation.predicted != point.name:
        verdict = f"predicted {explanation.predicted}, but it is {point.name}"
    phase = "" if point.phase is None else f", phase {point.phase}"
    return f"{name} (#{point.index}{phase}): {verdict}; {output}"


def notes(explanation: Explanation) -> list[str]:
    """Return the remarks below the tables: they explain the output, and columns that
    are easily confused."""
    remarks = [explanation.sharing]
    if explanation.movement is not None:
        remarks.append(explanation.movement.sentence)
    if explanation.warning:
        remarks.append(f"if left out: withheld; {explanation.warning}")
    elif explanation.has_effects:
        how = "predicted by its effect"
        if explanation.left_out_is_actual:
            how = "found by training without it"
        remarks.append(
            "added: what the example added in this training; "
            f"if left out: the change of the output without the example, {how}"
        )
    if explanation.components:
        remarks.append(
            "component: the parameters through which training changed the output; "
            "it does not show the output without them"
        )
    if explanation.positions:
        remarks.append(
            "position: the position in a training text whose loss added this; for most "
            "language models, it is the loss of the next token"
        )
    return [remark for remark in remarks if remark]


def on_one_line(text: str) -> str:
    """Shorten a text to one line of at most `MAX_SHOWN_LETTERS` letters.

    >>> on_one_line("one\\ntwo")
    'one two'
    """
    return fitting(" ".join(text.split()), MAX_SHOWN_LETTERS)
