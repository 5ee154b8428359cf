"""Whether units become tuned to one task, and what is forgotten, by the scale α of the outputs:

    selectivity    Σ_u |r_u(A) − r_u(B)| / Σ_u (r_u(A) + r_u(B)),    r_u(T) the deviation over x of unit u's activity
                   in the last hidden layer, where the cue says task T; it is
                   0 where all units answer to both alike, 1 where each answers to one alone
    gained         selectivity after both tasks, less that of the untrained network
    forgetting     rise of task A's loss ½(f − y)² on new points while B is learned, over ½ mean y²

An input is x ~ N(0, I_d) and a cue, (c, 0) for task A and (0, c) for B; the targets are y = w_A·x and w_B·x with w_A
and w_B orthogonal unit vectors. Large α makes training lazy, small α rich.

T. Flesch, K. Juechems, T. Dumbalska, A. Saxe & C. Summerfield, "Orthogonal representations for robust context-dependent
task performance in brains and neural networks", Neuron 110 (2022), compare the two regimes on tasks with a cue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor, nn

from ntkexp.claim.trial.base import AbstractTrial
from ntkexp.claim.trial.task_by_task import LearnedTask, ScaledNetwork
from ntkexp.component import LARGEST, Count
from ntkexp.init.base import AbstractInit
from ntkexp.mistake import Mistake
from ntkexp.model.mlp import MLP
from ntkexp.records.sweep import Level
from ntkexp.shapes import Weights
from ntkexp.stream import stream


class SelectiveUnits(AbstractTrial):
    """The same network learns A and then B at each α, until the loss is small or steps run out."""

    model: MLP
    init: AbstractInit
    alphas: tuple[float, ...] = Field((0.1, 10.0), min_length=2)
    dimension: int = Field(6, ge=2, le=LARGEST)
    train: Count = 60
    new: Count = 60
    cue: float = Field(2.0, ge=0)
    steps: Count = 1000
    fraction: float = Field(0.2, gt=0, lt=1)
    until: float = Field(0.005, gt=0)

    def rows(self, seed: int) -> Sequence[Mapping[str, Level]]:
        return [{"alpha": alpha, **self.row(seed, alpha)} for alpha in self.alphas]

    def row(self, seed: int, alpha: float) -> Mapping[str, float]:
        """Learn both tasks at one scale."""
        learned, new = self.tasks(seed)
        shape = tuple(learned[0].inputs.shape[1:])
        module = self.model.module(self.init, shape, 1, stream("weights", seed)).eval()
        network = ScaledNetwork(module, alpha)
        weights, seen = {name: weight.clone() for name, weight in network.start.items()}, [0.0]
        for task in learned:
            weights = network.learned(weights, task, self.steps, self.fraction, self.until)
            seen.append(loss(network, weights, new[0]) / float(new[0].targets.square().mean() / 2))
        first, last = (selectivity(module, known, new) for known in (network.start, weights))
        return {
            "selectivity": last,
            "gained": last - first,
            "forgetting": seen[2] - seen[1],
            "learned": loss(network, weights, learned[1]),
        }

    def tasks(self, seed: int) -> tuple[tuple[LearnedTask, LearnedTask], tuple[LearnedTask, LearnedTask]]:
        """Draw both tasks: what is learned of them, and the same new points for both."""
        generator = stream("cue", seed)
        directions = torch.linalg.qr(torch.randn(self.dimension, 2, generator=generator, dtype=torch.float64)).Q
        points = torch.randn(2 * self.train + self.new, self.dimension, generator=generator, dtype=torch.float64)
        one, other, new = (
            points[: self.train],
            points[self.train : 2 * self.train],
            points[2 * self.train :],
        )

        def task(x: Tensor, number: int) -> LearnedTask:
            cue = self.cue * torch.eye(2, dtype=x.dtype)[number].expand(len(x), 2)
            return LearnedTask(torch.cat([x, cue], 1), x @ directions[:, number])

        return (task(one, 0), task(other, 1)), (task(new, 0), task(new, 1))


def loss(network: ScaledNetwork, weights: Weights, task: LearnedTask) -> float:
    """The mean of ½(f − y)²."""
    with torch.no_grad():
        return float((network.outputs(weights, task.inputs) - task.targets).square().mean() / 2)


def selectivity(module: nn.Module, weights: Weights, tasks: Sequence[LearnedTask]) -> float:
    """How much more the units of the last hidden layer answer to one task than to the other."""
    heard: list[Tensor] = []
    readout = [layer for layer in module.modules() if not list(layer.children())][-1]
    handle = readout.register_forward_pre_hook(lambda _, given: heard.append(given[0].detach()))
    try:
        for task in tasks:
            torch.func.functional_call(module, dict(weights), (task.inputs,))
    finally:
        handle.remove()
    if len(heard) != len(tasks) or heard[0].dim() != 2:
        raise Mistake("trial.model: units are read before the readout; choose a model with hidden layers, as an MLP")
    return selective_share(*(activity.std(0) for activity in heard))


def selective_share(one: Float[Tensor, " unit"], other: Float[Tensor, " unit"]) -> float:
    """Compare the answers of units to two tasks.

    >>> selective_share(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    1.0
    """
    return float((one - other).abs().sum() / (one + other).sum())
