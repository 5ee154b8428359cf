"""The way in, and the way out: the program put together from its commands, and whatever ends one early as one line on
stderr and an exit status.
"""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Annotated

import typer

from ntkexp.chapter import files, folders
from ntkexp.cli import commands
from ntkexp.cli.surroundings import refuse_unfit, settle, with_advice
from ntkexp.engine.base import DENIED, FAULTS, exhausted, in_words
from ntkexp.mistake import Mistake, without_secrets

# --- The command line, put together from the files in `commands`: a command is the function that has the name of its
# file, and a folder is a group of them.


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
        from ntkexp.records.folder import package_version

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
    """Add the commands in a folder, and the groups in it."""
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


# --- The way in, and the way out: whatever ends a command early becomes one line on stderr and an exit status.
#
#     0   done        1   the machine failed (a full disk, no memory, a closed pipe), or runs of a sweep are not done
#     2   the user can put it right: a key, an option, a file or folder that is not there, or that may not be used
#     130 interrupted, by Ctrl-C or SIGTERM, however often
#
# Bugs of the program keep their traceback.


# Typer's usage errors (an unknown option, a missing argument) share this base. It has no public name of its own: it is
# click's, and recent versions of Typer bring their own copy of click.
UsageError: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "UsageError")


def main() -> None:
    """Run the command of `sys.argv`."""
    settle()
    status = run(sys.argv[1:])
    gc.freeze()  # at its end Python looks for garbage in all that was loaded: half a second, where torch was
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Run a command; its exit status is given back."""
    try:
        refuse_unfit()
        execute(list(arguments))
        sys.stdout.flush()
    except typer.Exit as end:
        return end.exit_code
    except (KeyboardInterrupt, typer.Abort) as interrupt:
        with ignoring_interrupts():
            return complain(str(interrupt) or "interrupted", 130)
    except Exception as error:
        if (known := failure(error)) is None:
            raise
        return complain(*known)
    return 0


def failure(error: Exception) -> tuple[str, int] | None:
    """Give the line and the exit status of an exception that is no bug."""
    match error:
        case Mistake():
            return with_advice(error), 2
        case UsageError():
            return usage(error), 2
        case OSError() if error.errno in FAULTS:
            drop_output()
            return in_words(error), 2 if error.errno in DENIED else 1
        case RuntimeError() if "home directory" in str(error):
            return "~ stands for no folder here; write the whole path, or set HOME", 2
        case RuntimeError() | MemoryError() if said := exhausted(error):
            return said, 1
    return None


@contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """Ignore further interrupts: who presses Ctrl-C once more is on the way out already."""
    ends = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)
    try:
        yield
    finally:
        for number in ends:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)


def execute(arguments: list[str]) -> None:
    """Invoke a command; Typer's own `main` answers shells alone: it would swallow closed pipes and interrupts."""
    command = typer.main.get_command(app)
    if "_NTKEXP_COMPLETE" in os.environ:
        command(arguments, prog_name="ntkexp")
    with command.make_context("ntkexp", arguments) as context:
        command.invoke(context)


def usage(error: Exception) -> str:
    """Word a usage error of Typer's as ours are."""
    said = str(getattr(error, "format_message", error.__str__)()).strip().removesuffix(".")
    where = getattr(getattr(error, "ctx", None), "command_path", "ntkexp")
    advice = "" if "Did you mean" in said or "Possible" in said else f"; `{where} --help` lists what there is"
    return f"{said[:1].lower()}{said[1:]}{advice}"


def drop_output() -> None:
    """Let go of an output that cannot be written: Python would try once more at its end, in its own words."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def complain(text: str, status: int) -> int:
    """Write one line on stderr, whatever was typed: control characters are shown by their codes."""
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in without_secrets(text))
    sys.stderr.write(f"ntkexp: {line}\n")
    return status
