"""What the compiled loops read: operations and fields as arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ntkexp.covariance.operation import SERIES
from ntkexp.layer.pointwise import ROUNDING
from ntkexp.limit.fused.levels import Level
from ntkexp.limit.network import Side

Array = np.ndarray[Any, Any]
Laid: TypeAlias = Sequence[tuple[Tensor, ...]]
"""For each operation that meets variances, its fields, [example, *pixel]."""


WORDS, WEIGHTS = 8, 8


@dataclass(frozen=True)
class Tables:
    """A row of numbers for every operation of a level, and fields of both sides."""

    operations: Array
    weights: Array
    left: Array
    right: Array
    spread: Array  # the fields of vectors that are laid out for the left side, where the others stay numbers
    rounding: Any  # how near to one a correlation counts as one


def of_images(level: Level, left: Side, right: Side) -> Tables:
    """The tables of images, whose fields are inputs first, if nothing arrives, [image, field, pixel]."""
    one, two = laid(level, left, right)
    pixels = prod(level.sizes)

    def fields(side: Side, laid: Laid) -> Array:
        inputs = (
            side.x.new_zeros(len(side.x), 0, pixels) if level.arrivals else side.x.reshape(*side.x.shape[:2], pixels)
        )
        parts = [inputs, *(end.reshape(len(side.x), 1, pixels) for ends in laid for end in ends)]
        return np.ascontiguousarray(torch.cat(parts, 1).numpy())

    return Tables(
        *rows(level, one, left.x), fields(left, one), fields(right, two), spread(level, one), rounding(left.x)
    )


def of_vectors(level: Level, left: Side, right: Side) -> Tables:
    """The tables of vectors, whose fields are [example, field]."""
    one, two = laid(level, left, right)
    fields = (torch.stack([end for ends in laid for end in ends], 1).contiguous().numpy() for laid in (one, two))
    return Tables(*rows(level, one, left.x), next(fields), next(fields), spread(level, one), rounding(left.x))


def count(level: Level, left: Side, right: Side) -> int:
    """How many fields images have, but for inputs."""
    met = ((step.ends, left.variances[step.met], right.variances[step.met]) for step in level.operations if step.ends)
    return sum(len(ends(torch.maximum(one.max(), two.max())[None])) for ends, one, two in met)


def laid(level: Level, left: Side, right: Side) -> tuple[Laid, Laid]:
    """What the operations that meet variances ask to be laid out, of the examples of both sides."""
    sides, size = [left] if left is right else [left, right], len(left.x)
    found = [
        step.ends(torch.cat([side.variances[step.met] for side in sides])) for step in level.operations if step.ends
    ]
    first = [tuple(end[:size] for end in ends) for ends in found]
    return first, first if left is right else [tuple(end[size:] for end in ends) for ends in found]


def rows(level: Level, laid: Laid, x: Tensor) -> tuple[Array, Array]:
    """Each operation has its kind, registers, reach across, down and deep, first field and end of fields; and s, b, α,
    β, whether the rows beside are still to be added, and up to three constants.
    """
    operations, fields, before = level.operations, iter(laid), 0
    words, weights = np.zeros((len(operations), WORDS), np.int64), np.zeros((len(operations), WEIGHTS))
    for k, step in enumerate(operations):
        beyond = before + (len(next(fields)) if step.meets else 0)
        words[k] = (step.kind, step.register, step.other, *reversed(step.reach), before, beyond)
        numbers = (*step.weights, float(step.reach[1] == 1), *step.constants)
        weights[k, : len(numbers)] = numbers
        before = beyond
    return words, weights.astype(x.numpy().dtype)


def spread(level: Level, laid: Laid) -> Array:
    """The fields of all operations but for coefficients of series."""
    kinds = [step.kind for step in level.operations if step.meets]
    each = [kind == SERIES and place > 1 for kind, ends in zip(kinds, laid, strict=True) for place in range(len(ends))]
    return np.array([field for field, number in enumerate(each) if not number], np.int64)


def rounding(x: Tensor) -> Any:
    """How near to one a correlation counts as one."""
    eps = torch.finfo(x.dtype).eps
    return torch.tensor(ROUNDING * eps, dtype=x.dtype).numpy()[()]
