"""The slow, obvious kernel: a Jacobian for every example by itself, and one inner product."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from ntkexp.shapes import Weights


def jacobians(module: nn.Module, x: Tensor, weights: Weights | None = None) -> dict[str, Float[Tensor, "n out size"]]:
    """∂f(x_i)/∂θ for every parameter that requires gradients, one back-propagation for each output of each example."""
    own = {name: weight.detach() for name, weight in module.named_parameters()} | (weights or {})
    trained = {name: own[name].clone().requires_grad_() for name, p in module.named_parameters() if p.requires_grad}
    rows = []
    for example in x:
        outputs = functional_call(module, own | trained, (example[None],), tie_weights=True).flatten()
        rows.append(
            [
                torch.autograd.grad(output, list(trained.values()), retain_graph=True, materialize_grads=True)
                for output in outputs
            ]
        )
    return {
        name: torch.stack([torch.stack([gradients[k].flatten() for gradients in one]) for one in rows])
        for k, name in enumerate(trained)
    }


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
