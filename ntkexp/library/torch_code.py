"""Torch's own code: whether what runs when a layer is called is still what torch's authors wrote.

A class of torch's can be given another method, and a function that its method calls another meaning. So the names that
are looked up on the way are gathered once, from the code itself, with what they mean; afterwards it takes microseconds
to see that they mean the same. Code that is not torch's own is vouched for by nobody.

>>> from unittest import mock
>>> code = code_of(frozenset({torch.nn.Linear}))
>>> assert code is not None
>>> with mock.patch.object(torch.nn.functional, "linear"):
...     code.is_unchanged()
False
>>> code.is_unchanged()
True
"""

from __future__ import annotations

import builtins
import sysconfig
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

TORCH = str(Path(torch.__file__).parent)
LAYERS = str(Path(nn.__file__).parent)
PYTHON = sysconfig.get_path("stdlib")
TENSOR = vars(Tensor)
PACKAGES = sysconfig.get_path("purelib")


@dataclass
class Code:
    """What names mean in the namespaces where they are looked up, what functions run, and what classes hold."""

    names: dict[int, tuple[Mapping[str, Any], dict[str, Any]]] = field(default_factory=dict)
    absent: dict[int, tuple[Mapping[str, Any], set[str]]] = field(default_factory=dict)  # names of Python's own
    functions: dict[FunctionType, tuple[Any, ...]] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)  # all names that are looked up
    classes: dict[type, dict[str, Any]] = field(default_factory=dict)

    def is_unchanged(self) -> bool:
        """Whether all of it is as it was."""
        return (
            all(known.items() <= space.items() for space, known in self.names.values())
            and all(space.keys().isdisjoint(absent) for space, absent in self.absent.values())
            and list(map(parts, self.functions)) == list(self.functions.values())
            and all(self.used(kind) == known for kind, known in self.classes.items())
        )

    def used(self, kind: type) -> dict[str, Any]:
        """What a class holds under names that are looked up, or that Python looks up by itself. Libraries put methods
        of their own beside these."""
        return {name: value for name, value in vars(kind).items() if name in self.asked or name.startswith("__")}


@cache
def code_of(kinds: frozenset[type[nn.Module]]) -> Code | None:
    """What is reached from calling layers of these classes, and None if some of it is not torch's."""
    code, met = Code(), set[type]()
    for kind in kinds:
        lineage = [each for each in kind.__mro__ if each is not object]
        if not all(follow(code, lineage, each) for each in methods(lineage, ("__call__", "forward"))):
            return None
        met.update(lineage)
    code.classes = {each: code.used(each) for each in met}
    return code if all(is_own(value) for held in code.classes.values() for value in held.values()) else None


def follow(code: Code, lineage: Sequence[type], function: FunctionType) -> bool:
    """Gather what a function reaches; False if not all is torch's."""
    if function in code.functions:
        return True
    code.functions[function] = parts(function)
    if not is_own(function):
        return False
    names = tuple(dict.fromkeys(looked_up(function.__code__)))
    code.asked.update(names)
    found = [*(cell.cell_contents for cell in function.__closure__ or ())]
    for space in spaces(function, names):
        known = {name: space[name] for name in names if name in space}
        code.names.setdefault(id(space), (space, {}))[1].update(known)
        found += known.values()
    own = function.__globals__
    absent = {name for name in names if name not in own and hasattr(builtins, name)}
    code.absent.setdefault(id(own), (own, set()))[1].update(absent)
    next_ones = [each for each in found if isinstance(each, FunctionType) and is_within(LAYERS, each)]
    return all(map(is_own, found)) and all(
        follow(code, lineage, each) for each in [*next_ones, *methods(lineage, names)]
    )


def spaces(function: FunctionType, names: Sequence[str]) -> list[Mapping[str, Any]]:
    """Where a function may look names up: its module, modules that these are names of, and tensors."""
    found: list[Mapping[str, Any]] = [TENSOR]
    latest: list[Mapping[str, Any]] = [function.__globals__]
    while latest:
        found += latest
        modules = [value for space in latest for name in names if isinstance(value := space.get(name), ModuleType)]
        inside = {id(vars(module)): vars(module) for module in modules}
        latest = [space for space in inside.values() if all(space is not known for known in found)]
    return found


def methods(lineage: Sequence[type], names: Sequence[str]) -> list[FunctionType]:
    """The methods of these names, of a class and of those that it derives from."""
    return [vars(kind)[name] for kind in lineage for name in names if isinstance(vars(kind).get(name), FunctionType)]


def looked_up(code: CodeType) -> Iterator[str]:
    """The names in a piece of code, and in those inside it."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from looked_up(each)


parts = attrgetter("__code__", "__defaults__", "__kwdefaults__")
"""What can be exchanged in a function."""


def is_own(value: Any) -> bool:
    """Whether what a name means is torch's or Python's; what cannot be called is a constant."""
    if isinstance(value, FunctionType):
        return is_within(TORCH, value) or (is_within(PYTHON, value) and not is_within(PACKAGES, value))
    if isinstance(value, type | BuiltinFunctionType | ModuleType) or not callable(value):
        return True
    return type(value).__module__.partition(".")[0] in ("builtins", "functools", "torch", "typing")


def is_within(folder: str, function: FunctionType) -> bool:
    """Whether a function was written in a file of this folder."""
    return function.__code__.co_filename.startswith(folder)
