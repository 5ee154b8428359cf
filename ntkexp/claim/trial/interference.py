"""What learning task B does to task A, decomposed over the examples of B:

    f_end(x) − f_switch(x) = Σⱼ 𝒮(x, xⱼ),    𝒮(x, xⱼ) = −Σ_s η_s/M K̄_s(x, xⱼ) ℓ′ⱼ(s)        x of A, xⱼ of B

    closure       ‖difference of both sides‖/‖left side‖
    forgetting    rise of the loss ½(f − y)² of A's new points while B is learned
    top_share     of what lowers the margins y f of A, the share of a tenth of B's examples, those that lower them most
    switch        correlation over x of the left side with what the kernel K(A, B) at the switch says of it:
                  r ← (1 − η_s K(B, B)/M) r,  f_end − f_switch ≈ −Σ_s η_s/M K(A, B) r_s,   r₀ = ℓ′(switch)
    shuffled      the same, with the columns of K(A, B) moved on by half of the examples

The identity is that of the path kernel (P. Domingos 2020, arXiv:2012.00152, theorem 1), between two tasks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.claim.trial.scaled_descent import LearningStep
from ntkexp.claim.trial.task_by_task import ScaledNetwork, task_of
from ntkexp.component import Count
from ntkexp.data.base import AbstractSource
from ntkexp.init.base import AbstractInit
from ntkexp.library import secant_kernel
from ntkexp.mistake import Mistake
from ntkexp.model.base import AbstractArchitecture
from ntkexp.records.sweep import Level
from ntkexp.stream import stream


class Interference(AbstractTrial):
    """Two sources of two classes are learned in turn, and the new points of the first are watched."""

    model: AbstractArchitecture
    init: AbstractInit
    first: AbstractSource
    then: AbstractSource
    steps: Count = 60
    fraction: float = Field(0.1, gt=0, lt=1)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        one, other = self.first.split(seed), self.then.split(seed)
        if len(one.classes) != 2 or len(other.classes) != 2 or not len(one.probe.inputs):
            raise Mistake("trial.first, trial.then: choose data of two classes, and a first with probe=20 or more")
        shape, generator = tuple(one.train.inputs.shape[1:]), stream("weights", seed)
        network = ScaledNetwork(self.model.module(self.init, shape, 1, generator, one.vocabulary).eval(), alpha=1.0)
        start = {name: weight.clone() for name, weight in network.start.items()}
        switch = network.learned(start, task_of(one.train), self.steps, self.fraction, until=0.0)
        task, watched = task_of(other.train), task_of(one.probe)
        path = list(network.learn(switch, task, self.steps, self.fraction, until=0.0))
        parts = sum(contributions(network, step, watched.inputs, task.inputs) for step in path)
        assert isinstance(parts, Tensor)
        before, after = (network.outputs(weights, watched.inputs) for weights in (switch, path[-1].after))
        change = after - before
        across = network.kernel(switch, watched.inputs, task.inputs)
        known = network.kernel(switch, task.inputs, task.inputs)
        shuffled = across.roll(len(task.targets) // 2, 1)
        missed = (after - watched.targets).square() - (before - watched.targets).square()
        return [
            {
                "closure": float((parts.sum(1) - change).norm() / change.norm()),
                "forgetting": float(missed.mean() / 2),
                "top_share": top_share(-watched.targets @ parts),
                "switch": correlation(foretold(across, known, path), change),
                "shuffled": correlation(foretold(shuffled, known, path), change),
            }
        ]


def contributions(
    network: ScaledNetwork, step: LearningStep, watched: Tensor, learned: Tensor
) -> Float[Tensor, "point train"]:
    """What each example adds to the outputs in one step."""
    kernel = secant_kernel(network.module, step.before, step.after, watched, learned)[:, 0, :, 0]
    return -step.size / len(step.missed) * kernel * step.missed[:, 0]


def foretold(
    across: Float[Tensor, "point train"], known: Float[Tensor, "train train"], path: Sequence[LearningStep]
) -> Float[Tensor, " point"]:
    """The change of outputs by the same steps with a kernel that stays as it is."""
    missed, change = path[0].missed[:, 0], across.new_zeros(len(across))
    for step in path:
        rate = step.size / len(missed)
        change, missed = change - rate * across @ missed, missed - rate * known @ missed
    return change


def correlation(one: Float[Tensor, " point"], other: Float[Tensor, " point"]) -> float:
    """Correlate two patterns over points.

    >>> correlation(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([6.0, 4.0, 2.0]))
    -1.0
    """
    return round(float(torch.corrcoef(torch.stack([one, other]))[0, 1]), 6)


def top_share(harm: Float[Tensor, " train"]) -> float:
    """The share of the harm that the most harmful tenth does.

    >>> top_share(torch.tensor([6.0, 1.0, 1.0, -3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]))
    0.75
    """
    done = harm.clamp(min=0).sort(descending=True).values
    return float(done[: math.ceil(len(done) / 10)].sum() / done.sum())
