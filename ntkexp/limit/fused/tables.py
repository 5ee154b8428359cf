"""What the compiled loops read: operations and fields as arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ntkexp.layer.pointwise import ROUNDING
from ntkexp.limit.fused.program import TileProgram
from ntkexp.limit.network import Side

Array = np.ndarray[Any, Any]


def operations(program: TileProgram) -> Array:
    """A row for each: kind, register, other register, reach across and down, first field."""
    rows = [(step.kind, step.register, step.other, *reversed(step.reach), 2 * step.met) for step in program.operations]
    return np.array(rows)


def weights(program: TileProgram, dtype: torch.dtype) -> Array:
    """A row for each: s, b, α, β, k, h, and whether the rows beside are still to be added."""
    return torch.tensor(
        [(*step.weights, float(step.reach[0] == 1)) for step in program.operations], dtype=dtype
    ).numpy()


def rounding(x: Tensor) -> Any:
    """How near to one a correlation counts as one."""
    eps = torch.finfo(x.dtype).eps
    return torch.tensor(ROUNDING * eps, dtype=x.dtype).numpy()[()]


def fields(program: TileProgram, side: Side) -> Array:
    """What tiles need of images: inputs, and √q and 1/√q at every nonlinear layer, [image, field, pixel]."""
    pixels = side.x.shape[2:].numel()
    inputs = side.x.reshape(*side.x.shape[:2], pixels)
    parts = [inputs, *(root.reshape(len(side.x), 1, pixels) for root in roots(program, side))]
    return np.ascontiguousarray(torch.cat(parts, 1).numpy())


def vector_fields(program: TileProgram, side: Side) -> Array:
    """What rows need of vectors: √q and 1/√q at every nonlinear layer, [example, field]."""
    return np.ascontiguousarray(torch.stack(roots(program, side), 1).numpy())


def roots(program: TileProgram, side: Side) -> list[Tensor]:
    """The roots √q and 1/√q, zero where q is."""
    both = []
    for variance in side.variances[: program.met]:
        root = variance.sqrt()
        both += [root, torch.where(root > 0, 1 / root, 0.0)]
    return both
