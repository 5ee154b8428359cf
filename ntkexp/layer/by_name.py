"""Layers by their names in a configuration, wherever a field takes one.

>>> named("activation", {"relu": "R", "tanh": "T"})("tanh")
'T'
>>> named("activation", {"relu": "R", "tanh": "T"})("tahn")
Traceback (most recent call last):
ntkexp.mistake.Mistake: 'tahn' is no activation; choose from relu, tanh; did you mean 'tanh'?
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ntkexp.mistake import Mistake, nearest


def named(kind: str, known: Mapping[str, object]) -> Callable[[object], object]:
    """A validator that puts a layer in place of its name, and leaves a layer as it is."""

    def layer(name: object) -> object:
        if not isinstance(name, str):
            return name
        if name not in known:
            raise Mistake(f"'{name}' is no {kind}; choose from {', '.join(known)}{nearest(name, known)}")
        return known[name]

    return layer
