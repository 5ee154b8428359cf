"""Steps of training, with features and with the path kernel, and whole commands."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from ntkexp.kernel.read.program_cache import ProgramCache
from ntkexp.kernel.read.reader import Reader
from ntkexp.library import reader_of
from ntkexp.loss import Squared
from ntkexp.model.functional import function_of, weights_of
from ntkexp.optimizer.descent import GD
from ntkexp.path.integrals import Integrals
from ntkexp.path.points import Points
from ntkexp.path.rule.base import Secant
from ntkexp.path.step import Descent
from ntkexp.path.step_kernel import StepBlock
from ntkexp.schedule import Constant
from tests.bench.architectures import NETWORKS, mlp_of as mlp, of_features, of_training, points
from tests.bench.cell import Act, Cell, Machine, medians, seconds

# A training step with secant features, compared with a plain step. The features are read at the end of the step and
# along its segment, by compiled programs.


STEPS = "A training step with secant features, N = 64"
EXAMPLES = 64


def steps(machine: Machine, *, quick: bool) -> list[Cell]:
    """Return a cell for each network and number of outputs."""
    outputs, times = ((1,), 2) if quick else ((1, 10), 15)
    return [step_cell(name, count, times, machine) for name in NETWORKS for count in outputs]


def step_cell(name: str, outputs: int, times: int, machine: Machine) -> Cell:
    """Return the cell of a network."""
    found = medians(acts(name, outputs), times)
    make, shape = NETWORKS[name]
    needed = of_features(make(outputs).double().eval(), torch.randn(EXAMPLES, *shape, dtype=torch.float64), outputs)
    return Cell(f"{name}, C={outputs}", found["features"], {"plain step": found["plain"]}, machine.floor(needed, 0))


def acts(name: str, outputs: int) -> dict[str, Act]:
    """Return the computations of a plain step of a network, and of a step with features."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    module, inputs = make(outputs).double().eval(), torch.randn(EXAMPLES, *shape, dtype=torch.float64)
    bare, start = reader_of(module)
    reader = replace(bare, programs=ProgramCache())
    end = {key: weight + 0.01 * torch.randn_like(weight) for key, weight in start.items()}
    before = reader.record(start, inputs)

    def plain() -> None:
        leaves = {key: weight.detach().requires_grad_() for key, weight in start.items()}
        loss = reader.function(leaves, inputs).square().sum()
        for weight, gradient in zip(start.values(), torch.autograd.grad(loss, list(leaves.values())), strict=True):
            torch.sub(weight, gradient, alpha=0.01)

    def features() -> None:
        after = reader.record(end, inputs)
        reader.along(before, after)
        reader.tangent(after)

    for _ in range(3):  # the second run of a program is still checked against plain autograd
        features()
    return {"plain": plain, "features": features}


# Training of a network 64-w-w-w-1 by a squared loss, with the secant path kernel at every step, compared with the same
# steps in plain PyTorch. The number of steps is the default of a run, because the first steps compile programs.


STEP_SIZE = 0.05
TRAINING = "A step of training with the secant path kernel, MLP 64-w-w-w-1, w = 512, N = Q = 256"


def training(machine: Machine, *, quick: bool) -> list[Cell]:
    """Return a cell for each choice of queries."""
    examples, width, length, times = (32, 32, 2, 2) if quick else (256, 512, 300, 3)
    choices = (("training examples", 0), ("other points", examples))
    return [training_cell(name, width, examples, others, length, times, machine) for name, others in choices]


def training_cell(name: str, width: int, examples: int, others: int, length: int, times: int, machine: Machine) -> Cell:
    """Return the cell of one choice."""
    module, inputs = mlp(width, 1), points(examples + others, 1)
    targets = points(examples, 2)[:, :1]
    acts = {
        "plain": lambda: plainly(module, inputs[:examples], targets, length),
        "path": lambda: with_path_kernel(module, inputs, targets, length),
    }
    found = medians(acts, times)
    floor = machine.floor(of_training(module, inputs[:examples], others), 0)
    return Cell(f"queries: {name}", found["path"] / length, {"plain step": found["plain"] / length}, floor)


def plainly(module: nn.Module, inputs: Tensor, targets: Tensor, length: int) -> None:
    """Train in plain PyTorch, and restore the weights."""
    start = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=STEP_SIZE)
    for _ in range(length):
        optimizer.zero_grad()
        loss = (module(inputs) - targets).square().sum() / (2 * len(inputs))
        loss.backward()
        optimizer.step()
    module.load_state_dict(start)


def with_path_kernel(module: nn.Module, inputs: Tensor, targets: Tensor, length: int) -> None:
    """Take the same steps, and accumulate 𝒦 and 𝒮."""
    train = len(targets)
    weights = weights_of(module)
    reader = Reader(function_of(module), frozenset(weights), programs=ProgramCache())
    read = Points(reader=reader, inputs=inputs, train=train, block=len(inputs), keeps_tapes=True)
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
        steps=length,
        seed=0,
    )
    places = read.other_blocks or read.train_blocks
    room = inputs.new_zeros(len(inputs), 1, train, 1)
    rest = (room.new_zeros(room.shape[:axes]) for axes in (3, 2))
    integrals = Integrals(Secant().quadrature(1, 1, 0), room, *rest)
    for step in descent.steps_from(weights):
        for place in places:
            integrals.add(step, StepBlock(read, step.segment, place))


# Whole commands, as a user waits for them: a small run, a finished sweep, reports of many runs.


COMMANDS = "Whole commands, with the start of Python and the import of torch"
TINY = ("model.width=8", "data.train=16", "data.query=4", "data.test=4", "steps=2", "data.seed=0", "--quiet")


def commands(_: Machine, *, quick: bool) -> list[Cell]:
    """Return a cell for each command. The reported runs are as small as possible."""
    few, many = (1, 0) if quick else (30, 200)
    train = TINY if quick else ("steps=20", "model.width=32", "--quiet")
    with tempfile.TemporaryDirectory() as folder:
        words = {
            "train steps=20 model.width=32": ["train", *train, "--force"],
            f"sweep of {few} finished runs": ["sweep", f"seed=0..{few - 1}", *TINY, f"--out={folder}/few"],
            f"report of {few} runs": ["report", f"{folder}/few/runs", f"--out={folder}/few-report"],
        }
        if many:
            words[f"report of {many} runs"] = ["report", f"{folder}/many/runs", f"--out={folder}/many-report"]
            call(["sweep", f"seed=0..{many - 1}", *TINY, f"--out={folder}/many"], folder)
        acts = {name: partial(call, given, folder) for name, given in words.items()}
        found = {name: seconds(act) for name, act in acts.items()} if quick else medians(acts, 5)
    return [Cell(name, found[name]) for name in words]


def call(words: list[str], folder: str) -> None:
    """Run a command."""
    subprocess.run([sys.executable, "-m", "ntkexp", *words], cwd=folder, check=True, capture_output=True)
