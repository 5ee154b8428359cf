"""The arguments of `ntkexp explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ntkexp.cli.arguments import Again, AsJson, Trust


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
