"""A file of the user's, by its path, and its bytes; whatever is wrong with it is said in one line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from ntkexp.mistake import Mistake, nearest_file, refuse_special

LARGEST = 1 << 34
"""Bytes of a file of data, all of which are read into memory."""


def expanded(path: Path) -> Path:
    """`~` as the shell means it."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise Mistake(f"{quoted(path)}: there is no such home folder") from error


UserPath = Annotated[Path, AfterValidator(expanded)]
"""A path on the command line or in YAML."""


def quoted(path: Path) -> str:
    """The key and its value, which is quoted, because a file name may hold blanks and line breaks."""
    return f"data.path={str(path)!r}"


def is_there(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError as error:
        raise unreadable(path, error) from error


def existing(path: Path) -> Path:
    try:
        folder, exists = path.is_dir(), path.exists()
        beside = path.parent.iterdir() if path.parent.is_dir() and not exists else ()
        siblings = [entry.name for entry in beside if entry.is_file()]
    except OSError as error:
        raise unreadable(path, error) from error
    if folder:
        raise Mistake(f"{quoted(path)} is a folder; name the file")
    if not exists:
        raise Mistake(f"{quoted(path)}: there is no such file{one_line(nearest_file(path.name, siblings))}")
    refuse_special(path, quoted(path), LARGEST)
    return path


def contents(path: Path) -> bytes:
    """Read the bytes of a file, as many as it says: of those in /proc, which say 0, some never end."""
    try:
        with existing(path).open("rb") as file:
            return file.read(path.stat().st_size)
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path, error: OSError) -> Mistake:
    """The mistake of a file that cannot be read, with what the operating system says."""
    return Mistake(f"{quoted(path)} cannot be read: {error.strerror}")


def one_line(text: str) -> str:
    """The text with line breaks as they are written in Python."""
    return text.replace("\r", "\\r").replace("\n", "\\n")
