"""Types that all parts share, and the names of their axes.

The axis `query` counts queries, the points whose outputs are explained, and `out` the outputs of a
query. The axis `train` counts training examples, and `out_` their outputs. A kernel always has the
axes [query, out, train, out_].
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
"""One tensor [example, …], or positional or named arguments. Non-tensor arguments are constants."""

Shape: TypeAlias = tuple[int, ...]
"""The shape of an example, without the axis of examples."""

Function: TypeAlias = Callable[[Weights, Inputs], Tensor]
"""A map from weights and inputs [example, …] to outputs [example, out]."""
