"""`ntkexp resume`: a run goes on from its last checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ntkexp.cli.commands.train import advice_for, resume_command, show
from ntkexp.cli.options import AsJson, Events, Quiet, Trust, interruptible, options, write_events
from ntkexp.report.progress import listener


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    tensorboard: Events = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    trust: Trust = None,
) -> None:
    """Go on from a run's last checkpoint."""
    from ntkexp.config.build import admit

    trust = trust or []
    admitted = admit(trust)
    from ntkexp.run.execute import resume as go_on

    with interruptible(advice_for(run, f"{resume_command(run, trust)} goes on from the last checkpoint")):
        folder = go_on(run.expanduser(), listener(quiet), admitted, options(trust=trust))
    write_events(folder, tensorboard)
    show(folder, quiet=quiet, as_json=as_json)
