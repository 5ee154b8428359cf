"""Types that all parts share, and the names of their axes.

`probe` is a point where the network is read and `out` one of its outputs there; `train` is a training example and
`out_` one of its outputs. A kernel always has the axes [probe, out, train, out_].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

Weights: TypeAlias = dict[str, Tensor]
"""Named parameters, as `module.named_parameters()` names them."""

Inputs: TypeAlias = Tensor | tuple[object, ...] | Mapping[str, object]
"""One tensor [example, …], several by position, or several by name; what is not a tensor among them is a constant."""

Function: TypeAlias = Callable[[Weights, Inputs], Tensor]
"""Weights and inputs [example, …] to outputs [example, out]."""
