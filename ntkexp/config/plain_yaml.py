"""YAML text → plain data: mappings, lists, texts, numbers; how much that may stand for; and plain data → YAML.

Whatever else a text may hold is a YAML error with its line. A date is a text, as it is to Hydra, whose files these are.

>>> parsed("a: [1, 2020-13-45]")
{'a': [1, '2020-13-45']}
>>> parsed("a: !!int 1x")
Traceback (most recent call last):
yaml.constructor.ConstructorError: '1x' is not a valid int
  in "<unicode string>", line 1, column 4:
    a: !!int 1x
       ^

A value as it would be written on the command line.

>>> spell_value([1, None, "a"]), spell_value(True), spell_value("x")
('[1, null, a]', 'true', 'x')
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from reprlib import repr as brief
from typing import Any, TypeAlias

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

from ntkexp.mistake import Mistake, refuse_special

DEEPEST = 50
MOST = 100_000
"""Entries, an anchor's counted wherever they are referred to: who copies what is here must not run out of memory."""

LETTER = 10  # entries that a letter of a text with ${…} counts as: a slow grammar looks at each

DATE = "tag:yaml.org,2002:timestamp"
PLAIN = {
    f"tag:yaml.org,2002:{kind}"
    for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge")
}
"""What values are: sets, dates, bytes and pairs, which tags can ask for, are in no JSON that a run leaves."""


class Loader(yaml.SafeLoader):
    """Knows no dates, and says of a value that is none where it stands."""

    yaml_implicit_resolvers = {  # noqa: RUF012  as its base declares it
        key: [(tag, pattern) for tag, pattern in resolvers if tag != DATE]
        for key, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1  # goes down by calls, of which there cannot be many
        if self.depth > DEEPEST:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise ComposerError(
                None, None, f"more than {DEEPEST} lists and mappings are nested", mark
            )
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag not in PLAIN:
            kind = str(node.tag).replace("tag:yaml.org,2002:", "!!")
            advice = "write it as text, a number, a list or KEY: VALUE lines"
            raise ConstructorError(
                None, None, f"{kind} is not supported; {advice}", node.start_mark
            )
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, str):
                value.encode()  # half a character, which YAML can spell, is in no file that can be written
            return value
        except (ValueError, ArithmeticError, AttributeError, LookupError, TypeError):
            kind, shown = str(node.tag).rpartition(":")[2], brief(node.value)
            raise ConstructorError(
                None, None, f"{shown} is not a valid {kind}", node.start_mark
            ) from None


def parsed(text: str) -> Any:
    """Parse the one document in a text; None if there is none."""
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        refuse_growth(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def refuse_growth(root: yaml.Node) -> None:
    """An anchor stands for a copy, and a few of them in each other for more copies than there is memory."""
    sizes: dict[int, tuple[int, int]] = {}

    def extent(node: yaml.Node) -> tuple[int, int]:
        """How many entries a node has with all copies, and how deep it is."""
        if id(node) not in sizes:
            sizes[id(node)] = (
                MOST + 1,
                0,
            )  # until it is known, lest a node in itself be followed for ever
            match node:
                case yaml.MappingNode():
                    children = [part for pair in node.value for part in pair]
                case yaml.SequenceNode():
                    children = list(node.value)
                case _:
                    children = []
            own = 1 + (
                LETTER * len(node.value)
                if isinstance(node, yaml.ScalarNode) and "${" in node.value
                else 0
            )
            parts = [extent(child) for child in children]
            sizes[id(node)] = (
                own + sum(part[0] for part in parts),
                1 + max((part[1] for part in parts), default=0),
            )
        entries, depth = sizes[id(node)]
        if entries > MOST or depth > DEEPEST:
            found = f"{MOST} entries" if entries > MOST else f"{DEEPEST} levels"
            raise ComposerError(
                None, None, f"its anchors and ${{…}} make more than {found} of it", node.start_mark
            )
        return entries, depth

    extent(root)


# --- How much the references of a configuration stand for: counted before one is followed.
#
#     entries(${KEY} …) = 1 + Σ entries(KEY),     of a list or mapping the sum of its parts
#
# A reference stands for a copy, and a few of them in each other for more copies than there is time.


MOST_REFERENCES = 1000  # entries in all of a configuration: to follow one takes about a millisecond
LONG = 1000  # letters that count as an entry

Place: TypeAlias = tuple[str, ...]
"""The keys that lead to a node."""

REFERENCE = re.compile(r"\$\{\s*([^${}:]*)([:}$]?)")
REFERRED = re.compile(r"\.*[\w.\[\]-]+")


def refuse_reference_growth(tree: Mapping[str, Any]) -> None:
    """Refuse references that lie too deep in each other, or stand for too much.

    >>> refuse_reference_growth({"a": "x", "b": "${a}${a}", "c": ["${b}", "${.[0]}"]})
    >>> refuse_reference_growth({"a0": 1} | {f"a{k}": f"${{a{k - 1}}}${{a{k - 1}}}" for k in range(1, 20)})
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: a9: its ${…} stand for more than 1000 entries; refer to fewer, or write them out
    """
    extent = Extent(tree)
    most = MOST_REFERENCES
    if len(extent.texts) > most or sum(extent(place)[0] for place in extent.texts) > most:
        raise Mistake(
            f"the ${{…}} of this configuration stand for more than {most} entries; write some of them out"
        )


class Extent:
    """How many entries a node is, and how deep references lie in each other there."""

    def __init__(self, tree: Mapping[str, Any]) -> None:
        self.tree, self.level = tree, 0
        self.known: dict[Place, tuple[int, int]] = {}
        self.texts = [place for place, node in leaves(tree, ()) if has_references(node)]

    def __call__(self, place: Place) -> tuple[int, int]:
        if place not in self.known:
            self.known[place] = 0, 0  # until it is known: who follows a circle says so by himself
            node = self.node(place)
            if has_references(node):
                self.known[place] = self.of_references(place, node)
            else:
                parts = [self((*place, key)) for key, _ in children(node)]
                own = 1 + (len(node) // LONG if isinstance(node, str) else 0)
                self.known[place] = (
                    own + sum(part[0] for part in parts),
                    max((part[1] for part in parts), default=0),
                )
        return self.known[place]

    def of_references(self, place: Place, text: str) -> tuple[int, int]:
        """The extent of what a text refers to, or may refer to."""
        self.level += 1
        targets: list[Place | None] = []
        for reference in REFERENCE.finditer(text) if self.level <= DEEPEST else ():
            if reference[2] == "$":  # the key is made of another reference
                targets += self.texts
            words = (
                REFERRED.findall(text, reference.end())
                if reference[2] == ":"
                else [reference[1].strip()]
            )
            targets += [self.target(place, word) for word in words]
        parts = [self(target) for target in targets if target is not None]
        entries = text.count("${") + len(text) // LONG + sum(part[0] for part in parts)
        below = 1 + max((part[1] for part in parts), default=0)
        if entries > MOST_REFERENCES or max(self.level, below) > DEEPEST:
            many = entries > MOST_REFERENCES
            what = (
                f"stand for more than {MOST_REFERENCES} entries"
                if many
                else f"lead on more than {DEEPEST} times"
            )
            raise Mistake(
                f"{'.'.join(place)}: its ${{…}} {what}; refer to fewer, or write them out"
            )
        self.level -= 1
        return entries, below

    def target(self, place: Place, key: str) -> Place | None:
        """Where a key leads, as far as no other reference lies on the way; dots at its front are steps up."""
        up = len(key) - len(key.lstrip("."))
        target = place[: len(place) - up] if up else ()
        for part in re.findall(r"[^.\[\]]+", key):
            if has_references(self.node(target)):
                return target
            if child(self.node(target), part) is None:
                return None
            target = (*target, part)
        return target

    def node(self, place: Place) -> Any:
        node: Any = self.tree
        for key in place:
            node = child(node, key)
        return node


def has_references(node: object) -> bool:
    return isinstance(node, str) and "${" in node


def child(node: object, key: str) -> Any:
    """What lies there under a key, if anything."""
    if isinstance(node, Mapping):
        return (
            node.get(key)
            if key in node
            else next((node[other] for other in node if str(other) == key), None)
        )
    if (
        isinstance(node, list | tuple)
        and key.isdecimal()
        and len(key) < LONG
        and int(key) < len(node)
    ):
        return node[int(key)]
    return None


def children(node: object) -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        yield from ((str(key), value) for key, value in node.items())
    elif isinstance(node, list | tuple):
        yield from ((str(k), value) for k, value in enumerate(node))


def leaves(node: object, place: Place) -> Iterator[tuple[Place, Any]]:
    parts = list(children(node))
    for key, value in parts:
        yield from leaves(value, (*place, key))
    if not parts:
        yield place, node


# --- A file of YAML.


LARGEST = 1 << 24
"""Bytes of a YAML file."""


def read_yaml(file: Path) -> dict[str, Any]:
    try:
        refuse_special(file, str(file), LARGEST)
        tree = deepcopy(parse_cached(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise Mistake(f"{file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise yaml_mistake(error, file) from None
    if not isinstance(tree, dict | None):
        raise Mistake(f"{file} holds no KEY: VALUE lines; write such as 'width: 64'")
    return tree or {}


@lru_cache(maxsize=1000)
def parse_cached(text: str) -> Any:
    """What a text says, parsed once: a list of all choices reads the same few files again and again."""
    return parsed(text)


def yaml_mistake(error: yaml.YAMLError | UnicodeDecodeError, file: Path) -> Mistake:
    """What is wrong with a YAML file, and where."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return Mistake(f"{file} cannot be read as YAML: it is not plain text in UTF-8")
    mark = error.problem_mark or error.context_mark
    where = f", line {mark.line + 1}" if mark else ""
    return Mistake(f"{file}{where} cannot be read as YAML: {error.problem or error.context}")


# --- Plain data as YAML.


def spell_value(value: object) -> str:
    """Spell a value as YAML on one line, and text as it stands."""
    if isinstance(value, str):
        return value
    text = str(yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True))
    return text.removesuffix("\n...\n").strip()


def as_yaml(tree: Mapping[str, Any], indent: str = "") -> str:
    """Plain data in its own order, a line per key.

    >>> print(as_yaml({"a": {"b": [1, None], "c": "x: y"}}), end="")
    a:
      b: [1, null]
      c: 'x: y'
    """
    lines = []
    for key, item in tree.items():
        if isinstance(item, dict) and item:
            lines.append(f"{indent}{key}:\n{as_yaml(item, indent + '  ')}")
        else:
            listed = str(
                yaml.safe_dump(
                    [item], default_flow_style=True, width=float("inf"), allow_unicode=True
                )
            )
            lines.append(f"{indent}{key}: {listed.strip()[1:-1]}\n")
    return "".join(lines)
