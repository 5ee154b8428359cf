"""The arguments of `ntkexp sweep`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ntkexp.cli.arguments import AsJson, ConfigDir, Engine, Events, Quiet, RetryFailed, SweepWords, Trust, Workers


def sweep(
    words: SweepWords = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The folder of outputs, in which runs go into runs/.")
    ] = Path("outputs"),
    workers: Workers = None,
    engine: Engine = "local",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the runs, with about the time and memory they take, and begin none.")
    ] = False,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop all runs at the first failure.")] = False,
    retry_failed: RetryFailed = False,
    tensorboard: Events = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    trust: Trust = None,
    config_dir: ConfigDir = None,
) -> None:
    """Run many experiments: a NAME such as width, or KEY=VALUE with several values."""
    from ntkexp.cli.sweep import SweepRequest, sweep

    asked = SweepRequest(
        words=words or [],
        out=out,
        engine=engine,
        workers=workers,
        dry_run=dry_run,
        fail_fast=fail_fast,
        retry_failed=retry_failed,
        tensorboard=tensorboard,
        quiet=quiet,
        as_json=as_json,
        trust=trust or [],
        config_dir=config_dir,
    )
    raise typer.Exit(sweep(asked))
