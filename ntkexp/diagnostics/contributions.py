"""What can be said of the integrals of a whole run, in numbers.

cancellation           Σ|𝒮| / Σ_x |Σᵢ 𝒮|: how far the parts exceed their sum
top_k                  the share of |𝒮| that comes from the k largest contributors to a point, on average
coefficient_variation  of aᵢ(x) = 𝒦(x, xᵢ)⁻¹ 𝒮(x, xᵢ) over the points x, the median over examples: zero for a kernel
                       machine whose coefficients do not depend on the query
left_out               the share of pairs whose 𝒦 is too small to divide by
symmetry_defect        ‖𝒦 − 𝒦ᵀ‖/‖𝒦‖ among the training examples
psd_defect             −λ_min/λ_max of the symmetric part of 𝒦 there, if λ_min is negative
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.on_disk import blocks, summed

TOPS = (1, 5, 10)
SMALL = 1e-3  # of the largest 𝒦


def summary(
    kernel: Float[Tensor, "probe out kept out_"], contributions: Float[Tensor, "probe out train"], train: int
) -> dict[str, float]:
    """Find all of these; the first `train` points are the training examples (none, if the path was not read there)."""
    mass = torch.stack([block.abs().sum() for block in blocks(contributions)]).sum()
    found = {"cancellation": ratio(mass, summed(contributions).abs().sum())}
    found |= {f"top_{k}": top_share(contributions, k) for k in TOPS}
    found |= coefficients(kernel, contributions) if is_square(kernel) else {}
    return found | (defects(kernel[:train]) if train and is_square(kernel) else {})


def is_square(kernel: Float[Tensor, "probe out train out_"]) -> bool:
    """Whether the path was read at every output, and its kernel kept."""
    return kernel.shape[1] == kernel.shape[3] and kernel.shape[2] > 0


def top_share(contributions: Float[Tensor, "probe out train"], k: int) -> float:
    """Find the share of the k largest contributors.

    >>> top_share(torch.tensor([[[3.0, -1.0]]]), 1)
    0.75
    """
    k = min(k, contributions.shape[2])
    sizes = (block.abs().sum(1) for block in blocks(contributions))
    return float(torch.cat([each.topk(k, dim=1).values.sum(1) / each.sum(1) for each in sizes]).mean())


def coefficients(
    kernel: Float[Tensor, "probe out train out_"], contributions: Float[Tensor, "probe out train"]
) -> dict[str, float]:
    """How much the coefficients of the kernel machine depend on the query."""
    blocks = kernel.transpose(1, 2)  # [probe, train, out, out_]
    sizes = torch.linalg.svdvals(blocks)[..., -1] if blocks.shape[2] > 1 else blocks[..., 0].abs()[..., 0]
    usable = (sizes > 0) & (sizes >= SMALL * blocks.abs().amax())
    divisor = torch.where(usable[..., None, None], blocks, torch.eye(blocks.shape[2]).to(blocks))
    parts = contributions.transpose(1, 2)[..., None].to(divisor)
    solved = torch.linalg.solve(divisor, parts)[..., 0]  # [probe, train, out]
    known = torch.where(usable[..., None], solved, torch.nan)
    mean = known.nanmean(0)
    deviation = (known - mean).square().nanmean(0).sqrt()
    variation = (deviation / mean.abs()).flatten()
    return {
        "coefficient_variation": float(variation.nanmedian()),
        "left_out": float((~usable).double().mean()),
    }


def defects(kernel: Float[Tensor, "train out train out_"]) -> dict[str, float]:
    """How far the path kernel is from being a kernel."""
    matrix = kernel.flatten(2).flatten(0, 1)
    values = torch.linalg.eigvalsh((matrix + matrix.mH) / 2)
    return {
        "symmetry_defect": ratio((matrix - matrix.mH).norm(), matrix.norm()),
        "psd_defect": max(0.0, ratio(-values[0], values[-1])),
    }


def ratio(above: Tensor, below: Tensor) -> float:
    """above / below, or NaN where there is nothing to divide by."""
    return float(above / below) if below else float("nan")
