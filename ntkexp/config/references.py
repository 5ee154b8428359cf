"""How much the references of a configuration stand for: counted before one is followed.

    entries(${KEY} …) = 1 + Σ entries(KEY),     of a list or mapping the sum of its parts

A reference stands for a copy, and a few of them in each other for more copies than there is time.

>>> refuse_growth({"a": "x", "b": "${a}${a}", "c": ["${b}", "${.[0]}"]})
>>> refuse_growth({"a0": 1} | {f"a{k}": f"${{a{k - 1}}}${{a{k - 1}}}" for k in range(1, 20)})
Traceback (most recent call last):
ntkexp.mistake.Mistake: a9: its ${…} stand for more than 1000 entries; refer to fewer, or write them out
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

from ntkexp.mistake import HIDDEN, SHORTEST, Mistake, without_secrets

DEEPEST = 50
MOST = 1000  # in all of a configuration: to follow one takes about a millisecond
LONG = 1000  # letters that count as an entry

Place: TypeAlias = tuple[str, ...]
"""The keys that lead to a node."""

REFERENCE = re.compile(r"\$\{\s*([^${}:]*)([:}$]?)")
KEY = re.compile(r"\.*[\w.\[\]-]+")


def of_environment(name: str, *default: Any) -> Any:
    """Follow `${oc.env:NAME}` as OmegaConf does, and remember the value: no message shows it."""
    found = oc.env(name, *default)
    if isinstance(found, str) and len(found) >= SHORTEST and name in os.environ:
        HIDDEN[found] = f"${{oc.env:{without_secrets(name)}}}"
    return found


OmegaConf.register_new_resolver("oc.env", of_environment, replace=True)


def refuse_growth(tree: Mapping[str, Any]) -> None:
    """References that lie too deep in each other, or stand for too much."""
    extent = Extent(tree)
    if len(extent.texts) > MOST or sum(extent(place)[0] for place in extent.texts) > MOST:
        raise Mistake(f"the ${{…}} of this configuration stand for more than {MOST} entries; write some of them out")


class Extent:
    """How many entries a node is, and how deep references lie in each other there."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.tree, self.level = tree, 0
        self.known: dict[Place, tuple[int, int]] = {}
        self.texts = [place for place, node in leaves(tree, ()) if refers(node)]

    def __call__(self, place: Place) -> tuple[int, int]:
        if place not in self.known:
            self.known[place] = 0, 0  # until it is known: who follows a circle says so by himself
            node = self.node(place)
            if refers(node):
                self.known[place] = self.followed(place, node)
            else:
                parts = [self((*place, key)) for key, _ in children(node)]
                own = 1 + (len(node) // LONG if isinstance(node, str) else 0)
                self.known[place] = own + sum(part[0] for part in parts), max((part[1] for part in parts), default=0)
        return self.known[place]

    def followed(self, place: Place, text: str) -> tuple[int, int]:
        """What a text with references stands for."""
        self.level += 1
        targets = list(self.targets(place, text)) if self.level <= DEEPEST else []
        parts = [self(target) for target in targets]
        entries = text.count("${") + len(text) // LONG + sum(part[0] for part in parts)
        depth = max(self.level, 1 + max((part[1] for part in parts), default=0))
        self.level -= 1
        if entries > MOST or depth > DEEPEST:
            found = f"stand for more than {MOST} entries" if entries > MOST else f"lead on more than {DEEPEST} times"
            raise Mistake(f"{'.'.join(place)}: its ${{…}} {found}; refer to fewer, or write them out")
        return entries, 1 + max((part[1] for part in parts), default=0)

    def targets(self, place: Place, text: str) -> Iterator[Place]:
        """What a text refers to, or may refer to."""
        for found in REFERENCE.finditer(text):
            if found[2] == "$":  # the key is made of another reference
                yield from self.texts
            words = KEY.findall(text, found.end()) if found[2] == ":" else [found[1].strip()]
            yield from (target for word in words if (target := self.target(place, word)) is not None)

    def target(self, place: Place, key: str) -> Place | None:
        """Where a key leads, as far as no other reference lies on the way; dots at its front are steps up."""
        up = len(key) - len(key.lstrip("."))
        found = place[: len(place) - up] if up else ()
        for part in re.findall(r"[^.\[\]]+", key):
            if refers(self.node(found)):
                return found
            if child(self.node(found), part) is None:
                return None
            found = (*found, part)
        return found

    def node(self, place: Place) -> Any:
        """What lies at a place."""
        found: Any = self.tree
        for key in place:
            found = child(found, key)
        return found


def refers(node: object) -> bool:
    """Whether a node is a text with a reference."""
    return isinstance(node, str) and "${" in node


def child(node: object, key: str) -> Any:
    """What lies there under a key, if anything."""
    if isinstance(node, Mapping):
        return node.get(key) if key in node else next((node[other] for other in node if str(other) == key), None)
    if isinstance(node, list | tuple) and key.isdecimal() and len(key) < LONG and int(key) < len(node):
        return node[int(key)]
    return None


def children(node: object) -> Iterator[tuple[str, Any]]:
    """What a mapping or list holds, by keys."""
    if isinstance(node, Mapping):
        yield from ((str(key), value) for key, value in node.items())
    elif isinstance(node, list | tuple):
        yield from ((str(k), value) for k, value in enumerate(node))


def leaves(node: object, place: Place) -> Iterator[tuple[Place, Any]]:
    """Whatever holds nothing else."""
    parts = list(children(node))
    for key, value in parts:
        yield from leaves(value, (*place, key))
    if not parts:
        yield place, node
