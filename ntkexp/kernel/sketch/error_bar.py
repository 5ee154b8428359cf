"""How far a sketched kernel is from the kernel, without the kernel: from a few random vectors V of normal numbers.

    E ‖(K̂ − K)V‖²_F = v ‖K̂ − K‖²_F

K V takes a contraction on the right and one on the left for each vector, and no products of examples with examples.
The sum of squares is a mixture of χ² of v degrees, which falls short of its mean the furthest where all of the error
lies in one direction (Székely & Bakirov 2003). Even there the bar is as large as the error in 99 of 100 cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.stream import stream

VECTORS = 8
LEAST = 1.6465  # what χ² of 8 degrees exceeds in 99 of 100 cases


def random_vectors(shape: Sequence[int], seed: int, like: Tensor) -> Float[Tensor, "vector example out"]:
    """V, drawn apart from the sketch that it judges."""
    noise = torch.randn(VECTORS, *shape, generator=stream("sketch error", seed), dtype=torch.float64)
    return noise.to(like)


def error_bar(missed: Float[Tensor, "vector probe out"]) -> float:
    """‖K̂ − K‖_F at most, from (K̂ − K)V."""
    return sqrt(float(missed.double().square().sum()) / LEAST)
