"""Docstrings are sentences: none begins in the middle of one, so that only a name would tell what it is about."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.readme import ROOT

FILES = sorted((ROOT / "ntkexp").rglob("*.py"))
TIES = (
    "Above Across After Along Among As At Before Behind Below Between Beyond By For From In Inside Into Like Near Not "
    "Of On Onto Out Over Per Through To Under Until Up Upon With Within Without"
)
FRAGMENT = re.compile(rf"(?:{'|'.join(TIES.split())}|The same (?:as|at|for|of|with))\b")


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """The docstrings of a file, with the lines on which begins what they describe."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""


@pytest.mark.parametrize("text", ["Of its arrays.", "By that rule.", "As it is.", "The same of vectors."])
def test_a_fragment_is_told(text: str) -> None:
    assert FRAGMENT.match(text)


@pytest.mark.parametrize("text", ["The same step size throughout.", "Often it is one.", "Inputs as they are.", "Σ f²."])
def test_a_sentence_is_none(text: str) -> None:
    assert not FRAGMENT.match(text)


def test_no_docstring_is_a_fragment() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for file in FILES
        for line, text in docstrings(file)
        if FRAGMENT.match(text)
    ]
    assert not found, "\n".join(["begin with what it is, or with what it does:", *found])
