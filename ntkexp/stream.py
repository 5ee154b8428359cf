"""Random numbers: each purpose has its own stream, so that data do not depend on the seed of the weights.

    stream(purpose, seed, …) = torch's generator, started at the first 32 bits of sha256("purpose/seed/…")

32 bits are all that torch's generator reads of a start. There is no other door to chance.

>>> torch.equal(torch.rand(3, generator=stream("weights", 0)), torch.rand(3, generator=stream("weights", 0)))
True
>>> torch.equal(torch.rand(3, generator=stream("weights", 0)), torch.rand(3, generator=stream("examples", 0)))
False
"""

from __future__ import annotations

from hashlib import sha256
from typing import Literal, TypeAlias

import torch

Purpose: TypeAlias = Literal[
    "examples",  # what a source of data makes up: inputs, and what is to be learned
    "order",  # of the examples before they are cut into splits
    "noise",  # on training targets
    "weights",  # before training
    "batches",
    "trial",  # inputs that a network is tried on before it meets the data
    "ownership",  # numbers by which a module shows which example owns what
    "sketch",  # where the elements of a parameter go, and with which signs
    "sketch error",  # vectors by which a sketch is compared with what it is a sketch of
    "independence",  # orders and parts of a batch that are run to see whether its examples are independent
    "loss",  # outputs at which a loss is compared with differences
    "half",  # examples of which half is left out, and then the rest
    "random kernel",  # of a machine that knows nothing
    "left out",  # which examples a training is repeated without
    "cue",  # of a task, beside its inputs
    "signature",  # by which a tensor is recognised
    "signs",  # of the rounding of weights
    "rounding",  # noise that shows what rounding does to a gradient
    "terms",  # shares by which the terms of a gradient are measured
    "rounding",  # the shares by which the terms of a gradient are measured
    "outputs",  # random sums of outputs, which a replay is compared with, and noise in what it is given
    "removals",  # examples that are left out to see what changes
    "monte carlo",  # networks whose kernels are averaged
    "process",  # draws with which networks are compared
    "faithfulness",  # a cotangent by which a module's gradients are compared with its values
    "pixels",  # where they go in images that are scrambled
    "near pairs",  # axes on which examples are projected to find those that are nearly equal
    "splits",  # parts of the examples that a kernel learns from
]


def stream(purpose: Purpose, *numbers: int) -> torch.Generator:
    """The stream of a purpose, for a seed and whatever else tells one draw from another."""
    name = "/".join(map(str, (purpose, *numbers)))
    return torch.Generator().manual_seed(int.from_bytes(sha256(name.encode()).digest()[:4], "big"))
