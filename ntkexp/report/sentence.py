"""What a ladder means, in one sentence of its own numbers: of all its rows, those included that are no numbers.

>>> rows = [Result(split, "secant", relative_error=4e-15, floor=1e-13) for split in ("train", "test")]
>>> sentence(rows)
'On both splits the secant kernel machine reproduces the trained network to rounding (4e-15).'
>>> broken = sentence([*rows, Result("probe", "secant", relative_error=float('nan'), floor=1e-13)])
>>> broken.partition("(4e-15); ")[2]
'the secant kernel machine is not finite on probe.'
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from ntkexp.records.results import FOLLOWED, Result
from ntkexp.report.likeness import COMPARED, Likeness, likeness
from ntkexp.text import listed, share, short, spoken

SPOKEN = {
    "secant": "the secant kernel machine",
    "gauss": "the Gauss–Legendre sum",
    "left": "the textbook sum",
    "frozen_start": "the frozen kernel",
}
"""The machines the sentence speaks of, in this order."""


@dataclass(frozen=True)
class Spoken:
    """A machine has these rows; a split where it has none is in none of its lists."""

    name: str
    rows: tuple[Result, ...]
    splits: tuple[str, ...]  # of the whole ladder

    def which(self, *said: Likeness) -> list[Result]:
        """These rows say one of those."""
        return [row for row in self.rows if likeness(row) in said]

    @property
    def compared(self) -> list[Result]:
        """These rows have an error that means something."""
        return self.which(*COMPARED)

    @property
    def worst(self) -> float:
        """The largest error of these is so large."""
        return max(row.relative_error or 0.0 for row in self.compared)

    @property
    def exact(self) -> bool:
        """Whether rounding explains all of them."""
        return not self.which(Likeness.MISSES)

    @property
    def size(self) -> str:
        """The worst error is spelled in words that follow 'misses by'."""
        return f"{'up to ' * (len(self.compared) > 1)}{share(self.worst)}"

    @property
    def where(self) -> str:
        """It was compared there: on which splits, and at how many of their points if not at all."""
        here, several = [row.split for row in self.compared], len(self.splits) > 1
        counts = [row.points for row in self.compared if row.points]
        splits = places(here, self.splits) if several else ""
        if not counts:
            return f"on {splits} " if several else ""
        few, all_ = map(sum, zip(*counts, strict=True))
        if len(counts) < len(here):
            return f"on {splits}, on {len(counts)} of them at {few} of {all_} points, "
        return f"at {few} of {all_} points{f' of {splits}' if several else ''} "


def sentence(results: Sequence[Result], *, diverged: bool = False) -> str:
    """Say which machines are the trained network, how far the others miss it at worst, and what has no number; of a run
    that diverged, that nothing was trained, and what is true of the network all the same.

    >>> sentence([Result("test", "secant", relative_error=4e-15, floor=1e-13)], diverged=True)[40:]
    'of the network that is left: the secant kernel machine reproduces it to rounding (4e-15).'
    """
    if diverged:
        text = comparison(results).replace("the trained network", "it", 1)
        return f"Training diverged; what remains true is of the network that is left: {text[0].lower()}{text[1:]}"
    return comparison(results)


def comparison(results: Sequence[Result]) -> str:
    """Compare the machines with the network, however its training ended."""
    splits = tuple(dict.fromkeys(row.split for row in results))
    found = [
        Spoken(name, tuple(row for row in results if row.machine == machine), splits)
        for machine, name in spoken_of(results).items()
    ]
    parts = [*compared(found), *unexplained(found[0]), *outside(found[0]), *broken(found)]
    if not parts:
        return nothing(results)
    text = "; ".join([*parts, *untold(found)])
    return f"{text[0].upper()}{text[1:]}."


def spoken_of(results: Sequence[Result]) -> dict[str, str]:
    """Choose the machines to speak of, and how: where the usual ones have nothing to say, all that there are.

    >>> sentence([Result("test", "my_rule", relative_error=0.02, floor=1e-13)])
    'The machine my rule misses the trained network by 2 %.'
    """
    if any(row.machine in SPOKEN and likeness(row) is not Likeness.SILENT for row in results):
        return SPOKEN
    return SPOKEN | {row.machine: f"the machine {spoken(row.machine)}" for row in results if row.machine not in SPOKEN}


def compared(found: Sequence[Spoken]) -> list[str]:
    """Name the machines that are the network where they were compared with it, then those that are not."""
    known = sorted((each for each in found if each.compared), key=lambda each: not each.exact)
    parts: list[str] = []
    before = ""
    for (exact, where), group in groupby(known, key=lambda each: (each.exact, each.where)):
        lead = "" if where == before else where or "at all points "
        parts.append(lead + (reproduces if exact else misses)(list(group), named=not parts))
        before = where
    return parts


def reproduces(exact: Sequence[Spoken], *, named: bool) -> str:
    """Name the machines that are the network; `named` if it has not been spoken of yet."""
    errors = ", ".join(short(each.worst) for each in exact)
    target = "the trained network" if named else "it"
    return f"{listed([each.name for each in exact])} reproduce{'s' * (len(exact) == 1)} {target} to rounding ({errors})"


def misses(inexact: Sequence[Spoken], *, named: bool) -> str:
    """Name the machines that are not."""
    first, *others = inexact
    target = " the trained network" if named else ""
    return ", ".join(
        [f"{first.name} misses{target} by {first.size}", *(f"{each.name} by {each.size}" for each in others)]
    )


def unexplained(secant: Spoken) -> list[str]:
    """Say how much rounding explains of a secant that misses, where that is the smallest part."""
    missed = secant.which(Likeness.MISSES)
    if not missed:
        return []
    row = max(missed, key=lambda row: (row.relative_error or 0.0) / row.tolerance)
    where = f" on {row.split} ({short(row.relative_error)})" if len(secant.splits) > 1 else ""
    return [f"rounding explains no more than {short(row.tolerance)} of the secant's miss{where}"]


def outside(secant: Spoken) -> list[str]:
    """Say what was done outside of the steps of a loop that was followed.

    >>> sentence([Result("probe", "secant", FOLLOWED, 0.5, 1e-13, note="a clamp did half")]).split("; ")[2]
    'a clamp did half.'
    """
    return [row.remark for row in secant.compared if row.detail == FOLLOWED and row.remark]


def broken(found: Sequence[Spoken]) -> list[str]:
    """Name the machines that say what is no number, by where they do."""
    where: dict[tuple[str, ...], list[str]] = {}
    for each in found:
        if rows := each.which(Likeness.BROKEN):
            where.setdefault(tuple(row.split for row in rows), []).append(each.name)
    return [
        f"{listed(names)} {'is' if len(names) == 1 else 'are'} not finite{on(splits, found[0].splits)}"
        for splits, names in where.items()
    ]


def untold(found: Sequence[Spoken]) -> list[str]:
    """Say where the network cannot be compared with a machine that is compared elsewhere."""
    said = {
        Likeness.LOST: "the trained network is not finite",
        Likeness.STILL: "the network moved by no more than rounding",
    }
    parts = []
    for why, text in said.items():
        splits = dict.fromkeys(row.split for each in found for row in each.which(why))
        parts += [f"{text}{on(list(splits), found[0].splits)}"] if splits else []
    return parts


def nothing(results: Sequence[Result]) -> str:
    """Say why there is nothing to compare."""
    known = spoken_of(results)
    rows = [row for row in results if row.machine in known]
    said = {likeness(row) for row in rows}
    if Likeness.LOST in said:
        return "The trained network is not finite, so no kernel machine can be compared with it."
    if Likeness.STILL in said:
        return "Training moved the network by no more than rounding, so there is nothing to reproduce."
    reason = next((row.note for row in rows if row.note), "")
    return "No kernel machine was compared with the trained network" + (f": {reason}." if reason else ".")


def on(here: Sequence[str], splits: Sequence[str]) -> str:
    """Name the splits, where there are several."""
    return f" on {places(here, splits)}" if len(splits) > 1 else ""


def places(here: Sequence[str], splits: Sequence[str]) -> str:
    """Name some of the splits in words.

    >>> places(["train"], ["train", "test"]), places(["train", "test"], ["train", "test"])
    ('train', 'both splits')
    """
    if len(set(here)) < len(splits):
        return listed(list(dict.fromkeys(here)))
    return "both splits" if len(splits) == 2 else f"all {len(splits)} splits"
