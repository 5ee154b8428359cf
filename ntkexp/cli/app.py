"""The commands, each a few lines: what it does is imported when it is called."""

# ruff: noqa: PLC0415  what is slow to import waits until it is needed

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ntkexp.cli.arguments import AsJson, ConfigDir, Events, Overrides, Quiet, SweepWords, Trust
from ntkexp.cli.kernel.app import kernel

app = typer.Typer(
    help="Is a network trained by gradient descent a kernel machine, and which one?",
    rich_markup_mode=None,  # plain help comes in half the time
    pretty_exceptions_enable=False,
)


app.add_typer(kernel, name="kernel")


class Format(StrEnum):
    """How a report is written."""

    html = "html"
    md = "md"
    text = "text"
    csv = "csv"
    json = "json"


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        from ntkexp.records.version import package_version

        typer.echo(f"ntkexp {package_version()}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
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


@app.command()
def sweep(
    words: SweepWords = None,
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="The folder of outputs, in which runs go into runs/.")
    ] = Path("outputs"),
    workers: Annotated[
        int | None, typer.Option("--workers", min=1, help="How many runs at once; one for each core if not given.")
    ] = None,
    engine: Annotated[
        str,
        typer.Option("--engine", metavar="ENGINE", help="Where runs happen: local, dask:ADDRESS or slurm:KEY=VALUE,…"),
    ] = "local",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the runs, with about the time and memory they take, and begin none.")
    ] = False,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop all runs at the first failure.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run those again that failed.")] = False,
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


@app.command()
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
        from ntkexp.config.choices import Choices
        from ntkexp.config.folders import folders
        from ntkexp.config.show import tree

        text = tree(Choices(folders(config_dir)))
    elif cost:
        from ntkexp.cli.kernel_cost import plan
        from ntkexp.config.compose import compose

        text = plan(compose(overrides or [], config_dir, trust or []))
    else:
        from ntkexp.config.compose import resolve
        from ntkexp.config.show import shown

        text = shown(resolve(overrides or [], config_dir, trust or []))
    sys.stdout.write(text)


@app.command()
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


@app.command()
def report(
    named: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN|SWEEP]...", help="Run folders, sweeps, or folders of them; everything if none is given."
        ),
    ] = None,
    form: Annotated[
        Format, typer.Option("--format", help="A page (html), or tables for a paper or a program.")
    ] = Format.html,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR|FILE", help="The folder of outputs; with a format other than html, the file to write."
        ),
    ] = None,
) -> None:
    """Put finished runs and sweeps onto one page, outputs/report/index.html."""
    from ntkexp.cli.report import report

    report(named or [], form.value, out)


@app.command()
def explain(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    probe: Annotated[
        list[int] | None,
        typer.Option("--probe", metavar="K", min=0, help="A point by its number in the split; may be repeated."),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", metavar="SPLIT", help="The split whose points are explained: train, probe or test."),
    ] = None,
    worst: Annotated[
        int | None,
        typer.Option("--worst", metavar="N", min=1, help="Explain the N points that the network misses most."),
    ] = None,
    top: Annotated[
        int, typer.Option("--top", metavar="N", min=1, help="How many training examples to list for each point.")
    ] = 10,
    picture: Annotated[
        Path | None, typer.Option("--picture", metavar="FILE", help="The file of the picture, .svg or .png.")
    ] = None,
) -> None:
    """See which training examples made a prediction, and when."""
    from ntkexp.cli.explain import explain

    explain(run, split, probe or [], worst, top, picture)


@app.command()
def compare(
    first: Annotated[str, typer.Argument(metavar="RUN|SWEEP", help="The folder of a run, or a sweep by its name.")],
    second: Annotated[str, typer.Argument(metavar="RUN|SWEEP", help="Another run or sweep.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder of outputs.")] = Path("outputs"),
) -> None:
    """See what differs between two runs, or between two sweeps in pairs of runs."""
    from ntkexp.cli.compare import compare

    compare(first, second, out)


@app.command()
def runs(
    filters: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Show only the runs of which this holds, such as model.width=64 or state=dead.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder of outputs.")] = Path("outputs"),
    delete: Annotated[bool, typer.Option("--delete", help="Delete the runs that are listed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before deleting.")] = False,
    as_json: AsJson = False,
) -> None:
    """List runs with their states, and delete those no longer wanted."""
    from ntkexp.cli.runs import runs

    runs(filters or [], out, remove=delete, sure=yes, as_json=as_json)
