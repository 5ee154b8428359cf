"""The arguments of `ntkexp train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ntkexp.cli.arguments import AsJson, ConfigDir, Events, Overrides, Quiet, Trust


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
