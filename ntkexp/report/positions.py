"""Which positions of the training texts made a prediction: what the loss at each of them added."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ntkexp.records.contributions import BY_POSITION
from ntkexp.report.examples import example
from ntkexp.report.run import Run
from ntkexp.report.tables import Column, Table, format_signed
from ntkexp.text import printable

STRONGEST = 60  # percent of a colour, for the position that added or took most


@dataclass(frozen=True)
class PositionPart:
    """What the loss at a position of a training text added to an output."""

    example: int  # the place of the text among the training examples
    name: str  # of the text
    position: int
    token: str  # that was read there; nothing, where it is not known
    added: float


def position_parts(run: Run, rule: str, point: int, out: int) -> tuple[PositionPart, ...]:
    """What each position of each text added to an output, text by text; nothing, where they were not told apart."""
    by_position = run.by_rule(BY_POSITION, rule)
    if by_position is None:
        return ()
    parts = by_position.isel(probe=point).sel(out=out).to_numpy().astype(float)
    tokens, texts = (
        tokens_of(run, *parts.shape),
        [example(run, "train", place) for place in range(len(parts))],
    )
    names = [text.name if text.text else f"#{text.index}" for text in texts]
    return tuple(
        PositionPart(place, names[place], position, tokens[place][position], float(added))
        for (place, position), added in np.ndenumerate(parts)
        if added or tokens[place][position]
    )


def tokens_of(run: Run, examples: int, positions: int) -> list[list[str]]:
    """The tokens of each text, as their text or their numbers, if a text has a token at each position."""
    shown, texts = run.data["train_shown"], run.data.get("train_tokens")
    if shown.shape != (examples, positions) or not np.issubdtype(shown.dtype, np.integer):
        return [[""] * positions] * examples
    if texts is not None:
        return [[printable(str(text)) for text in row] for row in texts]
    return [["" if token < 0 else str(token) for token in row] for row in shown]


def tabulate_positions(parts: tuple[PositionPart, ...]) -> Table:
    """Give what each position added, those first that added or took most; the rows add up to what all examples did."""
    columns = (
        Column("example", number=False),
        Column("position"),
        Column("token", number=False),
        Column("added", spell=format_signed, adds=True),
    )
    ordered = sorted(parts, key=lambda part: -abs(part.added))
    return Table(
        columns, tuple((part.name, part.position, part.token, part.added) for part in ordered)
    )


@dataclass(frozen=True)
class Shaded:
    """A token as it is shown, in a colour for its sign, mixed with the paper's."""

    text: str
    added: str
    color: str
    percent: int


def shaded_texts(
    parts: tuple[PositionPart, ...], examples: list[int]
) -> list[tuple[str, list[Shaded]]]:
    """Some texts by their names, whose tokens are shaded by what the loss at each of them added."""
    found: dict[int, list[PositionPart]] = {place: [] for place in examples}
    for part in parts:
        if part.example in found:
            found[part.example].append(part)
    most = max((abs(part.added) for text in found.values() for part in text), default=0.0) or 1.0
    return [
        (text[0].name, [shaded(part, most) for part in text]) for text in found.values() if text
    ]


def shaded(part: PositionPart, most: float) -> Shaded:
    """A token, in the palette's blue if the loss there added to the output, in vermilion if it took from it."""
    color, percent = (
        "c0072b2" if part.added > 0 else "cd55e00",
        round(STRONGEST * abs(part.added) / most),
    )
    return Shaded(part.token or f"[{part.position}]", format_signed(part.added), color, percent)
