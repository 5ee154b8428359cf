"""What can be chosen: groups (folders), their options (files) and the keys of each, read from YAML alone.

Completion and advice ask here, without Hydra and without importing a component.

>>> choices = Choices(config_folders(None))
>>> choices.options("init"), choices.keys("optimizer", "sgd")["optimizer.batch"]
(['mean_field', 'ntk', 'standard'], 32)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ntkexp.config.plain_yaml import read_yaml, spell_value
from ntkexp.mistake import Mistake, WrongArgument, nearest, refuse_special

# --- Where the YAML files lie: those that come with the package, and before them those of the user.


LAYOUT = "it takes a folder of YAML files laid out like configs/, such as DIR/model/NAME.yaml"


def config_folders(config_dir: Path | None) -> tuple[Path, ...]:
    """List the folders to look in, the user's before the package's; the first that has a file wins."""
    if config_dir is None:
        return (shipped(),)
    folder = config_dir.expanduser()
    given = f"config_dir={folder}"
    if not folder.exists():
        beside = (
            [str(other) for other in folder.parent.glob("*/")] if folder.parent.is_dir() else []
        )
        raise WrongArgument(
            f"{given}: there is no such folder; {LAYOUT}{nearest(str(folder), beside)}",
            "config_dir",
        )
    if not folder.is_dir():
        raise WrongArgument(f"{given} is a file; {LAYOUT}", "config_dir")
    files = [*folder.glob("*.yaml"), *folder.glob("*/*.yaml")]
    if not files:
        raise WrongArgument(f"{given} holds no YAML file; {LAYOUT}", "config_dir")
    for file in files:
        if file.exists():  # Hydra opens whatever has the name
            refuse_special(file, str(file), sys.maxsize)
    return folder.resolve(), shipped()


def shipped() -> Path:
    """The package's own: inside it once installed, beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    inside, beside = package / "configs", package.parent / "configs"
    return inside if inside.is_dir() else beside


# --- The choices that these files are.


NO_CHOICES = frozenset({"claim", "study", "sweep"})
"""Folders of YAML that describe something else than a part of an experiment."""


@dataclass(frozen=True)
class Choices:
    """Options lie in some folders; a file in an earlier folder hides its namesakes in later ones."""

    folders: tuple[Path, ...]

    def groups(self) -> list[str]:
        return sorted(
            {file.parent.name for folder in self.folders for file in folder.glob("*/*.yaml")}
            - NO_CHOICES
        )

    def options(self, group: str) -> list[str]:
        files = (file for folder in self.folders for file in (folder / group).glob("*.yaml"))
        return sorted({file.stem for file in files if file.is_file()})

    def file(self, group: str, option: str) -> Path:
        if option not in self.options(group):
            options = ", ".join(self.options(group))
            hint = nearest(option, self.options(group))
            raise Mistake(f"'{option}' is not an option of {group}; choose from {options}{hint}")
        return next(
            file for folder in self.folders if (file := folder / group / f"{option}.yaml").is_file()
        )

    def root(self) -> Path:
        """The file in which everything is put together."""
        return next(file for folder in self.folders if (file := folder / "config.yaml").is_file())

    def keys(self, group: str, option: str) -> dict[str, Any]:
        """Find the dotted keys of an option, with their values."""
        return dict(dotted(read_yaml(self.file(group, option)), f"{group}."))

    def common(self) -> dict[str, Any]:
        """Find the dotted keys that belong to no group, with their values."""
        values = {key: value for key, value in read_yaml(self.root()).items() if key != "defaults"}
        return dict(dotted(values, ""))

    def defaults(self) -> dict[str, str]:
        """The option of each group where nothing else is asked for."""
        entries = read_yaml(self.root()).get("defaults", [])
        if not isinstance(entries, list):
            raise Mistake(f"{self.root()}: 'defaults' takes a list, such as '- model: mlp'")
        pairs = [pair for entry in entries if isinstance(entry, dict) for pair in entry.items()]
        return {
            str(group).split()[-1].lstrip("/"): option
            for group, option in pairs
            if isinstance(option, str)
        }


def dotted(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Go through the leaves of a tree.

    >>> dict(dotted({"a": {"b": 1, "c": [2]}}, ""))
    {'a.b': 1, 'a.c': [2]}
    """
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{key}.")
        elif key != "_target_":
            yield f"{prefix}{key}", value


# --- All of them as text, with their comments.


def tree(choices: Choices) -> str:
    """Show every group and option with its keys, and last what belongs to none."""
    defaults = choices.defaults()
    files = {
        f"{title(group, option, choices)}{' (default)' * (defaults.get(group) == option)}": choices.file(
            group, option
        )
        for group in choices.groups()
        for option in choices.options(group)
    }
    files["always"] = choices.root()
    return "\n".join(
        "\n".join([head, *(f"    {line}" for line in lines(files[head]))]) + "\n" for head in files
    )


def title(group: str, option: str, choices: Choices) -> str:
    """How an option is chosen: as a group's, by its name, or by its name in a list.

    >>> choices = Choices(config_folders(None))
    >>> title("model", "mlp", choices), title("measure", "loss", choices), title("rule", "left", choices)
    ('model=mlp', 'path.measure=loss', 'path.rule=[left]')
    """
    if group in choices.defaults():
        return f"{group}={option}"
    common = choices.common()
    key = next((key for key in common if key.split(".")[-1] == group), group)
    return f"{key}={option}" if common.get(key) in choices.options(group) else f"{key}=[{option}]"


def lines(file: Path) -> Iterator[str]:
    """The lines of a file that hold keys and comments, without what is no choice."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Mistake(f"{file} cannot be read as YAML: it is not UTF-8 text") from None
    within = False
    for line in text.splitlines():
        within = line.startswith("defaults:") or (within and line[:1] in " -")
        if line.strip() and not within and not line.lstrip().startswith("_target_:"):
            yield line


# --- What a shell offers in place of an unfinished word: groups and keys, then their options and values.
#
# It answers while somebody waits, so it reads YAML and imports no component.


def complete(words: Sequence[str], unfinished: str, choices: Choices) -> list[str]:
    """The words that may stand in place of the unfinished one, given those before it.

    >>> complete([], "model.wi", Choices(config_folders(None)))
    ['model.width=', 'model.width=512']
    """
    *before, begun = rejoin_lists(words)
    chosen = choices.defaults() | {
        group: option
        for group, _, option in (word.partition("=") for word in before)
        if option in choices.options(group)
    }
    known = choices.common() | {
        key: value
        for group, option in chosen.items()
        for key, value in choices.keys(group, option).items()
    }
    if begun.removesuffix("=") not in {*known, *chosen}:
        begun = ""
    text = begun + unfinished
    key, equals, value = text.partition("=")
    if equals:
        offered = [f"{key}={option}" for option in values(key, value, chosen, known, choices)]
    else:  # keys; where a single one is left its values too: a shell then ends the word only there
        keys = [word for word in (*chosen, *known) if word.startswith(key)]
        default = (
            [(keys[0], option) for option in values(keys[0], "", chosen, known, choices)]
            if len(keys) == 1
            else []
        )
        offered = [
            *(f"{word}=" for word in keys),
            *(f"{word}={option}" for word, option in default),
        ]
    return [word.removeprefix(begun) for word in offered if word.startswith(text)]


def rejoin_lists(words: Sequence[str]) -> list[str]:
    """Words as they were typed, and last what of the unfinished one comes before an '='.

    bash splits a word at '=' and hands over its parts, others the whole; of `model=` bash drops the '=' itself.

    >>> rejoin_lists(["data", "=", "table", "model", "="]), rejoin_lists(["data=table"]), rejoin_lists(["model"])
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


def values(
    key: str, value: str, chosen: Mapping[str, str], known: Mapping[str, Any], choices: Choices
) -> Iterator[str]:
    """Offer the options of a group, the names of a list, or the default."""
    names = choices.options(key.rsplit(".", maxsplit=1)[-1])
    if key in chosen:
        yield from choices.options(key)
    elif key in known and names and isinstance(known[key], list):
        started = value[: max(value.rfind(","), value.rfind("[")) + 1] or "["
        yield from (
            f"{started}{name}{end}" for name in names if name not in started for end in ("]", ",")
        )
    elif known.get(key) in names:
        yield from names
    elif isinstance(known.get(key), bool):
        yield from ("false", "true")
    elif known.get(key) not in (None, "???"):
        yield spell_value(known[key]).replace(", ", ",")
