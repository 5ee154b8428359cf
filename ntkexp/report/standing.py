"""What one machine is in many runs, in one clause that counts all of them.

A machine misses a network that it misses on any split; it is a network that it is on every split where the two can be
compared, and the clause says in how many runs that is not everywhere.

>>> exact, missed = Standing(Likeness.EXACT, 5e-15), Standing(Likeness.MISSES, 0.3)
>>> clause("the secant", [exact] * 99 + [missed])
'the secant reproduces 99 of 100 trained networks to rounding (5e-15 at worst) and misses 1 by 30 %'
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ntkexp.records.results import Result
from ntkexp.report.likeness import COMPARED, Likeness, likeness
from ntkexp.text import listed, share, short

SAID = {
    Likeness.EXACT: "reproduces {} to rounding ({})",
    Likeness.MISSES: "misses {} by {}",
    Likeness.BROKEN: "is not finite beside {}",
    Likeness.LOST: "cannot be compared with {} that {} not finite",
    Likeness.STILL: "cannot be told from {} that moved by no more than rounding",
    Likeness.SILENT: "was not compared with {}",
}
"""What is said of the networks of each kind, in this order."""

DECISIVE = (Likeness.LOST, Likeness.BROKEN, Likeness.MISSES, Likeness.EXACT, Likeness.STILL)
"""The likeness that stands for a run is the first of these that it has."""


@dataclass(frozen=True)
class Standing:
    """One machine stands so to the network of a run, by all its rows; the largest error among them is kept."""

    likeness: Likeness
    error: float = 0.0
    everywhere: bool = True  # whether it was compared at all points of every split


def standing(ladder: Sequence[Result], machine: str) -> Standing:
    """Find the standing of a machine, from all rows of a run."""
    rows = [row for row in ladder if row.machine == machine]
    said = {likeness(row) for row in rows}
    compared = [row for row in rows if likeness(row) in COMPARED]
    fully = {row.split for row in compared if row.points is None} == {row.split for row in ladder}
    worst = max((row.relative_error or 0.0 for row in compared), default=0.0)
    return Standing(next((each for each in DECISIVE if each in said), Likeness.SILENT), worst, fully)


def clause(name: str, standings: Sequence[Standing]) -> str:
    """Speak of one machine in all runs; nothing if it was compared in none."""
    parts: list[str] = []
    for kind, text in SAID.items():
        here = [each for each in standings if each.likeness is kind]
        if here:
            what = counted(len(here), len(standings), "" if parts else "trained networks")
            parts.append(text.format(what, detail(kind, here)))
    if all(each.likeness is Likeness.SILENT for each in standings):
        return ""
    part = sum(not each.everywhere for each in standings if each.likeness in COMPARED)
    return f"{name} {listed(parts)}{f', at some points alone in {part}' if part else ''}"


def detail(kind: Likeness, here: Sequence[Standing]) -> str:
    """Spell the errors of the networks of a kind, the worst always among them.

    >>> detail(Likeness.MISSES, [Standing(Likeness.MISSES, error) for error in (0.01, 0.02, 0.3)])
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


def counted(some: int, whole: int, what: str) -> str:
    """Spell so many of all, and what they are, where that is not known yet.

    >>> counted(5, 5, "networks"), counted(2, 2, "networks"), counted(2, 5, "networks"), counted(2, 5, "")
    ('all 5 networks', 'both networks', '2 of 5 networks', '2')
    """
    if not what:
        return str(some)
    every = "both" if whole == 2 else f"all {whole}"
    return f"{every if some == whole else f'{some} of {whole}'} {what}"
