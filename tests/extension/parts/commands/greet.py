"""The arguments of `ntkexp greet`."""

from __future__ import annotations

from typing import Annotated

import typer


def greet(name: Annotated[str, typer.Argument(metavar="NAME", help="Somebody.")]) -> None:
    """Say who asks."""
    typer.echo(f"it is {name} who asks")
