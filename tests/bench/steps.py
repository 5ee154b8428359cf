"""Steps of training: with features, with the path kernel, in single precision, and operation by operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ntkexp.kernel.read.program_cache import ProgramCache
from ntkexp.kernel.read.reader import Reader
from ntkexp.library import reader_of, tangent_kernel
from ntkexp.loss import Squared
from ntkexp.model.functional import function_of, weights_of
from ntkexp.optimizer.descent import GD
from ntkexp.path.integrals import Integrals
from ntkexp.path.points import Points
from ntkexp.path.rule.base import Secant
from ntkexp.path.step import Descent
from ntkexp.path.step_kernel import StepBlock
from ntkexp.schedule import Constant
from tests.bench.architectures import INPUTS, NETWORKS, Encoder, cnn, of_features, of_training, points
from tests.bench.architectures import mlp_of as mlp
from tests.bench.cell import Act, Cell, Machine, Table, medians, milliseconds, seconds
from tests.bench.peers import Race

# A training step with secant features beside the plain step that it replaces, N = 64.
#
# With features means: the step is recorded at its end, and read at a point and along its segment, by a plan that is
# kept.


STEPS = "A training step with secant features, N = 64"
EXAMPLES = 64


def steps(machine: Machine, *, quick: bool, peers: Race | None) -> list[Cell]:
    """A cell for every network and number of outputs."""
    outputs, times = ((1,), 2) if quick else ((1, 10), 15)
    return [step_cell(name, count, times, machine) for name in NETWORKS for count in outputs]


def step_cell(name: str, outputs: int, times: int, machine: Machine) -> Cell:
    """One network."""
    found = medians(acts(name, outputs, torch.float64), times)
    make, shape = NETWORKS[name]
    needed = of_features(make(outputs).double().eval(), torch.randn(EXAMPLES, *shape, dtype=torch.float64), outputs)
    return Cell(f"{name}, C={outputs}", found["features"], {"plain step": found["plain"]}, machine.floor(needed, 0))


def acts(name: str, outputs: int, kind: torch.dtype) -> dict[str, Act]:
    """A plain step of one network in such numbers, and its features."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    module, inputs = make(outputs).to(kind).eval(), torch.randn(EXAMPLES, *shape, dtype=kind)
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

    for _ in range(3):  # the second round of a program is still compared with the usual way
        features()
    return {"plain": plain, "features": features}


# Training with the secant path kernel at every step, against the same steps in plain PyTorch.
#
# The network is 64-w-w-w-1, the loss squared; a plain step is a forward pass, a backward pass and the update. Queries
# are the training examples themselves, or as many other points. There are as many steps as a run has if nothing is
# said, for programs are made in the first ones.


STEP_SIZE = 0.05
TRAINING = "A step of training with the secant path kernel, MLP 64-w-w-w-1, w = 512, N = Q = 256"


def training(machine: Machine, *, quick: bool, peers: Race | None) -> list[Cell]:
    """A cell for each choice of queries."""
    examples, width, length, times = (32, 32, 2, 2) if quick else (256, 512, 300, 3)
    return [training_cell(name, width, examples, others, length, times, machine) for name, others in choices(examples)]


def choices(examples: int) -> tuple[tuple[str, int], ...]:
    """Where the path is read, and how many points there are beside the training examples."""
    return (("training examples", 0), ("other points", examples))


def training_cell(name: str, width: int, examples: int, others: int, length: int, times: int, machine: Machine) -> Cell:
    """One choice."""
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
    """The loop that everyone writes, from the module's weights, which it leaves as they are."""
    start = {name: weight.detach().clone() for name, weight in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=STEP_SIZE)
    for _ in range(length):
        optimizer.zero_grad()
        loss = (module(inputs) - targets).square().sum() / (2 * len(inputs))
        loss.backward()
        optimizer.step()
    module.load_state_dict(start)


def with_path_kernel(module: nn.Module, inputs: Tensor, targets: Tensor, length: int) -> None:
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
        steps=length,
        seed=0,
    )
    places = read.other_blocks or read.train_blocks
    room = inputs.new_zeros(len(inputs), 1, train, 1)
    rest = (room.new_zeros(room.shape[:axes]) for axes in (3, 2))
    integrals = Integrals(Secant().quadrature(1, 1, 0), room, *rest)
    for step in descent.walk(weights):
        for place in places:
            integrals.add(step, StepBlock(read, step.segment, place))


# Single precision beside double: the same kernels, steps and training, how long they take in each.


PRECISIONS = ("what", "float64, ms", "float32, ms", "ratio")
TRAINED = 20  # programs are made in the first
KINDS = {"float64": torch.float64, "float32": torch.float32}


def precision(quick: bool = False) -> list[Table]:
    """A line for every kernel, step and training."""
    names, examples, width, times = (("mlp",), 8, 8, 1) if quick else (tuple(NETWORKS), 256, 512, 5)
    rows = [line(f"kernel, {name}", {kind: kernel(name, examples, kind) for kind in KINDS}, times) for name in names]
    for outputs in (1, 10):
        title = f"step with features, {{}}, C={outputs}"
        rows += [line(title.format(name), {kind: step(name, outputs, kind) for kind in KINDS}, times) for name in names]
    both = {kind: trained(width, examples, kind) for kind in KINDS}
    rows.append(line(f"{TRAINED} steps of training, mlp, w={width}", both, times))
    return [Table(f"Precision: N = {examples}, of steps 64", PRECISIONS, rows)]


def line(name: str, both: dict[str, Act], times: int) -> list[str]:
    """Medians in turns."""
    found = medians(both, times)
    ratio = found["float64"] / found["float32"]
    return [name, *(milliseconds(found[kind]) for kind in KINDS), f"{ratio:.2f}"]


def kernel(name: str, examples: int, kind: str) -> Act:
    """The tangent kernel of one network."""
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    module, inputs = make(1).to(KINDS[kind]).eval(), torch.randn(examples, *shape, dtype=KINDS[kind])
    return lambda: tangent_kernel(module, inputs)


def step(name: str, outputs: int, kind: str) -> Act:
    """The features of a step, by programs."""
    return acts(name, outputs, KINDS[kind])["features"]


def trained(width: int, examples: int, kind: str) -> Act:
    """Training with the path kernel at every step, the making of programs included."""
    module, inputs = mlp(width, 1).to(KINDS[kind]), points(examples, 1).to(KINDS[kind])
    targets = points(examples, 2)[:, :1].to(KINDS[kind])
    return lambda: with_path_kernel(module, inputs, targets, TRAINED)


# Where the time of a cell goes, operation by operation: the medians of several profiles, and of these the shares.


SHARES = "Shares of operations: the six that take longest, and what is left"
SHOWN = 6
ENOUGH, MOST = 2.0, 25  # seconds of a cell, and rounds

Shares: TypeAlias = Mapping[str, float]


def profile_of_cells(*, quick: bool) -> list[Table]:
    """A row for every cell."""
    some, few, times, enough = (8, 4, 1, 0.0) if quick else (256, 48, 3, ENOUGH)
    channels, side = (4, 6) if quick else (64, 14)
    widths = (16,) if quick else (128, 512, 1024)
    found: dict[str, Act] = {
        f"MLP w={width}, C={outputs}, N={some}": kernel_in_double(mlp(width, outputs), (INPUTS,), some)
        for outputs in (1, 10)
        for width in widths
    }
    found |= {
        f"CNN, C=1, N={some}": kernel_in_double(cnn(1, channels, side, 3), (1, side, side), some),
        f"CNN, C=10, N={few}": kernel_in_double(cnn(10, channels, side, 3), (1, side, side), few),
        f"transformer, C=1, N={some}": kernel_in_double(Encoder(1), (8, 8), some),
    }
    found |= {
        f"step of {name}, C={outputs}, N=64": acts(name, outputs, torch.float64)["features"]
        for name in NETWORKS
        for outputs in ((1,) if quick else (1, 10))
    }
    rows = [[name, in_words(shares(act, times, enough))] for name, act in found.items()]
    return [Table(SHARES, ["cell", "operations"], rows)]


def kernel_in_double(module: nn.Module, shape: tuple[int, ...], examples: int) -> Callable[[], object]:
    """The tangent kernel of a module at random inputs."""
    made, inputs = module.double().eval(), torch.randn(examples, *shape, dtype=torch.float64)
    return lambda: tangent_kernel(made, inputs)


def shares(act: Act, times: int, enough: float) -> Shares:
    """What part of the time each operation takes by itself; a median forgets the times at which others ran.

    What is short takes more rounds, for at most `enough` seconds, for a turn of others makes more of it.
    """
    act()
    rounds = [once(act) for _ in range(max(times, min(MOST, int(enough / seconds(act)))))]
    middle = {name: median(each.get(name, 0.0) for each in rounds) for name in rounds[0]}
    return {name: value / sum(middle.values()) for name, value in middle.items()}


def once(act: Act) -> dict[str, float]:
    """Seconds of each operation, by its name."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        act()
    return {each.key.removeprefix("aten::"): each.self_cpu_time_total / 1e6 for each in found.key_averages()}


def in_words(found: Shares) -> str:
    """The largest shares.

    >>> in_words({"mm": 0.25, "bmm": 0.75})
    'bmm 75 %, mm 25 %, others 0 %'
    """
    first = sorted(found.items(), key=lambda item: -item[1])[:SHOWN]
    said = [f"{name} {share:.0%}" for name, share in [*first, ("others", 1 - sum(share for _, share in first))]]
    return ", ".join(said).replace("%", " %")
