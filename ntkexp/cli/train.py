"""`ntkexp train` and `ntkexp resume`: an experiment is carried out, and its ladder shown."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from ntkexp.cli.surroundings import AGAIN, interruptible, is_count, options
from ntkexp.mistake import Mistake
from ntkexp.records.folder import BEGUN, RunFolder
from ntkexp.report.progress import listener

if TYPE_CHECKING:
    from ntkexp.records.results import Result


def train(
    overrides: Sequence[str],
    out: Path,
    *,
    force: bool,
    tensorboard: bool,
    quiet: bool,
    as_json: bool,
    trust: Sequence[str],
    config_dir: Path | None,
) -> None:
    """Carry out one run, new or unfinished."""
    limit_threads(overrides)
    from ntkexp.config.compose import compose

    experiment = compose(overrides, config_dir, trust)
    place = ensure_writable(out.expanduser())
    from ntkexp.experiment.identity import folder_name
    from ntkexp.run.execute import execute

    folder = place / "runs" / folder_name(experiment)
    advice = f"the same command, or {resume_command(folder, trust)}, goes on from the last checkpoint"
    with interruptible(advice_for(folder, advice)):
        folder = execute(experiment, overrides, place, force, listener(quiet, AGAIN), options(out, trust, config_dir))
    keep_events(folder, tensorboard)
    show(folder, quiet=quiet, as_json=as_json)


def resume(run: Path, *, tensorboard: bool, quiet: bool, as_json: bool, trust: Sequence[str]) -> None:
    """Carry out the rest of a run."""
    from ntkexp.config.build import admit

    admitted = admit(trust)
    from ntkexp.run.execute import resume as go_on

    with interruptible(advice_for(run, f"{resume_command(run, trust)} goes on from the last checkpoint")):
        folder = go_on(run.expanduser(), listener(quiet), admitted, options(trust=trust))
    keep_events(folder, tensorboard)
    show(folder, quiet=quiet, as_json=as_json)


def resume_command(folder: Path, trust: Sequence[str]) -> str:
    """Spell the command that goes on with a run: what was trusted for one is not trusted for the next.

    >>> resume_command(Path("runs/a b"), ["my_net.py"])
    "`ntkexp resume 'runs/a b' --trust my_net.py`"
    """
    return f"`{shlex.join(['ntkexp', 'resume', str(folder), *(word for name in trust for word in ('--trust', name))])}`"


def keep_events(folder: Path, wanted: bool) -> None:
    """Write the finished run as TensorBoard reads it, if somebody wants it."""
    if wanted:
        from ntkexp.report.events import ensure_events

        ensure_events(folder)


def limit_threads(overrides: Sequence[str]) -> None:
    """Limit threads before torch is imported, which is before validation: its libraries read their number then."""
    given = [text.partition("=")[2] for text in overrides if text.lstrip("+").startswith("threads=")]
    if given and is_count(given[-1]):
        os.environ |= {"OMP_NUM_THREADS": given[-1], "MKL_NUM_THREADS": given[-1]}


def ensure_writable(folder: Path) -> Path:
    """Refuse a folder in which runs cannot be written, an hour of training early; it is created if need be."""
    from ntkexp.records.atomic import make_folder

    try:
        make_folder(folder)
    except OSError as error:
        raise Mistake(f"--out={folder}: {error.strerror}; it takes a folder that can be written to") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Mistake(f"--out={folder} cannot be written to; choose another folder")
    return folder


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

    told, ladder = RunFolder(folder).vouched, read_results(folder / "results.csv")
    outcome = str(told["outcome"])
    if as_json:
        rows = [asdict(row) for row in ladder]
        sys.stdout.write(to_text({"folder": str(folder), "outcome": outcome, "results": rows}))
    else:
        text = in_words(folder, ladder, diverged=bool(told["diverged"]))
        sys.stdout.write(f"\n{wrap(outcome)}\n\n{text}\n{folder}\n")


def in_words(folder: Path, ladder: Sequence[Result], *, diverged: bool) -> str:
    """Lay out the ladder with the seconds that each machine took, and say what it means."""
    from ntkexp.records.results import of_machines, read_timings
    from ntkexp.report.sentence import format_ladder, sentence

    table = format_ladder(ladder, of_machines(read_timings(folder / "timings.csv")))
    return f"{table.rstrip()}\n\n{wrap(sentence(ladder, diverged=diverged))}"
