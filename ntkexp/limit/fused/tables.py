"""What the compiled loops read: operations and fields as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ntkexp.layer.pointwise import ROUNDING
from ntkexp.limit.fused.program import TileProgram
from ntkexp.limit.network import Side

Array = np.ndarray[Any, Any]
Laid: TypeAlias = Sequence[tuple[Tensor, ...]]
"""For each operation that meets variances, its fields, [example, *pixel]."""


WEIGHTS = 8


@dataclass(frozen=True)
class Tables:
    """A row of numbers for every operation, and fields of both sides."""

    operations: Array
    weights: Array
    left: Array
    right: Array
    rounding: Any  # how near to one a correlation counts as one


def of_images(program: TileProgram, left: Side, right: Side) -> Tables:
    """The tables of images, whose fields are inputs first, [image, field, pixel]."""
    one, two = (laid(program, side) for side in (left, right))
    pixels = left.x.shape[2:].numel()

    def fields(side: Side, laid: Laid) -> Array:
        inputs = side.x.reshape(*side.x.shape[:2], pixels)
        parts = [inputs, *(end.reshape(len(side.x), 1, pixels) for ends in laid for end in ends)]
        return np.ascontiguousarray(torch.cat(parts, 1).numpy())

    return Tables(*rows(program, one, left.x), fields(left, one), fields(right, two), rounding(left.x))


def of_vectors(program: TileProgram, left: Side, right: Side) -> Tables:
    """The tables of vectors, whose fields are [example, field]."""
    one, two = (laid(program, side) for side in (left, right))
    fields = (torch.stack([end for ends in laid for end in ends], 1).contiguous().numpy() for laid in (one, two))
    return Tables(*rows(program, one, left.x), next(fields), next(fields), rounding(left.x))


def laid(program: TileProgram, side: Side) -> Laid:
    """What the operations that meet variances ask to be laid out, of the examples of a side."""
    asked = [step.ends for step in program.operations if step.ends]
    return [ends(variance) for ends, variance in zip(asked, side.variances, strict=False)]


def rows(program: TileProgram, laid: Laid, x: Tensor) -> tuple[Array, Array]:
    """Each operation has its kind, registers, reach across, down and deep, and first field; and s, b, α,
    β, whether the rows beside are still to be added, and up to three constants.
    """
    first = [0, *accumulate(len(ends) for ends in laid)]
    words, weights = [], torch.zeros(len(program.operations), WEIGHTS, dtype=x.dtype)
    for row, step in zip(weights, program.operations, strict=True):
        words.append((step.kind, step.register, step.other, *reversed(step.reach), first[step.met]))
        numbers = (*step.weights, float(step.reach[1] == 1), *step.constants)
        row[: len(numbers)] = torch.tensor(numbers, dtype=x.dtype)
    return np.array(words), weights.numpy()


def rounding(x: Tensor) -> Any:
    """How near to one a correlation counts as one."""
    eps = torch.finfo(x.dtype).eps
    return torch.tensor(ROUNDING * eps, dtype=x.dtype).numpy()[()]
