"""Tangent kernels, beside per-example Jacobians multiplied out and, with `--peers`, other programs at their best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap

from ntkexp.kernel.read.program_cache import TRIALS
from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.library import tangent_kernel
from tests.bench.architectures import INPUTS, Encoder, cnn, operations
from tests.bench.architectures import mlp_of as mlp
from tests.bench.cell import Act, Cell, Machine, medians
from tests.bench.peers import SECONDS, Race

TITLE = "Tangent kernels: MLP 64-w-w-w-C, CNN of 3×64 channels on 14×14, one block of a transformer"
SIDE = 14  # of images
PROGRAMS = {
    "nngeometry": ("jacobian",),
    "neural_tangents": ("structured derivatives", "jacobian contraction", "vector products"),
}
"""Other programs, and by which methods each finds a kernel: the fastest is shown."""


Size: TypeAlias = tuple[str, int, int, int]
"""Kind of network, width, outputs and examples."""


def depthwise(outputs: int, channels: int, side: int) -> nn.Module:
    """Two depthwise convolutions behind a plain one."""
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1), nn.ReLU()]
    for _ in range(2):
        layers += [nn.Conv2d(channels, channels, 3, padding=1, groups=channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side * side, outputs))


def cells(machine: Machine, *, quick: bool, peers: Race | None) -> list[Cell]:
    """A cell for every network and number of outputs; ten outputs of a CNN get fewer examples, as their peers must."""
    some, few, times = (8, 4, 1) if quick else (256, 48, 5)
    widths, channels = ((16,), 4) if quick else ((128, 512, 1024), 64)
    found = [
        cell(f"MLP w={width}", mlp(width, outputs), (INPUTS,), some, times, machine)
        for outputs in (1, 10)
        for width in widths
    ]
    sizes = [("mlp", width, outputs, some) for outputs in (1, 10) for width in widths]
    for outputs, examples in ((1, few), (10, few), (1, some)):
        net = cnn(outputs, channels, SIDE, 3)
        found.append(cell("CNN", net, (1, SIDE, SIDE), examples, max(times // 2, 1), machine))
    sizes += [("cnn", channels, outputs, few) for outputs in (1, 10)]
    if peers is not None:  # of the others a CNN of more examples takes minutes
        found = beside(found, sizes, peers, times)
    half = channels // 2
    for outputs in (1, 10):
        found.append(cell("transformer", Encoder(outputs), (8, 8), some, times, machine))
        found.append(
            cell("depthwise", depthwise(outputs, half, 8), (3, 8, 8), some if outputs == 1 else few, 3, machine)
        )
    return found


def beside(cells: Sequence[Cell], sizes: Sequence[Size], race: Race, times: int) -> list[Cell]:
    """The first cells, which are of these sizes, with what other programs take: each at its best."""
    found = list(cells)
    for program, methods in PROGRAMS.items():
        kernels = {(size, method): (*size, method) for size in sizes for method in methods}
        told = race.best(program, list(kernels.values()), times, torch.get_num_threads())
        for place, size in enumerate(sizes):
            answers = [told[kernels[size, method]] for method in methods]
            numbers = [answer for answer in answers if isinstance(answer, float)]
            peers = {**found[place].peers, **({program: min(numbers)} if numbers else {})}
            failed = {**found[place].failed, **({} if numbers else {program: str(answers[0])})}
            found[place] = replace(found[place], peers=peers, failed=failed)
    return found


def cell(name: str, module: nn.Module, shape: tuple[int, ...], examples: int, times: int, machine: Machine) -> Cell:
    """One network, beside torch.func."""
    torch.manual_seed(0)
    module = module.double().eval()
    inputs = torch.randn(examples, *shape, dtype=torch.float64)
    outputs = module(inputs[:1]).shape[1]
    acts: dict[str, Act] = {"ours": lambda: tangent_kernel(module, inputs)}
    for _ in range(TRIALS + 1):  # what is kept of a module is there from then on
        tangent_kernel(module, inputs)
    with plain_kernels():  # torch cannot batch the derivative of its fused attention
        if outputs == 1:  # of more, the Jacobians alone would take gigabytes
            check(module, inputs[:8])
            acts["jacrev"] = lambda: multiplied_out(module, inputs)
        found = medians(acts, times, SECONDS)
    theirs = {"jacrev": found["jacrev"]} if outputs == 1 else {}
    floor = machine.floor(*operations(module, inputs))
    return Cell(f"{name}, C={outputs}, N={examples}", found["ours"], theirs, floor)


def multiplied_out(module: nn.Module, inputs: Tensor) -> Tensor:
    """J Jᵀ from the Jacobians of single examples."""

    def single(weights: dict[str, Tensor], example: Tensor) -> Tensor:
        outputs: Tensor = functional_call(module, weights, (example[None],))[0]
        return outputs

    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    jacobians: dict[str, Tensor] = vmap(jacrev(single), (None, 0))(weights, inputs)
    shares = (torch.einsum("qcp,ndp->qcnd", rows.flatten(2), rows.flatten(2)) for rows in jacobians.values())
    first, *others = shares
    return sum(others, start=first)


def check(module: nn.Module, inputs: Tensor) -> None:
    """What is compared is the same."""
    expected = multiplied_out(module, inputs)
    torch.testing.assert_close(tangent_kernel(module, inputs), expected, rtol=1e-11, atol=1e-11)
