"""The types that every chapter speaks, and the words for their axes.

`probe` is a point where the network is read and `out` one of its outputs there; `train` is a training example and
`out_` one of its outputs. A kernel always has the axes [probe, out, train, out_].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor
else:
    Tensor = Any

Weights: TypeAlias = dict[str, Tensor]
"""Named parameters, as `module.named_parameters()` names them."""

Function: TypeAlias = Callable[[Weights, Tensor], Tensor]
"""Weights and inputs [example, …] to outputs [example, out]."""
