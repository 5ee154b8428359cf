"""The ladder of one run as a person reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ntkexp.records.results import SPLITS, Result, at_points
from ntkexp.text import aligned, listed, short


class LadderRow(NamedTuple):
    """One line of the ladder is about one machine."""

    machine: str
    detail: str
    numbers: list[float | None]


def ladder_table(results: Sequence[Result], seconds: Mapping[str, float] | None = None) -> str:
    """Lay out a line per machine: its relative error on every split, and agreement and R² where the run is judged.

    What there is to note, and why a machine has nothing to say, stands below.
    """
    header, lines = ladder_rows(results, seconds)
    rows = [[name, detail, *map(entry, numbers)] for name, detail, numbers in lines]
    text = aligned(header, rows, [False, False, *[True] * (len(header) - 2)])
    said = notes(results)
    return "\n\n".join([text, *(["\n".join(said)] if said else [])])


def entry(number: float | None) -> str:
    """Spell a number of the ladder: one that was measured and is none is told from one that was not measured.

    >>> entry(0.5), entry(None), entry(float("nan"))
    ('0.5', '–', 'nan')
    """
    return "nan" if number is not None and math.isnan(number) else short(number)


def ladder_rows(
    results: Sequence[Result], seconds: Mapping[str, float] | None = None
) -> tuple[list[str], list[LadderRow]]:
    """Find the headings of the ladder, and its lines with every digit."""
    splits = [split for split in SPLITS if any(result.split == split for result in results)]
    main = main_split(results)
    header = ["machine", "detail", *splits, f"agreement ({main})", "R²", *(["seconds"] if seconds else [])]
    rows = []
    for name, detail in machines(results):
        found = {result.split: result for result in results if (result.machine, result.detail) == (name, detail)}
        if all(result.relative_error is None and result.max_error is None for result in found.values()):
            continue
        here = found.get(main, Result("", name))
        errors = [found[split].relative_error if split in found else None for split in splits]
        clock = [seconds.get(name)] if seconds else []
        rows.append(LadderRow(name, detail, [*errors, here.agreement, here.r2, *clock]))
    return header, rows


def notes(results: Sequence[Result]) -> list[str]:
    """Note what there is to note of the machines; on which splits, where it is not the same on all.

    >>> notes([Result(split, "left", note=f"as published; {at_points(2, 5)}") for split in ("train", "test")])
    ['left: as published; at 4 of 10 points']
    """
    splits, said = {row.split for row in results}, []
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
            said.append(f"{name}: {'; '.join(filter(None, [remark, *few]))}")
    return said


def machines(results: Sequence[Result]) -> list[tuple[str, str]]:
    """List the machines with their details, in the order of the ladder."""
    return list(dict.fromkeys((result.machine, result.detail) for result in results))


def main_split(results: Sequence[Result]) -> str:
    """Find the split that a single number should speak of: new points if there are any, those meant for it first."""
    present = {result.split for result in results}
    return next((split for split in ("probe", "test", "train") if split in present), "probe")
