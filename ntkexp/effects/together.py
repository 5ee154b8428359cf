"""Several vectors are taken through a function together, or one by one where that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from jaxtyping import Num
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

Found = TypeVar("Found", Tensor, tuple[Tensor, Tensor])


def at_once(function: Callable[..., Found], *several: Num[Tensor, "several ..."], together: int | None = None) -> Found:
    """So many at a time, all by default; one by one where a module looks at numbers and decides by them.

    >>> at_once(lambda x: x * 2 if x.sum() > 0 else x, torch.tensor([[1.0], [-1.0]]))
    tensor([[ 2.],
            [-1.]])
    """
    try:
        found: Found = vmap(function, chunk_size=together, randomness="same")(*several)  # of a known state
    except RuntimeError:  # what is wrong with the function itself is told below
        return one_by_one(function, *several)
    return found


def one_by_one(function: Callable[..., Found], *several: Num[Tensor, "several ..."]) -> Found:
    """The same without `vmap`."""
    found: list[Any] = [function(*each) for each in zip(*several, strict=True)]
    stacked: Any = tree_map(lambda *parts: torch.stack(parts), *found)
    of_its_kind: Found = stacked
    return of_its_kind
