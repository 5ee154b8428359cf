"""The eigendecomposition of a kernel matrix: one of Θ(X, X) serves every time and every ridge,

    g(R) B = V g(λ + ridge) Vᵀ B,    R = Θ(X, X) + ridge = V (λ + ridge) Vᵀ.

An eigenvalue below n · eps · λ_max is rounding, and counts as zero. So does one that is no larger than the most
negative, which a kernel would not have: it measures what rounding the entries did.

>>> from ntkexp.closed_form.gain import FOREVER
>>> theta = torch.diag(torch.tensor([4.0, 0.0], dtype=torch.float64))
>>> modes_of(theta).at(FOREVER, ridge=1.0)(torch.ones(2, 1, dtype=torch.float64)).flatten().tolist()
[0.2, 1.0]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.closed_form.gain import AbstractGain
from ntkexp.mistake import Mistake

Learned: TypeAlias = Callable[[Tensor], Tensor]
"""B [entry, column] ↦ g(R) B."""


@dataclass(frozen=True)
class Modes:
    """Eigenvalues, none of them negative, from the smallest up, and their eigenvectors."""

    values: Float[Tensor, " mode"]
    vectors: Float[Tensor, "entry mode"]

    def at(self, gain: AbstractGain, ridge: float = 0.0) -> Learned:
        """The map B ↦ g(R) B, R being the kernel plus the ridge."""
        refuse_negative(ridge)
        gains = gain(self.values + ridge)[:, None]
        return lambda right: self.vectors @ (gains * (self.vectors.mH @ right))


def modes_of(matrix: Float[Tensor, "entry entry"]) -> Modes:
    """The modes of a matrix's symmetric part, which has to be positive but for rounding."""
    values, vectors = torch.linalg.eigh((matrix + matrix.mH) / 2)
    rounding = torch.maximum(len(values) * torch.finfo(values.dtype).eps * values[-1:], -values[:1])
    return Modes(torch.where(values > rounding, values, 0.0), vectors)


def refuse_negative(ridge: float) -> None:
    """A ridge that is less than nothing cannot be added to a kernel."""
    if not 0 <= ridge < math.inf:
        raise Mistake(f"ridge={ridge:g}: it takes a number ≥ 0")
