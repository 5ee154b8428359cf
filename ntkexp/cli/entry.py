"""The way in, and the way out: whatever ends a command early becomes one line on stderr and an exit status.

    0   done        1   the machine failed (a full disk, a closed pipe)
    2   the user can put it right       130   interrupted

Bugs of the program keep their traceback.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence

import typer

from ntkexp.cli.app import app
from ntkexp.fault import FAULTS, in_words
from ntkexp.mistake import Mistake

# Typer's usage errors (an unknown option, a missing argument) share this base. It has no public name of its own: it is
# click's, and recent versions of Typer bring their own copy of click.
UsageError: type[Exception] = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "UsageError")


def main() -> None:
    """Run the command of `sys.argv`."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that spin slow down whoever shares the cores
    status = run(sys.argv[1:])
    gc.freeze()  # at its end Python looks for garbage in all that was loaded: half a second, where torch was
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Run a command; its exit status."""
    try:
        execute(list(arguments))
        sys.stdout.flush()
    except Mistake as mistake:
        return complain(str(mistake), 2)
    except UsageError as error:
        return complain(usage(error), 2)
    except typer.Exit as end:
        return end.exit_code
    except (KeyboardInterrupt, typer.Abort) as interrupt:
        return complain(str(interrupt) or "interrupted", 130)
    except OSError as error:
        if error.errno not in FAULTS:
            raise
        return broken(error)
    return 0


def execute(arguments: list[str]) -> None:
    """Typer's own `main` is for answering a shell only: it would swallow closed pipes and interrupts."""
    command = typer.main.get_command(app)
    if "_NTKEXP_COMPLETE" in os.environ:
        command(arguments, prog_name="ntkexp")
    with command.make_context("ntkexp", arguments) as context:
        command.invoke(context)


def usage(error: Exception) -> str:
    """A usage error of Typer's, in the form of ours."""
    said = str(getattr(error, "format_message", error.__str__)()).strip().removesuffix(".")
    advice = "" if "Did you mean" in said or "Possible" in said else "; `ntkexp --help` lists what there is"
    return f"{said[:1].lower()}{said[1:]}{advice}"


def broken(error: OSError) -> int:
    """The machine's fault."""
    try:
        sys.stdout.flush()
    except OSError:  # Python would try once more at its end, and complain in its own words
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return complain(in_words(error), 1)


def complain(text: str, status: int) -> int:
    """One line on stderr, whatever was typed: control characters are shown by their codes."""
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)
    sys.stderr.write(f"ntkexp: {line}\n")
    return status
