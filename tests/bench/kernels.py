"""Tangent kernels, compared with other programs, and of a large language model."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional

from ntkexp.kernel.read.program_cache import TRIALS
from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.library import tangent_kernel
from tests.bench.architectures import INPUTS, Encoder, cnn, mlp_of as mlp, operations
from tests.bench.cell import Act, Cell, Machine, Table, medians
from tests.bench.peers import SECONDS, Peers

# Tangent kernels, compared with products of per-example Jacobians and, with `--peers`, with other programs.


KERNELS = "Tangent kernels: MLP 64-w-w-w-C, CNN of 3×64 channels on 14×14, one block of a transformer"
SIDE = 14  # of images
PROGRAMS = {
    "nngeometry": ("jacobian",),
    "neural_tangents": ("structured derivatives", "jacobian contraction", "vector products"),
}
"""Other programs and their methods. The table shows the fastest method."""


Size: TypeAlias = tuple[str, int, int, int]
"""Kind of network, width, outputs and examples."""


def depthwise(outputs: int, channels: int, side: int) -> nn.Module:
    """Return a plain convolution and two depthwise ones."""
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 3, padding=1), nn.ReLU()]
    for _ in range(2):
        layers += [nn.Conv2d(channels, channels, 3, padding=1, groups=channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(channels * side * side, outputs))


def kernels(machine: Machine, *, quick: bool, peers: Peers | None) -> list[Cell]:
    """Return a cell for each network and number of outputs. Other programs need fewer examples for CNNs."""
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
    if peers is not None:  # their CNNs with more examples take minutes
        found = beside(found, sizes, peers, times)
    half = channels // 2
    for outputs in (1, 10):
        found.append(cell("transformer", Encoder(outputs), (8, 8), some, times, machine))
        found.append(
            cell("depthwise", depthwise(outputs, half, 8), (3, 8, 8), some if outputs == 1 else few, 3, machine)
        )
    return found


def beside(cells: Sequence[Cell], sizes: Sequence[Size], peers: Peers, times: int) -> list[Cell]:
    """Return the cells with the times of other programs, each by its fastest method, after the cells of the sizes."""
    found = list(cells)
    for program, methods in PROGRAMS.items():
        kernels = [(*size, method) for size in sizes for method in methods]
        answers = peers.medians(program, kernels, times, torch.get_num_threads())
        for place in range(len(sizes)):
            of_size = answers[place * len(methods) : (place + 1) * len(methods)]
            numbers = [answer for answer in of_size if isinstance(answer, float)]
            if numbers:
                timed = {**found[place].peers, program: min(numbers)}
                found[place] = replace(found[place], peers=timed)
            else:
                failed = {**found[place].failed, program: str(of_size[0])}
                found[place] = replace(found[place], failed=failed)
    return found


def cell(name: str, module: nn.Module, shape: tuple[int, ...], examples: int, times: int, machine: Machine) -> Cell:
    """Return the cell of a network, compared with torch.func."""
    torch.manual_seed(0)
    module = module.double().eval()
    inputs = torch.randn(examples, *shape, dtype=torch.float64)
    outputs = module(inputs[:1]).shape[1]
    acts: dict[str, Act] = {"ours": lambda: tangent_kernel(module, inputs)}
    for _ in range(TRIALS + 1):  # compiles its programs
        tangent_kernel(module, inputs)
    with plain_kernels():  # torch cannot batch the derivative of its fused attention
        if outputs == 1:  # Jacobians of ten outputs would take gigabytes
            check(module, inputs[:8])
            acts["jacrev"] = lambda: multiplied_out(module, inputs)
        found = medians(acts, times, SECONDS)
    theirs = {"jacrev": found["jacrev"]} if outputs == 1 else {}
    floor = machine.floor(*operations(module, inputs))
    return Cell(f"{name}, C={outputs}, N={examples}", found["ours"], theirs, floor)


def multiplied_out(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return J Jᵀ from the Jacobians of single examples."""

    def single(weights: dict[str, Tensor], example: Tensor) -> Tensor:
        outputs: Tensor = functional_call(module, weights, (example[None],))[0]
        return outputs

    weights = {name: weight.detach() for name, weight in module.named_parameters()}
    jacobians: dict[str, Tensor] = vmap(jacrev(single), (None, 0))(weights, inputs)
    shares = (torch.einsum("qcp,ndp->qcnd", rows.flatten(2), rows.flatten(2)) for rows in jacobians.values())
    first, *others = shares
    return sum(others, start=first)


def check(module: nn.Module, inputs: Tensor) -> None:
    """Check that both ways give the same kernel."""
    expected = multiplied_out(module, inputs)
    torch.testing.assert_close(tangent_kernel(module, inputs), expected, rtol=1e-11, atol=1e-11)


# The tangent kernel of an untrained language model of the size of GPT-2's smallest (124 M weights), exact and sketched.
# The output is the mean log-likelihood of a text.


class Block(nn.Module):
    """Causal attention and a layer of four times the width, each with a norm and a skip connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        texts, length, width = x.shape
        parts = self.read(self.before(x)).view(texts, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.write(seen.transpose(1, 2).reshape(x.shape))
        result: Tensor = x + self.down(functional.gelu(self.up(self.between(x)), approximate="tanh"))
        return result


class Language(nn.Module):
    """GPT-2 with tied input and output embeddings."""

    def __init__(self, words: int, longest: int, width: int, depth: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(longest, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        for weight in self.parameters():
            if weight.dim() > 1:
                nn.init.normal_(weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.blocks(self.words(x) + self.places.weight[: x.shape[1]]))
        scores = torch.log_softmax(hidden[:, :-1] @ self.words.weight.t(), dim=2)
        return scores.gather(2, x[:, 1:, None]).mean((1, 2))


def language(*, quick: bool) -> list[Table]:
    """Return rows of the exact kernel and of sketches, in single precision."""
    torch.manual_seed(0)
    words, texts, length = (50, 4, 6) if quick else (50257, 32, 32)
    module = Language(words, 1024, 64, 2) if quick else Language(words, 1024, 768, 12)
    x = torch.randint(words, (texts, length))
    rows = [of_texts(module.eval(), x, size) for size in ((None, 64) if quick else (None, 1024, 8192))]
    header = ("M weights", "texts", "words", "k", "seconds", "of processors", "GB", "bar/‖K̂‖")
    return [Table("Language: a kernel of texts, exact and sketched", header, rows)]


def of_texts(module: nn.Module, x: Tensor, size: int | None) -> list[str]:
    """Return the row of one kernel, exact or with this size of the sketch."""
    start, worked = time.perf_counter(), time.process_time()
    error = ""
    if size is None:
        tangent_kernel(module, x)
    else:
        kernel, bar = tangent_kernel(module, x, sketch=size)
        error = f"{bar / float(kernel.norm()):.3f}"
    seconds, worked = time.perf_counter() - start, time.process_time() - worked
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    weights = sum(weight.numel() for weight in module.parameters()) / 1e6
    cells = [f"{weights:.1f}", *map(str, x.shape), "exact" if size is None else str(size)]
    return [*cells, f"{seconds:.0f}", f"{worked:.0f}", f"{memory:.2f}", error]
