"""Tangent kernels: beside others, of a large language model, and sketched."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, jacrev, vmap
from torch.nn import functional

from ntkexp.kernel.features.gram import gram
from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.read.program_cache import TRIALS
from ntkexp.kernel.record.taping import plain_kernels
from ntkexp.kernel.sketch import Sketch, error_bar, random_vectors, sketched_gram
from ntkexp.library import reader_of, tangent_kernel
from ntkexp.shapes import Weights
from tests.bench.architectures import INPUTS, Encoder, cnn, operations
from tests.bench.architectures import mlp_of as mlp
from tests.bench.cell import Act, Cell, Machine, Table, medians
from tests.bench.peers import SECONDS, Race

# Tangent kernels, beside per-example Jacobians multiplied out and, with `--peers`, other programs at their best.


KERNELS = "Tangent kernels: MLP 64-w-w-w-C, CNN of 3×64 channels on 14×14, one block of a transformer"
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


def kernels(machine: Machine, *, quick: bool, peers: Race | None) -> list[Cell]:
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


# The tangent kernel of a language model of the size of GPT-2's smallest (124 M weights), untrained, on texts,
# exact and sketched: the output is a text's mean log-likelihood. Seconds, of a clock and of processors, the largest
# memory so far, and the error bar.


class Block(nn.Module):
    """Causal attention and a layer of four times the width, each after a norm and beside a skip."""

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
    """GPT-2 in its smallest size, its table of words read at both ends."""

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


def language(quick: bool = False) -> list[Table]:
    """A kernel in single precision, each way."""
    torch.manual_seed(0)
    words, texts, length = (50, 4, 6) if quick else (50257, 32, 32)
    module = Language(words, 1024, 64, 2) if quick else Language(words, 1024, 768, 12)
    x = torch.randint(words, (texts, length))
    rows = [of_texts(module.eval(), x, size) for size in ((None, 64) if quick else (None, 1024, 8192))]
    header = ("M weights", "texts", "words", "k", "seconds", "of processors", "GB", "bar/‖K̂‖")
    return [Table("Language: a kernel of texts, exact and sketched", header, rows)]


def of_texts(module: nn.Module, x: Tensor, size: int | None) -> list[str]:
    """One kernel, by this many dimensions."""
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


# Sketched kernels: their error against k, at 48 points with 48 others of one secant step of gradient descent. Medians
# over sketches of the relative errors of K̂ and of −ηK̂ℓ′, and of the error bar over the error.


RATE = 0.3
ERRORS = ("network", "C", "k", "K̂", "𝒮", "Σ𝒮", "bar/error")


def sketch(quick: bool = False) -> list[Table]:
    """A line for each network, number of outputs and size of the sketch."""
    sizes, seeds, points = ((64,), 1, 6) if quick else ((512, 2048), 3, 48)
    rows = []
    for name in ("mlp",) if quick else ("mlp", "cnn", "transformer"):
        for outputs in (1,) if quick else (1, 10):
            step = one_step(network(name, outputs), SHAPES[name], points, outputs)
            rows += [row(name, outputs, size, [step.errors(size, seed) for seed in range(seeds)]) for size in sizes]
    return [Table("Sketches of one step: relative errors", ERRORS, rows)]


SHAPES = {"mlp": (20,), "cnn": (1, 8, 8), "transformer": (8, 8)}


def network(name: str, outputs: int) -> nn.Module:
    """A small network of each kind."""
    torch.manual_seed(0)
    if name == "cnn":
        return cnn(outputs)
    if name == "transformer":
        return Encoder(outputs)
    return nn.Sequential(nn.Linear(20, 96), nn.ReLU(), nn.Linear(96, 96), nn.ReLU(), nn.Linear(96, outputs))


def row(name: str, outputs: int, size: int, errors: list[list[float]]) -> list[str]:
    """The medians as cells."""
    return [name, str(outputs), str(size), *(f"{median(each):.2g}" for each in zip(*errors, strict=True))]


@dataclass(frozen=True)
class Step:
    """Both sides of a step, its gradient, and ℓ′."""

    left: Jacobian
    right: Jacobian
    gradient: Weights
    pull: Float[Tensor, "train out"]
    change: Float[Tensor, "query out"]

    def errors(self, size: int, seed: int) -> list[float]:
        """The errors of one sketch, in the order of the table."""
        kernel = gram(self.left, self.right)
        made = Sketch(size, seed, {name: part.shape for name, part in self.gradient.items()})
        estimate = sketched_gram(made.of(self.left.blocks), made.of(self.right.blocks))
        parts, missed = self.parts(estimate), estimate - kernel
        vectors = random_vectors(missed.shape[2:], seed, missed)
        bar = error_bar(torch.einsum("qcnd,vnd->vqc", missed, vectors)) / float(missed.norm())
        return [
            relative(estimate, kernel),
            relative(parts, self.parts(kernel)),
            relative(parts.sum(2), self.change),
            bar,
        ]

    def parts(self, kernel: Float[Tensor, "query out train out_"]) -> Float[Tensor, "query out train"]:
        """−ηKℓ′."""
        return -RATE * torch.einsum("qcnd,nd->qcn", kernel, self.pull)


def one_step(module: nn.Module, shape: tuple[int, ...], points: int, outputs: int) -> Step:
    """One step of gradient descent under squared loss, on random inputs and targets."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(2 * points, *shape, generator=draw, dtype=torch.float64)
    y = torch.randn(points, outputs, generator=draw, dtype=torch.float64)
    reader, start = reader_of(module.double().eval())
    tape = reader.record(start, x[:points])
    right, pull = reader.tangent(tape), (tape.outputs - y) / points
    gradient = right.weighted(pull).total(start)
    end = {name: weight - RATE * gradient[name] for name, weight in start.items()}
    before, after = (reader.record(weights, x[points:]) for weights in (start, end))
    left = reader.secant(before, after).jacobian
    return Step(left, right, gradient, pull, after.outputs - before.outputs)


def relative(found: Tensor, expected: Tensor) -> float:
    """‖found − expected‖/‖expected‖."""
    return float((found - expected).norm() / expected.norm())
