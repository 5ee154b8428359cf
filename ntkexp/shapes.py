"""Shared types, and the names of axes.

    query    queries: the points whose outputs are attributed
    out      outputs at a query
    train    training examples
    out_     outputs at a training example

A kernel always has the axes [query, out, train, out_].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

Weights: TypeAlias = dict[str, Tensor]
"""Parameters by the names of `module.named_parameters()`."""

Inputs: TypeAlias = Tensor | tuple[object, ...] | Mapping[str, object]
"""The inputs of a network: a tensor [example, …], or a tuple or mapping of arguments.

Arguments that are not tensors are constants.
"""

Shape: TypeAlias = tuple[int, ...]
"""The shape of one example, without the example axis."""

Function: TypeAlias = Callable[[Weights, Inputs], Tensor]
"""A map from weights and inputs [example, …] to outputs [example, out]."""
