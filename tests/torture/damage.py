"""Random damages of files: a flipped byte, a cut, an empty or other content, a repeated or zeroed block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TypeAlias

Harm: TypeAlias = Callable[[Random, bytes, bytes], bytes]

UNTOLD = (".lock", "error.txt", "progress.json")
"""Files that only inform readers."""


def flipped(luck: Random, content: bytes, other: bytes) -> bytes:
    """Flip bits of one byte."""
    place = luck.randrange(len(content))
    return content[:place] + bytes([content[place] ^ luck.randrange(1, 256)]) + content[place + 1 :]


def cut(luck: Random, content: bytes, other: bytes) -> bytes:
    return content[: luck.randrange(len(content))]


def emptied(luck: Random, content: bytes, other: bytes) -> bytes:
    return b""


def swapped(luck: Random, content: bytes, other: bytes) -> bytes:
    """Take the file of another folder."""
    return other


def doubled(luck: Random, content: bytes, other: bytes) -> bytes:
    """Repeat a block."""
    start, end = block(luck, content)
    return content[:end] + content[start:end] + content[end:]


def zeroed(luck: Random, content: bytes, other: bytes) -> bytes:
    start, end = block(luck, content)
    return content[:start] + bytes(end - start) + content[end:]


def block(luck: Random, content: bytes) -> tuple[int, int]:
    """Draw the start and end of a block of at most a page."""
    start = luck.randrange(len(content))
    return start, min(len(content), start + luck.choice((1, 8, 64, 512, 4096)))


HARMS: tuple[Harm, ...] = (flipped, flipped, cut, emptied, swapped, swapped, doubled, zeroed)


def damage(luck: Random, folder: Path, twin: Path, untold: tuple[str, ...] = UNTOLD) -> str:
    """Damage one file of a folder. Return a description. `twin` is a similar folder."""
    kinds: dict[str, list[Path]] = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name not in untold:
            kinds.setdefault(file.relative_to(folder).parts[0], []).append(file)
    file = luck.choice(kinds[luck.choice(sorted(kinds))])  # a store counts as one file
    place = file.relative_to(folder)
    if luck.random() < 0.08:
        file.unlink()
        return f"{place} is gone"
    content, like = file.read_bytes(), twin / place
    other = like.read_bytes() if like.is_file() else luck.choice(kinds[place.parts[0]]).read_bytes()
    harm = luck.choice(HARMS) if content else swapped
    file.write_bytes(harm(luck, content, other))
    return f"{place} is {harm.__name__}"
