"""Arguments: what an operation is given or gives, by itself or in lists and tuples.

torch walks trees of any kind, which takes longer than most operations; those of an operation have no other branches.

>>> replace((1, [2, "x"]), lambda leaf: 10 * leaf), list(leaves((1, [2, None])))
((10, [20, 'xxxxxxxxxx']), [1, 2, None])
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


def replace(value: Any, function: Callable[[Any], Any]) -> Any:
    """The same, a function applied to every leaf."""
    if isinstance(value, tuple):
        return tuple([replace(each, function) for each in value])
    if isinstance(value, list):
        return [replace(each, function) for each in value]
    return function(value)


def leaves(value: Any) -> Iterator[Any]:
    """What is in it that holds nothing else."""
    if isinstance(value, tuple | list):
        for each in value:
            yield from leaves(each)
    else:
        yield value
