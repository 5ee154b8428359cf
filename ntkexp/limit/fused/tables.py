"""What the compiled loops read: operations and fields as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ntkexp.covariance.operation import SERIES
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
    spread: Array  # the fields of vectors that are laid out for the left side, where the others stay numbers
    rounding: Any  # how near to one a correlation counts as one


def of_images(program: TileProgram, left: Side, right: Side) -> Tables:
    """The tables of images, whose fields are inputs first, [image, field, pixel]."""
    one, two = laid(program, left, right)
    pixels = left.x.shape[2:].numel()

    def fields(side: Side, laid: Laid) -> Array:
        inputs = side.x.reshape(*side.x.shape[:2], pixels)
        parts = [inputs, *(end.reshape(len(side.x), 1, pixels) for ends in laid for end in ends)]
        return np.ascontiguousarray(torch.cat(parts, 1).numpy())

    return Tables(
        *rows(program, one, left.x), fields(left, one), fields(right, two), spread(program, one), rounding(left.x)
    )


def of_vectors(program: TileProgram, left: Side, right: Side) -> Tables:
    """The tables of vectors, whose fields are [example, field]."""
    one, two = laid(program, left, right)
    fields = (torch.stack([end for ends in laid for end in ends], 1).contiguous().numpy() for laid in (one, two))
    return Tables(*rows(program, one, left.x), next(fields), next(fields), spread(program, one), rounding(left.x))


def count(program: TileProgram, left: Side, right: Side) -> int:
    """How many fields images have."""
    asked = [step.ends for step in program.operations if step.ends]
    both = zip(left.variances, right.variances, strict=True)
    largest = (torch.maximum(one.max(), two.max())[None] for one, two in both)
    return program.channels + sum(len(ends(variance)) for ends, variance in zip(asked, largest, strict=False))


def laid(program: TileProgram, left: Side, right: Side) -> tuple[Laid, Laid]:
    """What the operations that meet variances ask to be laid out, of the examples of both sides."""
    asked, count = [step.ends for step in program.operations if step.ends], len(left.x)
    sides = [left.variances] if left is right else [left.variances, right.variances]
    found = [ends(torch.cat(met)) for ends, *met in zip(asked, *sides, strict=False)]
    first = [tuple(end[:count] for end in ends) for ends in found]
    return first, first if left is right else [tuple(end[count:] for end in ends) for ends in found]


def rows(program: TileProgram, laid: Laid, x: Tensor) -> tuple[Array, Array]:
    """Each operation has its kind, registers, reach across, down and deep, first field and end of fields; and s, b, α,
    β, whether the rows beside are still to be added, and up to three constants.
    """
    first = [0, *accumulate(len(ends) for ends in laid)]
    words, weights = [], torch.zeros(len(program.operations), WEIGHTS, dtype=x.dtype)
    for row, step in zip(weights, program.operations, strict=True):
        words.append(
            (step.kind, step.register, step.other, *reversed(step.reach), first[step.met], first[step.met + step.meets])
        )
        numbers = (*step.weights, float(step.reach[1] == 1), *step.constants)
        row[: len(numbers)] = torch.tensor(numbers, dtype=x.dtype)
    return np.array(words), weights.numpy()


def spread(program: TileProgram, laid: Laid) -> Array:
    """The fields of all operations but for coefficients of series."""
    kinds = [step.kind for step in program.operations if step.meets]
    each = [kind == SERIES and place > 1 for kind, ends in zip(kinds, laid, strict=True) for place in range(len(ends))]
    return np.array([field for field, number in enumerate(each) if not number], np.int64)


def rounding(x: Tensor) -> Any:
    """How near to one a correlation counts as one."""
    eps = torch.finfo(x.dtype).eps
    return torch.tensor(ROUNDING * eps, dtype=x.dtype).numpy()[()]
