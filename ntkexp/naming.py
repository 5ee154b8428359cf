"""Names of component classes in configurations.

    ntkexp.loss.Squared    the class Squared of the module ntkexp/loss.py
    ntkexp.model.MLP       the class MLP of one of the files in the package ntkexp/model

The identity of a run is a hash that includes these names. A name inside a package omits
the file, so a class can move to another file of the package without changing the
identities of runs."""

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
"""The imported packages that load their classes lazily (see `classes_of`)."""


def class_path(kind: type) -> str:
    """Return the name of a class in configurations. The name omits the file if the
    package is one of `LAZY_PACKAGES`.

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
    """Return the option name of a class: its name in snake case.

    >>> option_name("ntkexp.model.DeepLinear"), option_name("ntkexp.optimizer.AdamW")
    ('deep_linear', 'adamw')
    >>> option_name("my_parts.LeakyReLU")
    'leaky_relu'
    """
    return WORD_START.sub("_", path.rpartition(".")[2]).lower()


def module_names(package: ModuleType) -> list[str]:
    """Return the sorted module names of a package, without subpackages.

    >>> from ntkexp.report.plots import together
    >>> module_names(together)
    ['errors', 'heat_map', 'laws', 'over_steps']
    """
    return sorted(
        module.name for module in iter_modules(package.__path__) if not module.ispkg
    )


@cache
def module_of_class(folders: tuple[str, ...]) -> dict[str, str]:
    """Map each class name in the folders to its module.

    Search the source text without importing.
    """
    modules: dict[str, str] = {}
    for folder in folders:
        for file in sorted(Path(folder).glob("*.py")):
            for name in CLASS.findall(file.read_text(encoding="utf-8")):
                modules[name] = file.stem
    return modules


def classes_of(package: str) -> Callable[[str], object]:
    """Return a `__getattr__` function for a package. It imports the module of a class
    when the class is first used."""
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
