"""A configuration to read: as YAML that would bring it about again, and the tree of everything that can be chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from ntkexp.config.choices import Choices
from ntkexp.mistake import Mistake

if TYPE_CHECKING:  # the tree is shown without Hydra and torch
    from ntkexp.config.compose import Resolved


def shown(resolved: Resolved) -> str:
    """What would run: a `config.yaml` for a folder of the user's."""
    fields = resolved.experiment().fields()
    defaults = "".join(f"  - {group}: {resolved.chosen[group]}\n" for group in fields if group in resolved.chosen)
    return f"defaults:\n{defaults}  - _self_\n\n{as_yaml(completed(resolved.tree, fields))}"


def as_yaml(tree: Mapping[str, Any], indent: str = "") -> str:
    """Plain data in its own order, a line per key.

    >>> print(as_yaml({"a": {"b": [1, None], "c": "x: y"}}), end="")
    a:
      b: [1, null]
      c: 'x: y'
    """
    return "".join(
        f"{indent}{key}:\n{as_yaml(item, indent + '  ')}"
        if isinstance(item, dict) and item
        else f"{indent}{key}: {on_one_line(item)}\n"
        for key, item in tree.items()
    )


def on_one_line(value: object) -> str:
    """YAML of a value."""
    listed = str(yaml.safe_dump([value], default_flow_style=True, width=float("inf"), allow_unicode=True))
    return listed.strip()[1:-1]


def completed(tree: dict[str, Any], fields: dict[str, Any]) -> dict[str, Any]:
    """The tree as the user wrote it, with the fields that only a class has a default for."""
    return {
        key: completed(item, fields.get(key, {})) if isinstance(item, dict) else item
        for key, item in (fields | tree).items()
    }


def tree(choices: Choices) -> str:
    """Show every group and option with its keys, and last what belongs to none."""
    defaults = choices.defaults()
    blocks = [
        block(
            f"{title(group, option, choices)}{' (default)' * (defaults.get(group) == option)}",
            choices.file(group, option),
        )
        for group in choices.groups()
        for option in choices.options(group)
    ]
    return "\n".join([*blocks, block("always", choices.root())])


def title(group: str, option: str, choices: Choices) -> str:
    """How an option is asked for: as a group's, or by its name in a list."""
    if group in choices.defaults():
        return f"{group}={option}"
    lists = [key for key in choices.common() if key.split(".")[-1] == group]
    return f"{(lists or [group])[0]}=[{option}]"


def block(head: str, file: Path) -> str:
    """A file with its comments, without what is no choice."""
    return "\n".join([head, *(f"    {line}" for line in lines(file))]) + "\n"


def lines(file: Path) -> Iterator[str]:
    """The lines of a file that hold keys and comments."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Mistake(f"{file} cannot be read as YAML: it is not UTF-8 text") from None
    within = False
    for line in text.splitlines():
        within = line.startswith("defaults:") or (within and line[:1] in " -")
        if line.strip() and not within and not line.lstrip().startswith("_target_:"):
            yield line
