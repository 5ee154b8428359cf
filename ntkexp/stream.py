"""Random numbers: each purpose has its own stream, so that data do not depend on the seed of the
weights.

    stream(purpose, seed, …) = torch's generator, started at the first 32 bits of sha256("purpose/seed/…")

torch's generator uses only 32 bits of a seed. The package draws all its random numbers from
`stream`.

>>> draw = torch.rand(3, generator=stream("weights", 0))
>>> torch.equal(draw, torch.rand(3, generator=stream("weights", 0)))
True
>>> torch.equal(draw, torch.rand(3, generator=stream("examples", 0)))
False
"""

from __future__ import annotations

from hashlib import sha256
from typing import Literal, TypeAlias

import torch

Purpose: TypeAlias = Literal[
    "examples",  # inputs and targets of synthetic data
    "order",  # the order of the examples before they are split
    "noise",  # noise on training targets
    "weights",  # initial weights
    "batches",
    "trial",  # inputs for trying out a network before it meets the data
    "ownership",  # numbers that reveal which example owns a row of a tensor
    "sketch",  # positions and signs of a parameter's elements in a sketch
    "sketch error",  # vectors for measuring the error of a sketch
    "independence",  # orders and subsets of a batch, for checking that its examples are independent
    "loss",  # outputs for comparing a loss with finite differences
    "half",  # the two halves of the examples that are removed one after the other
    "random kernel",  # the kernel machine that knows nothing about the data
    "left out",  # the examples without which a training is repeated
    "cue",  # the task cues that are appended to inputs
    "signature",  # numbers that identify a tensor
    "signs",  # signs of weight perturbations of rounding size
    "rounding",  # noise and shares that measure rounding errors of gradients and of their terms
    "terms",  # shares that measure the terms of a gradient
    "outputs",  # random sums of outputs, and noise in inputs, for checking a replay
    "removals",  # examples whose removal is measured
    "monte carlo",  # networks whose kernels are averaged
    "process",  # draws of a Gaussian process that networks are compared with
    "faithfulness",  # a cotangent for comparing a module's gradients with its values
    "pixels",  # the pixel permutation of scrambled images
    "near pairs",  # projection axes for finding nearly equal examples
    "splits",  # the parts of the examples that a kernel learns from
]


def stream(purpose: Purpose, *numbers: int) -> torch.Generator:
    """Return the generator for a purpose; the numbers are the seed and, if needed, an index."""
    name = "/".join(map(str, (purpose, *numbers)))
    seed = int.from_bytes(sha256(name.encode()).digest()[:4], "big")
    return torch.Generator().manual_seed(seed)
