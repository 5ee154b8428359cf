"""What leaving each example of a followed loop out would change in the outputs at the queries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import jacrev

from ntkexp.effects.mean import AbstractMean
from ntkexp.effects.sweep import sweep_from
from ntkexp.effects.trajectory import AbstractTrajectory
from ntkexp.kernel.record.inputs import examples, part
from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.shapes import Function, Inputs

ROWS = 12  # vectors of weights that are held for an output: its adjoints, and those of a pass
IN_CACHE = 2**21  # numbers in one pass


class FollowedEffects(NamedTuple):
    """The effects, and how much more outputs feel of the weights on the way back than at the end."""

    values: Float[Tensor, "probe out example"]
    growth: float


def followed_effects(
    training: AbstractTrajectory,
    function: Function,
    queries: Inputs,
    mean: AbstractMean,
    memory_gb: float,
    *,
    one_step: bool = False,
) -> FollowedEffects:
    """Sweep back for so many queries at a time as there is memory for."""
    end = training.end
    gradients = [end_gradient(training, function, part(queries, slice(k, k + 1))) for k in range(examples(queries))]
    at_once = max(1, int(memory_gb * 1e9 / (ROWS * end.nbytes)))
    effects, sizes = [], []
    for vectors in torch.split(torch.cat(gradients), at_once):
        sweep = sweep_from(training, vectors, mean, max(1, IN_CACHE // len(end)), one_step=one_step)
        for _ in sweep.steps_back():
            continue
        effects.append(sweep.effects)
        sizes.append(torch.tensor(sweep.sizes))
    total = torch.stack(sizes).sum(0)
    values = torch.cat(effects).view(len(gradients), -1, training.examples)
    return FollowedEffects(values, float(total.max() / total[0]))


def end_gradient(training: AbstractTrajectory, function: Function, query: Inputs) -> Float[Tensor, "out weight"]:
    """∂f/∂θ_T of the outputs at one query."""
    with plain_kernels():
        found: Tensor = jacrev(lambda at: function(training.flat.weights(at), query).reshape(-1))(training.end)
    return found
