"""Which keys there are, given what is chosen, and what an unknown one was probably meant to be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic.fields import FieldInfo

from ntkexp.component import Component
from ntkexp.config.aliases import KEYS
from ntkexp.config.build import Builder
from ntkexp.config.choices import Choices
from ntkexp.config.field_types import bases
from ntkexp.mistake import Mistake, UnknownKey, nearest

TARGET = FieldInfo(annotation=str)


def keys(
    tree: Mapping[str, Any], kind: type[Component], builder: Builder, prefix: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Find every dotted key under the chosen components, with its field."""
    for name, field in kind.model_fields.items():
        yield f"{prefix}{name}", field
        child, wanted = tree.get(name), bases(field.annotation)
        if isinstance(child, Mapping) and wanted:
            key = f"{prefix}{name}"
            yield f"{key}._target_", TARGET
            yield from keys(child, builder.kind(child, wanted, key), builder, f"{key}.")


def unknown(key: str, known: Mapping[str, FieldInfo], chosen: Mapping[str, str], choices: Choices) -> Mistake:
    """Advice for a key that there is not."""
    given, last = key, key.rsplit(".", maxsplit=1)[-1]
    named = sorted((other for other in known if other.split(".")[-1] == last), key=depth)
    if named:
        return Mistake(f"{key}: there is no such key; did you mean '{named[0]}'?")
    meant = KEYS.get(last.lower(), "")
    if meant and parent(key) in {"", parent(meant)}:
        if meant in {*known, *chosen} or "=" in meant:
            return Mistake(f"{key}: there is no such key; did you mean '{meant}'?")
        key, last = meant, meant.rpartition(".")[2]
    elsewhere = [
        (group, option) for group, option, other in others(choices, chosen) if other in {key, f"{group}.{key}"}
    ]
    if elsewhere:
        # the one of that name, else the plainest
        group, option = min(elsewhere, key=lambda found: (found[1] != last, len(choices.keys(*found))))
        return Mistake(
            f"{given}: {group}={chosen[group]} has no such key, {group}={option} has it; "
            f"did you mean '{group}={option} {group}.{last}=…'?"
        )
    hint = closest(key, known) or known_in(key, known)
    return Mistake(f"{key}: there is no such key{hint}") if hint else UnknownKey(f"{key}: there is no such key")


def others(choices: Choices, chosen: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """The keys that other options would have."""
    for group, current in chosen.items():
        for option in choices.options(group):
            if option != current:
                yield from ((group, option, key) for key in choices.keys(group, option))


def closest(key: str, known: Mapping[str, FieldInfo]) -> str:
    """Hint at the nearest key: beside it if its group exists, by the last part if it names no group, else in full."""
    group, dot, last = key.rpartition(".")
    wanted = [other for other in known if not dot or parent(other) == group]
    beside = {other.split(".")[-1]: other for other in sorted(wanted, key=depth, reverse=True)}
    near = get_close_matches(last, beside, n=1, cutoff=0.5)
    return f"; did you mean '{beside[near[0]]}'?" if near else "" if beside else nearest(key, known)


def known_in(key: str, known: Mapping[str, FieldInfo]) -> str:
    """Find the keys beside an unknown one."""
    beside = [other for other in known if parent(other) == parent(key) and not other.endswith("_target_")]
    return f"; known are {', '.join(beside)}" if beside else ""


def depth(key: str) -> int:
    """How many groups a key lies in; of two that fit, the shallower is meant."""
    return key.count(".")


def parent(key: str) -> str:
    """Take the last part from a key."""
    return key.rpartition(".")[0]
