"""One word, one meaning: a class of one chapter is called like none of another.

Components are spared: they go by their chapter, in configurations as in `ntkexp.loss.Squared`. So are callbacks, which
go by the library that they are for, as in `ntkexp.lightning.Follow`.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from importlib import import_module

import ntkexp
from ntkexp.component import Component
from tests.docs.readme import ROOT


def modules_by_class() -> dict[str, list[str]]:
    """The modules in which a class of this name is written."""
    found = defaultdict(list)
    files = sorted((ROOT / "ntkexp").rglob("*.py"))
    for file in (each for each in files if each.stem not in ntkexp.CALLBACKS or each.parent.name != "ntkexp"):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(".".join(file.relative_to(ROOT).with_suffix("").parts))
    return found


def is_component(module: str, name: str) -> bool:
    """Whether the class is a component."""
    return issubclass(getattr(import_module(module), name), Component)


def test_a_class_has_its_name_for_itself() -> None:
    shared = {name: found for name, found in modules_by_class().items() if len({m.split(".")[1] for m in found}) > 1}
    others = {name: [m for m in found if not is_component(m, name)] for name, found in shared.items()}
    assert {name: found for name, found in others.items() if len(found) > 1} == {}
