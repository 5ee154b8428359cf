"""The arguments and options that commands share, each declared once, and what they bring about."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from ntkexp.cli.surroundings import is_count
from ntkexp.mistake import Mistake


def offer(context: typer.Context, incomplete: str) -> list[str]:
    """What the shell offers for KEY=VALUE. Nobody can read an error there, so a mistake offers nothing."""
    from ntkexp.config.choices import Choices, complete, folders

    given = context.params.get("config_dir")
    try:
        return complete(context.params.get("overrides") or [], incomplete, Choices(folders(given and Path(given))))
    except Mistake:
        return []


def offer_sweep(context: typer.Context, incomplete: str) -> list[str]:
    """Offer in the shell what a sweep takes: its name first, then KEY=VALUE."""
    from ntkexp.config.choices import Choices, complete, folders

    given, words = context.params.get("config_dir"), context.params.get("words") or []
    try:
        choices = Choices(folders(given and Path(given)))
        named = bool(words) and words[0] in choices.options("sweep")
        names = [] if words else [name for name in choices.options("sweep") if name.startswith(incomplete)]
        return [*names, *complete(words[named:], incomplete, choices)]
    except Mistake:
        return []


def offer_claims(context: typer.Context, incomplete: str) -> list[str]:
    """Offer in the shell the names of claims, each once."""
    from ntkexp.config.choices import Choices, folders

    given, said = context.params.get("config_dir"), context.params.get("names") or []
    try:
        known = Choices(folders(given and Path(given))).options("claim")
    except Mistake:
        return []
    return [name for name in [*known, "list", "judge"] if name.startswith(incomplete) and name not in said]


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


def keep_events(folder: Path, wanted: bool) -> None:
    """Write the finished run as TensorBoard reads it, if somebody wants it."""
    if wanted:
        from ntkexp.report.events import ensure_events

        ensure_events(folder)


def require_tensorboard(wanted: bool) -> bool:
    """TensorBoard is missed before an hour of training, not after it."""
    if wanted:
        from ntkexp.report.events import refuse_without_tensorboard

        refuse_without_tensorboard()
    return wanted


Overrides: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="What the experiment is, such as model.width=64; `ntkexp config --tree` shows every key.",
        autocompletion=offer,
        show_default=False,
    ),
]
SweepWords: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME] [KEY=VALUES]...",
        help="A sweep by its name, such as width, and keys with values, such as model.width=64,128 seed=0..4.",
        autocompletion=offer_sweep,
        show_default=False,
    ),
]
RunsFolder: TypeAlias = Annotated[
    Path, typer.Option("--out", metavar="DIR", help="The folder of outputs, in which runs go into runs/.")
]
OutputsFolder: TypeAlias = Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder of outputs.")]
ConfigDir: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "--config-dir", metavar="DIR", help="A folder of YAML files of yours; they come before those of the package."
    ),
]
Trust: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "--trust", metavar="PACKAGE|FILE.py", help="Let Python code of this package or file run; may be repeated."
    ),
]
Quiet: TypeAlias = Annotated[bool, typer.Option("--quiet", help="Print errors only.")]
Workers: TypeAlias = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", min=1, help="How many runs at once; one for each core if not given."),
]
RetryFailed: TypeAlias = Annotated[bool, typer.Option("--retry-failed", help="Run those again that failed.")]
Again: TypeAlias = Annotated[
    str | None,
    typer.Option("--again", metavar="FILE.py:FUNCTION", help="A function that carries a followed loop out anew."),
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the outcome as one JSON object.")]
Events: TypeAlias = Annotated[
    bool,
    typer.Option("--tensorboard", callback=require_tensorboard, help="Write finished runs for TensorBoard as well."),
]
KernelFile: TypeAlias = Annotated[
    Path | None, typer.Option("--out", metavar="FILE", help="The kernel file; one in outputs/kernels if not given.")
]
Recompute: TypeAlias = Annotated[
    bool, typer.Option("--force", help="Compute the kernel anew, even if the file is finished.")
]
Tiles: TypeAlias = Annotated[
    int | None,
    typer.Option("--workers", metavar="N", min=1, help="How many tiles at once; one for each core if not given."),
]
Engine: TypeAlias = Annotated[
    str, typer.Option("--engine", metavar="ENGINE", help="Who computes: local, dask:ADDRESS or slurm:KEY=VALUE,…")
]
FillDryRun: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Say about how many core hours it would take, and compute nothing.")
]
