"""`_target_: ntkexp.model.MLP` → the class, provided that it is a component of the right kind and may be imported.

A component of this package goes by its chapter, which imports the file of that class and no other; one from elsewhere
goes by its module, `package.module.Class`.

Importing runs code, so only this package is imported unasked; others, a package or a file my_net.py, if trusted.

>>> from ntkexp.loss.base import AbstractLoss
>>> component("ntkexp.loss.Squared", AbstractLoss, "loss")
<class 'ntkexp.loss.squared.Squared'>
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from types import ModuleType

from ntkexp.chapter import HOME, homes, is_own, public
from ntkexp.component import Component, can_be_built
from ntkexp.mistake import Mistake, Untrusted, WrongArgument, nearest
from ntkexp.model.foreign.user_file import load

ROOT = Path(__file__).parents[2]
"""Where this package lies."""


def component(target: object, base: type[Component], key: str, trusted: Collection[str] = ()) -> type[Component]:
    """Find the class that a `_target_` names."""
    given = f"{key}._target_={target}".removeprefix(".")
    module_name, _, name = str(target).rpartition(".")
    if not isinstance(target, str) or not all(part.isidentifier() for part in target.split(".")) or not module_name:
        raise Mistake(f"{given} names no class; write package.module.Class")
    if not any(f"{module_name}.".startswith(f"{package}.") for package in (HOME, *trusted)):
        package = module_name.split(".")[0]
        raise Untrusted(f"{given} lies outside {HOME}, and is imported only if you say so", package)
    if is_own(module_name):
        refuse_file(module_name, name, given)
    module = imported(module_name, given)
    try:
        found = getattr(module, name)
    except AttributeError as error:
        raise Mistake(f"{given}: {error}") from None
    if not (isinstance(found, type) and issubclass(found, base) and can_be_built(found)):
        raise Mistake(f"{given} is no {base.__name__} that can be built; choose one, such as {example(base)}")
    return found


def refuse_file(module_name: str, name: str, given: str) -> None:
    """A file of this package is never imported by its name, only by that of a class in its chapter."""
    parent, _, file = module_name.rpartition(".")
    chapter = ROOT.joinpath(*parent.split("."))
    if (chapter / f"{file}.py").is_file():
        known = [f"{parent}.{kind}" for kind in homes((str(chapter),))]
        raise Mistake(f"{given}: classes go by their chapter, not by their file{nearest(f'{parent}.{name}', known)}")


def example(base: type[Component]) -> str:
    """Find some component of a kind, to be named in advice."""
    concrete = [kind for kind in base.__subclasses__() if can_be_built(kind)] or [base]
    return public(concrete[0])


def imported(name: str, given: str) -> ModuleType:
    """Import a module of this package or of a trusted one."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise Mistake(f"{given}: there is no module {error.name}{nearest(name, beside(name))}") from None
    except Exception as error:
        if name.split(".", maxsplit=1)[0] == HOME:
            raise
        raise Mistake(f"{given}: {name} cannot be imported: {type(error).__name__}: {error}") from error


def beside(name: str) -> list[str]:
    """The chapters of this package in the folder where this one would lie."""
    parent = name.rpartition(".")[0]
    return [f"{parent}.{file.parent.name}" for file in ROOT.joinpath(*parent.split(".")).glob("*/__init__.py")]


def admit(entries: Sequence[str]) -> tuple[str, ...]:
    """The packages and files that the user trusts, imported, by the name under which a `_target_` finds them."""
    if entries and (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # last, so that nothing here hides a module of Python's
    return tuple(admit_file(Path(entry)) if entry.endswith(".py") else admit_package(entry) for entry in entries)


def admit_package(name: str) -> str:
    """A package that Python finds, or that lies in the working folder."""
    try:
        found = find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise WrongArgument(
            f"trust={name}: there is no such package; it takes a package's name, or a file my_net.py", "trust"
        )
    return name


def admit_file(file: Path) -> str:
    """Import a file under its name without the ending; what goes wrong in it is said with its line."""
    file = Path(os.path.realpath(file.expanduser()))  # also of a link to itself
    given = f"trust={file}"
    if not file.is_file():
        raise WrongArgument(
            f"{given}: there is no such file; it takes the name of a package, or a file my_net.py", "trust"
        )
    if file.stem == HOME:
        raise WrongArgument(f"{given}: '{HOME}' cannot be the name of a new module; call the file otherwise", "trust")
    try:
        return load(file, given).__name__
    except Mistake as mistake:
        raise WrongArgument(str(mistake), "trust") from mistake


def refuse_untrusted(component: Component, key: str, trusted: Collection[str]) -> None:
    """Code runs only if it lies in a trusted file or package."""
    for file in component.code():
        if not any(holds(name, file.resolve()) for name in trusted):
            raise Untrusted(f"{key}: {file} is Python code of yours, which runs only if you say so", quote(str(file)))


def holds(name: str, file: Path) -> bool:
    """Whether a module is in a file, or a package around it."""
    spec = find_spec(name)
    if spec is None:
        return False
    folders = [Path(folder).resolve() for folder in spec.submodule_search_locations or ()]
    return spec.origin == str(file) or any(file.is_relative_to(folder) for folder in folders)
