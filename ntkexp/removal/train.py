"""Training again: several runs at once, each with its own weights of the examples.

All begin at the same weights and see the same batches, so that what differs in the end is what the examples did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.optimizer.base import Memory
from ntkexp.removal.film import WEIGHTS
from ntkexp.removal.gradient import gradients
from ntkexp.removal.rerun import Rerun


class Taken(NamedTuple):
    """A step was taken by all runs: what it began with, and what the optimizer made of it."""

    step: int
    found: Mapping[str, Float[Tensor, "run weight"]]  # θ before it, the memory after it
    weights: Float[Tensor, "run weight"]


def retrain(rerun: Rerun, weight: Float[Tensor, "run train"]) -> Iterator[Taken]:
    """Take step after step, with these weights of the examples."""
    flat, runs = rerun.flat, len(weight)
    weights = flat.vector(rerun.start).expand(runs, -1)
    memory: Memory = {}
    for step in range(rerun.length):
        drawn = rerun.batch(step)
        left = drawn.left(weight)
        share = left * rerun.divided(drawn, left)[:, None]
        with torch.no_grad(), plain_kernels():
            gradient = gradients(rerun, weights, share, drawn.rows)
        before = weights
        weights, memory = moved(rerun, step, weights, gradient, memory)
        parts = {name: flat.vector(dict(part)) for name, part in memory.items()}
        yield Taken(step, {WEIGHTS: before, **parts}, weights)


def moved(
    rerun: Rerun, step: int, weights: Float[Tensor, "run weight"], gradient: Float[Tensor, "run weight"], memory: Memory
) -> tuple[Float[Tensor, "run weight"], Memory]:
    """Where the optimizer takes all runs, and what it remembers."""
    flat = rerun.flat
    taken = gradient * clippings(rerun, gradient)[:, None]
    after, kept = rerun.optimizer.update(step, flat.weights(weights), flat.weights(taken), rerun.sizes(step), memory)
    return flat.vector(after), kept


def clippings(rerun: Rerun, gradient: Float[Tensor, "run weight"]) -> Float[Tensor, " run"]:
    """What the gradient of each run is shortened by."""
    return gradient.new_tensor([rerun.optimizer.clipping(rerun.flat.weights(row)) for row in gradient])


def trained(rerun: Rerun, weight: Float[Tensor, "run train"]) -> Float[Tensor, "run weight"]:
    """Find the weights at the end."""
    weights = rerun.flat.vector(rerun.start).expand(len(weight), -1)
    for taken in retrain(rerun, weight):
        weights = taken.weights
    return weights
