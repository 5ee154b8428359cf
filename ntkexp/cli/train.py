"""`ntkexp train`, `resume` and `config`: run, continue or show an experiment."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from ntkexp.cli.options import (
    AGAIN,
    OUTPUTS,
    AsJson,
    CommonOptions,
    ConfigDir,
    Events,
    Log,
    Overrides,
    Quiet,
    RunsFolder,
    Trust,
    Verbose,
    ensure_writable,
    interruptible,
    options,
    wrap,
    write_events,
    write_json,
    write_out,
)
from ntkexp.records.folder import BEGUN, RunFolder, command
from ntkexp.report.progress import progress_listener
from ntkexp.text import printable_lines


def train(
    overrides: Overrides = None,
    out: RunsFolder = OUTPUTS,
    force: Annotated[
        bool, typer.Option("--force", help="Run it again, even if it is finished.")
    ] = False,
    tensorboard: Events = False,
    log: Log = None,
    verbose: Verbose = False,
    *,
    common: CommonOptions,
) -> None:
    """Train one network, and see which kernel machine it is."""
    experiment = common.compose(overrides)
    outputs = ensure_writable(out.expanduser())
    from ntkexp.experiment.identity import folder_name
    from ntkexp.run.execute import execute
    from ntkexp.run.folder_listener import RunRequest

    folder = outputs / "runs" / folder_name(experiment)
    advice = f"the same command, or {resume_command(folder, common.trusted, log)}, continues from the last checkpoint"
    with interruptible(advice_for(folder, advice)):
        arguments = overrides or []
        request = RunRequest(
            experiment=experiment,
            folder=RunFolder(folder),
            overrides=arguments,
            repeat=command(
                "train", arguments, options(out, common.trusted, common.config_dir)
            ),
            progress=progress_listener(common.quiet, AGAIN),
            log=log,
        )
        execute(request, force=force)
    write_events(folder, tensorboard)
    print_results(folder, quiet=common.quiet, as_json=common.as_json, verbose=verbose)


def resume_command(folder: Path, trust: Sequence[str], log: str | None = None) -> str:
    """Return the command that resumes a run. It repeats `--trust`,
    because runs do not store it.

    >>> resume_command(Path("runs/a b"), ["my_net.py"])
    "`ntkexp resume 'runs/a b' --trust my_net.py`"
    >>> resume_command(Path("runs/a"), [], "mlflow")
    '`ntkexp resume runs/a --log=mlflow`'
    """
    trusting = [word for name in trust for word in ("--trust", name)]
    logging = [] if log is None else [f"--log={log}"]
    return f"`{shlex.join(['ntkexp', 'resume', str(folder), *trusting, *logging])}`"


def advice_for(folder: Path, advice: str) -> Callable[[], str]:
    """Return a function that `interruptible` calls if the user interrupts the run. The
    function returns the advice, or a remark if no step was taken."""
    return lambda: (
        f"; {advice}" if (folder / BEGUN).is_file() else " before the first step"
    )


def has_colours() -> bool:
    """Return True if stdout is a terminal, and NO_COLOR is not set."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def bold(text: str) -> str:
    """Return a text in bold if stdout has colours. Escape its control characters."""
    text = printable_lines(text)
    return typer.style(text, bold=True) if has_colours() else text


def green_lines(text: str, names: Sequence[str]) -> str:
    """Colour the lines that begin with one of the names. Escape control characters."""
    text = printable_lines(text)
    if not has_colours():
        return text
    lines = []
    for line in text.splitlines():
        starts = any(line.startswith((f"{name} ", f"{name},")) for name in names)
        lines.append(typer.style(line, fg="green") if starts else line)
    return "\n".join(lines)


def print_results(folder: Path, *, quiet: bool, as_json: bool, verbose: bool) -> None:
    """Print the results of a finished run: the verdict,
    the comparison and the folder."""
    facts = RunFolder(folder).sealed_facts
    outcome = str(facts["outcome"])
    if quiet and not as_json:
        # warn even if quiet: the run is finished, but not usable
        if facts.get("diverged"):
            sys.stderr.write(f"ntkexp: {folder} {outcome}\n")
        return
    from ntkexp.records.results import read_results

    ladder = read_results(folder / "results.csv")
    if as_json:
        write_json(
            {
                "folder": str(folder),
                "outcome": outcome,
                "diverged": bool(facts.get("diverged")),
                "results": [asdict(row) for row in ladder],
            }
        )
        return
    from ntkexp.records.results import of_machines, read_timings
    from ntkexp.report.sentence import (
        exact_machines,
        format_errors,
        format_ladder,
        ladder_sentence,
    )

    verdict = bold(wrap(ladder_sentence(ladder, diverged=bool(facts["diverged"]))))
    table = format_errors(ladder)
    if verbose:
        timings = of_machines(read_timings(folder / "timings.csv"))
        table = format_ladder(ladder, timings).rstrip()
    table = green_lines(table, exact_machines(ladder))
    sys.stdout.write(f"\n{verdict}\n\n{table}\n\n")
    write_out(f"{wrap(outcome)}\n{folder}\n")


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    tensorboard: Events = False,
    log: Log = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
    trust: Trust = None,
    verbose: Verbose = False,
) -> None:
    """Continue a run from its last checkpoint."""
    from ntkexp.config.build import admit

    trust = trust or []
    admitted = admit(trust)
    from ntkexp.run.execute import resume as resume_run

    with interruptible(
        advice_for(
            run, f"{resume_command(run, trust, log)} continues from the last checkpoint"
        )
    ):
        folder = resume_run(
            run.expanduser(),
            progress_listener(quiet),
            admitted,
            options(trust=trust),
            log=log,
        )
    write_events(folder, tensorboard)
    print_results(folder, quiet=quiet, as_json=as_json, verbose=verbose)


def config(
    overrides: Overrides = None,
    show_tree: Annotated[
        bool, typer.Option("--tree", help="Show all groups and options instead.")
    ] = False,
    trust: Trust = None,
    config_dir: ConfigDir = None,
) -> None:
    """Show what would run, as YAML."""
    if show_tree:
        from ntkexp.config.choices import Choices, config_folders, tree

        text = tree(Choices(config_folders(config_dir)))
    else:
        from ntkexp.config.compose import resolve

        text = resolve(overrides or [], config_dir, trust or []).as_yaml()
    sys.stdout.write(text)
