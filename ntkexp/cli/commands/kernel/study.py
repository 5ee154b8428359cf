"""The arguments of `ntkexp kernel study`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ntkexp.cli.arguments import AsJson, ConfigDir, Engine, Overrides, Quiet, Tiles, Trust


def study(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of a file in configs/study, such as images.")],
    overrides: Overrides = None,
    ridge: Annotated[
        str,
        typer.Option(
            "--ridge",
            metavar="R|best",
            help="What is added to each kernel's diagonal; best: of a grid, by the examples left out.",
        ),
    ] = "best",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="The folder for the kernels and the table.")
    ] = None,
    workers: Tiles = None,
    engine: Engine = "local",
    quiet: Quiet = False,
    as_json: AsJson = False,
    trust: Trust = None,
    config_dir: ConfigDir = None,
) -> None:
    """Compare several kernels of infinite width in one table of accuracies."""
    from ntkexp.cli.kernel.request import FillRequest
    from ntkexp.cli.kernel.study import StudyRequest, study

    filling = FillRequest(
        overrides=overrides or [],
        out=out,
        workers=workers,
        engine=engine,
        quiet=quiet,
        as_json=as_json,
        trust=trust or [],
        config_dir=config_dir,
    )
    study(StudyRequest(name=name, ridge=ridge, filling=filling))
