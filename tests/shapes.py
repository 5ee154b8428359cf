"""While tests run, the shapes in signatures are checked: of functions, and of the fields of dataclasses.

What states no shape is left alone: mypy checks its types, and a check at each call would make the tests twice as long.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

from beartype import BeartypeConf, beartype
from jaxtyping import jaxtyped

PACKAGE = "ntkexp"
CHECKER = beartype(conf=BeartypeConf(is_pep484_tower=True))  # a whole number is a float, as for mypy
SHAPED = frozenset({"Float", "Int", "Integer", "UInt8", "Bool", "Shaped"})


def checked(stating: Any) -> Any:
    """A function or a dataclass whose shapes are compared at each call."""
    return jaxtyped(stating, typechecker=CHECKER)


class Decorate(ast.NodeTransformer):
    """Decorates what states shapes."""

    decorator = ast.parse(f'__import__("{__name__}", fromlist=["_"]).{checked.__name__}', mode="eval").body

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        given = node.args
        arguments = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        if states_shapes(node.returns, *(each.annotation for each in arguments if each is not None)):
            node.decorator_list.append(self.decorator)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        if states_shapes(*(each.annotation for each in node.body if isinstance(each, ast.AnnAssign))):
            node.decorator_list.insert(0, self.decorator)
        return self.generic_visit(node)


def states_shapes(*annotations: ast.expr | None) -> bool:
    """Whether one of jaxtyping's types is among them."""
    named = (name for each in annotations if each is not None for name in ast.walk(each))
    return any(isinstance(name, ast.Name) and name.id in SHAPED for name in named)


class Loader(SourceFileLoader):
    """Compiles a module with its shapes checked, and keeps nothing of it on the disk."""

    def get_code(self, fullname: str) -> CodeType:
        tree = Decorate().visit(ast.parse(self.get_data(self.path)))
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)


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
