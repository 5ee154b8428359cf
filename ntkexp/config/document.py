"""YAML text → plain data: mappings, lists, texts, numbers. Whatever else a text may hold is a YAML error with its line.

A date is a text, as it is to Hydra, whose files these are.

>>> parsed("a: [1, 2020-13-45]")
{'a': [1, '2020-13-45']}
>>> parsed("a: !!int 1x")
Traceback (most recent call last):
yaml.constructor.ConstructorError: '1x' is no int
  in "<unicode string>", line 1, column 4:
    a: !!int 1x
       ^
"""

from __future__ import annotations

from reprlib import repr as brief
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.constructor import ConstructorError

DEEPEST = 50
MOST = 100_000
"""Entries, an anchor's counted wherever they are referred to: who copies what is here must not run out of memory."""

LETTER = 10  # entries that a letter of a text with ${…} counts as: a slow grammar looks at each

DATE = "tag:yaml.org,2002:timestamp"
PLAIN = {f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge")}
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
            raise ComposerError(None, None, f"more than {DEEPEST} lists and mappings lie in each other", mark)
        found = super().compose_node(parent, index)
        self.depth -= 1
        return found

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag not in PLAIN:
            kind = str(node.tag).replace("tag:yaml.org,2002:", "!!")
            advice = "write it as text, a number, a list or KEY: VALUE lines"
            raise ConstructorError(None, None, f"{kind} is no kind of value here; {advice}", node.start_mark)
        try:
            found = super().construct_object(node, deep)
            refuse_halves(found)
            return found
        except (ValueError, ArithmeticError, AttributeError, LookupError, TypeError):
            kind, shown = str(node.tag).rpartition(":")[2], brief(node.value)
            raise ConstructorError(None, None, f"{shown} is no {kind}", node.start_mark) from None


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


def refuse_halves(value: object) -> None:
    """Half a character, which YAML can spell, is in no file that can be written."""
    if isinstance(value, str):
        value.encode()


def refuse_growth(root: yaml.Node) -> None:
    """An anchor stands for a copy, and a few of them in each other for more copies than there is memory."""
    known: dict[int, tuple[int, int]] = {}

    def extent(node: yaml.Node) -> tuple[int, int]:
        """How many entries a node has with all copies, and how deep it is."""
        if id(node) not in known:
            known[id(node)] = MOST + 1, 0  # until it is known, lest a node in itself be followed for ever
            parts = [extent(child) for child in children(node)]
            known[id(node)] = (
                own(node) + sum(part[0] for part in parts),
                1 + max((part[1] for part in parts), default=0),
            )
        entries, depth = known[id(node)]
        if entries > MOST or depth > DEEPEST:
            found = f"{MOST} entries" if entries > MOST else f"{DEEPEST} levels"
            raise ComposerError(None, None, f"its anchors and ${{…}} make more than {found} of it", node.start_mark)
        return entries, depth

    extent(root)


def own(node: yaml.Node) -> int:
    """What a node counts by itself."""
    return 1 + (LETTER * len(node.value) if isinstance(node, yaml.ScalarNode) and "${" in node.value else 0)


def children(node: yaml.Node) -> list[yaml.Node]:
    """What a list or mapping holds."""
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
