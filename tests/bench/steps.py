"""A training step with secant features beside the plain step that it replaces, N = 64.

With features means: the step is recorded at its end, and read at a point and along its segment, by a plan that is kept.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ntkexp.kernel.read.program_cache import ProgramCache
from ntkexp.library import reader_of
from tests.bench.architectures import NETWORKS, of_features
from tests.bench.cell import Act, Cell, Machine, medians
from tests.bench.peers import Race

TITLE = "A training step with secant features, N = 64"
EXAMPLES = 64


def cells(machine: Machine, *, quick: bool, peers: Race | None) -> list[Cell]:
    """A cell for every network and number of outputs."""
    outputs, times = ((1,), 2) if quick else ((1, 10), 15)
    return [cell(name, count, times, machine) for name in NETWORKS for count in outputs]


def cell(name: str, outputs: int, times: int, machine: Machine) -> Cell:
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

    for _ in range(3):  # the second round of a program is still held against the usual way
        features()
    return {"plain": plain, "features": features}
