"""`ntkexp train`: an experiment is carried out, and its ladder shown."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ntkexp.cli.options import (
    AGAIN,
    OUTPUTS,
    CommonOptions,
    Events,
    Overrides,
    RunsFolder,
    ensure_writable,
    interruptible,
    options,
    write_events,
)
from ntkexp.records.folder import BEGUN, RunFolder
from ntkexp.report.progress import listener


def train(
    overrides: Overrides = None,
    out: RunsFolder = OUTPUTS,
    force: Annotated[bool, typer.Option("--force", help="Run it again, even if it is finished.")] = False,
    tensorboard: Events = False,
    *,
    common: CommonOptions,
) -> None:
    """Train one network, and see which kernel machine it is."""
    experiment = common.compose(overrides)
    place = ensure_writable(out.expanduser())
    from ntkexp.experiment.identity import folder_name
    from ntkexp.run.execute import execute

    folder = place / "runs" / folder_name(experiment)
    advice = f"the same command, or {resume_command(folder, common.trusted)}, goes on from the last checkpoint"
    with interruptible(advice_for(folder, advice)):
        repeat = options(out, common.trusted, common.config_dir)
        folder = execute(experiment, overrides or [], place, force, listener(common.quiet, AGAIN), repeat)
    write_events(folder, tensorboard)
    show(folder, quiet=common.quiet, as_json=common.as_json)


def resume_command(folder: Path, trust: Sequence[str]) -> str:
    """Spell the command that goes on with a run: what was trusted for one is not trusted for the next.

    >>> resume_command(Path("runs/a b"), ["my_net.py"])
    "`ntkexp resume 'runs/a b' --trust my_net.py`"
    """
    return f"`{shlex.join(['ntkexp', 'resume', str(folder), *(word for name in trust for word in ('--trust', name))])}`"


def advice_for(folder: Path, advice: str) -> Callable[[], str]:
    """What an interrupted run is told, once it is known whether it had begun."""
    return lambda: f"; {advice}" if (folder / BEGUN).is_file() else " before the first step"


def wrap(text: str) -> str:
    """Break a text at blanks for a terminal; a pipe gets it as one line."""
    return textwrap.fill(text, shutil.get_terminal_size().columns) if sys.stdout.isatty() else text


def show(folder: Path, *, quiet: bool, as_json: bool) -> None:
    """Show what came out of a run that is known to be whole: the ladder, what it means, and where everything lies."""
    if quiet and not as_json:
        return
    from ntkexp.records.atomic import to_text
    from ntkexp.records.results import read_results

    facts, ladder = RunFolder(folder).sealed_facts, read_results(folder / "results.csv")
    outcome = str(facts["outcome"])
    if as_json:
        rows = [asdict(row) for row in ladder]
        sys.stdout.write(to_text({"folder": str(folder), "outcome": outcome, "results": rows}))
        return
    from ntkexp.records.results import of_machines, read_timings
    from ntkexp.report.sentence import format_ladder, sentence

    # the ladder with the seconds that each machine took, and what it means
    table = format_ladder(ladder, of_machines(read_timings(folder / "timings.csv")))
    meaning = sentence(ladder, diverged=bool(facts["diverged"]))
    sys.stdout.write(f"\n{wrap(outcome)}\n\n{table.rstrip()}\n\n{wrap(meaning)}\n{folder}\n")
