"""Jacobian applied to a step of weights, multiplied out: J Δθ."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.features.blocks import Factored
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.shapes import Weights


def applied(features: Jacobian, step: Weights) -> Float[Tensor, "example out"]:
    """Σ over parameters of ⟨∂f/∂θ, Δθ⟩."""
    parts = []
    for block in features.blocks:
        if isinstance(block, Factored):
            bias, weight = block.dense().tensor_split([block.biases], dim=2)
            if block.bias is not None:
                parts.append(torch.einsum("ncio,o->nc", bias, block.bias.of(step[block.bias.name])))
            if block.weight is not None:
                parts.append(torch.einsum("ncio,io->nc", weight, block.weight.of(step[block.weight.name])))
        else:
            parts += [rows.rows @ step[rows.name].flatten()[: rows.size] for rows in block.by_name()]
    return torch.stack(parts).sum(0)
