"""The kernel from Jacobians by plain autograd, and comparisons for all tests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call

from ntkexp.kernel.features.blocks import Block, Factored, Rows
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.mistake import Mistake
from ntkexp.shapes import Weights

EPS = torch.finfo(torch.float64).eps


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Return normal numbers in double precision."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def jacobians(module: nn.Module, x: Tensor, weights: Weights | None = None) -> dict[str, Float[Tensor, "n out size"]]:
    """Return ∂f(xᵢ)/∂θ for each trained parameter, by a backward pass for each output of each example."""
    own = {name: weight.detach() for name, weight in module.named_parameters()} | (weights or {})
    trained = {name: own[name].clone().requires_grad_() for name, p in module.named_parameters() if p.requires_grad}
    rows = []
    for example in x:
        outputs = functional_call(module, own | trained, (example[None],), tie_weights=True).flatten()
        leaves = list(trained.values())
        rows.append([torch.autograd.grad(f, leaves, retain_graph=True, materialize_grads=True) for f in outputs])
    return {
        name: torch.stack([torch.stack([gradients[k].flatten() for gradients in one]) for one in rows])
        for k, name in enumerate(trained)
    }


def tangent(
    module: nn.Module, x1: Tensor, x2: Tensor, weights: Weights | None = None
) -> Float[Tensor, "query out train out_"]:
    """Return K(x, x′) = J(x) J(x′)ᵀ."""
    left, right = (torch.cat(list(jacobians(module, x, weights).values()), 2) for x in (x1, x2))
    return torch.einsum("qcp,ndp->qcnd", left, right)


def contracted(jacobian: dict[str, Float[Tensor, "n out size"]], step: Weights) -> Float[Tensor, "n out"]:
    """Return J Δθ."""
    return torch.stack([rows @ step[name].flatten() for name, rows in jacobian.items()]).sum(0)


# Gradient blocks as dense arrays, and the product of a Jacobian with a step of the weights, J Δθ.


def dense(block: Factored) -> Float[Tensor, "example out in_ features"]:
    """Return Σ_u a_u ⊗ β_u. The bias is the weight of a first input `shift`."""
    inputs = block.inputs
    if block.shift is not None:
        inputs = torch.cat([torch.full_like(inputs[..., :1], block.shift), inputs], 2)
    return torch.einsum("nui,ncuo->ncio", inputs, block.outputs)


def by_name(block: Block) -> dict[str, Float[Tensor, "example out _"]]:
    """Return the gradient of each parameter, up to its last used element."""
    rows = Jacobian((block,), *block.gradients).as_rows(block.extents).blocks
    return {part.name: part.rows for part in rows if isinstance(part, Rows)}


def applied(features: Jacobian, step: Weights) -> Float[Tensor, "example out"]:
    """Return the sum of ⟨∂f/∂θ, Δθ⟩ over parameters."""
    parts = []
    for block in features.blocks:
        if isinstance(block, Factored):
            bias, weight = dense(block).tensor_split([0 if block.shift is None else 1], dim=2)
            if block.bias is not None:
                parts.append(torch.einsum("ncio,o->nc", bias, block.bias.of(step[block.bias.name])))
            if block.weight is not None:
                parts.append(torch.einsum("ncio,io->nc", weight, block.weight.of(step[block.weight.name])))
        else:
            parts += [rows @ step[name].flatten()[: rows.shape[2]] for name, rows in by_name(block).items()]
    return torch.stack(parts).sum(0)


# Comparisons of arrays, and of error messages.


def agree(actual: Tensor, expected: Tensor, tolerance: float, scale: Tensor | float | None = None) -> None:
    """Assert |actual − expected| ≤ tolerance · scale everywhere; the default scale is the largest expected entry."""
    assert actual.shape == expected.shape, f"{list(actual.shape)} against {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{actual.dtype} against {expected.dtype}"
    size = expected.abs().max() if scale is None else torch.as_tensor(scale)
    error = (actual - expected).abs()
    worst = int(error.argmax())
    place = tuple(int(index) for index in torch.unravel_index(torch.tensor(worst), error.shape))
    assert not error.isnan().any(), "there are entries that are not numbers"
    assert bool((error <= tolerance * size).all()), (
        f"at {place}: {actual.flatten()[worst]:.17g} against {expected.flatten()[worst]:.17g}, "
        f"off by {float(error.max() / size.max()):.1e} where {tolerance:.1e} is allowed"
    )


@contextmanager
def refused(*patterns: str, kind: type[Exception] = Mistake) -> Iterator[None]:
    """Assert that the body raises an error of one line that matches every pattern."""
    with pytest.raises(kind) as caught:
        yield
    message = str(caught.value)
    assert message
    assert "\n" not in message
    for pattern in patterns:
        assert re.search(pattern, message), message
