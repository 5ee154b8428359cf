"""Training with the secant path kernel at every step, against the same steps in plain PyTorch.

The network is 64-w-w-w-1, the loss squared; a plain step is a forward pass, a backward pass and the update. Probes are
the training examples themselves, or as many other points. There are as many steps as a run has if nothing is said, for
programs are made in the first ones.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ntkexp.kernel.read.program_cache import ProgramCache
from ntkexp.kernel.read.reader import Reader
from ntkexp.loss import Squared
from ntkexp.model.functional import function_of, weights_of
from ntkexp.optimizer.descent import GD
from ntkexp.path.integrals import Integrals
from ntkexp.path.points import Points, StepBlock
from ntkexp.path.rule.base import Secant
from ntkexp.path.step import Descent
from ntkexp.schedule import Constant
from tests.bench.architectures import mlp_of as mlp
from tests.bench.architectures import of_training, points
from tests.bench.cell import Cell, Machine, medians
from tests.bench.peers import Race

STEP_SIZE = 0.05
TITLE = "A step of training with the secant path kernel, MLP 64-w-w-w-1, w = 512, N = Q = 256"


def cells(machine: Machine, *, quick: bool, peers: Race | None) -> list[Cell]:
    """A cell for each choice of probes."""
    examples, width, steps, times = (32, 32, 2, 2) if quick else (256, 512, 300, 3)
    return [cell(name, width, examples, others, steps, times, machine) for name, others in choices(examples)]


def choices(examples: int) -> tuple[tuple[str, int], ...]:
    """Where the path is read, and how many points there are beside the training examples."""
    return (("training examples", 0), ("other points", examples))


def cell(name: str, width: int, examples: int, others: int, steps: int, times: int, machine: Machine) -> Cell:
    """One choice."""
    module, inputs = mlp(width, 1), points(examples + others, 1)
    targets = points(examples, 2)[:, :1]
    acts = {
        "plain": lambda: plainly(module, inputs[:examples], targets, steps),
        "path": lambda: with_path_kernel(module, inputs, targets, steps),
    }
    found = medians(acts, times)
    floor = machine.floor(of_training(module, inputs[:examples], others), 0)
    return Cell(f"probes: {name}", found["path"] / steps, {"plain step": found["plain"] / steps}, floor)


def plainly(module: nn.Module, inputs: Tensor, targets: Tensor, steps: int) -> None:
    """The loop that everyone writes, from the module's weights, which it leaves as they are."""
    start = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=STEP_SIZE)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (module(inputs) - targets).square().sum() / (2 * len(inputs))
        loss.backward()
        optimizer.step()
    module.load_state_dict(start)


def with_path_kernel(module: nn.Module, inputs: Tensor, targets: Tensor, steps: int) -> None:
    """The same steps, with 𝒦 and 𝒮 accumulated."""
    train = len(targets)
    weights = weights_of(module)
    reader = Reader(function_of(module), frozenset(weights), programs=ProgramCache())
    read = Points(reader=reader, inputs=inputs, train=train, block=len(inputs), keep=True)
    alike = dict.fromkeys(weights, 1.0)
    descent = Descent(
        points=read,
        targets=targets,
        loss=Squared(),
        scale=1.0,
        optimizer=GD(),
        factors=alike,
        schedule=Constant(),
        step_size=STEP_SIZE,
        steps=steps,
        seed=0,
    )
    places = read.other_blocks or read.train_blocks
    room = inputs.new_zeros(len(inputs), 1, train, 1)
    rest = (room.new_zeros(room.shape[:axes]) for axes in (3, 2))
    integrals = Integrals(Secant().quadrature(1, 1, 0), room, *rest)
    for step in descent.walk(weights):
        for place in places:
            integrals.add(step, StepBlock(read, step.segment, place))
