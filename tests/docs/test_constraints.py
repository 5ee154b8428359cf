"""Every package that ntkexp asks for is pinned, to a version that it asks for and that is installed here."""

from __future__ import annotations

import tomllib
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

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
