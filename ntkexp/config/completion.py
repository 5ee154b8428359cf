"""What a shell offers in place of an unfinished word: groups and keys, then their options and values.

It answers while somebody waits, so it reads YAML and imports no component.

>>> from ntkexp.config.choices import folders
>>> complete([], "model.wi", Choices(folders(None)))
['model.width=', 'model.width=512']
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ntkexp.config.choices import Choices
from ntkexp.config.plain_yaml import spelled


def complete(words: Sequence[str], unfinished: str, choices: Choices) -> list[str]:
    """The words that may stand in place of the unfinished one, given those before it."""
    *before, begun = rejoined(words)
    chosen = choices.defaults() | {
        group: option
        for group, _, option in (word.partition("=") for word in before)
        if option in choices.options(group)
    }
    known = choices.common() | {
        key: value for group, option in chosen.items() for key, value in choices.keys(group, option).items()
    }
    if begun.removesuffix("=") not in {*known, *chosen}:
        begun = ""
    found = [
        word for word in offered(begun + unfinished, chosen, known, choices) if word.startswith(begun + unfinished)
    ]
    return [word.removeprefix(begun) for word in found]


def rejoined(words: Sequence[str]) -> list[str]:
    """Words as they were typed, and last what of the unfinished one comes before an '='.

    bash splits a word at '=' and hands over its parts, others the whole; of `model=` bash drops the '=' itself.

    >>> rejoined(["data", "=", "table", "model", "="]), rejoined(["data=table"]), rejoined(["model"])
    (['data=table', 'model='], ['data=table', ''], ['model='])
    """
    typed: list[str] = []
    for word in words:
        if typed and (word == "=" or typed[-1].endswith("=")):
            typed[-1] += word
        else:
            typed.append(word)
    if typed and typed[-1].endswith("="):
        return typed
    if typed and "=" not in typed[-1]:
        return [*typed[:-1], f"{typed[-1]}="]
    return [*typed, ""]


def offered(text: str, chosen: Mapping[str, str], known: Mapping[str, Any], choices: Choices) -> list[str]:
    """Keys; or values, once there is an '=', and where a single key is left: a shell then ends the word only there."""
    key, equals, value = text.partition("=")
    if equals:
        return [f"{key}={option}" for option in values(key, value, chosen, known, choices)]
    keys = [word for word in (*chosen, *known) if word.startswith(key)]
    default = (
        [f"{keys[0]}={option}" for option in values(keys[0], "", chosen, known, choices)] if len(keys) == 1 else []
    )
    return [*(f"{word}=" for word in keys), *default]


def values(
    key: str, value: str, chosen: Mapping[str, str], known: Mapping[str, Any], choices: Choices
) -> Iterator[str]:
    """Offer the options of a group, the names of a list, or the default."""
    names = choices.options(key.rsplit(".", maxsplit=1)[-1])
    if key in chosen:
        yield from choices.options(key)
    elif key in known and names and isinstance(known[key], list):
        started = value[: max(value.rfind(","), value.rfind("[")) + 1] or "["
        yield from (f"{started}{name}{end}" for name in names if name not in started for end in ("]", ","))
    elif isinstance(known.get(key), bool):
        yield from ("false", "true")
    elif known.get(key) not in (None, "???"):
        yield spelled(known[key]).replace(", ", ",")
