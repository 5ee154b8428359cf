"""An engine computes a block: which one is chosen by what it knows and by shapes, never by clocks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from ntkexp.covariance.operation import NoFusedForm
from ntkexp.layer.width import affine
from ntkexp.limit import torch_engine
from ntkexp.limit.fused.program import TileProgram, program
from ntkexp.limit.network import Kernels, Network, Side
from ntkexp.mistake import Mistake, nearest

ENGINES = ("auto", "torch", "fused")
Engine: TypeAlias = Literal["auto", "torch", "fused"]
Run: TypeAlias = Callable[[Side, Side, bool], Kernels]
"""Two sides, and whether they are the same ↦ the kernels of a block, whose entries are finite."""
ENOUGH = 3e7  # pairs of pixels times layers: a tenth of a second in torch, against the second that numba takes to load


def engine_of(engine: Engine, net: Network, x: Tensor, pairs: int, memory_gb: float, threads: int | None) -> Run:
    """The engine that is asked for, or the faster one for so many pairs of examples."""
    if not isinstance(engine, str) or engine not in ENGINES:
        raise Mistake(f"engine={engine} is none of {', '.join(ENGINES)}{nearest(str(engine), ENGINES)}")
    by_torch = partial(torch_engine.kernels, net, memory_gb=memory_gb)
    if engine == "torch" or (engine == "auto" and net.work * pairs < ENOUGH):
        return by_torch
    reason = why_not(net, x)
    try:
        known = None if reason else program(net.layers, net.shape)
    except NoFusedForm as missing:
        known, reason = None, f"{missing} has no fused form"
    if known:
        return partial(by_tiles, known, net, threads or torch.get_num_threads(), memory_gb)
    if engine == "fused":
        raise Mistake(f"engine=fused: {reason}; choose torch")
    return by_torch


def why_not(net: Network, x: Tensor) -> str:
    """What the fused engine does not do, whatever the layers are."""
    if x.device.type != "cpu" or x.dtype not in {torch.float32, torch.float64}:
        return f"it takes float32 or float64 on a CPU, not {x.dtype} on {x.device.type}"
    scales = [scale for layer in affine(net.layers) for scale in (layer.W_std, layer.b_std)]
    if x.requires_grad or any(isinstance(scale, Tensor) and scale.requires_grad for scale in scales):
        return "it has no derivatives"
    return ""


def by_tiles(
    known: TileProgram, net: Network, threads: int, memory_gb: float, left: Side, right: Side, same: bool
) -> Kernels:
    """The kernels by numba, which is loaded when it is first needed."""
    from ntkexp.limit.fused.run import kernels  # noqa: PLC0415

    return kernels(known, net, left, right, same, threads, memory_gb)
