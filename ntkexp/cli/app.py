"""The commands, each a few lines: what it does is imported when it is called."""

# ruff: noqa: PLC0415  what is slow to import waits until it is needed

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ntkexp.cli.arguments import AsJson, ConfigDir, Overrides, Quiet, SweepWords, Trust

app = typer.Typer(
    help="Is a network trained by gradient descent a kernel machine, and which one?",
    rich_markup_mode=None,  # plain help comes in half the time
    pretty_exceptions_enable=False,
)


class Format(StrEnum):
    """How a table is written."""

    text = "text"
    csv = "csv"
    json = "json"


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        from ntkexp.version import package_version

        typer.echo(f"ntkexp {package_version()}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def train(
    overrides: Overrides = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where runs go.")] = Path("outputs"),
    force: Annotated[bool, typer.Option("--force", help="Run again what is finished.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    trust: Trust = None,
    config_dir: ConfigDir = None,
) -> None:
    """Train one network, and see which kernel machine it is."""
    from ntkexp.cli.train import train

    train(overrides or [], out, force=force, quiet=quiet, as_json=as_json, trust=trust or [], config_dir=config_dir)


@app.command()
def sweep(
    words: SweepWords = None,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where runs go.")] = Path("outputs"),
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Runs at once; else one per core.")] = None,
    engine: Annotated[str, typer.Option("--engine", metavar="ENGINE", help="Where runs happen.")] = "local",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the runs, and about what they take.")] = False,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop all at the first failure.")] = False,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Run again what failed.")] = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    trust: Trust = None,
    config_dir: ConfigDir = None,
) -> None:
    """Run many experiments: a NAME such as width, or KEY=VALUE with several values."""
    from ntkexp.cli.sweep import Asked, sweep

    given = (words or [], out, engine, workers, dry_run, fail_fast, retry_failed, quiet, as_json)
    raise typer.Exit(sweep(Asked(*given, trust or [], config_dir)))


@app.command()
def config(
    overrides: Overrides = None,
    everything: Annotated[bool, typer.Option("--tree", help="Every group and option instead.")] = False,
    trust: Trust = None,
    config_dir: ConfigDir = None,
) -> None:
    """Show what would run, as YAML."""
    if everything:
        from ntkexp.config.choices import Choices
        from ntkexp.config.folders import folders
        from ntkexp.config.show import tree

        text = tree(Choices(folders(config_dir)))
    else:
        from ntkexp.config.compose import resolve
        from ntkexp.config.show import shown

        text = shown(resolve(overrides or [], config_dir, trust or []))
    sys.stdout.write(text)


@app.command()
def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    quiet: Quiet = False,
    as_json: AsJson = False,
    trust: Trust = None,
) -> None:
    """Go on from a run's last checkpoint."""
    from ntkexp.cli.train import resume

    resume(run, quiet=quiet, as_json=as_json, trust=trust or [])


@app.command()
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of finished runs.")],
    form: Annotated[Format, typer.Option("--format", help="How to write the table.")] = Format.text,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where to write it.")] = None,
) -> None:
    """Put finished runs into one table."""
    from ntkexp.cli.report import report

    report(runs, form.value, out)
