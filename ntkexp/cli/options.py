"""Arguments and options that several commands share, and advice in messages.

`with_advice` replaces Python arguments in a message by command-line options, and names
an option that solves the problem.

>>> with_advice(WrongArgument("memory_gb=0: it takes a number > 0", "memory_gb"))
'--memory-gb=0: it takes a number > 0'
>>> with_advice(NoPlace("the disk is full; choose another place"))
'the disk is full; choose another place with --out'

`options` returns the options that repeat a command.

>>> options(Path("outputs"), ["net.py"], Path("mine")), options(Path("there"))
(['--trust=net.py', '--config-dir=mine'], ['--out=there'])
"""

from __future__ import annotations

import inspect
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, get_type_hints

import typer

from ntkexp.mistake import (
    HydraSetting,
    Mistake,
    NoPlace,
    UnknownKey,
    Untrusted,
    Useless,
    WrongArgument,
)
from ntkexp.report.tables import format_json
from ntkexp.text import printable_lines

if TYPE_CHECKING:
    from ntkexp.config.choices import Choices
    from ntkexp.experiment.experiment import Experiment
    from ntkexp.records.atomic import Json

OUTPUTS = Path("outputs")
"""The default folder of results."""

MAX_THREADS = 1024

# --- Shell completion. It cannot show errors, so a mistake gives no completions.


def choices_of(context: typer.Context) -> Choices:
    from ntkexp.config.choices import Choices, config_folders

    config_dir = context.params.get("config_dir")
    return Choices(config_folders(config_dir and Path(config_dir)))


def complete_overrides(context: typer.Context, incomplete: str) -> list[str]:
    from ntkexp.config.choices import complete

    try:
        return complete(
            context.params.get("overrides") or [], incomplete, choices_of(context)
        )
    except Mistake:
        return []


def complete_sweep(context: typer.Context, incomplete: str) -> list[str]:
    """Return the completions for a sweep: first its name, then KEY=VALUE."""
    from ntkexp.config.choices import complete

    arguments = context.params.get("arguments") or []
    try:
        choices = choices_of(context)
        named = bool(arguments) and arguments[0] in choices.options("sweep")
        completions = complete(arguments[named:], incomplete, choices)
        if arguments:
            return completions
        names = [
            name for name in choices.options("sweep") if name.startswith(incomplete)
        ]
        return names + completions
    except Mistake:
        return []


def complete_claims(context: typer.Context, incomplete: str) -> list[str]:
    typed = context.params.get("names") or []
    try:
        names = choices_of(context).options("claim")
    except Mistake:
        return []
    return [
        name
        for name in [*names, "list", "judge", "register", "publish", "check"]
        if name.startswith(incomplete) and name not in typed
    ]


# --- Arguments and options.


def require_tensorboard(enabled: bool) -> bool:
    """Raise before training if TensorBoard is not installed."""
    if enabled:
        from ntkexp.report.events import refuse_without_tensorboard

        refuse_without_tensorboard()
    return enabled


def require_log(name: str | None) -> str | None:
    """Raise before training if the log is unknown or its package is not installed."""
    if name is not None:
        from ntkexp.report.live_log import check_log

        check_log(name)
    return name


Overrides: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings of the experiment, such as model.width=64; `ntkexp config --tree` lists all keys.",
        autocompletion=complete_overrides,
        show_default=False,
    ),
]
SweepWords: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME] [KEY=VALUES]...",
        help=(
            "The name of a sweep, such as width, and keys with values, such as model.width=64,128 "
            "seed=0..4."
        ),
        autocompletion=complete_sweep,
        show_default=False,
    ),
]
RunsFolder: TypeAlias = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="DIR",
        help="The folder of outputs; runs are stored in its folder runs/.",
    ),
]
OutputsFolder: TypeAlias = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="The folder of outputs.")
]
ConfigDir: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--config-dir",
        metavar="DIR",
        help="A folder of your YAML files, which take precedence over the package's.",
    ),
]
Trust: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--trust",
        metavar="PACKAGE|FILE.py",
        help="Let Python code of this package or file run; may be repeated.",
    ),
]
Quiet: TypeAlias = Annotated[bool, typer.Option("--quiet", help="Print errors only.")]
Workers: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        min=1,
        help="The number of runs at once; by default, one for each core.",
    ),
]
RetryFailed: TypeAlias = Annotated[
    bool, typer.Option("--retry-failed", help="Run failed runs again.")
]
Again: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--again",
        metavar="FILE.py:FUNCTION",
        help="A function that runs the followed loop again.",
    ),
]
Verbose: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--verbose",
        help="Also show settings, R², seconds and remarks of the kernel machines.",
    ),
]
AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print the results as one JSON object.")
]
Events: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--tensorboard",
        callback=require_tensorboard,
        help="Also write finished runs for TensorBoard.",
    ),
]
Log: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--log",
        metavar="wandb|mlflow|tensorboard",
        callback=require_log,
        help="Send the metrics of each step to this service during the run.",
    ),
]
Engine: TypeAlias = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="ENGINE",
        help="The engine that runs jobs: local, dask:ADDRESS or slurm:KEY=VALUE,…",
    ),
]


@dataclass(frozen=True)
class CommonOptions:
    """Options of all commands that compose experiments.
    `spread_options` makes each field an option."""

    quiet: Quiet = False
    as_json: AsJson = False
    trust: Trust = None
    config_dir: ConfigDir = None

    @property
    def trusted(self) -> list[str]:
        return self.trust or []

    def compose(self, overrides: Sequence[str] | None) -> Experiment:
        """Compose the experiment from the overrides of a command.
        Importing torch makes this slow."""
        # Linear algebra libraries read the number of threads when torch is imported, so
        # set it now, before the overrides are validated.
        words = [text.lstrip("+") for text in overrides or []]
        counts = [
            word.removeprefix("threads=")
            for word in words
            if word.startswith("threads=")
        ]
        if counts and is_thread_count(counts[-1]):
            os.environ |= {"OMP_NUM_THREADS": counts[-1], "MKL_NUM_THREADS": counts[-1]}
        from ntkexp.config.compose import compose

        return compose(overrides or [], self.config_dir, self.trusted)


def spread_options(command: Callable[..., None]) -> Callable[..., None]:
    """Convert a command for Typer: each field
    of a dataclass argument becomes an option.

    >>> def greet(name: str, *, loud: bool = False) -> None: ...
    >>> def leave(*, common: CommonOptions) -> None: ...
    >>> spread_options(greet) is greet, list(inspect.signature(spread_options(leave)).parameters)
    (True, ['quiet', 'as_json', 'trust', 'config_dir'])
    """
    if not inspect.getfullargspec(command).kwonlyargs:
        return command  # skip the evaluation of annotations, which is slow
    parameters = []
    groups = dict[str, Any]()
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        if not is_dataclass(parameter.annotation):
            parameters.append(parameter)
            continue
        groups[name] = parameter.annotation
        hints = annotations_of(groups[name])
        parameters += [
            parameter.replace(
                name=field.name, annotation=hints[field.name], default=field.default
            )
            for field in fields(groups[name])
        ]
    if not groups:
        return command

    @wraps(command)
    def typer_command(**arguments: Any) -> None:
        for name, kind in groups.items():
            arguments[name] = kind(
                **{field.name: arguments.pop(field.name) for field in fields(kind)}
            )
        command(**arguments)

    typer_command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    typer_command.__annotations__ = {
        parameter.name: parameter.annotation for parameter in parameters
    }
    return typer_command


@cache
def annotations_of(group: type) -> dict[str, Any]:
    return get_type_hints(group, include_extras=True)


# --- Effects of options.


def is_thread_count(text: str) -> bool:
    """Return True if a text is a number of threads from 1 to 1024.

    >>> [count for count in ("1", " 08", "1024", "0", "1025", "four", "") if is_thread_count(count)]
    ['1', ' 08', '1024']
    """
    return (
        re.fullmatch(r"\s*0*[1-9]\d{0,3}\s*", text) is not None
        and int(text) <= MAX_THREADS
    )


def ensure_writable(folder: Path) -> Path:
    """Create the folder if it is missing. Raise before training
    if it is not writable."""
    from ntkexp.records.atomic import make_folder

    try:
        make_folder(folder)
    except OSError as error:
        raise Mistake(
            f"--out={folder}: {error.strerror}; it takes a folder that can be written to"
        ) from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise Mistake(f"--out={folder} cannot be written to; choose another folder")
    return folder


def write_events(folder: Path, enabled: bool) -> None:
    """Write the TensorBoard events of a finished run, if wanted."""
    if enabled:
        from ntkexp.report.events import ensure_events

        ensure_events(folder)


# --- Interrupts. Ctrl-C or SIGTERM ends a command with advice on how to continue.


@contextmanager
def interruptible(advice: Callable[[], str]) -> Iterator[None]:
    """Append the result of `advice` to the message if the block is interrupted."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted{advice()}") from None


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C inside the block."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


ADVICE: Mapping[type[Mistake], str] = {
    NoPlace: " with --out",
    Useless: " with --force",
    Untrusted: "; add `--trust {source}`",
    HydraSetting: "; --out says where runs go, --config-dir adds YAML",
    UnknownKey: "; `ntkexp config --tree` shows every key",
}
"""The advice appended to the message of each class of mistake."""

AGAIN = "; --force computes it again"
"""The advice appended to the remark that a result is already finished."""


def with_advice(mistake: Mistake) -> str:
    """Return the message of a mistake with advice.
    Replace Python arguments by options."""
    text = str(mistake)
    for argument in mistake.arguments if isinstance(mistake, WrongArgument) else ():
        text = re.sub(rf"\b{argument}=", f"--{argument.replace('_', '-')}=", text)
    for kind, advice in ADVICE.items():
        if isinstance(mistake, kind):
            return text + advice.format_map(vars(mistake))
    return text


def trusted(entries: Sequence[str]) -> tuple[str, ...]:
    """Return the trusted packages and files. Make the paths of files absolute."""
    return tuple(
        str(Path(entry).expanduser().absolute()) if entry.endswith(".py") else entry
        for entry in entries
    )


def write_json(value: Json) -> None:
    """Print JSON. Escape control characters."""
    sys.stdout.write(format_json(value))


def write_out(text: str) -> None:
    """Print a text. Escape control characters, which may occur in names from files."""
    sys.stdout.write(printable_lines(text))


def wrap(text: str) -> str:
    """Wrap sentences to the width of the terminal, and keep tables and paths.

    Leave the text unchanged if stdout is a pipe.
    """
    if not sys.stdout.isatty():
        return text
    columns = shutil.get_terminal_size().columns
    wrapper = textwrap.TextWrapper(
        columns, break_long_words=False, break_on_hyphens=False
    )
    lines = []
    for line in text.split("\n"):
        is_row = "  " in line.strip()  # columns of tables are two blanks apart
        lines.append(line if is_row else wrapper.fill(line))
    return "\n".join(lines)


def options(
    out: Path = OUTPUTS, trust: Sequence[str] = (), config_dir: Path | None = None
) -> list[str]:
    """Return the options to repeat a command: the output folder,
    trusted code and YAML folder."""
    arguments = [] if out == OUTPUTS else [f"--out={out}"]
    arguments += [f"--trust={entry}" for entry in trust]
    if config_dir:
        arguments.append(f"--config-dir={config_dir}")
    return arguments
