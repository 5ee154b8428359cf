"""A Python file of the user's: what it is made of, and what importing it gives.

Importing runs it. Whoever calls `load` answers for that; the command line asks the user first.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from ntkexp.mistake import Mistake
from ntkexp.model.foreign.error_line import one_line
from ntkexp.model.foreign.torchvision_import import load_torchvision

VISION = {"timm", "torchvision", "transformers"}
"""Packages that import torchvision, or are it."""


def load(file: Path, given: str) -> ModuleType:
    """Load the module in a file, under its name without the ending; a file beside it can be imported by it."""
    file = file.resolve()
    known = sys.modules.get(file.stem)
    if known is not None and getattr(known, "__file__", None) == str(file):
        return known
    if known is not None or not file.stem.isidentifier():
        raise Mistake(f"{given}: '{file.stem}' cannot be the name of a new module; call the file otherwise")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last, so that nothing there hides a module of Python's
    return run(file, given)


def run(file: Path, given: str) -> ModuleType:
    """Import a file."""
    spec = spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    if not VISION.isdisjoint(imports(file)):
        load_torchvision()
    module = sys.modules[file.stem] = module_from_spec(spec)
    try:
        with one_line(given, file):
            spec.loader.exec_module(module)
    except Mistake:
        del sys.modules[file.stem]
        raise
    return module


def files_of(file: Path) -> tuple[Path, ...]:
    """Find the file, and those beside it that it imports, and that these import."""
    found, waiting = {file}, [file]
    while waiting:
        new = {other for name in imports(waiting.pop()) for other in beside(file.parent, name)} - found
        found |= new
        waiting += new
    return tuple(sorted(found))


def imports(file: Path) -> Iterator[str]:
    """Find the packages whose modules a file imports; none where it is no Python."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def beside(folder: Path, name: str) -> set[Path]:
    """Find the files of a module or package in a folder."""
    return {file for file in (folder / f"{name}.py", *(folder / name).rglob("*.py")) if file.is_file()}
