"""`ntkexp compare`: what differs between two runs, or between two sweeps in pairs of runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ntkexp.cli.options import OUTPUTS, OutputsFolder
from ntkexp.mistake import Mistake

if TYPE_CHECKING:
    from ntkexp.report.material import Material
    from ntkexp.report.run import Run


def compare(
    first: Annotated[str, typer.Argument(metavar="RUN|SWEEP", help="The folder of a run, or a sweep by its name.")],
    second: Annotated[str, typer.Argument(metavar="RUN|SWEEP", help="Another run or sweep.")],
    out: OutputsFolder = OUTPUTS,
) -> None:
    """See what differs between two runs, or between two sweeps in pairs of runs."""
    one, other = (gathered(name, out.expanduser()) for name in (first, second))
    if one.analyses and other.analyses:
        compare_sweeps(one, other)
    elif len(one.runs) == len(other.runs) == 1:
        compare_runs(one.runs[0], other.runs[0])
    else:
        raise Mistake(f"{first} and {second} are compared if they are two runs or two sweeps, and they are neither")


def gathered(name: str, out: Path) -> Material:
    from ntkexp.report.material import NothingLeft, gather

    try:
        return gather([name], out)
    except NothingLeft as mistake:
        reason = str(mistake).removeprefix("nothing is left to report: ")
        raise Mistake(
            f"{reason}; two finished runs or two sweeps are compared, each by its path, or by its name in {out}"
        ) from None


def compare_runs(first: Run, second: Run) -> None:
    from ntkexp.report.run import compare_configs, compare_results, numbers_of_one_alone
    from ntkexp.report.tables import format_text, of_frame

    sys.stdout.write(f"first   {first.name}: {first.outcome}\nsecond  {second.name}: {second.outcome}\n\n")
    differing = compare_configs(first, second)
    sys.stdout.write(
        f"{format_text(of_frame(differing))}\n\n" if len(differing) else "their configurations are the same\n\n"
    )
    differences = compare_results(first, second)
    sys.stdout.write(f"{format_text(of_frame(differences))}\n" if len(differences) else "they share no number\n")
    for name, run, alone in zip(("first", "second"), (first, second), numbers_of_one_alone(first, second), strict=True):
        if run.diverged:
            sys.stdout.write(f"{name} diverged, so it has no numbers\n")
        elif alone and not (first.diverged or second.diverged):
            sys.stdout.write(f"{name} alone has {', '.join(alone)}\n")


def compare_sweeps(one: Material, other: Material) -> None:
    from ntkexp.report.analysis.tables import compare
    from ntkexp.report.tables import format_text, of_frame

    for material in (one, other):
        if material.left_out_line:
            sys.stderr.write(f"ntkexp: {material.left_out_line}\n")
    sys.stdout.write(f"{format_text(of_frame(compare(one.analyses[0], other.analyses[0])))}\n")
