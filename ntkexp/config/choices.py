"""Groups (folders), their options (YAML files) and the keys of each option.

Shell completion and error messages use this module. To be fast, it imports neither
Hydra nor the classes of components.

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

# --- The folders of YAML files: the user's, then the package's.


LAYOUT = "it takes a folder of YAML files laid out like configs/, such as DIR/model/NAME.yaml"


def config_folders(config_dir: Path | None) -> tuple[Path, ...]:
    """Return the folders to search. The user's folder, if any, comes before the folder
    of the package.

    A file in the first folder hides a file of the same name in the second folder.
    """
    if config_dir is None:
        return (shipped(),)
    folder = config_dir.expanduser()
    argument = f"config_dir={folder}"
    if not folder.exists():
        sibling_folders = [str(other) for other in folder.parent.glob("*/")]
        raise WrongArgument(
            f"{argument}: there is no such folder; {LAYOUT}{nearest(str(folder), sibling_folders)}",
            "config_dir",
        )
    if not folder.is_dir():
        raise WrongArgument(f"{argument} is a file; {LAYOUT}", "config_dir")
    files = [*folder.glob("*.yaml"), *folder.glob("*/*.yaml")]
    if not files:
        raise WrongArgument(f"{argument} holds no YAML file; {LAYOUT}", "config_dir")
    for file in files:
        if file.exists():  # refuse pipes and devices, which Hydra would open
            refuse_special(file, str(file), sys.maxsize)
    return folder.resolve(), shipped()


def shipped() -> Path:
    """Return the package's folder of YAML files: inside an installed package,
    or next to it."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


# --- The options in these folders.


NO_CHOICES = frozenset({"claim", "study", "sweep"})
"""Folders of YAML files that are not components of an experiment."""


@dataclass(frozen=True)
class Choices:
    """The options (YAML files) in some folders.
    Files in earlier folders hide files of the same name."""

    folders: tuple[Path, ...]

    def groups(self) -> list[str]:
        return sorted(
            {
                file.parent.name
                for folder in self.folders
                for file in folder.glob("*/*.yaml")
            }
            - NO_CHOICES
        )

    def options(self, group: str) -> list[str]:
        files = (
            file for folder in self.folders for file in (folder / group).glob("*.yaml")
        )
        return sorted({file.stem for file in files if file.is_file()})

    def file(self, group: str, option: str) -> Path:
        if option not in self.options(group):
            options = ", ".join(self.options(group))
            hint = nearest(option, self.options(group))
            raise Mistake(
                f"'{option}' is not an option of {group}; choose from {options}{hint}"
            )
        return next(
            file
            for folder in self.folders
            if (file := folder / group / f"{option}.yaml").is_file()
        )

    def root(self) -> Path:
        """Return `config.yaml`, which lists the default options
        and the keys outside groups."""
        return next(
            file
            for folder in self.folders
            if (file := folder / "config.yaml").is_file()
        )

    def keys(self, group: str, option: str) -> dict[str, Any]:
        """Return the dotted keys of an option, with their values."""
        return dict(dotted(read_yaml(self.file(group, option)), f"{group}."))

    def common(self) -> dict[str, Any]:
        """Return the dotted keys that belong to no group, with their values."""
        values = {
            key: value
            for key, value in read_yaml(self.root()).items()
            if key != "defaults"
        }
        return dict(dotted(values, ""))

    def defaults(self) -> dict[str, str]:
        """Return the default option of each group."""
        entries = read_yaml(self.root()).get("defaults", [])
        defaults: dict[str, str] = {}
        for entry in entries if isinstance(entries, list) else [entries]:
            match entry:
                case dict() if all(
                    isinstance(option, str) for option in entry.values()
                ):
                    defaults |= entry
                case "_self_":
                    continue
                case _:
                    raise Mistake(
                        f"{self.root()}: 'defaults' takes a list, such as '- model: mlp'"
                    )
        return defaults


def dotted(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nested dictionary with dotted keys, without `_target_`.

    >>> dict(dotted({"a": {"b": 1, "c": [2]}}, ""))
    {'a.b': 1, 'a.c': [2]}
    """
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from dotted(value, f"{prefix}{key}.")
        elif key != "_target_":
            yield f"{prefix}{key}", value


# --- All options as text, with their comments.


def tree(choices: Choices) -> str:
    """List every option with its keys and comments.
    The keys outside groups come last."""
    defaults = choices.defaults()
    files = dict[str, Path]()
    for group in choices.groups():
        for option in choices.options(group):
            is_default = defaults.get(group) == option
            head = title(group, option, choices) + (" (default)" if is_default else "")
            files[head] = choices.file(group, option)
    files["always"] = choices.root()

    blocks = []
    for head, file in files.items():
        keys = [f"    {line}" for line in key_lines(file)]
        blocks.append("\n".join([head, *keys]) + "\n")
    return "\n".join(blocks)


def title(group: str, option: str, choices: Choices) -> str:
    """Return the override that chooses an option: GROUP=OPTION,
    KEY=OPTION or KEY=[OPTION].

    >>> choices = Choices(config_folders(None))
    >>> title("model", "mlp", choices), title("measure", "loss", choices), title("rule", "left", choices)
    ('model=mlp', 'path.measure=loss', 'path.rule=[left]')
    """
    if group in choices.defaults():
        return f"{group}={option}"
    common = choices.common()
    key = next((key for key in common if key.split(".")[-1] == group), group)
    takes_one = common.get(key) in choices.options(group)
    return f"{key}={option}" if takes_one else f"{key}=[{option}]"


def key_lines(file: Path) -> Iterator[str]:
    """Yield the lines of a YAML file, without its `defaults` and `_target_`."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise Mistake(f"{file} cannot be read as YAML: it is not UTF-8 text") from None
    in_defaults = False
    for line in text.splitlines():
        in_defaults = line.startswith("defaults:") or (in_defaults and line[:1] in " -")
        if (
            line.strip()
            and not in_defaults
            and not line.lstrip().startswith("_target_:")
        ):
            yield line


def comment_of(file: Path, key: str) -> str:
    """Return the comment of a key of a YAML file, or "".

    >>> comment_of(Choices(config_folders(None)).file("data", "table"), "path")
    'a .csv or .parquet file'
    """
    for line in key_lines(file):
        if line.startswith(f"{key}:"):
            return line.partition(" # ")[2].strip()
    return ""


# --- Shell completion of groups and keys, then of their options and values.


def complete(words: Sequence[str], unfinished: str, choices: Choices) -> list[str]:
    """Return the completions of an unfinished word, given the words before it.

    >>> complete([], "model.wi", Choices(config_folders(None)))
    ['model.width=', 'model.width=512']
    """
    *before, beginning = rejoin_lists(words)
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
    if beginning.removesuffix("=") not in {*known, *chosen}:
        beginning = ""
    text = beginning + unfinished
    key, equals, value = text.partition("=")
    if equals:
        completions = [
            f"{key}={option}" for option in values(key, value, chosen, known, choices)
        ]
    else:
        keys = [word for word in (*chosen, *known) if word.startswith(key)]
        completions = [f"{word}=" for word in keys]
        # If only one key matches, offer values too. The shell would append a blank to a
        # single completion.
        if len(keys) == 1:
            options = values(keys[0], "", chosen, known, choices)
            completions += [f"{keys[0]}={option}" for option in options]
    return [
        word.removeprefix(beginning) for word in completions if word.startswith(text)
    ]


def rejoin_lists(words: Sequence[str]) -> list[str]:
    """Rejoin words that bash split at '='. Other shells pass complete words.

    The last item of the result is the part of the unfinished word up to and including
    '=', or '' if there is no '='. If bash has dropped the '=' of `model=`, restore it.

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
    key: str,
    value: str,
    chosen: Mapping[str, str],
    known: Mapping[str, Any],
    choices: Choices,
) -> Iterator[str]:
    """Yield completions for the value of a key: options, lists of options,
    or the default."""
    names = choices.options(key.rsplit(".", maxsplit=1)[-1])
    if key in chosen:
        yield from choices.options(key)
    elif key in known and names and isinstance(known[key], list):
        started = value[: max(value.rfind(","), value.rfind("[")) + 1] or "["
        yield from (
            f"{started}{name}{end}"
            for name in names
            if name not in started
            for end in ("]", ",")
        )
    elif known.get(key) in names:
        yield from names
    elif isinstance(known.get(key), bool):
        yield from ("false", "true")
    elif known.get(key) not in (None, "???"):
        yield spell_value(known[key]).replace(", ", ",")
