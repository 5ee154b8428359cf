"""While tests run, the shapes in signatures are checked: of functions, and of the fields of dataclasses.

What states no shape is left alone: mypy checks its types, and a check at each call would make the tests twice as long.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache, cached_property, update_wrapper, wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from importlib.util import find_spec
from inspect import isclass
from pathlib import Path
from threading import local
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast

import numpy as np
from beartype import BeartypeConf, beartype
from jaxtyping import jaxtyped
from torch import Tensor

PACKAGE = "ntkexp"
CHECKER = beartype(conf=BeartypeConf(is_pep484_tower=True))  # a whole number is a float, as for mypy
SHAPED = frozenset({"Float", "Int", "Integer", "UInt8", "Bool", "Shaped"})


def checked(stating: Any) -> Any:
    """A function or a dataclass whose shapes are compared."""
    if not isclass(stating):
        return Compared(stating).call
    if is_dataclass(stating):
        stating.__init__ = checked(stating.__init__)  # type: ignore[method-assign]  # in place, as jaxtyping does
    return stating


class Compared:
    """A function whose shapes are compared once for each look of its arguments and its result, on which all depends.

    A comparison takes longer than most of what is compared. What compares is made once, when it is first needed: to
    compile it takes twenty milliseconds, and tests call functions with many looks.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.seen: dict[object, set[object]] = {}
        self.acting = local()

    @property
    def call(self) -> Callable[..., Any]:
        """The function, in the place of which this stands."""

        @wraps(self.function)
        def call(*given: Any, **named: Any) -> Any:
            known = self.seen.setdefault(look((given, named)), set())
            if not known:
                result = self.compared(self.function, given, named)
            elif look(result := self.function(*given, **named)) not in known:
                self.compared(lambda *_, **__: result, given, named)
            known.add(look(result))
            return result

        return call

    def compared(self, acting: Callable[..., Any], given: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """What another function makes of these arguments, compared as if it were this one."""
        self.acting.next = acting
        return self.comparing(*given, **named)

    @cached_property
    def comparing(self) -> Callable[..., Any]:
        """What compares: arguments are compared, then the function that acts next is called, and nothing in between."""

        def act(*given: Any, **named: Any) -> Any:
            acting = self.acting.__dict__.pop("next")  # taken, for it may hold a result, which is not to be kept
            return acting(*given, **named)

        placed = FunctionType(act.__code__, self.function.__globals__, closure=act.__closure__)
        return jaxtyped(update_wrapper(placed, self.function), typechecker=CHECKER)


def look(value: object) -> object:
    """All of a value that its shapes depend on."""
    if isinstance(value, Tensor | np.ndarray):
        return value.shape, value.dtype
    if isinstance(value, tuple | list):
        return type(value), *map(look, value)
    if isinstance(value, dict):
        return type(value), *map(look, value.values())
    return type(value)


class Decorate(ast.NodeTransformer):
    """Decorates what states shapes, by one of these names."""

    def __init__(self, shaped: frozenset[str]) -> None:
        self.shaped = shaped

    decorator = ast.parse(f'__import__("{__name__}", fromlist=["_"]).{checked.__name__}', mode="eval").body

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        given = node.args
        arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        if self.states_shapes(node.returns, *(each.annotation for each in arguments if each is not None)):
            node.decorator_list.append(self.decorator)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        if self.states_shapes(*(each.annotation for each in node.body if isinstance(each, ast.AnnAssign))):
            node.decorator_list.insert(0, self.decorator)
        return self.generic_visit(node)

    def states_shapes(self, *annotations: ast.expr | None) -> bool:
        """Return whether one of the names is among them."""
        named = (name for each in annotations if each is not None for name in ast.walk(each))
        return any(isinstance(name, ast.Name) and name.id in self.shaped for name in named)


def shaped_names(source: str, tree: ast.Module) -> frozenset[str]:
    """Return the names of types with shapes in a module: jaxtyping's, and aliases that it defines or imports."""
    imported = {
        name.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith(f"{PACKAGE}.")
        for name in node.names
        if name.name in aliases_of(str(node.module))
    }
    return SHAPED.union(ALIAS.findall(source), imported)


ALIAS = re.compile(rf"^(\w+)(?:: TypeAlias)? = .*\b(?:{'|'.join(SHAPED)})\[", re.MULTILINE)


@cache
def aliases_of(module: str) -> frozenset[str]:
    """Return the names that a module of the package gives to types with shapes."""
    (package,) = find_spec(PACKAGE).submodule_search_locations  # type: ignore[union-attr,misc]  # it is a package
    file = Path(package, *module.split(".")[1:]).with_suffix(".py")
    return frozenset(ALIAS.findall(file.read_text(encoding="utf-8")) if file.exists() else ())


class Loader(SourceFileLoader):
    """Compiles a module that states shapes with a check of them, and keeps nothing of it on the disk."""

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        if b"jaxtyping" not in source:
            return cast("CodeType", super().get_code(fullname))
        tree = ast.parse(source)
        decorate = Decorate(shaped_names(source.decode(), tree))
        return compile(decorate.visit(tree), self.path, "exec", dont_inherit=True)


class Finder(MetaPathFinder):
    """Finds the modules of the package."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = PathFinder.find_spec(fullname, path) if fullname.split(".", maxsplit=1)[0] == PACKAGE else None
        if found is not None and found.origin is not None:
            found.loader = Loader(fullname, found.origin)
        return found


def check_shapes() -> None:
    """From now on, in modules yet to be imported."""
    sys.meta_path.insert(0, Finder())
