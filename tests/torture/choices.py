"""Every key and every option of configs/, found there."""

from __future__ import annotations

from functools import cache
from random import Random

from ntkexp.config.choices import Choices, folders
from ntkexp.config.plain_yaml import spelled

CHOICES = Choices(folders(None))
CHOSEN = tuple(CHOICES.defaults())  # the groups of which a run has one option each


@cache
def keys_of(group: str, option: str) -> tuple[tuple[str, str], ...]:
    """The keys of an option, each with its value as it would be written."""
    return tuple((key, spelled(value)) for key, value in CHOICES.keys(group, option).items())


@cache
def common() -> tuple[tuple[str, str], ...]:
    """The keys of no option."""
    return tuple((key, spelled(value)) for key, value in CHOICES.common().items())


def aimed(luck: Random) -> tuple[list[str], str, str]:
    """A key somewhere: the words that choose its option, the key, and its value there."""
    if luck.random() < 0.35:
        return [], *luck.choice(common())
    group = luck.choice(CHOSEN)
    option = luck.choice(CHOICES.options(group))
    found = keys_of(group, option)
    return [f"{group}={option}"], *(luck.choice(found) if found else luck.choice(common()))
