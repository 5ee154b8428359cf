"""The slow, obvious kernel: a Jacobian for every example by itself, and one inner product."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from ntkexp.shapes import Weights


def jacobians(module: nn.Module, x: Tensor, weights: Weights | None = None) -> dict[str, Float[Tensor, "n out size"]]:
    """∂f(x_i)/∂θ for every parameter that requires gradients."""
    own = {name: weight.detach() for name, weight in module.named_parameters()} | (weights or {})
    trained = {name: own[name] for name, weight in module.named_parameters() if weight.requires_grad}

    def outputs(chosen: Weights, example: Tensor) -> Tensor:
        found: Tensor = functional_call(module, own | chosen, (example[None],), tie_weights=True)
        return found.flatten()

    found = vmap(jacrev(outputs), (None, 0))(trained, x)
    return {name: jacobian.reshape(*jacobian.shape[:2], -1) for name, jacobian in found.items()}


def tangent(
    module: nn.Module, x1: Tensor, x2: Tensor, weights: Weights | None = None
) -> Float[Tensor, "probe out train out_"]:
    """K(x, x′) = J(x) J(x′)ᵀ."""
    left, right = (torch.cat(list(jacobians(module, x, weights).values()), 2) for x in (x1, x2))
    return torch.einsum("qcp,ndp->qcnd", left, right)


def contracted(jacobian: dict[str, Float[Tensor, "n out size"]], step: Weights) -> Float[Tensor, "n out"]:
    """J Δθ."""
    parts = [rows @ step[name].flatten() for name, rows in jacobian.items()]
    return torch.stack(parts).sum(0)
