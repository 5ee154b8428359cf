"""The chapters of the package as the import contracts in pyproject.toml and the chapters' own docstrings have them."""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.docs.readme import ROOT


@dataclass(frozen=True)
class Chapter:
    """A folder, or a single file."""

    path: Path

    @property
    def file(self) -> Path:
        """Where its docstring stands."""
        return self.path / "__init__.py" if self.path.is_dir() else self.path

    @property
    def sentence(self) -> str:
        """The first paragraph of its docstring."""
        text = ast.get_docstring(ast.parse(self.file.read_text(encoding="utf-8"))) or ""
        return " ".join(text.partition("\n\n")[0].split()).rstrip(".:;") + "."


def floors(contract: str) -> list[list[Chapter]]:
    """The chapters that a contract names, floor by floor, the lowest first."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (found,) = [each for each in settings["tool"]["importlinter"]["contracts"] if each["name"] == contract]
    (container,) = found["containers"]
    folder = ROOT / container.replace(".", "/")
    layers = [re.split(r"[|:]", layer) for layer in reversed(found["layers"])]
    return [[chapter(folder / name.strip()) for name in layer] for layer in layers]


def chapter(module: Path) -> Chapter:
    """The chapter that a module's path leads to."""
    return Chapter(module if module.is_dir() else module.with_suffix(".py"))
