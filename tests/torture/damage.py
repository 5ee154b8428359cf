"""A file that is damaged: a byte flipped, cut short, emptied, swapped with another's, gone, a block twice or zero."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TypeAlias

Harm: TypeAlias = Callable[[Random, bytes, bytes], bytes]

UNTOLD = (".lock", "error.txt", "progress.json")
"""Files of which nothing is made but a word for a reader."""


def flipped(luck: Random, content: bytes, other: bytes) -> bytes:
    """A bit, or several in a byte."""
    place = luck.randrange(len(content))
    return content[:place] + bytes([content[place] ^ luck.randrange(1, 256)]) + content[place + 1 :]


def cut(luck: Random, content: bytes, other: bytes) -> bytes:
    return content[: luck.randrange(len(content))]


def emptied(luck: Random, content: bytes, other: bytes) -> bytes:
    return b""


def swapped(luck: Random, content: bytes, other: bytes) -> bytes:
    """The same file of another folder."""
    return other


def doubled(luck: Random, content: bytes, other: bytes) -> bytes:
    """A block of it twice."""
    start, end = block(luck, content)
    return content[:end] + content[start:end] + content[end:]


def zeroed(luck: Random, content: bytes, other: bytes) -> bytes:
    start, end = block(luck, content)
    return content[:start] + bytes(end - start) + content[end:]


def block(luck: Random, content: bytes) -> tuple[int, int]:
    """Where a page or less begins and ends."""
    start = luck.randrange(len(content))
    return start, min(len(content), start + luck.choice((1, 8, 64, 512, 4096)))


HARMS: tuple[Harm, ...] = (flipped, flipped, cut, emptied, swapped, swapped, doubled, zeroed)


def damage(luck: Random, folder: Path, twin: Path, untold: tuple[str, ...] = UNTOLD) -> str:
    """Damage one file of a folder; what was done, in words. `twin` is a folder like it, of something else."""
    kinds: dict[str, list[Path]] = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name not in untold:
            kinds.setdefault(file.relative_to(folder).parts[0], []).append(file)
    file = luck.choice(kinds[luck.choice(sorted(kinds))])  # a store of many files no more often than a table
    place = file.relative_to(folder)
    if luck.random() < 0.08:
        file.unlink()
        return f"{place} is gone"
    content, like = file.read_bytes(), twin / place
    other = like.read_bytes() if like.is_file() else luck.choice(kinds[place.parts[0]]).read_bytes()
    harm = luck.choice(HARMS) if content else swapped
    file.write_bytes(harm(luck, content, other))
    return f"{place} is {harm.__name__}"
