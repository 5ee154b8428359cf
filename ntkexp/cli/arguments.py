"""The arguments and options that commands share."""

# ruff: noqa: PLC0415  what is slow to import waits until it is needed

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeAlias

import typer


def offer(context: typer.Context, incomplete: str) -> list[str]:
    """What the shell offers for KEY=VALUE. Nobody can read an error there, so a mistake offers nothing."""
    from ntkexp.config.choices import Choices
    from ntkexp.config.complete import complete
    from ntkexp.config.folders import folders
    from ntkexp.mistake import Mistake

    given = context.params.get("config_dir")
    try:
        return complete(context.params.get("overrides") or [], incomplete, Choices(folders(given and Path(given))))
    except Mistake:
        return []


Overrides: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Choices, such as model.width=64; `ntkexp config --tree` shows all.",
        autocompletion=offer,
        show_default=False,
    ),
]
ConfigDir: TypeAlias = Annotated[
    Path | None, typer.Option("--config-dir", metavar="DIR", help="A folder of YAML files that come first.")
]
Trust: TypeAlias = Annotated[
    list[str] | None,
    typer.Option("--trust", metavar="PACKAGE|FILE.py", help="Let Python code from here run; may be repeated."),
]
Quiet: TypeAlias = Annotated[bool, typer.Option("--quiet", help="Print errors only.")]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print the outcome as one JSON object.")]
