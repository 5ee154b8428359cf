"""Read YAML as plain data (mappings, lists, texts, numbers), limit its size,
and write YAML.

Other tags, such as sets or bytes, raise a YAML error with the line. Dates are read as
text, because Hydra does so with the same files.

>>> parsed("a: [1, 2020-13-45]")
{'a': [1, '2020-13-45']}
>>> parsed("a: !!int 1x")
Traceback (most recent call last):
yaml.constructor.ConstructorError: '1x' is not a valid int
  in "<unicode string>", line 1, column 4:
    a: !!int 1x
       ^

`spell_value` formats a value as on the command line.

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

MAX_NESTING = 50
MAX_YAML_ENTRIES = 100_000  # entries of one file, including copies by anchors
# each letter of a text with ${…} counts as 10: Hydra parses it slowly
ENTRIES_PER_LETTER = 10

DATE = "tag:yaml.org,2002:timestamp"
PLAIN_TAGS = {
    f"tag:yaml.org,2002:{kind}"
    for kind in ("null", "bool", "int", "float", "str", "seq", "map", "merge")
}
"""The allowed tags. Runs are stored as JSON, which has no sets, dates,
bytes or pairs."""


class Loader(yaml.SafeLoader):
    """A YAML loader for plain data without dates.
    Its errors name the line of a value."""

    yaml_implicit_resolvers = {  # noqa: RUF012  declared like in the base class
        key: [(tag, pattern) for tag, pattern in resolvers if tag != DATE]
        for key, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.depth += 1
        # the base class is recursive and would overflow the stack
        if self.depth > MAX_NESTING:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            problem = f"more than {MAX_NESTING} lists and mappings are nested"
            raise ComposerError(None, None, problem, mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag not in PLAIN_TAGS:
            kind = str(node.tag).replace("tag:yaml.org,2002:", "!!")
            problem = f"{kind} is not supported; write it as text, a number, a list or KEY: VALUE lines"
            raise ConstructorError(None, None, problem, node.start_mark)
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, str):
                value.encode()  # refuse lone surrogates, which no UTF-8 file can store
            return value
        except (ValueError, ArithmeticError, AttributeError, LookupError, TypeError):
            kind = str(node.tag).rpartition(":")[2]
            problem = f"{brief(node.value)} is not a valid {kind}"
            raise ConstructorError(None, None, problem, node.start_mark) from None


def parsed(text: str) -> Any:
    """Parse a YAML document. Return None for an empty text."""
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        refuse_large_expansion(node)
        return loader.construct_document(node)
    finally:
        loader.dispose()


def refuse_large_expansion(root: yaml.Node) -> None:
    """Raise if a document is too large after its anchors are copied.

    Nested anchors can make a small file exponentially large ("billion laughs").
    """
    waiting = [(root, 1, root.start_mark)]
    entries = 0
    while waiting:
        node, depth, mark = waiting.pop()
        entries += 1
        if isinstance(node, yaml.ScalarNode) and "${" in node.value:
            entries += ENTRIES_PER_LETTER * len(node.value)
        if entries > MAX_YAML_ENTRIES or depth > MAX_NESTING:
            is_large = entries > MAX_YAML_ENTRIES
            limit = (
                f"{MAX_YAML_ENTRIES} entries" if is_large else f"{MAX_NESTING} levels"
            )
            problem = f"its anchors and ${{…}} expand to more than {limit}"
            raise ComposerError(None, None, problem, mark)
        parts: list[yaml.Node] = []
        if isinstance(node, yaml.MappingNode):
            parts = [part for pair in node.value for part in pair]
        elif isinstance(node, yaml.SequenceNode):
            parts = list(node.value)
        # visit parts in document order; errors name the line of the top-level entry
        waiting.extend(
            (part, depth + 1, part.start_mark if node is root else mark)
            for part in reversed(parts)
        )


# --- References ${KEY}. Each reference copies its target, so nested references grow
# exponentially. The functions below count the copies before OmegaConf makes them.


# maximum number of copied entries; OmegaConf takes 1 ms for each
MAX_REFERENCE_ENTRIES = 1000
LETTERS_PER_ENTRY = 1000  # a long text counts as an additional entry per 1000 letters

NodePath: TypeAlias = tuple[Any, ...]
"""The path of a node: the keys and indices that lead to it from the root."""

INTERPOLATION = re.compile(r"\$\{\s*([^${}:]*)([:}$]?)")
REFERENCE_ARGUMENT = re.compile(r"\.*[\w.\[\]-]+")


def refuse_reference_growth(tree: Mapping[str, Any]) -> None:
    """Raise if references are nested too deeply or copy too many entries.

    >>> refuse_reference_growth({"a": "x", "b": "${a}${a}", "c": ["${b}", "${.[0]}"]})
    >>> refuse_reference_growth({"a0": 1} | {f"a{k}": f"${{a{k - 1}}}${{a{k - 1}}}" for k in range(1, 20)})
    Traceback (most recent call last):
    ntkexp.mistake.Mistake: a8: the references ${…} up to here copy more than 1000 entries; write some of them out
    """
    nodes = dict(all_nodes(tree, ()))
    entries = 0
    for path, node in nodes.items():
        if has_references(node):
            entries = count_copies(nodes, path, entries)


def count_copies(nodes: Mapping[NodePath, Any], text: NodePath, entries: int) -> int:
    """Count the entries that the references in one text copy, and return the sum of
    this count and `entries`. `text` is the path of the text."""
    # Nodes to visit, each with the chain of references from `text` to the node: the
    # paths of the texts that contain the references.
    waiting: list[tuple[tuple[NodePath, ...], NodePath]] = [((), text)]
    while waiting:
        chain, path = waiting.pop()
        node = nodes[path]
        size = len(node) // LETTERS_PER_ENTRY if isinstance(node, str) else 0
        if not has_references(node):
            entries += 1 + size
            waiting.extend((chain, (*path, key)) for key, _ in children(node))
        elif path not in chain:  # skip circles, which OmegaConf reports
            entries += node.count("${") + size
            waiting.extend(
                ((*chain, path), target) for target in reference_targets(nodes, path)
            )
        key = ".".join(map(str, text))
        if len(chain) > MAX_NESTING:
            raise Mistake(
                f"{key}: its references ${{…}} are nested more than {MAX_NESTING} deep; write "
                "some of them out"
            )
        if entries > MAX_REFERENCE_ENTRIES:
            raise Mistake(
                f"{key}: the references ${{…}} up to here copy more than {MAX_REFERENCE_ENTRIES} "
                "entries; write some of them out"
            )
    return entries


def reference_targets(
    nodes: Mapping[NodePath, Any], path: NodePath
) -> Iterator[NodePath]:
    """Yield the path of every node that a `${…}` reference
    in this string may point to."""
    text = nodes[path]
    for reference in INTERPOLATION.finditer(text):
        # a nested reference, ${${…}}: any text is a possible target
        if reference[2] == "$":
            yield from (other for other, node in nodes.items() if has_references(node))
        keys = [reference[1].strip()]
        if reference[2] == ":":  # a resolver, such as ${oc.select: a.b}
            keys = REFERENCE_ARGUMENT.findall(text, reference.end())
        for key in keys:
            target = reference_target(nodes, path, key)
            if target is not None:
                yield target


def reference_target(
    nodes: Mapping[NodePath, Any], path: NodePath, key: str
) -> NodePath | None:
    """Return the path of the node that `key` refers to. Return None if it does not exist.

    Leading dots make the key relative to `path`. If a node on the way is itself a
    reference, return the path of that node."""
    steps_up = len(key) - len(key.lstrip("."))
    target = path[: len(path) - steps_up] if steps_up else ()
    for part in re.findall(r"[^.\[\]]+", key):
        if has_references(nodes[target]):
            return target
        is_number = part.isdecimal() and len(part) < LETTERS_PER_ENTRY
        if is_number and (*target, part) not in nodes:
            target = (*target, int(part))
        else:
            target = (*target, part)
        if target not in nodes:
            return None
    return target


def has_references(node: object) -> bool:
    return isinstance(node, str) and "${" in node


def children(node: object) -> Iterator[tuple[Any, Any]]:
    if isinstance(node, Mapping):
        yield from node.items()
    elif isinstance(node, list | tuple):
        yield from enumerate(node)


def all_nodes(node: object, path: NodePath) -> Iterator[tuple[NodePath, Any]]:
    """Yield every node with its path, in document order."""
    yield path, node
    for key, child in children(node):
        yield from all_nodes(child, (*path, key))


# --- Reading YAML files.


MAX_YAML_BYTES = 1 << 24


def read_yaml(file: Path) -> dict[str, Any]:
    try:
        refuse_special(file, str(file), MAX_YAML_BYTES)
        tree = deepcopy(parse_cached(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise Mistake(f"{file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise yaml_mistake(error, file) from None
    if not isinstance(tree, dict | None):
        raise Mistake(
            f"{file} holds no KEY: VALUE lines; write, for example, 'width: 64'"
        )
    return tree or {}


@lru_cache(maxsize=1000)
def parse_cached(text: str) -> Any:
    """Parse a YAML document, with a cache. Listing all options reads the same files
    many times."""
    return parsed(text)


def yaml_mistake(error: yaml.YAMLError | UnicodeDecodeError, file: Path) -> Mistake:
    """Convert a YAML error to a `Mistake` with the file, the line and the problem."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return Mistake(f"{file} cannot be read as YAML: it is not plain text in UTF-8")
    mark = error.problem_mark or error.context_mark
    line = f", line {mark.line + 1}" if mark else ""
    return Mistake(
        f"{file}{line} cannot be read as YAML: {error.problem or error.context}"
    )


# --- Writing plain data as YAML.


def spell_value(value: object) -> str:
    """Format a value as YAML on one line. Texts get no quotes."""
    if isinstance(value, str):
        return value
    text = str(
        yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True)
    )
    return text.removesuffix("\n...\n").strip()


def as_yaml(tree: Mapping[str, Any], indent: str = "") -> str:
    """Format a mapping as YAML, with a line for each key, in the order of the mapping.

    >>> print(as_yaml({"a": {"b": [1, None], "c": "x: y"}}), end="")
    a:
      b: [1, null]
      c: 'x: y'
    """
    lines = []
    for key, item in tree.items():
        if isinstance(item, dict) and item:
            lines.append(f"{indent}{key}:\n{as_yaml(item, indent + '  ')}")
            continue
        # dump [item] and strip the brackets: the result is one line, with quotes around
        # texts that need them
        width = float("inf")
        listed = yaml.safe_dump(
            [item], default_flow_style=True, width=width, allow_unicode=True
        )
        lines.append(f"{indent}{key}: {str(listed).strip()[1:-1]}\n")
    return "".join(lines)
