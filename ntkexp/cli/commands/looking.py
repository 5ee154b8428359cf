"""The arguments of the commands that look at what was trained: `report`, `explain`, `attribute`, `compare`, `runs`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ntkexp.cli.arguments import Again, AsJson, Quiet, Trust

# --- The arguments of `ntkexp report`.


class Format(StrEnum):
    """How a report is written."""

    html = "html"
    md = "md"
    text = "text"
    csv = "csv"
    json = "json"


def report(
    named: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|SWEEP]...", help="Run folders, sweeps, or folders of them; everything if none is given."
        ),
    ] = None,
    form: Annotated[
        Format,
        typer.Option("--format", metavar="|".join(Format), help="A page (html), or tables for a paper or a program."),
    ] = Format.html,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR|FILE", help="The folder of outputs; with a format other than html, the file to write."
        ),
    ] = None,
) -> None:
    """Put finished runs and sweeps onto one page, outputs/report/index.html."""
    from ntkexp.cli.report import report

    report(named or [], form.value, out)


# --- The arguments of `ntkexp explain`.


def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    probe: Annotated[
        list[int] | None,
        typer.Option("--probe", metavar="K", min=0, help="A point by its number in the split; may be repeated."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", metavar="SPLIT", help="The split whose points are explained: train, probe or test."),
    ] = None,
    worst: Annotated[
        int | None,
        typer.Option("--worst", metavar="N", min=1, help="Explain the N points that the network misses most."),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", metavar="N", min=1, help="How many training examples to list for each point.")
    ] = 10,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="The file of the picture, .svg or .png.")
    ] = None,
    without: Annotated[
        str | None,
        typer.Option(
            "--without",
            metavar="GROUP",
            help="Train again without some examples, and split over them what that changed: places such as 3,20..29, "
            "#K for a number in the source, an id, class:NAME or top:N.",
        ),
    ] = None,
    again: Again = None,
    page: Annotated[
        bool,
        typer.Option("--page", help="Write a page on which points can be chosen, with all that is known of each."),
    ] = False,
    as_json: AsJson = False,
    trust: Trust = None,
) -> None:
    """See which training examples made a prediction, and when; or what changes without some of them."""
    from ntkexp.cli.explain import explain

    explain(
        run,
        split,
        probe or [],
        worst,
        top,
        picture,
        without=without,
        again=again,
        page=page,
        as_json=as_json,
        trust=trust or [],
    )


# --- The arguments of `ntkexp attribute`.


def attribute(
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="The folder of a trace: ntkexp.follow(…, to=FOLDER).")
    ],
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="FILE.py:FUNCTION", help="A function that builds the followed module."),
    ] = None,
    effects: Annotated[
        bool, typer.Option("--effects", help="Find also what would change without each example; needs the loss.")
    ] = False,
    loss: Annotated[
        str | None,
        typer.Option("--loss", metavar="FILE.py:FUNCTION", help="The loss of each example, of outputs and the call."),
    ] = None,
    again: Again = None,
    decode: Annotated[
        str | None,
        typer.Option("--decode", metavar="FILE.py:FUNCTION", help="The text of a list of tokens, to show examples by."),
    ] = None,
    quiet: Quiet = False,
    trust: Trust = None,
) -> None:
    """Find what each example of a followed training added to the queries' outputs."""
    from ntkexp.cli.attribute import UserCode, attribute

    user = UserCode(model=model, loss=loss, again=again, decode=decode, trust=trust or [])
    attribute(folder, user, effects=effects, quiet=quiet)


# --- The arguments of `ntkexp compare`.


def compare(
    first: Annotated[str, typer.Argument(metavar="RUN|SWEEP", help="The folder of a run, or a sweep by its name.")],
    second: Annotated[str, typer.Argument(metavar="RUN|SWEEP", help="Another run or sweep.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder of outputs.")] = Path("outputs"),
) -> None:
    """See what differs between two runs, or between two sweeps in pairs of runs."""
    from ntkexp.cli.report import compare

    compare(first, second, out)


# --- The arguments of `ntkexp runs`.


def runs(
    filters: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Show only the runs of which this holds, such as model.width=64 or state=dead.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder of outputs.")] = Path("outputs"),
    delete: Annotated[bool, typer.Option("--delete", help="Delete the runs that are listed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before deleting.")] = False,
    as_json: AsJson = False,
) -> None:
    """List runs with their states, and delete those no longer wanted."""
    from ntkexp.cli.report import runs

    runs(filters or [], out, remove=delete, sure=yes, as_json=as_json)
