"""Where the YAML files lie: those that come with the package, and before them those of the user."""

from __future__ import annotations

import sys
from pathlib import Path

from ntkexp.mistake import WrongArgument, nearest, refuse_special

LAYOUT = "it takes a folder of YAML files laid out like configs/, such as DIR/model/NAME.yaml"


def folders(config_dir: Path | None) -> tuple[Path, ...]:
    """List the folders to look in; the first that has a file wins."""
    return (shipped(),) if config_dir is None else (checked(config_dir.expanduser()), shipped())


def shipped() -> Path:
    """Find the package's own: inside it once installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside, beside = package / "configs", package.parent / "configs"
    return inside if inside.is_dir() else beside


def checked(folder: Path) -> Path:
    """Find the user's folder as an absolute path, or refuse it."""
    given = f"config_dir={folder}"
    if not folder.exists():
        beside = [str(other) for other in folder.parent.glob("*/")] if folder.parent.is_dir() else []
        raise WrongArgument(f"{given}: there is no such folder; {LAYOUT}{nearest(str(folder), beside)}", "config_dir")
    if not folder.is_dir():
        raise WrongArgument(f"{given} is a file; {LAYOUT}", "config_dir")
    if not any(folder.glob("*.yaml")) and not any(folder.glob("*/*.yaml")):
        raise WrongArgument(f"{given} holds no YAML file; {LAYOUT}", "config_dir")
    for file in [*folder.glob("*.yaml"), *folder.glob("*/*.yaml")]:
        if file.exists():  # Hydra opens whatever has the name
            refuse_special(file, str(file), sys.maxsize)
    return folder.resolve()
