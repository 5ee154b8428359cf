"""The entry point. It assembles the commands,
and reports each error as one line on stderr."""

from __future__ import annotations

import errno
import gc
import io
import os
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from ntkexp.cli.claims import claims
from ntkexp.cli.ensemble import ensemble
from ntkexp.cli.explain import attribute, explain
from ntkexp.cli.kernel_fill import limit, tangent
from ntkexp.cli.kernel_predict import predict, study
from ntkexp.cli.options import MAX_THREADS, is_thread_count, spread_options, with_advice
from ntkexp.cli.results import compare, report, runs
from ntkexp.cli.sweep import sweep
from ntkexp.cli.train import config, resume, train
from ntkexp.cli.validate import validate
from ntkexp.engine.base import (
    DENIED,
    FAULTS,
    SAFE_PATH,
    exhaustion_message,
    fault_in_words,
    warning_in_words,
)
from ntkexp.mistake import Mistake, line_of_user, without_secrets

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

# --- The program. Each command is a function. The help lists commands in this order.


def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.")
    ] = False,
) -> None:
    if version:
        from ntkexp.records.folder import package_version

        typer.echo(f"ntkexp {package_version()}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


COMMAND_FUNCTIONS = (
    train,
    sweep,
    claims,
    config,
    resume,
    report,
    explain,
    attribute,
    validate,
    compare,
    runs,
)
KERNEL_COMMANDS = (limit, tangent, predict, ensemble, study)


EXAMPLES = {
    "train": (
        "ntkexp train model.width=64 optimizer=adamw",
        "ntkexp train data=table data.path=my.csv data.target=species",
    ),
    "sweep": (
        "ntkexp sweep width --workers=2",
        "ntkexp sweep model.width=16,32 seed=0..4 steps=100",
    ),
    "claims": ("ntkexp claims list", "ntkexp claims symmetry --quick"),
    "config": ("ntkexp config optimizer=sgd", "ntkexp config --tree"),
    "resume": (
        "ntkexp resume outputs/runs/RUN",
        "ntkexp resume outputs/runs/RUN --verbose",
    ),
    "report": ("ntkexp report", "ntkexp report width --format=csv --out=width.csv"),
    "explain": (
        "ntkexp explain outputs/runs/RUN --query=3",
        "ntkexp explain outputs/runs/RUN --worst=2 --page",
    ),
    "attribute": (
        "ntkexp attribute outputs/runs/RUN --model=net.py:build --trust=net.py",
        "ntkexp attribute FOLDER --model=net.py:build --trust=net.py --by=module",
    ),
    "validate": (
        "ntkexp validate outputs/runs/RUN",
        "ntkexp validate outputs/runs/RUN --scores=theirs.npy --trainings=20",
    ),
    "compare": (
        "ntkexp compare outputs/runs/ONE outputs/runs/OTHER",
        "ntkexp compare width depth",
    ),
    "runs": ("ntkexp runs --columns=model.width", "ntkexp runs state=dead --delete"),
    "limit": (
        "ntkexp kernel limit model=cnn data.classes=all --out=cntk.zarr",
        "ntkexp kernel limit model.depth=3 --dry-run",
    ),
    "tangent": (
        "ntkexp kernel tangent model.width=64 --out=ntk.zarr",
        "ntkexp kernel tangent --run=outputs/runs/RUN --at=end",
    ),
    "predict": (
        "ntkexp kernel predict cntk.zarr --ridge=best",
        "ntkexp kernel predict cntk.zarr --time=100 --time=inf",
    ),
    "ensemble": (
        "ntkexp kernel ensemble",
        "ntkexp kernel ensemble model.width=256 --networks=20",
    ),
    "study": (
        "ntkexp kernel study images",
        "ntkexp kernel study images --ridge=0.1 --workers=2",
    ),
}
"""Two examples of each command, shown below its help."""


def examples_of(name: str) -> str | None:
    """Return the examples below the help of a command.
    Click keeps the line breaks of a paragraph that begins with "\\b"."""
    if name not in EXAMPLES:
        return None
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in EXAMPLES[name])])


def assemble() -> typer.Typer:
    program = typer.Typer(
        help="Is a network trained by gradient descent a kernel machine, and which one?",
        rich_markup_mode=None,  # plain help is twice as fast
        pretty_exceptions_enable=False,
    )
    program.callback(invoke_without_command=True)(root)
    kernel_help = "Compute a kernel into a file, and predict with it."
    kernel = typer.Typer(help=kernel_help, short_help=kernel_help, no_args_is_help=True)
    program.add_typer(kernel, name="kernel")
    for group, commands in ((program, COMMAND_FUNCTIONS), (kernel, KERNEL_COMMANDS)):
        for command in commands:
            summary = (command.__doc__ or "").strip().partition("\n")[0]
            group.command(short_help=summary, epilog=examples_of(command.__name__))(
                spread_options(command)
            )
    return program


app = assemble()


# --- The environment of the process: correct it,
# or report a problem before a library fails.


THREADS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "NUMBA_NUM_THREADS",
)
MIN_OPEN_FILES = 64
"""The smallest usable limit of open files. A run needs about 15,
and a sweep a few per worker."""


STDOUT = "stdout"


class Output(io.FileIO):
    """The file of stdout. Its errors name stdout, to distinguish them from errors of
    files with results."""

    def write(self, content: ReadableBuffer, /) -> int:
        try:
            return super().write(content)
        except OSError as error:
            error.filename = STDOUT
            raise


def set_up_process() -> None:
    """Set up the environment of the process: threads, signals,
    standard streams and warnings."""
    # waiting threads sleep instead of spinning, which would slow down other processes
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # child processes must not import files of the working folder
    os.environ[SAFE_PATH] = "1"
    # treat SIGTERM like Ctrl-C
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # If file descriptors 0 to 2 are closed, open them. Otherwise the next opened file
    # would be taken for stdin, stdout or stderr. Escape characters that the encoding of stdout lacks.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, "w", encoding="utf-8", closefd=False))
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(Output(1, "w", closefd=False)),
        encoding=sys.stdout.encoding,
        errors="backslashreplace",
        line_buffering=sys.stdout.isatty(),
    )
    warnings.showwarning = show_warning


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Write a warning as one line on stderr."""
    write_error(warning_in_words(message, category, filename, lineno), 0)


def refuse_unfit(arguments: Sequence[str]) -> None:
    """Raise if the environment or the arguments prevent every command from working."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise Mistake("the working folder is gone; go to one that exists") from None
    # with a lower limit of open files, a library or worker would fail later
    if 0 <= resource.getrlimit(resource.RLIMIT_NOFILE)[0] < MIN_OPEN_FILES:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    refuse_thread_counts(os.environ)
    for name in (os.getcwd(), *arguments):
        if not is_utf8(name):
            raise Mistake(
                f"{name}: this name is not UTF-8, and results are; give the file or folder another name"
            )
    # linear algebra libraries start a thread for each core;
    # check that the system allows this
    count = os.environ.get("OMP_NUM_THREADS", "").split(",")[0]
    started_all = threading.Event()
    threads = [
        threading.Thread(target=started_all.wait)
        for _ in range(int(count or len(os.sched_getaffinity(0))) - 1)
    ]
    try:
        for thread in threads:
            thread.start()  # `failure` converts the error to a message
    finally:
        started_all.set()


def is_utf8(name: str) -> bool:
    """Return True if a name can be encoded as UTF-8.
    Python decodes other bytes to lone surrogates.

    >>> is_utf8("café"), is_utf8(os.fsdecode(bytes([99, 97, 102, 233])))
    (True, False)
    """
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def refuse_thread_counts(environment: Mapping[str, str]) -> None:
    """Raise if an environment variable contains an invalid number of threads.

    OMP_NUM_THREADS may be a list, with a number for each nesting level.

    >>> refuse_thread_counts({"OMP_NUM_THREADS": "four"})
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: OMP_NUM_THREADS=four: it takes a whole number ≥ 1 and ≤ 1024; unset it, or write threads=4
    """
    for name in THREADS:
        value = environment.get(name, "1")
        counts = value.split(",") if name == "OMP_NUM_THREADS" else [value]
        if not all(map(is_thread_count, counts)):
            raise Mistake(
                f"{name}={value}: it takes a whole number ≥ 1 and ≤ {MAX_THREADS}; unset it, or write threads=4"
            )


# --- Errors: each becomes one line on stderr and an exit status.
# Bugs keep their traceback. Python's development mode shows it for code of the user, too.
#
#     0    done
#     1    the machine failed (a full disk, no memory, a closed pipe), or some runs of a sweep are not done
#     2    a mistake of the user: a wrong key or option, a file or folder that is missing or not accessible,
#          an exception in the user's own code
#     130  interrupted, by Ctrl-C or SIGTERM


# The base class of Typer's usage errors (an unknown option, a missing argument). It has
# no public name, because recent versions of Typer contain a private copy of click.
UsageError: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "UsageError"
)

FORMER_OPTIONS = {
    "--plan": "--plan was removed; `ntkexp sweep --dry-run seed=0,1` shows the time and memory of runs",
    "--probe": "--probe is called --query now",
}
"""The message for each option that was renamed or removed."""


SHOW_TRACEBACK = "PYTHONDEVMODE=1 in the environment shows the traceback"


def main() -> None:
    set_up_process()
    status = run(sys.argv[1:])
    # skip the final garbage collection, which takes 0.5 s after importing torch
    gc.freeze()
    sys.exit(status)


def run(arguments: Sequence[str]) -> int:
    """Run a command. Return its exit status."""
    try:
        refuse_unfit(arguments)
        execute(list(arguments))
        sys.stdout.flush()
    except typer.Exit as end:
        return end.exit_code
    except (KeyboardInterrupt, typer.Abort) as interrupt:
        # block further interrupts while the message is written, then ignore them
        ends = {signal.SIGINT, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, ends)
        try:
            return write_error(str(interrupt) or "interrupted", 130)
        finally:
            for number in ends:
                signal.signal(number, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ends)
    except Exception as error:
        if (reason := failure(error)) is None:
            raise
        return write_error(*reason)
    return 0


def execute(arguments: list[str]) -> None:
    """Invoke a command.

    Call Typer's `main` only for shell completion, because `main` does not leave the
    handling of closed pipes and interrupts to the caller."""
    command = typer.main.get_command(app)
    if "_NTKEXP_COMPLETE" in os.environ:
        command(arguments, prog_name="ntkexp")
    with command.make_context("ntkexp", arguments) as context:
        command.invoke(context)


def failure(error: Exception) -> tuple[str, int] | None:  # noqa: PLR0911  a table
    """Return the message and the exit status for an exception, or None for a bug."""
    match error:
        case Mistake():
            return with_advice(error), 2
        case UsageError() if advice := FORMER_OPTIONS.get(
            getattr(error, "option_name", "")
        ):
            return advice, 2
        case UsageError():
            return usage_message(error), 2
        case OSError() if error.errno in FAULTS:
            return fault(error)
        case UnicodeEncodeError() if error.reason == "surrogates not allowed":
            name = error.object[max(0, error.start - 40) : error.end + 40]
            return (
                f"{name}: this name is not UTF-8, and results are; give the file or folder another name",
                2,
            )
        case RuntimeError() if "home directory" in str(error):
            return "there is no home folder for ~; write the whole path, or set HOME", 2
        case RuntimeError() | MemoryError() | ImportError() | OSError() if (
            exhausted_resource := exhaustion_message(error)
        ):
            return exhausted_resource, 1
    line = line_of_user(error)
    if line is None or sys.flags.dev_mode:
        return None
    return f"{line}; {SHOW_TRACEBACK}", 2


def usage_message(error: Exception) -> str:
    """Reword a usage error of Typer in the style of this package."""
    text = str(getattr(error, "format_message", error.__str__)())
    text = text.strip().removesuffix(".")
    text = text[:1].lower() + text[1:]
    if "Did you mean" in text or "Possible" in text:
        return text
    command = getattr(getattr(error, "ctx", None), "command_path", "ntkexp")
    return f"{text}; `{command} --help` lists all options"


def fault(error: OSError) -> tuple[str, int]:
    """Return the message and the exit status for an operating system error."""
    try:
        sys.stdout.flush()
    except OSError:  # redirect stdout, else Python would print another error at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if error.filename == STDOUT and error.errno == errno.EPIPE:
        return FAULTS[errno.EPIPE], 1
    if error.filename == STDOUT and error.errno is not None:
        reason = os.strerror(error.errno)
        return (
            f"the output cannot be written to stdout ({reason}); send it elsewhere",
            1,
        )
    return fault_in_words(error), 2 if error.errno in DENIED else 1


def write_error(text: str, status: int) -> int:
    """Write one line on stderr, with control characters escaped."""
    line = "".join(
        letter if letter.isprintable() else repr(letter)[1:-1]
        for letter in without_secrets(text)
    )
    sys.stderr.write(f"ntkexp: {line}\n")
    return status
