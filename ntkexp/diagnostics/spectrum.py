"""What a tangent kernel among the training examples says about training, in numbers.

With the eigenvalues λ of the (M·C)×(M·C) matrix K and p = λ/Σλ:

    effective rank    exp(−Σ p log p)
    stability         η w λ_max max ℓ″ / 2: gradient descent on a quadratic with this kernel is stable below 1
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.diagnostics.lanczos import largest_eigenvalue

TOP = 10
DENSE = 4096  # entries; all eigenvalues of a larger matrix would take minutes at every snapshot


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues stand from the largest down, with their eigenvectors."""

    values: Float[Tensor, " mode"]
    modes: Float[Tensor, "entry mode"]

    @property
    def effective_rank(self) -> float:
        """exp of the entropy of the normalised eigenvalues.

        >>> Spectrum(torch.tensor([2.0, 2.0, 0.0]), torch.eye(3)).effective_rank
        2.0
        """
        positive = self.values[self.values > 0]
        shares = positive / positive.sum()
        return float(torch.exp(-(shares * shares.log()).sum()))

    @property
    def condition(self) -> float:
        """λ_max/λ_min; infinite where λ_min is zero to rounding."""
        smallest, largest = float(self.values[-1]), float(self.values[0])
        noise = len(self.values) * torch.finfo(self.values.dtype).eps * largest
        return largest / smallest if smallest > noise else float("inf")

    def share(self, vectors: Float[Tensor, "entry *vector"], top: int) -> float:
        """How much of ‖v‖² lies in the eigenspace of the `top` largest eigenvalues, of all vectors together."""
        inside = self.modes[:, :top].mH @ vectors
        whole = float(vectors.square().sum())
        return float(inside.square().sum()) / whole if whole else float("nan")


def spectrum(kernel: Float[Tensor, "train out train out_"]) -> Spectrum:
    """Find the eigenvalues and eigenvectors of the kernel as a matrix."""
    matrix = kernel.flatten(2).flatten(0, 1)
    values, modes = torch.linalg.eigh((matrix + matrix.mH) / 2)
    return Spectrum(values.flip(0), modes.flip(1))


def largest(kernel: Float[Tensor, "train out train out_"]) -> float:
    """λ_max: from all eigenvalues of a matrix that is small enough, from below by products with a larger one."""
    matrix = kernel.flatten(2).flatten(0, 1)
    if len(matrix) <= DENSE:
        return float(torch.linalg.eigvalsh((matrix + matrix.mH) / 2)[-1])
    return largest_eigenvalue(matrix.__matmul__, matrix.diagonal().sqrt())
