"""ntkexp imports what it asks for; all of that is pinned, to a version that it asks for and that is installed here."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib.metadata import packages_distributions, version
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ntkexp.run.environment import LIBRARIES
from tests.docs.readme import ROOT, TEXT

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


def modules_shown() -> list[str]:
    """What the README runs by `python -m` before the chapter for those who change the program."""
    return re.findall(r"python -m (tests[\w.]*)", TEXT.partition("## Contributing")[0])


def wanted_by(path: Path) -> set[str]:
    """The names of everything that a file imports, whenever it does."""
    nodes = list(ast.walk(ast.parse(path.read_text("utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    origins = [(str(node.module), node.names) for node in nodes if isinstance(node, ast.ImportFrom)]
    inside = {f"{module}.{alias.name}" for module, taken in origins for alias in taken}
    return names | inside | {module for module, _ in origins}


def reached(module: str) -> set[str]:
    """The names of everything that running a module of the tests imports, through others of them."""
    found, left = set[str](), [module]
    while left:
        file = ROOT / Path(*left.pop().split("."))
        paths = [file.with_suffix(".py"), file / "__init__.py", file / "__main__.py"]
        fresh = {name for path in paths if path.is_file() for name in wanted_by(path)} - found
        found |= fresh
        left += [name for name in fresh if name.startswith("tests.")]
    return found


def test_modules_that_the_readme_shows_are_there() -> None:
    assert modules_shown()
    assert all(Path(ROOT, *name.split(".")).with_suffix(".py").is_file() for name in modules_shown())


@pytest.mark.parametrize("module", modules_shown())
def test_what_the_readme_shows_needs_no_more_than_its_first_command_installs(module: str) -> None:
    owners, always = packages_distributions(), named(PROJECT["dependencies"])
    roots = {name.partition(".")[0] for name in reached(module)} - sys.stdlib_module_names - {"ntkexp", "tests"}
    assert roots
    assert {name for name in roots if not always & set(map(canonicalize_name, owners[name]))} == set()


def named(lines: Iterable[str]) -> set[str]:
    """The packages that requirements name."""
    return {canonicalize_name(Requirement(line).name) for line in lines}


def imported() -> set[str]:
    """The first word of everything that some file of the package imports, now or later; type checkers know one more."""
    nodes = [node for path in (ROOT / "ntkexp").rglob("*.py") for node in ast.walk(ast.parse(path.read_text("utf-8")))]
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    return {name.partition(".")[0] for name in names} - sys.stdlib_module_names - {"ntkexp", "_typeshed"}


@pytest.mark.slow
def test_what_is_imported_is_asked_for() -> None:
    """By users: what only the tests need is not there."""
    extras = [lines for name, lines in PROJECT["optional-dependencies"].items() if name != "dev"]
    always, sometimes = named(PROJECT["dependencies"]), named(chain.from_iterable(extras))
    owners = packages_distributions()
    assert {
        name for name in imported() if not (always | sometimes) & set(map(canonicalize_name, owners[name]))
    } == set()
    assert always.issuperset(LIBRARIES)
