"""How components are named: by their module, or by their package where several files share one.

    ntkexp.loss.Squared    the class Squared of ntkexp/loss.py
    ntkexp.model.MLP       the class MLP of one of the files in ntkexp/model

Configurations name components like this, and identities of runs hash the names: a file can be moved within its package.
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

PACKAGE = "ntkexp"

CLASS = re.compile(r"^class ([A-Z]\w*)[(:]", re.MULTILINE)
WORD_START = re.compile(r"(?<=.)(?=[A-Z][a-z])")

LAZY_PACKAGES: set[str] = set()
"""The packages that `classes_of` serves, as far as they are imported."""


def class_path(kind: type) -> str:
    """The path by which a class is named: its package and its name where the package is lazy, else its module and name.

    >>> from fractions import Fraction
    >>> from ntkexp.loss import Squared
    >>> from ntkexp.model import MLP
    >>> class_path(MLP), class_path(Squared), class_path(Fraction)
    ('ntkexp.model.MLP', 'ntkexp.loss.Squared', 'fractions.Fraction')
    """
    package, _, _ = kind.__module__.rpartition(".")
    return f"{package if package in LAZY_PACKAGES else kind.__module__}.{kind.__qualname__}"


def is_in_this_package(path: str) -> bool:
    return path.partition(".")[0] == PACKAGE


def option_name(path: str) -> str:
    """The name of a component as an option, from its path: the words of its class in lower case.

    >>> option_name("ntkexp.model.DeepLinear"), option_name("ntkexp.optimizer.AdamW"), option_name("my_parts.LeakyReLU")
    ('deep_linear', 'adamw', 'leaky_relu')
    """
    return WORD_START.sub("_", path.rpartition(".")[2]).lower()


def module_names(package: ModuleType) -> list[str]:
    """The files of a package, sorted; subpackages are not among them.

    >>> from ntkexp.report.plots import together
    >>> module_names(together)
    ['errors', 'laws', 'over_steps']
    """
    return sorted(module.name for module in iter_modules(package.__path__) if not module.ispkg)


@cache
def module_of_class(folders: tuple[str, ...]) -> dict[str, str]:
    """The file of each class in these folders, from their text: nothing is imported."""
    files = (file for folder in folders for file in sorted(Path(folder).glob("*.py")))
    return {
        name: file.stem
        for file in files
        for name in CLASS.findall(file.read_text(encoding="utf-8"))
    }


def classes_of(package: str) -> Callable[[str], object]:
    """The `__getattr__` of a package, which imports the file of a class when the class is first used."""
    LAZY_PACKAGES.add(package)

    def import_class(name: str) -> object:
        modules = module_of_class(tuple(sys.modules[package].__path__))
        if name not in modules:
            raise AttributeError(
                f"module '{package}' has no attribute '{name}'{nearest(name, modules)}"
            )
        kind: object = getattr(import_module(f"{package}.{modules[name]}"), name)
        return kind

    return import_class
