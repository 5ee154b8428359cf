"""A training written out by the definitions of PyTorch, in one graph of autograd.

It is exact where differences of trainings are not: with Adam's ε = 1e-8 those of order 6 were off by up to 2e-3 at a
width of 1e-4, and by 1e-1 at 1e-5 where the sign of a gradient changes nearby.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.effects.sweep import MeanName
from ntkexp.optimizer.base import GUARD, AbstractOptimizer
from ntkexp.optimizer.descent import GD, SGD, Adam, AdamW, Momentum, Nesterov
from ntkexp.path.step import sizes_of
from tests.effects.trainings import Trained

Memory: TypeAlias = dict[str, Tensor]


def derivative(found: Trained, mean: MeanName) -> Float[Tensor, "vector example"]:
    """∂F/∂w of every output at the probe points, at weights of 1."""
    weights = torch.ones(found.trajectory.examples, dtype=torch.float64, requires_grad=True)
    reached = end(found, mean, weights)
    assert (reached - found.trajectory.end).abs().max() < 1e-12  # the same training
    points = found.setting.points
    outputs = points.reader.function(found.trajectory.flat.weights(reached), points.inputs[points.train :]).flatten()
    return torch.stack([torch.autograd.grad(output, weights, retain_graph=True)[0] for output in outputs])


def end(found: Trained, mean: MeanName, example_weights: Float[Tensor, " example"]) -> Float[Tensor, " weight"]:
    """θ after a training in which examples have these weights."""
    descent, flat, like = found.setting.descent, found.trajectory.flat, found.setting.problem.weights
    optimizer, memory = descent.optimizer, Memory()
    theta = flat.vector(like).requires_grad_()
    for index in range(descent.steps):
        size = sizes_of(like, descent.factors, descent.size(index))
        sizes = flat.vector({name: torch.full_like(weight, size[name]) for name, weight in like.items()})
        g = gradient(found, mean, index, theta, example_weights)
        if optimizer.clip_norm is not None:
            g = g * (optimizer.clip_norm / (g.norm() + GUARD)).clamp(max=1)
        coupled, lost = (0.0, 1.0) if optimizer.decouples else (1.0, 0.0)
        moved = MOVES[type(optimizer)](optimizer, index, g + coupled * optimizer.weight_decay * theta, memory)
        theta = theta - sizes * (moved + lost * optimizer.weight_decay * theta)
    return theta


def gradient(
    found: Trained, mean: MeanName, index: int, theta: Tensor, example_weights: Float[Tensor, " example"]
) -> Float[Tensor, " weight"]:
    """The gradient of a step, a mean of weighted losses."""
    descent, points = found.setting.descent, found.setting.points
    drawn = descent.optimizer.batch_indices(index, points.train, descent.seed)
    rows = torch.arange(points.train) if drawn is None else drawn
    outputs = points.reader.function(found.trajectory.flat.weights(theta), points.inputs[rows])
    losses, weights = descent.loss.value(outputs, descent.targets[rows]), example_weights[rows]
    whole = weights.sum() if mean == "renormalised" else len(rows)
    found_: Tensor = torch.autograd.grad(losses @ weights / whole, theta, create_graph=True)[0]
    return found_


def plain(optimizer: Any, index: int, p: Tensor, memory: Memory) -> Tensor:
    return p


def momentum(optimizer: Any, index: int, p: Tensor, memory: Memory) -> Tensor:
    memory["v"] = optimizer.momentum * memory["v"] + (1 - optimizer.dampening) * p if index else p
    return memory["v"]


def nesterov(optimizer: Any, index: int, p: Tensor, memory: Memory) -> Tensor:
    memory["v"] = optimizer.momentum * memory["v"] + p if index else p
    return p + float(optimizer.momentum) * memory["v"]


def adaptive(optimizer: Any, index: int, p: Tensor, memory: Memory) -> Tensor:
    """m̂/(√v̂ + ε), v̂ the largest so far where that is asked for."""
    nothing, (first, second) = torch.zeros_like(p), optimizer.betas
    memory["m"] = first * memory.get("m", nothing) + (1 - first) * p
    memory["v"] = second * memory.get("v", nothing) + (1 - second) * p * p
    root = torch.where(memory["v"] > 0, memory["v"].clamp(min=1e-300).sqrt(), 0.0)  # at zero √ has no slope
    if optimizer.amsgrad:
        root = memory["root"] = torch.maximum(root, memory.get("root", nothing))
    corrected: Tensor = memory["m"] / (1 - first ** (index + 1))
    found: Tensor = corrected / (root / (1 - second ** (index + 1)) ** 0.5 + optimizer.eps)
    return found


MOVES: dict[type[AbstractOptimizer], Callable[[Any, int, Tensor, Memory], Tensor]] = {
    GD: plain,
    SGD: plain,
    Momentum: momentum,
    Nesterov: nesterov,
    Adam: adaptive,
    AdamW: adaptive,
}
"""θ ← θ − η times this."""
