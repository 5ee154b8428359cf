"""What can be chosen: groups (folders), their options (files) and the keys of each, read from YAML alone.

Completion and advice ask here, without Hydra and without importing a component.

>>> from ntkexp.config.folders import folders
>>> choices = Choices(folders(None))
>>> choices.options("init"), choices.keys("optimizer", "sgd")["optimizer.batch"]
(['mean_field', 'ntk', 'standard'], 32)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from ntkexp.config.document import parsed
from ntkexp.mistake import Mistake, nearest, refuse_special

NO_CHOICES = frozenset({"claim", "study", "sweep"})
"""Folders of YAML that describe something else than a part of an experiment."""

LARGEST = 1 << 24
"""Bytes of a YAML file."""


@dataclass(frozen=True)
class Choices:
    """Options lie in some folders; a file in an earlier folder hides its namesakes in later ones."""

    folders: tuple[Path, ...]

    def groups(self) -> list[str]:
        """List the folders with an option in them."""
        return sorted({file.parent.name for folder in self.folders for file in folder.glob("*/*.yaml")} - NO_CHOICES)

    def options(self, group: str) -> list[str]:
        """List the options of a group."""
        files = (file for folder in self.folders for file in (folder / group).glob("*.yaml"))
        return sorted({file.stem for file in files if file.is_file()})

    def file(self, group: str, option: str) -> Path:
        """Find the file of an option."""
        if option not in self.options(group):
            known = ", ".join(self.options(group))
            hint = nearest(option, self.options(group))
            raise Mistake(f"'{option}' is no option of {group}; choose from {known}{hint}")
        return next(file for folder in self.folders if (file := folder / group / f"{option}.yaml").is_file())

    def root(self) -> Path:
        """The file in which everything is put together."""
        return next(file for folder in self.folders if (file := folder / "config.yaml").is_file())

    def keys(self, group: str, option: str) -> dict[str, Any]:
        """Find the dotted keys of an option, with their values."""
        return dict(dotted(read(self.file(group, option)), f"{group}."))

    def common(self) -> dict[str, Any]:
        """Find the dotted keys that belong to no group, with their values."""
        values = {key: value for key, value in read(self.root()).items() if key != "defaults"}
        return dict(dotted(values, ""))

    def defaults(self) -> dict[str, str]:
        """The option of each group where nothing else is asked for."""
        entries = read(self.root()).get("defaults", [])
        if not isinstance(entries, list):
            raise Mistake(f"{self.root()}: 'defaults' takes a list, such as '- model: mlp'")
        pairs = [pair for entry in entries if isinstance(entry, dict) for pair in entry.items()]
        return {str(group).split()[-1].lstrip("/"): option for group, option in pairs if isinstance(option, str)}


def read(file: Path) -> dict[str, Any]:
    """A YAML file, which must be a mapping."""
    try:
        refuse_special(file, str(file), LARGEST)
        found = deepcopy(known(file.read_text(encoding="utf-8")))
    except OSError as error:
        raise Mistake(f"{file} cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise unparsed(error, file) from None
    if not isinstance(found, dict | None):
        raise Mistake(f"{file} holds no KEY: VALUE lines; write such as 'width: 64'")
    return found or {}


@lru_cache(maxsize=1000)
def known(text: str) -> Any:
    """What a text says, parsed once: a list of all choices reads the same few files again and again."""
    return parsed(text)


def unparsed(error: yaml.YAMLError | UnicodeDecodeError, file: Path) -> Mistake:
    """What is wrong with a YAML file, and where."""
    if not isinstance(error, yaml.MarkedYAMLError):
        return Mistake(f"{file} cannot be read as YAML: it is not plain text in UTF-8")
    mark = error.problem_mark or error.context_mark
    where = f", line {mark.line + 1}" if mark else ""
    return Mistake(f"{file}{where} cannot be read as YAML: {error.problem or error.context}")


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
