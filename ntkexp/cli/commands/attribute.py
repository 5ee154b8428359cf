"""The arguments of `ntkexp attribute`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ntkexp.cli.arguments import Again, Quiet, Trust


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
