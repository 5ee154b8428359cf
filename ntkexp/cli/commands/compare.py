"""The arguments of `ntkexp compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def compare(
    first: Annotated[str, typer.Argument(metavar="RUN|SWEEP", help="The folder of a run, or a sweep by its name.")],
    second: Annotated[str, typer.Argument(metavar="RUN|SWEEP", help="Another run or sweep.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder of outputs.")] = Path("outputs"),
) -> None:
    """See what differs between two runs, or between two sweeps in pairs of runs."""
    from ntkexp.cli.compare import compare

    compare(first, second, out)
