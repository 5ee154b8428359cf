"""The command line, put together from the files in `commands`: a file is a command, and a folder a group of them."""

from __future__ import annotations

import inspect
from importlib import import_module
from types import ModuleType
from typing import Annotated

import typer

from ntkexp.chapter import files, folders
from ntkexp.cli import commands

FIRST = (
    "train",
    "sweep",
    "claims",
    "config",
    "resume",
    "report",
    "explain",
    "attribute",
    "compare",
    "runs",
    "limit",
    "tangent",
    "predict",
)
"""The commands in the order in which somebody comes to need them; others follow."""


def root(
    context: typer.Context, version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    if version:
        from ntkexp.records.version import package_version

        typer.echo(f"ntkexp {package_version()}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def assembled() -> typer.Typer:
    """Put the program together with all its commands."""
    program = typer.Typer(
        help="Is a network trained by gradient descent a kernel machine, and which one?",
        rich_markup_mode=None,  # plain help comes in half the time
        pretty_exceptions_enable=False,
    )
    program.callback(invoke_without_command=True)(root)
    fill(program, commands)
    return program


def fill(program: typer.Typer, package: ModuleType) -> None:
    """Add the commands in a folder, each the function that its file is named after, and the groups in it."""
    for name in folders(package):
        inside = import_module(f"{package.__name__}.{name}")
        group = typer.Typer(help=inspect.getdoc(inside), no_args_is_help=True)
        fill(group, inside)
        program.add_typer(group, name=name)
    for name in sorted(files(package), key=place):
        program.command()(getattr(import_module(f"{package.__name__}.{name}"), name))


def place(name: str) -> tuple[int, str]:
    """Where a command stands in the help.

    >>> sorted(["my_command", "runs", "train"], key=place)
    ['train', 'runs', 'my_command']
    """
    return FIRST.index(name) if name in FIRST else len(FIRST), name


app = assembled()
