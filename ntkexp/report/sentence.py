"""The comparison of kernel machines with the network: a table, a sentence,
and a clause.

`likeness` classifies a row of the table: the kernel machine equals the network, misses
it, or cannot be compared.

>>> [str(likeness(Result("query", "left", relative_error=error, floor=1e-13))) for error in (0.12, 1e-14, math.nan)]
['misses', 'exact', 'broken']

`ladder_sentence` summarises all rows of a run, including errors that are not finite.

>>> rows = [Result(split, "secant", relative_error=4e-15, floor=1e-13) for split in ("train", "test")]
>>> ladder_sentence(rows)
'On both splits the secant kernel machine reproduces the trained network to rounding (4e-15).'
>>> broken = ladder_sentence([*rows, Result("query", "secant", relative_error=float('nan'), floor=1e-13)])
>>> broken.partition("(4e-15); ")[2]
'the secant kernel machine is not finite on query.'

`clause` summarises one kernel machine over many runs. A network counts as missed if the
kernel machine misses it on any split. It counts as reproduced if the kernel machine
equals it on every split where both were compared. `DECISIVE` ranks all cases. The
clause also counts the runs that were compared at only some of the points.

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
from operator import attrgetter

from ntkexp.records.results import FOLLOWED, SPLITS, Result, at_points
from ntkexp.report.tables import Column, Table, format_text, text_column
from ntkexp.text import listed, share, short, spoken

# --- The table of one run.


def tabulate_ladder(
    results: Sequence[Result], seconds: Mapping[str, float] | None = None
) -> Table:
    """Return a row for each kernel machine: relative errors on each split, and the
    agreement and R² on the main split.

    A kernel machine that was not compared has no row; `ladder_notes` gives the reason.
    `seconds` adds a column of timings."""
    splits = [
        split for split in SPLITS if any(result.split == split for result in results)
    ]
    main = main_split(results)
    rows = []
    for name, detail in machines(results):
        of_machine = [
            row for row in results if (row.machine, row.detail) == (name, detail)
        ]
        if all(
            row.relative_error is None and row.max_error is None for row in of_machine
        ):
            continue
        by_split = {row.split: row for row in of_machine}
        on_main = by_split.get(main, Result("", name))
        errors = [
            by_split[split].relative_error if split in by_split else None
            for split in splits
        ]
        clock = [seconds.get(name)] if seconds else []
        rows.append((name, detail, *errors, on_main.agreement, on_main.r2, *clock))
    names = [*splits, f"agreement ({main})", "R²", *(["seconds"] if seconds else [])]
    numbers = [Column(name, spell=measured) for name in names]
    return Table((text_column("machine"), text_column("detail"), *numbers), tuple(rows))


def tabulate_errors(results: Sequence[Result]) -> Table:
    """Return the short table: relative errors on each split,
    and the agreement on the main split.

    The name of a kernel machine includes its settings only if several rows would
    otherwise have the same name."""
    full = tabulate_ladder(results)
    names = [row[0] for row in full.rows]
    rows = []
    for name, detail, *numbers, _ in full.rows:
        rows.append((f"{name}, {detail}" if names.count(name) > 1 else name, *numbers))
    _, _, *columns, _ = full.columns
    return Table((text_column("kernel machine"), *columns), tuple(rows))


def format_errors(results: Sequence[Result]) -> str:
    """Format the short table, and name the kernel machines that could not be compared.

    >>> rows = [Result("test", "left", "", 0.25, agreement=1.0), Result("test", "nngp", note="no limit")]
    >>> print(format_errors(rows))
    kernel machine  test  agreement (test)
    left            0.25                 1
    <BLANKLINE>
    not compared: nngp
    """
    table = tabulate_errors(results)
    shown = {row[0] for row in tabulate_ladder(results).rows}
    others = dict.fromkeys(row.machine for row in results if row.machine not in shown)
    text = format_text(table).rstrip()
    if not others:
        return text
    return f"{text}\n\nnot compared: {', '.join(others)}"


def exact_machines(results: Sequence[Result]) -> list[str]:
    """Return the kernel machines that equal the network on every split
    where the two are compared."""
    exact = []
    for name in dict.fromkeys(result.machine for result in results):
        kinds = {likeness(row) for row in results if row.machine == name}
        if kinds & COMPARED == {Likeness.EXACT}:
            exact.append(name)
    return exact


def measured(number: float) -> str:
    """Format a measured number. NaN becomes 'nan', because a dash means "not measured".

    >>> measured(0.5), measured(float("nan"))
    ('0.5', 'nan')
    """
    if math.isnan(number):
        return "nan"
    return short(number)


def format_ladder(
    results: Sequence[Result], seconds: Mapping[str, float] | None = None
) -> str:
    """Format the table for a terminal, with the notes below it."""
    blocks = [format_text(tabulate_ladder(results, seconds))]
    notes = ladder_notes(results)
    if notes:
        blocks.append("\n".join(notes))
    return "\n\n".join(blocks)


def ladder_notes(results: Sequence[Result]) -> list[str]:
    """Return the notes on each kernel machine.

    Name the splits of a note that does not apply to all splits.

    >>> ladder_notes([Result(split, "left", note=f"as published; {at_points(2, 5)}") for split in ("train", "test")])
    ['left: as published; at 4 of 10 points']
    """
    splits = {row.split for row in results}
    lines = []
    for machine, detail in machines(results):
        by_remark: dict[str, list[Result]] = {}
        for row in results:
            if (row.machine, row.detail) == (machine, detail) and row.note:
                by_remark.setdefault(row.remark, []).append(row)
        for remark, rows in by_remark.items():
            noted = [row.split for row in rows]
            name = machine if set(noted) == splits else f"{machine} ({listed(noted)})"
            parts = [remark] if remark else []
            counts = [row.points for row in rows if row.points]
            if counts:
                parts.append(at_points(*map(sum, zip(*counts, strict=True))))
            lines.append(f"{name}: {'; '.join(parts)}")
    return lines


def machines(results: Sequence[Result]) -> list[tuple[str, str]]:
    return list(dict.fromkeys((result.machine, result.detail) for result in results))


def main_split(results: Sequence[Result]) -> str:
    """Return the split to report if only one number is shown: query, else test,
    else train."""
    present = {result.split for result in results}
    return next(
        (split for split in ("query", "test", "train") if split in present), "query"
    )


class Likeness(StrEnum):
    """The result of comparing a kernel machine with the network on one split."""

    EXACT = "exact"  # the error is at most the bound on the rounding error
    MISSES = "misses"  # the error is larger than the bound on the rounding error
    BROKEN = "broken"  # outputs of the kernel machine are not finite
    LOST = "lost"  # outputs of the network are not finite
    # training changed the network by no more than rounding error, so there is nothing
    # to compare
    STILL = "still"
    SILENT = "silent"  # the kernel machine was not compared


COMPARED = frozenset({Likeness.EXACT, Likeness.MISSES})


def likeness(row: Result) -> Likeness:
    """Classify a row. `row.floor` is NaN if outputs of the network are not finite."""
    if row.relative_error is None:
        if row.max_error is None:
            return Likeness.SILENT
        return Likeness.STILL
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
"""The kernel machines that the sentence mentions, in this order,
with their names in words."""


@dataclass(frozen=True)
class Mentioned:
    """The rows of a kernel machine that is mentioned in the sentence."""

    name: str
    rows: tuple[Result, ...]
    splits: tuple[str, ...]  # the splits of all kernel machines in the table

    def which(self, *kinds: Likeness) -> list[Result]:
        return [row for row in self.rows if likeness(row) in kinds]

    @property
    def compared(self) -> list[Result]:
        """The rows that compare the kernel machine with the network."""
        return self.which(*COMPARED)

    @property
    def worst(self) -> float:
        """The largest error of the compared rows."""
        return max(row.relative_error or 0.0 for row in self.compared)

    @property
    def where(self) -> str:
        """The splits on which the kernel machine was compared, in words. If some points
        were not compared, also the number of compared points.

        The text ends with a blank, because the name of the kernel machine follows.
        """
        compared = [row.split for row in self.compared]
        has_splits = len(self.splits) > 1
        splits = name_splits(compared, self.splits) if has_splits else ""
        counts = [row.points for row in self.compared if row.points]
        if not counts:
            if has_splits:
                return f"on {splits} "
            return ""
        measured_points, points = map(sum, zip(*counts, strict=True))
        where = f"{measured_points} of {points} points"
        if len(counts) < len(compared):
            return f"on {splits}, on {len(counts)} of them at {where}, "
        if has_splits:
            return f"at {where} of {splits} "
        return f"at {where} "


def ladder_sentence(results: Sequence[Result], *, diverged: bool = False) -> str:
    """Summarise which kernel machines equal the trained network,
    and the errors of the others.

    If training diverged, the sentence is about the network at the last step.

    >>> ladder_sentence([Result("test", "secant", relative_error=4e-15, floor=1e-13)], diverged=True)[19:]
    'the network at the last step: the secant kernel machine reproduces it to rounding (4e-15).'
    >>> ladder_sentence([Result("test", "my_rule", relative_error=0.02, floor=1e-13)])
    'The machine my rule misses the trained network by 2 %.'
    >>> ladder_sentence([Result("query", "secant", FOLLOWED, 0.5, 1e-13, note="a clamp did half")]).split("; ")[2]
    'a clamp did half.'
    """
    text = comparison(results)
    if diverged:
        text = text.replace("the trained network", "it", 1)
        return f"Training diverged; the network at the last step: {text[0].lower()}{text[1:]}"
    return text


def comparison(results: Sequence[Result]) -> str:
    """Return the sentence of `ladder_sentence`, without a remark on divergence."""
    splits = tuple(dict.fromkeys(row.split for row in results))
    names = SPOKEN
    if not any(
        row.machine in SPOKEN and likeness(row) is not Likeness.SILENT
        for row in results
    ):
        # if no kernel machine in SPOKEN was compared, mention all other kernel machines
        others = [row.machine for row in results if row.machine not in SPOKEN]
        names = SPOKEN | {
            machine: f"the machine {spoken(machine)}" for machine in others
        }
    compared_machines = [
        Mentioned(name, tuple(row for row in results if row.machine == machine), splits)
        for machine, name in names.items()
    ]
    parts = (
        compared(compared_machines)
        + secant_remarks(compared_machines[0])
        + not_finite(compared_machines)
    )
    if not parts:
        return why_nothing([row for row in results if row.machine in names])

    # name the splits on which the network cannot be compared
    for kind, text in (
        (Likeness.LOST, "the trained network is not finite"),
        (Likeness.STILL, "the network moved by no more than rounding"),
    ):
        affected = [
            row.split for machine in compared_machines for row in machine.which(kind)
        ]
        if affected:
            parts.append(f"{text}{on_splits(list(dict.fromkeys(affected)), splits)}")
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def compared(mentioned: Sequence[Mentioned]) -> list[str]:
    """Return clauses for kernel machines that equal the network,
    then for kernel machines that miss it.

    Kernel machines that were compared on different splits
    or points have separate clauses."""
    exact = [
        machine
        for machine in mentioned
        if machine.compared and not machine.which(Likeness.MISSES)
    ]
    missing = [machine for machine in mentioned if machine.which(Likeness.MISSES)]
    clauses: list[str] = []
    where_before = ""
    for misses, compared_machines in ((False, exact), (True, missing)):
        for where, group in groupby(compared_machines, key=attrgetter("where")):
            text = clause_of_group(list(group), misses=misses, is_first=not clauses)
            clauses.append(
                ("" if where == where_before else where or "at all points ") + text
            )
            where_before = where
    return clauses


def clause_of_group(group: Sequence[Mentioned], *, misses: bool, is_first: bool) -> str:
    """Return the clause about kernel machines that were compared at the same points."""
    if not misses:
        errors = ", ".join(short(machine.worst) for machine in group)
        verb = "reproduces" if len(group) == 1 else "reproduce"
        network = "the trained network" if is_first else "it"
        names = listed([machine.name for machine in group])
        return f"{names} {verb} {network} to rounding ({errors})"
    misses_by = []
    for machine in group:
        up_to = "up to " if len(machine.compared) > 1 else ""
        misses_by.append(f"by {up_to}{share(machine.worst)}")
    verb = "misses the trained network" if is_first else "misses"
    text = f"{group[0].name} {verb} {misses_by[0]}"
    for machine, by in zip(group[1:], misses_by[1:], strict=True):
        text += f", {machine.name} {by}"
    return text


def secant_remarks(secant: Mentioned) -> list[str]:
    """Return remarks on the secant kernel machine: the rounding error in its result,
    and notes of a followed loop."""
    remarks = []
    missed = secant.which(Likeness.MISSES)
    if missed:
        row = max(missed, key=lambda row: (row.relative_error or 0.0) / row.tolerance)
        where = (
            f" on {row.split} ({short(row.relative_error)})"
            if len(secant.splits) > 1
            else ""
        )
        remarks.append(
            f"rounding explains no more than {short(row.tolerance)} of the secant's miss{where}"
        )
    return remarks + [
        row.remark for row in secant.compared if row.detail == FOLLOWED and row.remark
    ]


def not_finite(mentioned: Sequence[Mentioned]) -> list[str]:
    """Return a clause for each group of kernel machines that are not finite
    on the same splits."""
    names_by_splits: dict[tuple[str, ...], list[str]] = {}
    for machine in mentioned:
        broken = tuple(row.split for row in machine.which(Likeness.BROKEN))
        if broken:
            names_by_splits.setdefault(broken, []).append(machine.name)
    clauses = []
    for broken, names in names_by_splits.items():
        verb = "is" if len(names) == 1 else "are"
        clauses.append(
            f"{listed(names)} {verb} not finite{on_splits(broken, mentioned[0].splits)}"
        )
    return clauses


def why_nothing(rows: Sequence[Result]) -> str:
    kinds = {likeness(row) for row in rows}
    if Likeness.LOST in kinds:
        return "The trained network is not finite, so no kernel machine can be compared with it."
    if Likeness.STILL in kinds:
        return "Training moved the network by no more than rounding, so there is nothing to reproduce."
    text = "No kernel machine was compared with the trained network"
    reason = next((row.note for row in rows if row.note), "")
    if reason:
        return f"{text}: {reason}."
    return f"{text}."


def on_splits(here: Sequence[str], splits: Sequence[str]) -> str:
    if len(splits) > 1:
        return f" on {name_splits(here, splits)}"
    return ""


def name_splits(here: Sequence[str], splits: Sequence[str]) -> str:
    """List the splits `here` in words. If `here` contains all `splits`, write "both
    splits" or "all N splits".

    >>> name_splits(["train"], ["train", "test"]), name_splits(["train", "test"], ["train", "test"])
    ('train', 'both splits')
    """
    if len(set(here)) < len(splits):
        return listed(list(dict.fromkeys(here)))
    if len(splits) == 2:
        return "both splits"
    return f"all {len(splits)} splits"


# --- One clause about a kernel machine in many runs.


CLAUSES = {
    Likeness.EXACT: "reproduces {} to rounding ({})",
    Likeness.MISSES: "misses {} by {}",
    Likeness.BROKEN: "is not finite for {}",
    Likeness.LOST: "cannot be compared with {} that {} not finite",
    Likeness.STILL: "cannot be distinguished from {} that moved by no more than rounding",
    Likeness.SILENT: "has no result for {}",
}
"""One template for each `Likeness`. A sentence lists the clauses in this order. The
first field is the number of networks, and `errors_in_words` returns the second."""

DECISIVE = (
    Likeness.LOST,
    Likeness.BROKEN,
    Likeness.MISSES,
    Likeness.EXACT,
    Likeness.STILL,
)
"""How to combine the results of several splits: a run gets the first `Likeness` in this
list that occurs on any of its splits."""


@dataclass(frozen=True)
class Standing:
    """The comparison of one kernel machine with the network of a run,
    over all splits."""

    likeness: Likeness
    error: float = 0.0  # the largest relative error
    everywhere: bool = True  # True if all points of every split were compared


def standing(ladder: Sequence[Result], machine: str) -> Standing:
    """Combine the rows of one kernel machine in a run."""
    rows = [row for row in ladder if row.machine == machine]
    kinds = {likeness(row) for row in rows}
    kind = next((kind for kind in DECISIVE if kind in kinds), Likeness.SILENT)
    compared = [row for row in rows if likeness(row) in COMPARED]
    worst = max((row.relative_error or 0.0 for row in compared), default=0.0)
    splits = {row.split for row in ladder}
    at_all_points = {row.split for row in compared if row.points is None}
    return Standing(kind, worst, everywhere=at_all_points == splits)


def clause(name: str, standings: Sequence[Standing]) -> str:
    """Return the clause about one kernel machine in all runs. Return "" if no run has a
    result of this kernel machine."""
    runs = len(standings)
    if all(standing.likeness is Likeness.SILENT for standing in standings):
        return ""
    parts: list[str] = []
    for kind, text in CLAUSES.items():
        of_kind = [standing for standing in standings if standing.likeness is kind]
        if not of_kind:
            continue
        networks = str(len(of_kind))
        if not parts:  # only the first part states the total number of networks
            networks = f"{len(of_kind)} of {runs}"
            if len(of_kind) == runs:
                networks = "both" if runs == 2 else f"all {runs}"
            networks += " trained networks"
        parts.append(text.format(networks, errors_in_words(kind, of_kind)))
    partly = [
        standing
        for standing in standings
        if standing.likeness in COMPARED and not standing.everywhere
    ]
    remark = f" (in {len(partly)}, at some points only)" if partly else ""
    return f"{name} {listed(parts)}{remark}"


def errors_in_words(kind: Likeness, standings: Sequence[Standing]) -> str:
    """Return the second field of a template in `CLAUSES`: the errors of all networks
    with this likeness, or "is" or "are" if the networks are not finite.

    >>> errors_in_words(Likeness.MISSES, [Standing(Likeness.MISSES, error) for error in (0.01, 0.02, 0.3)])
    '2 % at the median and 30 % at worst'
    """
    errors = [standing.error for standing in standings]
    if kind is Likeness.EXACT:
        return f"{short(max(errors))}{' at worst' if len(errors) > 1 else ''}"
    if kind is Likeness.LOST:
        if len(errors) > 1:
            return "are"
        return "is"
    if len(errors) == 1:
        return share(errors[0])
    return f"{share(statistics.median(errors))} at the median and {share(max(errors))} at worst"
