"""How far a kernel is from another one: from that of the start, from that of infinite width, from that of the labels.

drift             ‖K − K′‖/‖K′‖
alignment         ⟨K, K′⟩/(‖K‖‖K′‖); centred (CKA) with H = 1 − 11ᵀ/M on both sides
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def drift(kernel: Float[Tensor, "..."], start: Float[Tensor, "..."]) -> float:
    """Find the distance of a kernel from where it started, relative to the start.

    >>> import torch
    >>> drift(1.5 * torch.eye(4), torch.eye(4))
    0.5
    """
    return float((kernel - start).norm() / start.norm())


def alignment(left: Float[Tensor, "..."], right: Float[Tensor, "..."]) -> float:
    """Find the cosine between two kernels.

    >>> import torch
    >>> alignment(torch.eye(4), torch.eye(4) * 3)
    1.0
    """
    return float((left * right).sum() / (left.norm() * right.norm()))


def label_alignment(kernel: Float[Tensor, "train kept train kept_"], targets: Float[Tensor, "train out"]) -> float:
    """Find the CKA of the kernel, averaged over outputs, with the kernel yyᵀ of the targets."""
    averaged = kernel.diagonal(dim1=1, dim2=3).mean(2)
    return alignment(centred(averaged), centred(targets @ targets.t()))


def centred(kernel: Float[Tensor, "train train"]) -> Float[Tensor, "train train"]:
    """H K H."""
    return kernel - kernel.mean(0, keepdim=True) - kernel.mean(1, keepdim=True) + kernel.mean()
