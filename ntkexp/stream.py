"""Random numbers. Each purpose has its own stream, so that, for example, weights and
data are independent.

`stream(purpose, seed, …)` is a torch.Generator. Its seed is the first 32 bits of
sha256("purpose/seed/…"), because torch uses only 32 bits of a seed. All random numbers
of the package are drawn from `stream`.

>>> draw = torch.rand(3, generator=stream("weights", 0))
>>> torch.equal(draw, torch.rand(3, generator=stream("weights", 0)))
True
>>> torch.equal(draw, torch.rand(3, generator=stream("examples", 0)))
False
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

Purpose: TypeAlias = Literal[
    "examples",  # inputs and targets of synthetic data
    "order",  # the order of the examples before they are split
    "noise",  # noise on training targets
    "weights",  # initial weights
    "batches",
    "trial",  # random inputs for testing a network before the data are read
    "ownership",  # numbers that reveal which example owns a row of a tensor
    "sketch",  # positions and signs of a parameter's elements in a sketch
    "sketch error",  # vectors for measuring the error of a sketch
    # orders and subsets of a batch, for checking that its examples are independent
    "independence",
    "loss",  # outputs for comparing a loss with finite differences
    "half",  # the random group of examples whose weight is halved and then set to 0
    "random kernel",  # a kernel machine with a random kernel, as a control
    "left out",  # the examples that retraining leaves out
    "cue",  # the task cues that are appended to inputs
    "signature",  # numbers that identify a tensor
    "signs",  # signs of weight perturbations as small as rounding errors
    "rounding",  # noise and random factors for measuring rounding errors of gradients
    # random weights for comparing gradients of examples with those of their batch
    "shares",
    "terms",  # random factors for measuring the terms of a gradient
    "outputs",  # random sums of outputs, and noise in inputs, for checking a replay
    "removals",  # examples whose removal is measured
    "monte carlo",  # networks whose kernels are averaged
    "process",  # draws of a Gaussian process that networks are compared with
    # a random vector for comparing a module's gradients with its values
    "faithfulness",
    "pixels",  # the pixel permutation of scrambled images
    "near pairs",  # projection axes for finding nearly equal examples
    "sharpness",  # the start vector of the Lanczos iteration for the Hessian
    "largest eigenvalue",  # the start vector of the Lanczos iteration for a large kernel
    "splits",  # the training splits of a kernel
    "permuted labels",  # the order of labels that a network learns as a control
    "diagnostics",  # torch's global generator while a diagnostic measures
]


def stream(purpose: Purpose, *numbers: int) -> torch.Generator:
    """Return the generator for a purpose.

    `numbers` are the seed and, if needed, indices such as a step.
    """
    name = "/".join(map(str, (purpose, *numbers)))
    seed = int.from_bytes(sha256(name.encode()).digest()[:4], "big")
    return torch.Generator().manual_seed(seed)


@contextmanager
def global_seed(seed: int) -> Iterator[None]:
    """Seed torch's global generator, from which layers and functions of the user draw.
    Afterwards, restore its state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def normal(generator: torch.Generator, *shape: int) -> Float[Tensor, "..."]:
    """Draw a tensor of this shape from N(0, 1), in double precision."""
    return torch.randn(shape, generator=generator, dtype=torch.float64)
