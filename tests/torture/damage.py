"""Random keys of configs/, random damages of files, and odd values."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from typing import TypeAlias

from ntkexp.config.choices import Choices, config_folders
from ntkexp.config.plain_yaml import spell_value

CHOICES = Choices(config_folders(None))
CHOSEN = tuple(CHOICES.defaults())  # groups with one option per run


@cache
def keys_of(group: str, option: str) -> tuple[tuple[str, str], ...]:
    """Return the keys of an option, with their values as text."""
    return tuple((key, spell_value(value)) for key, value in CHOICES.keys(group, option).items())


@cache
def common() -> tuple[tuple[str, str], ...]:
    """Return the keys without a group."""
    return tuple((key, spell_value(value)) for key, value in CHOICES.common().items())


def aimed(luck: Random) -> tuple[list[str], str, str]:
    """Draw a key. Return the words that choose its option, the key, and its value."""
    if luck.random() < 0.35:
        return [], *luck.choice(common())
    group = luck.choice(CHOSEN)
    option = luck.choice(CHOICES.options(group))
    found = keys_of(group, option)
    return [f"{group}={option}"], *(luck.choice(found) if found else luck.choice(common()))


# Damages: a file is flipped in a byte, cut, emptied, swapped, removed, or has a block twice or zeroed.


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


# Odd values: too large, of another type, or confusing to parse.


HUGE = ("1e11", "100000000000", str(10**20), str(10**24), str(2**63), str(2**63 - 1), str(2**64), f"1{'0' * 400}")
NUMBERS = (
    *("0", "-0", "-0.0", "1", "2", "3", "-1", "0.5", "-1.5", "1e-320", "1e-9", "1e9", "1e30", "1e308", "1e400"),
    *("-1e400", "nan", "NaN", ".nan", "inf", "-inf", ".inf", "0x10", "0b1", "0o17", "1_000", "1e", "1.", ".5", "+1"),
    *("٣", "½"),
    *HUGE,
)
WORDS = (
    *("", " ", "null", "~", "true", "false", "yes", "None", "???", "*", "&a", "!!python/object:os.system", "!x", "é"),
    *("日本語", "\u202e", "\ufeff", "\x1b[31m", "\t", "a\nb", "'", '"', "'a", "a'b", "\\", "%s", "{}", "{0}"),
    *("../../etc/passwd", "/dev/null", "/proc/self/mem", "/", ".", "..", "~root", "a" * 5000, "-", "--", "=", "=="),
    *(",", "==", "2020-13-45", "2020-01-01", "12:30:45", "1:1", "<<", "a: b", "# a", "relu", "mlp", "secant", "all"),
    *("log", "\udcff", "os.system", "ntkexp.model.MLP", "ntkexp.nope.Nope", "a.b.c", "__class__", "ntkexp"),
)
TREES = (
    *("[]", "[[]]", "[1,", "{", "{}", "{a:1}", "{a:{b:[1,2]}}", "[null]", "[1,1]", "[-1]", "[1e400]"),
    *("[0,100000000000]", "[secant]", "[secant,left,gauss]", "[a,b]", "{_target_:os.system}"),
    *("{_target_:ntkexp.model.MLP}", "[" * 300, "1,2", "1,,2", "range(0,3)", "choice(1,2)", "interval(0,1)"),
    *("shuffle(1,2)", "sort(1)", "glob(*)", "int(3)", "{1:2}", "{null:1}", "{_target_:1}", "[true,false]"),
    *("[[1],[2]]", "{a:b,a:c}", "[]]", "[NaN]"),
)
REFERENCES = (
    *("${seed}", "${model}", "${model.width}", "${nope}", "${..}", "${.}", "${", "${}", "${oc.env:HOME}"),
    *("${oc.env:NOPE}", "${oc.decode:1}", "${oc.create:{a:1}}", "${oc.select:seed}", "${oc.dict.keys:model}"),
    *("${hydra:job.name}", "${now:%Y}", "${a:${b:${c}}}", "a${seed}b", "$", "$$", "\\${seed}"),
    *("${oc.deprecated:seed}", "${optimizer}"),
)


def value(luck: Random) -> str:
    return luck.choice(luck.choice((NUMBERS, NUMBERS, WORDS, TREES, REFERENCES)))


def letters(luck: Random, most: int = 12) -> str:
    """Draw a text of odd letters."""
    return "".join(
        luck.choice("aZ0_.-=[]{}(),:;~+!@#$%^&*|\\/'\" \tßé日\u0301\U0001f600") for _ in range(luck.randrange(most))
    )


def misspelt(text: str, luck: Random) -> str:
    """Insert, remove or replace a letter."""
    at = luck.randrange(len(text) + 1)
    return text[:at] + luck.choice(("", text[at : at + 1] * 2, letters(luck, 3))) + text[at + 1 :]
