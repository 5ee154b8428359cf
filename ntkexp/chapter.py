"""How components are named: by their module, or by their package where several files share one.

    ntkexp.loss.Squared    the class Squared of ntkexp/loss.py
    ntkexp.model.MLP       the class MLP of one of the files in ntkexp/model

Configurations spell components so, and identities of runs hash it: a file can be moved within its chapter.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType

from ntkexp.mistake import nearest

HOME = "ntkexp"

CLASS = re.compile(r"^class ([A-Z]\w*)[(:]", re.MULTILINE)
START = re.compile(r"(?<=.)(?=[A-Z][a-z])")
"""Where a word begins inside the name of a class."""


FOLDERS: set[str] = set()
"""The chapters that are folders, as far as they are imported."""


def public(kind: type) -> str:
    """Find the path of a class: its chapter and its name; of one from elsewhere, its module and its name.

    >>> from fractions import Fraction
    >>> from ntkexp.loss import Squared
    >>> from ntkexp.model import MLP
    >>> public(MLP), public(Squared), public(Fraction)
    ('ntkexp.model.MLP', 'ntkexp.loss.Squared', 'fractions.Fraction')
    """
    folder, _, _ = kind.__module__.rpartition(".")
    return f"{folder if folder in FOLDERS else kind.__module__}.{kind.__qualname__}"


def is_own(path: str) -> bool:
    """Whether a dotted path leads into this package."""
    return path.partition(".")[0] == HOME


def option(path: str) -> str:
    """What a component is called, given its path: the words of its class, in small letters.

    >>> option("ntkexp.model.DeepLinear"), option("ntkexp.optimizer.AdamW"), option("my_parts.LeakyReLU")
    ('deep_linear', 'adamw', 'leaky_relu')
    """
    return START.sub("_", path.rpartition(".")[2]).lower()


def files(package: ModuleType) -> list[str]:
    """List the files of a folder of this package, by name: each is a part of its own, and listed nowhere else.

    >>> from ntkexp.report.plots import together
    >>> files(together)
    ['errors', 'laws', 'over_steps']
    """
    return sorted(found.name for found in iter_modules(package.__path__) if not found.ispkg)


def folders(package: ModuleType) -> list[str]:
    """List the folders in a folder of this package, by name.

    >>> from ntkexp.report import plots
    >>> folders(plots)
    ['figures', 'together']
    """
    return sorted(found.name for found in iter_modules(package.__path__) if found.ispkg)


@cache
def homes(folders: tuple[str, ...]) -> dict[str, str]:
    """The file in which each class of a chapter stands, by reading and without importing."""
    files = (file for folder in folders for file in sorted(Path(folder).glob("*.py")))
    return {name: file.stem for file in files for name in CLASS.findall(file.read_text(encoding="utf-8"))}


def classes_of(chapter: str) -> Callable[[str], object]:
    """The `__getattr__` of a chapter, which imports the file of a class when the class is first asked for."""
    FOLDERS.add(chapter)

    def found(name: str) -> object:
        known = homes(tuple(sys.modules[chapter].__path__))
        if name not in known:
            raise AttributeError(f"module '{chapter}' has no attribute '{name}'{nearest(name, known)}")
        kind: object = getattr(import_module(f"{chapter}.{known[name]}"), name)
        return kind

    return found
