"""The arguments of `ntkexp claims`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ntkexp.cli.arguments import ConfigDir, Engine, Quiet, RetryFailed, Trust, Workers, offer_claims


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
