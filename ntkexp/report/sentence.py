"""What a ladder means: as a table, in one sentence of its own numbers, and in one clause for a machine over many
runs.

How like the network a machine is, by a row of the ladder: it is the network, misses it, or cannot be compared.

>>> [str(likeness(Result("probe", "left", relative_error=error, floor=1e-13))) for error in (0.12, 1e-14, math.nan)]
['misses', 'exact', 'broken']

What a ladder means, in one sentence of its own numbers: of all its rows, those included that are not numbers.

>>> rows = [Result(split, "secant", relative_error=4e-15, floor=1e-13) for split in ("train", "test")]
>>> ladder_sentence(rows)
'On both splits the secant kernel machine reproduces the trained network to rounding (4e-15).'
>>> broken = ladder_sentence([*rows, Result("probe", "secant", relative_error=float('nan'), floor=1e-13)])
>>> broken.partition("(4e-15); ")[2]
'the secant kernel machine is not finite on probe.'

What one machine is in many runs, in one clause that counts all of them.

A machine misses a network that it misses on any split; it is a network that it is on every split where the two can be
compared, and the clause says in how many runs that is not everywhere.

>>> exact, missed = Standing(Likeness.EXACT, 5e-15), Standing(Likeness.MISSES, 0.3)
>>> clause("the secant", [exact] * 99 + [missed])
'the secant reproduces 99 of 100 trained networks to rounding (5e-15 at worst) and misses 1 by 30 %'
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import groupby
from operator import itemgetter

from ntkexp.records.results import FOLLOWED, SPLITS, Result, at_points
from ntkexp.report.tables import Column, Table, format_text
from ntkexp.text import listed, share, short, spoken

# --- The ladder of one run as a person reads it.


def tabulate_ladder(results: Sequence[Result], seconds: Mapping[str, float] | None = None) -> Table:
    """Give a row per machine: its relative error on every split, and agreement and R² where the run is judged.

    A machine that has nothing to say has no row; `ladder_notes` says why.
    """
    splits = [split for split in SPLITS if any(result.split == split for result in results)]
    main = main_split(results)
    rows = []
    for name, detail in machines(results):
        found = {
            result.split: result
            for result in results
            if (result.machine, result.detail) == (name, detail)
        }
        if all(
            result.relative_error is None and result.max_error is None for result in found.values()
        ):
            continue
        here = found.get(main, Result("", name))
        errors = [found[split].relative_error if split in found else None for split in splits]
        clock = [seconds.get(name)] if seconds else []
        rows.append((name, detail, *errors, here.agreement, here.r2, *clock))
    names = [*splits, f"agreement ({main})", "R²", *(["seconds"] if seconds else [])]
    texts = (Column("machine", number=False), Column("detail", number=False))
    return Table((*texts, *(Column(name, spell=measured) for name in names)), tuple(rows))


def measured(number: float) -> str:
    """Spell a number that was measured and may be none.

    >>> measured(0.5), measured(float("nan"))
    ('0.5', 'nan')
    """
    return "nan" if math.isnan(number) else short(number)


def format_ladder(results: Sequence[Result], seconds: Mapping[str, float] | None = None) -> str:
    """Write the ladder for a terminal; what there is to note, and why a machine has nothing to say, stands below."""
    lines = ladder_notes(results)
    return "\n\n".join(
        [format_text(tabulate_ladder(results, seconds)), *(["\n".join(lines)] if lines else [])]
    )


def ladder_notes(results: Sequence[Result]) -> list[str]:
    """Note what there is to note of the machines; on which splits, where it is not the same on all.

    >>> ladder_notes([Result(split, "left", note=f"as published; {at_points(2, 5)}") for split in ("train", "test")])
    ['left: as published; at 4 of 10 points']
    """
    splits, lines = {row.split for row in results}, []
    for machine, detail in machines(results):
        where: dict[str, list[Result]] = {}
        for row in results:
            if (row.machine, row.detail) == (machine, detail) and row.note:
                where.setdefault(row.remark, []).append(row)
        for remark, rows in where.items():
            here = [row.split for row in rows]
            name = machine if set(here) == splits else f"{machine} ({listed(here)})"
            counts = [row.points for row in rows if row.points]
            few = [at_points(*map(sum, zip(*counts, strict=True)))] if counts else []
            lines.append(f"{name}: {'; '.join(filter(None, [remark, *few]))}")
    return lines


def machines(results: Sequence[Result]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((result.machine, result.detail) for result in results))


def main_split(results: Sequence[Result]) -> str:
    """Find the split that a single number should speak of: new points if there are any, those meant for it first."""
    present = {result.split for result in results}
    return next((split for split in ("probe", "test", "train") if split in present), "probe")


class Likeness(StrEnum):
    """How like the network a machine is, by one row."""

    EXACT = "exact"  # rounding explains the error
    MISSES = "misses"
    BROKEN = "broken"  # what the machine says is not finite
    LOST = "lost"  # what the network says is not
    STILL = "still"  # the network moved by no more than rounding, which explains any error
    SILENT = "silent"  # nothing was compared


COMPARED = frozenset({Likeness.EXACT, Likeness.MISSES})


def likeness(row: Result) -> Likeness:
    """What this row says. The floor is measured on the network alone: where it is not a number, the network is none."""
    if row.relative_error is None:
        return Likeness.SILENT if row.max_error is None else Likeness.STILL
    if row.floor is not None and math.isnan(row.floor):
        return Likeness.LOST
    if not math.isfinite(row.relative_error):
        return Likeness.BROKEN
    if row.tolerance >= 1:
        return Likeness.STILL
    return Likeness.EXACT if row.exact else Likeness.MISSES


# --- One sentence about a run.


SPOKEN = {
    "secant": "the secant kernel machine",
    "gauss": "the Gauss–Legendre sum",
    "left": "the textbook sum",
    "frozen_start": "the frozen kernel",
}
"""The machines the sentence speaks of, in this order."""


@dataclass(frozen=True)
class Spoken:
    """The rows of a machine; a split where it has none is in none of its lists."""

    name: str
    rows: tuple[Result, ...]
    splits: tuple[str, ...]  # of the whole ladder

    def which(self, *kinds: Likeness) -> list[Result]:
        return [row for row in self.rows if likeness(row) in kinds]

    @property
    def compared(self) -> list[Result]:
        """The rows that have an error that means something."""
        return self.which(*COMPARED)

    @property
    def worst(self) -> float:
        """The largest error of these."""
        return max(row.relative_error or 0.0 for row in self.compared)

    @property
    def where(self) -> str:
        """The splits that were compared, and the number of points if some were left out."""
        here, several = [row.split for row in self.compared], len(self.splits) > 1
        counts = [row.points for row in self.compared if row.points]
        splits = name_splits(here, self.splits) if several else ""
        if not counts:
            return f"on {splits} " if several else ""
        few, all_ = map(sum, zip(*counts, strict=True))
        if len(counts) < len(here):
            return f"on {splits}, on {len(counts)} of them at {few} of {all_} points, "
        return f"at {few} of {all_} points{f' of {splits}' if several else ''} "


def ladder_sentence(results: Sequence[Result], *, diverged: bool = False) -> str:
    """Say which machines are the trained network, how far the others miss it at worst, and what has no number; of a run
    that diverged, that nothing was trained, and what is true of the network all the same.

    >>> ladder_sentence([Result("test", "secant", relative_error=4e-15, floor=1e-13)], diverged=True)[40:]
    'of the network that is left: the secant kernel machine reproduces it to rounding (4e-15).'
    >>> ladder_sentence([Result("test", "my_rule", relative_error=0.02, floor=1e-13)])
    'The machine my rule misses the trained network by 2 %.'
    >>> ladder_sentence([Result("probe", "secant", FOLLOWED, 0.5, 1e-13, note="a clamp did half")]).split("; ")[2]
    'a clamp did half.'
    """
    text = comparison(results)
    if diverged:
        text = text.replace("the trained network", "it", 1)
        return f"Training diverged; what remains true is of the network that is left: {text[0].lower()}{text[1:]}"
    return text


def comparison(results: Sequence[Result]) -> str:
    """Compare the machines with the network, however its training ended."""
    splits, names = tuple(dict.fromkeys(row.split for row in results)), SPOKEN
    if not any(row.machine in SPOKEN and likeness(row) is not Likeness.SILENT for row in results):
        # The usual machines have nothing to say: then all that there are are spoken of
        others = {
            row.machine: f"the machine {spoken(row.machine)}"
            for row in results
            if row.machine not in SPOKEN
        }
        names = SPOKEN | others
    found = [
        Spoken(name, tuple(row for row in results if row.machine == machine), splits)
        for machine, name in names.items()
    ]
    secant = found[0]
    parts = compared(found)

    # Of a secant that misses: how much rounding explains of it, where that is the smallest part
    if missed := secant.which(Likeness.MISSES):
        row = max(missed, key=lambda row: (row.relative_error or 0.0) / row.tolerance)
        where = f" on {row.split} ({short(row.relative_error)})" if len(splits) > 1 else ""
        parts.append(
            f"rounding explains no more than {short(row.tolerance)} of the secant's miss{where}"
        )

    # What was done outside of the steps of a loop that was followed
    parts += [row.remark for row in secant.compared if row.detail == FOLLOWED and row.remark]

    # Machines that say what is not a number, by where they do
    broken: dict[tuple[str, ...], list[str]] = {}
    for each in found:
        if rows := each.which(Likeness.BROKEN):
            broken.setdefault(tuple(row.split for row in rows), []).append(each.name)
    for here, who in broken.items():
        parts.append(
            f"{listed(who)} {'is' if len(who) == 1 else 'are'} not finite{on_splits(here, splits)}"
        )
    if not parts:
        return why_nothing([row for row in results if row.machine in names])

    # Where the network cannot be compared with a machine that is compared elsewhere
    for why, text in (
        (Likeness.LOST, "the trained network is not finite"),
        (Likeness.STILL, "the network moved by no more than rounding"),
    ):
        if there := list(dict.fromkeys(row.split for each in found for row in each.which(why))):
            parts.append(f"{text}{on_splits(there, splits)}")
    whole = "; ".join(parts)
    return f"{whole[0].upper()}{whole[1:]}."


def compared(spoken: Sequence[Spoken]) -> list[str]:
    """Name the machines that are the network where they were compared with it, then those that miss it."""
    measured = [
        (bool(each.which(Likeness.MISSES)), each.where, each) for each in spoken if each.compared
    ]
    parts: list[str] = []
    before = ""
    for (misses, where), group in groupby(
        sorted(measured, key=itemgetter(0)), key=itemgetter(0, 1)
    ):
        here, target = [each for _, _, each in group], "it" if parts else "the trained network"
        if not misses:
            errors = ", ".join(short(each.worst) for each in here)
            verb = f"reproduce{'s' * (len(here) == 1)}"
            text = f"{listed([each.name for each in here])} {verb} {target} to rounding ({errors})"
        else:
            sizes = [f"{'up to ' * (len(each.compared) > 1)}{share(each.worst)}" for each in here]
            verb = "misses" if parts else f"misses {target}"
            text = f"{here[0].name} {verb} by {sizes[0]}"
            text += "".join(
                f", {each.name} by {size}" for each, size in zip(here[1:], sizes[1:], strict=True)
            )
        parts.append(("" if where == before else where or "at all points ") + text)
        before = where
    return parts


def why_nothing(rows: Sequence[Result]) -> str:
    kinds = {likeness(row) for row in rows}
    if Likeness.LOST in kinds:
        return "The trained network is not finite, so no kernel machine can be compared with it."
    if Likeness.STILL in kinds:
        return (
            "Training moved the network by no more than rounding, so there is nothing to reproduce."
        )
    reason = next((row.note for row in rows if row.note), "")
    return "No kernel machine was compared with the trained network" + (
        f": {reason}." if reason else "."
    )


def on_splits(here: Sequence[str], splits: Sequence[str]) -> str:
    return f" on {name_splits(here, splits)}" if len(splits) > 1 else ""


def name_splits(here: Sequence[str], splits: Sequence[str]) -> str:
    """Name some of the splits in words.

    >>> name_splits(["train"], ["train", "test"]), name_splits(["train", "test"], ["train", "test"])
    ('train', 'both splits')
    """
    if len(set(here)) < len(splits):
        return listed(list(dict.fromkeys(here)))
    return "both splits" if len(splits) == 2 else f"all {len(splits)} splits"


# --- One clause about a machine in many runs.


CLAUSES = {
    Likeness.EXACT: "reproduces {} to rounding ({})",
    Likeness.MISSES: "misses {} by {}",
    Likeness.BROKEN: "is not finite for {}",
    Likeness.LOST: "cannot be compared with {} that {} not finite",
    Likeness.STILL: "cannot be told from {} that moved by no more than rounding",
    Likeness.SILENT: "has no result for {}",
}
"""What is said of the networks of each kind, in this order."""

DECISIVE = (Likeness.LOST, Likeness.BROKEN, Likeness.MISSES, Likeness.EXACT, Likeness.STILL)
"""The likeness that stands for a run is the first of these that it has."""


@dataclass(frozen=True)
class Standing:
    """How one machine stands to the network of a run, by all its rows, with the largest error among them."""

    likeness: Likeness
    error: float = 0.0
    everywhere: bool = True  # whether it was compared at all points of every split


def standing(ladder: Sequence[Result], machine: str) -> Standing:
    """The standing of a machine, from all rows of a run."""
    rows = [row for row in ladder if row.machine == machine]
    kinds = {likeness(row) for row in rows}
    compared = [row for row in rows if likeness(row) in COMPARED]
    fully = {row.split for row in compared if row.points is None} == {row.split for row in ladder}
    worst = max((row.relative_error or 0.0 for row in compared), default=0.0)
    return Standing(
        next((each for each in DECISIVE if each in kinds), Likeness.SILENT), worst, fully
    )


def clause(name: str, standings: Sequence[Standing]) -> str:
    """Speak of one machine in all runs; nothing if it was compared in none."""
    if all(each.likeness is Likeness.SILENT for each in standings):
        return ""
    parts: list[str] = []
    for kind, text in CLAUSES.items():
        if here := [each for each in standings if each.likeness is kind]:
            what = str(len(here))
            if not parts:  # what they are, and how many there are, is said once
                whole = "both" if len(standings) == 2 else f"all {len(standings)}"
                some = whole if len(here) == len(standings) else f"{what} of {len(standings)}"
                what = f"{some} trained networks"
            parts.append(text.format(what, errors_in_words(kind, here)))
    part = sum(not each.everywhere for each in standings if each.likeness in COMPARED)
    return f"{name} {listed(parts)}{f' (in {part}, at some points only)' if part else ''}"


def errors_in_words(kind: Likeness, here: Sequence[Standing]) -> str:
    """Spell the errors of the networks of a kind, the worst always among them.

    >>> errors_in_words(Likeness.MISSES, [Standing(Likeness.MISSES, error) for error in (0.01, 0.02, 0.3)])
    '2 % at the median and 30 % at worst'
    """
    errors = [each.error for each in here]
    if kind is Likeness.EXACT:
        return f"{short(max(errors))}{' at worst' if len(errors) > 1 else ''}"
    if kind is Likeness.LOST:
        return "are" if len(here) > 1 else "is"
    if len(errors) == 1:
        return share(errors[0])
    return f"{share(statistics.median(errors))} at the median and {share(max(errors))} at worst"
