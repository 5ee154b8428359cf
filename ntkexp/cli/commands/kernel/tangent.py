"""The arguments of `ntkexp kernel tangent`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ntkexp.cli.arguments import (
    AsJson,
    ConfigDir,
    Engine,
    FillDryRun,
    KernelFile,
    Overrides,
    Quiet,
    Recompute,
    Tiles,
    Trust,
)


class When(StrEnum):
    """Which weights of a run are meant."""

    start = "start"
    end = "end"


def tangent(
    overrides: Overrides = None,
    out: KernelFile = None,
    seeds: Annotated[
        str | None,
        typer.Option("--seeds", metavar="SEEDS", help="The seeds of the networks to average over, such as 0..9."),
    ] = None,
    outputs: Annotated[
        str,
        typer.Option(
            "--outputs",
            metavar="all|trace|0,3",
            help="The outputs between which the kernel is taken: all, some by number, or their trace.",
        ),
    ] = "all",
    run: Annotated[
        Path | None, typer.Option("--run", metavar="RUN", help="Take the network of this run instead.")
    ] = None,
    when: Annotated[
        When,
        typer.Option(
            "--at",
            metavar="|".join(When),
            help="Take the weights of the run before training (start) or after it (end).",
        ),
    ] = When.end,
    workers: Tiles = None,
    engine: Engine = "local",
    dry_run: FillDryRun = False,
    force: Recompute = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    trust: Trust = None,
    config_dir: ConfigDir = None,
) -> None:
    """Compute the tangent kernel of a network as it is drawn, or of a finished run."""
    from ntkexp.cli.kernel.fill import tangent, tangent_of_run
    from ntkexp.cli.kernel.request import FillRequest

    asked = FillRequest(
        overrides=overrides or [],
        out=out,
        workers=workers,
        engine=engine,
        dry_run=dry_run,
        force=force,
        quiet=quiet,
        as_json=as_json,
        trust=trust or [],
        config_dir=config_dir,
    )
    if run is None:
        tangent(asked, seeds, outputs)
    else:
        tangent_of_run(asked, seeds, outputs, run, when.value)
