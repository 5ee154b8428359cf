"""The commands as the app itself has them, each with its arguments, its options and what help says of them."""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

import typer

from ntkexp.cli.main import app

HEADER = ("option", "default", "meaning")


def walk(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """A command, or the commands of a group and of the groups in it, by the words that call them."""
    inside = getattr(command, "commands", {})
    if not inside:
        yield path, command
    for name, other in inside.items():
        yield from walk(other, f"{path} {name}")


ALL = dict(walk(typer.main.get_command(app), "ntkexp"))


def options() -> set[str]:
    """Every option of every command, and of the program itself."""
    common = {"--help", "--version", "--install-completion", "--show-completion"}
    return common | {word for command in ALL.values() for each in command.params for word in each.opts}


def called(path: str) -> str:
    """A command with its arguments.

    >>> called("ntkexp resume")
    'ntkexp resume RUN'
    """
    return " ".join([path, *(each.metavar for each in ALL[path].params if not is_option(each))])


def rows(path: str) -> Iterator[tuple[str, str, str]]:
    """The options of a command."""
    for each in filter(is_option, ALL[path].params):
        word = f"{each.opts[0]} {each.metavar}" if each.metavar else each.opts[0]
        yield f"`{word}`", default(each.default), each.help


def is_option(parameter: Any) -> bool:
    """Whether a parameter is an option, which begins with dashes, and no argument."""
    return bool(parameter.opts[0].startswith("--"))


def default(value: object) -> str:
    """What an option is if it is not given; nothing where it is then left out."""
    said = value.value if isinstance(value, Enum) else value
    return "" if said is None or said is False else f"`{said}`"
