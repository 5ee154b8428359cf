"""docs/reference.md and a page per group in docs/reference/, from the components, their YAML files and the help of
the commands.

`python -m tests.docs.reference` writes them, and a test compares them.
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
FOLDER = ROOT / "docs" / "reference"
CHOICES = Choices(config_folders(None))
LINE = re.compile(r"( *)([\w.]+):.*?(?: # (.*))?")  # indentation, key, comment
HEADER = ("key", "takes", "default", "meaning")
HEADINGS = {
    "data": "Data sets",
    "diagnostics": "Diagnostics",
    "init": "Initialization of weights",
    "loss": "Losses",
    "machine": "Kernel machines",
    "model": "Networks",
    "optimizer": "Optimizers and step sizes (learning rates)",
    "rule": "Rules for the kernel of a step",
    "schedule": "Schedules of the step size (learning rate)",
}
"""The titles of pages that are not the plural of the group."""
INTRODUCTION = """\
# Configuration keys

This page lists the settings of every experiment. Each group of options has a page. Choose an option by its name, such
as `data=moons`, and set a key by its value, such as `data.noise=0.2`, on the command line or in your own YAML file
(`--config-dir`). `ntkexp config` prints the resulting settings, and `ntkexp config --tree` lists all options in the
terminal. A key with the default – must be given.

"""
WRITTEN = "`python -m tests.docs.reference` writes this page from the components, their YAML files and the commands.\n"


def pages() -> dict[Path, str]:
    """Return the text of each page."""
    groups = {FOLDER / f"{group}.md": page_of(group) for group in CHOICES.groups()}
    return {FILE: index(), FOLDER / "sweep.md": sweeps(), FOLDER / "commands.md": calls(), **groups}


def index() -> str:
    """Return the first page: the groups, and the keys without a group."""
    links = [(f"[{group}](reference/{group}.md)", default_of(group), meaning(group)) for group in CHOICES.groups()]
    links += [("[sweep](reference/sweep.md)", "", "Sweeps that the package contains.")]
    links += [("[commands](reference/commands.md)", "", "Every command, with its arguments and options.")]
    groups = table(links, ("group", "default", "meaning"))
    return f"{INTRODUCTION}## Groups\n\n{groups}\n## Keys of every experiment\n\n{always()}\n{WRITTEN}"


def always() -> str:
    """Return the table of keys without a group."""
    file = CHOICES.root()
    fields = {
        key: field
        for key, field in of_class(component(read_yaml(file)), read_yaml(file))
        if key not in CHOICES.defaults()
    }
    return table(rows(file, "", fields, "reference/"))


def of_class(kind: type[Component], tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yield dotted keys with their fields, also of nested components."""
    for name, field in kind.model_fields.items():
        child = tree.get(name)
        if isinstance(child, Mapping) and "_target_" in child:
            yield from of_class(component(child), child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field


def page_of(group: str) -> str:
    usual = CHOICES.defaults().get(group)
    default = f" The default is `{usual}`." if usual else ""
    options = "\n".join(option(group, name) for name in CHOICES.options(group))
    heading = HEADINGS.get(group, f"{group}s".capitalize())
    return f"# {heading}\n\n{meaning(group)}{default}\n\n{options}\n{WRITTEN}"


def default_of(group: str) -> str:
    """Return the default option of a group, or an empty text."""
    usual = CHOICES.defaults().get(group)
    return f"`{usual}`" if usual else ""


def meaning(group: str) -> str:
    return sentence(inspect.getmodule(base(group)))


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
    return f"## {title(group, name, CHOICES)}\n\n{described(kind)}{keys}"


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


def rows(
    file: Path, prefix: str, fields: Mapping[str, FieldInfo], folder: str = ""
) -> Iterator[tuple[str, str, str, str]]:
    """Yield the key, its type, its default and its meaning. `folder` leads to the pages of groups."""
    defaults = dict(dotted(read_yaml(file), ""))
    for name, meaning in comments(file).items():
        if field := fields.get(f"{prefix}{name}"):
            default = spell_value(defaults.get(name, {}))
            yield f"`{prefix}{name}`", taken(name, field, folder), "–" if default == "???" else f"`{default}`", meaning


def taken(name: str, field: FieldInfo, folder: str) -> str:
    """Return the type in words. Components are names."""
    group = name.rpartition(".")[2]
    known = f"an option of [{group}]({folder}{group}.md)" if group in CHOICES.groups() else "a name"
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
    """Return the page of shipped sweeps."""
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
    shown = table(found, ("sweep", "axes", "seeds", "base", "meaning"))
    return f"# Sweeps\n\nRun a sweep by its name, such as `ntkexp sweep width`.\n\n{shown}\n{WRITTEN}"


def calls() -> str:
    """Return the page of commands."""
    return "\n".join(["# Commands\n", *map(call, commands.ALL), WRITTEN])


def call(path: str) -> str:
    """Return a command with its options."""
    told = " ".join(inspect.cleandoc(commands.ALL[path].help).split())
    return f"## {path}\n\n`{commands.called(path)}`\n\n{told}\n\n{table(commands.rows(path), commands.HEADER)}"


def table(found: Iterable[tuple[str, ...]], header: tuple[str, ...] = HEADER) -> str:
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *found]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
