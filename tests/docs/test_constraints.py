"""ntkexp imports what it asks for; all of that is pinned, to a version that it asks for and that is installed here."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions, version
from itertools import chain

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ntkexp.run.environment import LIBRARIES
from tests.docs.readme import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ASKED = [*PROJECT["dependencies"], *(line for extra in PROJECT["optional-dependencies"].values() for line in extra)]
REQUIREMENTS = [wanted for line in ASKED if (wanted := Requirement(line)).name != PROJECT["name"]]


def pinned() -> dict[str, str]:
    """The version of each package in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(name): number for name, number in pairs}


@pytest.mark.parametrize("wanted", REQUIREMENTS, ids=lambda wanted: str(wanted.name))
def test_what_is_asked_for_is_pinned(wanted: Requirement) -> None:
    assert wanted.specifier.contains(pinned()[canonicalize_name(wanted.name)])


def test_what_is_pinned_is_tested() -> None:
    installed = {name: version(name).partition("+")[0] for name in pinned()}
    assert installed == pinned()


def named(lines: Iterable[str]) -> set[str]:
    """The packages that requirements name."""
    return {canonicalize_name(Requirement(line).name) for line in lines}


def imported() -> set[str]:
    """The first word of everything that some file of the package imports, now or later; type checkers know one more."""
    nodes = [node for path in (ROOT / "ntkexp").rglob("*.py") for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"ntkexp", "_typeshed"}


def test_what_is_imported_is_asked_for() -> None:
    """By users: what only the tests need is not there."""
    extras = [lines for name, lines in PROJECT["optional-dependencies"].items() if name != "dev"]
    always, sometimes = named(PROJECT["dependencies"]), named(chain.from_iterable(extras))
    owners = packages_distributions()
    assert {
        name for name in imported() if not (always | sometimes) & set(map(canonicalize_name, owners[name]))
    } == set()
    assert always.issuperset(LIBRARIES)
