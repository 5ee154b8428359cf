"""Checks of shapes in tests: of arguments and results of functions, and of the fields of dataclasses.

An import hook adds a check to each function and dataclass of the package whose annotations contain shapes. Other
functions are not checked at run time, which would double the duration of the tests; mypy checks their types.
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


def checked(annotated: Any) -> Any:
    """Return a function or dataclass with a check of its shapes."""
    if not isclass(annotated):
        return CheckedFunction(annotated).call
    if is_dataclass(annotated):
        annotated.__init__ = checked(annotated.__init__)  # type: ignore[method-assign]  # in place, as jaxtyping does
    return annotated


class CheckedFunction:
    """A function with a check of its shapes, which runs once for each layout of the arguments and the result.

    A check takes longer than most calls, and compiling a check takes 20 ms. So each function has one check, which is
    compiled at the first call.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.known_results: dict[object, set[object]] = {}  # layout of arguments → checked layouts of results
        self.slot = local()

    @property
    def call(self) -> Callable[..., Any]:
        """The replacement of the function."""

        @wraps(self.function)
        def call(*args: Any, **kwargs: Any) -> Any:
            known = self.known_results.setdefault(layout((args, kwargs)), set())
            if not known:
                result = self.check(self.function, args, kwargs)
            elif layout(result := self.function(*args, **kwargs)) not in known:
                self.check(lambda *_, **__: result, args, kwargs)
            known.add(layout(result))
            return result

        return call

    def check(self, body: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Call `body`, and check the arguments and its result against the annotations of the function."""
        self.slot.body = body
        return self.check_around_slot(*args, **kwargs)

    @cached_property
    def check_around_slot(self) -> Callable[..., Any]:
        """The compiled check, with the annotations of the function around the body in the slot."""

        def call_body(*args: Any, **kwargs: Any) -> Any:
            body = self.slot.__dict__.pop("body")  # remove it, because it may hold a result
            return body(*args, **kwargs)

        # annotations are evaluated in the module of the function
        placed = FunctionType(call_body.__code__, self.function.__globals__, closure=call_body.__closure__)
        return jaxtyped(update_wrapper(placed, self.function), typechecker=CHECKER)


def layout(value: object) -> object:
    """Return the types, shapes and dtypes in a value."""
    if isinstance(value, Tensor | np.ndarray):
        return value.shape, value.dtype
    if isinstance(value, tuple | list):
        return type(value), *map(layout, value)
    if isinstance(value, dict):
        return type(value), *map(layout, value.values())
    return type(value)


class Decorate(ast.NodeTransformer):
    """Add the decorator `checked` to functions and classes whose annotations contain one of the names `shaped`."""

    def __init__(self, shaped: frozenset[str]) -> None:
        self.shaped = shaped

    decorator = ast.parse(f'__import__("{__name__}", fromlist=["_"]).{checked.__name__}', mode="eval").body

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        args = node.args
        arguments = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
        if self.have_shapes(node.returns, *(argument.annotation for argument in arguments if argument is not None)):
            node.decorator_list.append(self.decorator)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        if self.have_shapes(*(part.annotation for part in node.body if isinstance(part, ast.AnnAssign))):
            node.decorator_list.insert(0, self.decorator)
        return self.generic_visit(node)

    def have_shapes(self, *annotations: ast.expr | None) -> bool:
        """Return True if an annotation contains one of the names."""
        nodes = (node for annotation in annotations if annotation is not None for node in ast.walk(annotation))
        return any(isinstance(node, ast.Name) and node.id in self.shaped for node in nodes)


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
    """Return the type aliases with shapes in a module of the package."""
    (package,) = find_spec(PACKAGE).submodule_search_locations  # type: ignore[union-attr,misc]  # it is a package
    file = Path(package, *module.split(".")[1:]).with_suffix(".py")
    return frozenset(ALIAS.findall(file.read_text(encoding="utf-8")) if file.exists() else ())


class Loader(SourceFileLoader):
    """A loader that adds checks to a module with shapes. It writes no bytecode to the disk."""

    def get_code(self, fullname: str) -> CodeType:
        source = self.get_data(self.path)
        if b"jaxtyping" not in source:
            return cast("CodeType", super().get_code(fullname))
        tree = ast.parse(source)
        decorate = Decorate(shaped_names(source.decode(), tree))
        return compile(decorate.visit(tree), self.path, "exec", dont_inherit=True)


class Finder(MetaPathFinder):
    """A finder that loads the modules of the package by `Loader`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        found = PathFinder.find_spec(fullname, path) if fullname.split(".", maxsplit=1)[0] == PACKAGE else None
        if found is not None and found.origin is not None:
            found.loader = Loader(fullname, found.origin)
        return found


def check_shapes() -> None:
    """Check shapes in modules of the package that are imported later."""
    sys.meta_path.insert(0, Finder())
