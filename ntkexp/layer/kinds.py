"""The layers that there are, by name: those in the files of this chapter, and those that were imported from elsewhere.

>>> kinds()["Dense"], can_be_built(kinds()["Dense"])
(<class 'ntkexp.layer.affine.Dense'>, True)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module

from ntkexp.chapter import files, option, public
from ntkexp.component import can_be_built
from ntkexp.layer.base import AbstractLayer
from ntkexp.mistake import Mistake

CHAPTER = __name__.rpartition(".")[0]


def kinds() -> dict[str, type[AbstractLayer]]:
    """Find the classes by their names; two that go by the same words are told from one another by nobody."""
    read()
    found: dict[str, type[AbstractLayer]] = {}
    for kind in below(AbstractLayer):  # type: ignore[type-abstract]  # it is not built here
        if not can_be_built(kind):
            continue
        known = found.setdefault(option(kind.__name__), kind)
        if public(known) != public(kind):
            raise Mistake(f"{public(kind)}: there is a layer of this name, {public(known)}; call the class otherwise")
    return {kind.__name__: kind for kind in found.values()}


@cache
def read() -> None:
    """Import the files of this chapter."""
    for name in files(sys.modules[CHAPTER]):
        import_module(f"{CHAPTER}.{name}")


def below(kind: type[AbstractLayer]) -> Iterator[type[AbstractLayer]]:
    """The classes that are made from one, and from these."""
    for child in kind.__subclasses__():
        yield child
        yield from below(child)
