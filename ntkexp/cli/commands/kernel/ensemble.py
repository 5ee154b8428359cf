"""The arguments of `ntkexp kernel ensemble`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ntkexp.cli.arguments import AsJson, ConfigDir, Overrides, Quiet, Trust


def ensemble(
    overrides: Overrides = None,
    networks: Annotated[
        int, typer.Option("--networks", metavar="N", min=2, help="How many networks of each kind.")
    ] = 100,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder for the picture.")] = Path(
        "outputs/ensembles"
    ),
    quiet: Quiet = False,
    as_json: AsJson = False,
    trust: Trust = None,
    config_dir: ConfigDir = None,
) -> None:
    """Train many networks on a one-dimensional problem, and show them beside the processes of their kernels."""
    from ntkexp.cli.kernel.ensemble import EnsembleRequest, ensemble

    ensemble(
        EnsembleRequest(
            overrides=overrides or [],
            networks=networks,
            out=out,
            quiet=quiet,
            as_json=as_json,
            trust=trust or [],
            config_dir=config_dir,
        )
    )
