"""Words of the command line stay in the command line: elsewhere a mistake has a kind, from which the advice follows."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

import ntkexp
from ntkexp.cli.main import app
from ntkexp.cli.options import ADVICE, with_advice
from ntkexp.config.choices import Choices, folders
from ntkexp.mistake import Mistake, Untrusted, WrongArgument

PACKAGE = Path(ntkexp.__file__).parent
LIBRARY = ("kernel", "library", "limit", "closed_form.py")


def commands(command: object) -> Iterator[object]:
    yield command
    for inner in getattr(command, "commands", {}).values():
        yield from commands(inner)


def options() -> set[str]:
    found = {word for each in commands(typer.main.get_command(app)) for given in getattr(each, "params", ())
             for word in given.opts}  # fmt: skip
    return {word for word in found if word.startswith("--")}


def keys() -> set[str]:
    """Every key of a configuration that lies in a group, such as `model.width`."""
    choices = Choices(folders(None))
    inner = {
        key for group in choices.groups() for option in choices.options(group) for key in choices.keys(group, option)
    }
    return inner | {key for key in choices.common() if "." in key}


def texts(place: Path) -> Iterator[tuple[Path, str]]:
    """Every text in the code of a file or folder."""
    for file in [place] if place.is_file() else sorted(place.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield file, node.value


def test_no_option_is_named_outside_the_command_line() -> None:
    known = options()
    assert {"--out", "--force", "--memory-gb", "--retry-failed"} <= known
    elsewhere = [found for found in texts(PACKAGE) if PACKAGE / "cli" not in found[0].parents]
    named = [(file.name, word) for file, text in elsewhere for word in re.findall(r"--[a-z][a-z-]*", text)
             if word in known]  # fmt: skip
    assert len(elsewhere) > 1000
    assert not named


@pytest.mark.parametrize("place", LIBRARY)
def test_the_library_knows_no_configuration(place: str) -> None:
    known = keys()
    assert {"model.width", "path.pieces", "data.train"} <= known
    found = list(texts(PACKAGE / place))
    named = [(file.name, word) for file, text in found for word in re.findall(r"\b[a-z]+\.[a-z_]+\b", text)
             if word in known]  # fmt: skip
    assert found
    assert not named


@pytest.mark.parametrize("kind", ADVICE, ids=lambda kind: kind.__name__)
def test_advice_names_an_option_that_there_is(kind: type[Mistake]) -> None:
    made = kind("what is wrong", "my_net.py") if kind is Untrusted else kind("what is wrong")
    said = with_advice(made).removeprefix("what is wrong")
    named = re.findall(r"--[a-z][a-z-]*", said)
    assert named
    assert set(named) <= options()
    assert str(made) == "what is wrong"


def test_arguments_are_spelled_as_options() -> None:
    mistake = WrongArgument("steps=3 goes with step_size=…: so many steps of one size", "steps", "step_size")
    assert with_advice(mistake) == "--steps=3 goes with --step-size=…: so many steps of one size"
    assert (
        with_advice(WrongArgument("of 2 outputs; write outputs=all", "outputs")) == "of 2 outputs; write --outputs=all"
    )
    assert with_advice(Mistake("steps=3: a key")) == "steps=3: a key"
