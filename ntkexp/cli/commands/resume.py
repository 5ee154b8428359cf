"""The arguments of `ntkexp resume`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ntkexp.cli.arguments import AsJson, Events, Quiet, Trust


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
