"""The arguments of the commands that train: `train`, `resume`, `sweep`, `claims`, `config`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ntkexp.cli.arguments import (
    AsJson,
    ConfigDir,
    Engine,
    Events,
    Overrides,
    Quiet,
    RetryFailed,
    SweepWords,
    Trust,
    Workers,
    offer_claims,
)

# --- The arguments of `ntkexp train`.


def train(
    overrides: Overrides = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The folder of outputs, in which runs go into runs/.")
    ] = Path("outputs"),
    force: Annotated[bool, typer.Option("--force", help="Run it again, even if it is finished.")] = False,
    tensorboard: Events = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    trust: Trust = None,
    config_dir: ConfigDir = None,
) -> None:
    """Train one network, and see which kernel machine it is."""
    from ntkexp.cli.train import train

    train(
        overrides or [],
        out,
        force=force,
        tensorboard=tensorboard,
        quiet=quiet,
        as_json=as_json,
        trust=trust or [],
        config_dir=config_dir,
    )


# --- The arguments of `ntkexp resume`.


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    tensorboard: Events = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    trust: Trust = None,
) -> None:
    """Go on from a run's last checkpoint."""
    from ntkexp.cli.train import resume

    resume(run, tensorboard=tensorboard, quiet=quiet, as_json=as_json, trust=trust or [])


# --- The arguments of `ntkexp sweep`.


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


# --- The arguments of `ntkexp claims`.


def claims(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[list|judge|NAME]...",
            help="Claims by name, all if none is given; list: show them; judge: try the rules of judging.",
            autocompletion=offer_claims,
            show_default=False,
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes and few seeds: more stays undecided.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Larger sizes, where a claim has them.")] = False,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The folder of outputs, in which claims go into claims/.")
    ] = Path("outputs"),
    workers: Workers = None,
    engine: Engine = "local",
    retry_failed: RetryFailed = False,
    quiet: Quiet = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was found as a JSON list.")] = False,
    trust: Trust = None,
    config_dir: ConfigDir = None,
) -> None:
    """Run what decides claims of papers, and judge them: supported, refuted or undecided."""
    from ntkexp.cli.claims import ClaimsRequest, claims

    asked = ClaimsRequest(
        names=names or [],
        quick=quick,
        full=full,
        out=out,
        workers=workers,
        engine=engine,
        retry_failed=retry_failed,
        quiet=quiet,
        as_json=as_json,
        trust=trust or [],
        config_dir=config_dir,
    )
    raise typer.Exit(claims(asked))


# --- The arguments of `ntkexp config`.


def config(
    overrides: Overrides = None,
    everything: Annotated[bool, typer.Option("--tree", help="Show every group and option there is instead.")] = False,
    cost: Annotated[
        bool, typer.Option("--plan", help="Show how the kernel would be read instead, and what that costs.")
    ] = False,
    trust: Trust = None,
    config_dir: ConfigDir = None,
) -> None:
    """Show what would run, as YAML."""
    if everything:
        from ntkexp.config.choices import Choices, folders, tree

        text = tree(Choices(folders(config_dir)))
    elif cost:
        from ntkexp.cli.kernel_cost import plan
        from ntkexp.config.compose import compose

        text = plan(compose(overrides or [], config_dir, trust or []))
    else:
        from ntkexp.config.choices import shown
        from ntkexp.config.compose import resolve

        text = shown(resolve(overrides or [], config_dir, trust or []))
    sys.stdout.write(text)
