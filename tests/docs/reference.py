"""docs/reference.md, from the components, their YAML files and the help of the commands.

`python -m tests.docs.reference` writes it, and a test compares it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic.fields import FieldInfo

from ntkexp.component import Component, can_be_built
from ntkexp.config.choices import Choices, config_folders, dotted, title
from ntkexp.config.field_types import accepted_values
from ntkexp.config.plain_yaml import read_yaml, spell_value
from ntkexp.sweep.definition import read_values
from tests.docs import pages as commands
from tests.docs.readme import ROOT

FILE = ROOT / "docs" / "reference.md"
CHOICES = Choices(config_folders(None))
LINE = re.compile(r"( *)([\w.]+):.*?(?: # (.*))?")  # indentation, key, comment
HEADER = ("key", "takes", "default", "meaning")
INTRODUCTION = """\
# Reference

Every choice, with every key that it has; every sweep; and [every command](#commands). A choice is made as
`data=moons`, a key is set as `data.noise=0.2`, on the command line or in a YAML file of yours (`--config-dir`).
`ntkexp config` shows what a command line comes to, and `ntkexp config --tree` says in the terminal what this page says
of choices. A default of – has to be given.

This page is written by `python -m tests.docs.reference`; change the components, their YAML files and the commands
instead.
"""


def reference() -> str:
    """Return the page."""
    sections = [section(group) for group in CHOICES.groups()]
    return "\n".join([INTRODUCTION, always(), *sections, sweeps(), calls()])


def always() -> str:
    """Return the section of keys without a group."""
    file = CHOICES.root()
    fields = {
        key: field
        for key, field in of_class(component(read_yaml(file)), read_yaml(file))
        if key not in CHOICES.defaults()
    }
    return f"## Always\n\n{table(rows(file, '', fields))}"


def of_class(kind: type[Component], tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield dotted keys with their fields, also of nested components."""
    for name, field in kind.model_fields.items():
        child = tree.get(name)
        if isinstance(child, Mapping) and "_target_" in child:
            yield from of_class(component(child), child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def section(group: str) -> str:
    usual = CHOICES.defaults().get(group)
    default = f" If nothing is said, it is `{usual}`." if usual else ""
    options = "\n".join(option(group, name) for name in CHOICES.options(group))
    return f"## {group}\n\n{sentence(inspect.getmodule(base(group)))}{default}\n\n{options}"


def base(group: str) -> type[Component]:
    """Return the base class of a group."""
    kind = component(read_yaml(CHOICES.file(group, CHOICES.options(group)[0])))
    return next(
        parent for parent in reversed(kind.__mro__) if issubclass(parent, Component) and parent is not Component
    )


def option(group: str, name: str) -> str:
    file = CHOICES.file(group, name)
    kind = component(read_yaml(file))
    found = list(rows(file, f"{group}.", {f"{group}.{key}": field for key, field in kind.model_fields.items()}))
    keys = f"\n\n{table(found)}" if found else "\n"
    return f"### {title(group, name, CHOICES)}\n\n{described(kind)}{keys}"


def component(tree: Mapping[str, Any]) -> type[Component]:
    """Return the class of a YAML file."""
    module, _, name = tree["_target_"].rpartition(".")
    found: type[Component] = getattr(import_module(module), name)
    return found


def described(kind: type[Component]) -> str:
    """Return the first sentence of the class, or of the module if it has one component."""
    module = inspect.getmodule(kind)
    own = [other for other in vars(module).values() if inspect.isclass(other) and other.__module__ == kind.__module__]
    concrete = [other for other in own if issubclass(other, Component) and can_be_built(other)]
    return sentence(kind if len(concrete) > 1 else module)


def sentence(documented: ModuleType | type | None) -> str:
    """Return the first paragraph of a docstring."""
    text = (inspect.getdoc(documented) or "").partition("\n\n")[0].rstrip(":,;")
    return " ".join(text.split()).removesuffix(".") + "."


def rows(file: Path, prefix: str, fields: Mapping[str, FieldInfo]) -> Iterator[tuple[str, str, str, str]]:
    """Yield the key, its type, its default and its meaning."""
    defaults = dict(dotted(read_yaml(file), ""))
    for name, meaning in comments(file).items():
        if field := fields.get(f"{prefix}{name}"):
            default = spell_value(defaults.get(name, {}))
            yield f"`{prefix}{name}`", taken(name, field), "–" if default == "???" else f"`{default}`", meaning


def taken(name: str, field: FieldInfo) -> str:
    """Return the type in words. Components are names."""
    group = name.rpartition(".")[2]
    known = f"an option of [{group}](#{group})" if group in CHOICES.groups() else "a name"
    words = re.sub(r"a component of kind \w+", known, accepted_values(field))
    return re.sub(r"a name(, or a name)+", "a name", words)


def comments(file: Path) -> dict[str, str]:
    """Return the comment of each dotted key."""
    found: dict[str, str] = {}
    parents: list[tuple[int, str]] = []
    for line in file.read_text(encoding="utf-8").splitlines():
        if parsed := LINE.fullmatch(line):
            indent, key = len(parsed[1]), parsed[2]
            parents = [*((depth, name) for depth, name in parents if depth < indent), (indent, key)]
            found[".".join(name for _, name in parents)] = (parsed[3] or "").strip()
    return found


def sweeps() -> str:
    """Return the section of shipped sweeps."""
    found = []
    for name in CHOICES.options("sweep"):
        file = CHOICES.file("sweep", name)
        tree, lines = read_yaml(file), file.read_text(encoding="utf-8").splitlines()
        axes = (
            ", ".join(f"`{key}: {spell_value(list(read_values(key, given)))}`" for key, given in tree["axes"].items())
            or "–"
        )
        base = " ".join(f"`{text}`" for text in tree["base"]) or "–"
        found.append((f"`{name}`", axes, spell_value(tree["seeds"]), base, lines[0].removeprefix("# ")))
    return f"## sweep\n\nAs in `ntkexp sweep width`.\n\n{table(found, ('sweep', 'axes', 'seeds', 'base', 'meaning'))}"


def calls() -> str:
    """Return the section of commands."""
    return "\n".join(["## Commands\n", *map(call, commands.ALL)])


def call(path: str) -> str:
    """Return a command with its options."""
    told = " ".join(inspect.cleandoc(commands.ALL[path].help).split())
    return f"### {path}\n\n`{commands.called(path)}`\n\n{told}\n\n{table(commands.rows(path), commands.HEADER)}"


def table(found: Iterable[tuple[str, ...]], header: tuple[str, ...] = HEADER) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *found]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    FILE.write_text(reference(), encoding="utf-8")
