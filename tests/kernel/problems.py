"""Modules of many forms, each with the shape of an example, and the weights before and after a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.kernel.read.reader import Reader, Reading
from ntkexp.kernel.record.tape import Tape
from ntkexp.layer.pointwise import Pointwise
from ntkexp.layer.spec import activations
from ntkexp.library import reader_of
from ntkexp.shapes import Weights
from tests.kernel import oracle
from tests.kernel.networks import NETWORKS, ROUTED, Formula, routed_batch

ACTIVATIONS = activations()


def repeated(x: Tensor, layer: nn.Module, readout: nn.Module, times: int) -> Tensor:
    """Apply one layer several times."""
    for _ in range(times):
        x = torch.tanh(layer(x))
    outputs: Tensor = readout(x)
    return outputs


def two_heads(x: Tensor, body: nn.Module, one: nn.Module, two: nn.Module) -> Tensor:
    """Apply two readouts to different activations of one hidden layer."""
    hidden = body(x)
    return torch.cat([one(torch.tanh(hidden)), two(torch.relu(hidden))], 1)


def written_in_place(x: Tensor, w: Tensor, g: Tensor) -> Tensor:
    """Write into views and slices."""
    hidden = x @ w
    hidden[:, 0] = x[:, 0] * g
    hidden[:, 1:].mul_(2.0).add_(x[:, :2])
    canvas = x.new_zeros(len(x), 4)
    canvas[:, :3] = torch.tanh(hidden)
    return canvas


def mlp(activation: str, bias: bool = True) -> Callable[[], nn.Module]:
    """Return a maker of a network with two hidden layers and two outputs."""
    return lambda: nn.Sequential(
        *(nn.Linear(3, 7, bias=bias), Pointwise(ACTIVATIONS[activation])),
        *(nn.Linear(7, 6, bias=bias), Pointwise(ACTIVATIONS[activation])),
        nn.Linear(6, 2, bias=bias),
    )


def formula(function: Callable[..., Tensor], **parts: tuple[int, ...]) -> Callable[[], nn.Module]:
    """Return a maker of a `Formula`."""
    return lambda: Formula(function, **parts)


def called(times: int) -> Callable[[], nn.Module]:
    """Return a maker of a network that calls one layer this many times."""
    return lambda: Formula(partial(repeated, times=times), layer=nn.Linear(4, 4), readout=nn.Linear(4, 2))


def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute linear attention, summed over tokens."""
    return ((x @ q) @ (x @ k).transpose(1, 2) @ (x @ v)).sum(1)


def beside_positions(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Add a constant row to each position. All examples share the constant."""
    positions = torch.arange(15.0, dtype=x.dtype).view(5, 3) / 15
    return torch.tanh(x @ w + positions @ w).sum(1) @ v


def beside_a_state(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    """Add a constant with a row for each example."""
    return torch.tanh(x @ w + torch.full((len(x), 2), 0.3, dtype=x.dtype) @ u)


READ: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{activation: (mlp(activation), (3,)) for activation in ACTIVATIONS},
    "no bias": (mlp("relu", bias=False), (3,)),
    "called twice": (called(2), (4,)),
    "called three times": (called(3), (4,)),
    "two heads": (lambda: Formula(two_heads, body=nn.Linear(3, 6), one=nn.Linear(6, 1), two=nn.Linear(6, 2)), (3,)),
    "one output without an axis": (formula(lambda x, w, v: torch.tanh(x @ w) @ v, w=(3, 5), v=(5,)), (3,)),
    "tied and transposed": (formula(lambda x, w: torch.tanh(x @ w) @ w.t(), w=(4, 3)), (4,)),
    "disjoint slices": (formula(lambda x, w: torch.tanh(x @ w[:3]) @ w[3:6, :2] + w[6, :2], w=(7, 3)), (3,)),
    "overlapping slices": (formula(lambda x, w: torch.tanh(x @ w[:3]) @ w[1:4], w=(4, 3)), (3,)),
    "a row for all, and a band": (
        formula(lambda x, w, v: torch.tanh(x @ w.expand(4, 5)) @ v.unfold(0, 3, 1), w=(1, 5), v=(7,)),
        (4,),
    ),
    "every other column": (formula(lambda x, w: torch.tanh(x @ w[:, ::2]) @ w[:3, 1::2], w=(4, 6)), (4,)),
    "gains and shifts": (
        formula(lambda x, g, b, w, k: torch.tanh(x * g + b) @ w * k, g=(4,), b=(4,), w=(4, 2), k=()),
        (4,),
    ),
    "low rank": (
        formula(lambda x, w, a, b, o: torch.tanh(x @ (w + a @ b)) @ o, w=(4, 5), a=(4, 2), b=(2, 5), o=(5, 2)),
        (4,),
    ),
    "scaled weight": (formula(lambda x, w, g, o: torch.tanh(x @ (w * g)) @ o, w=(4, 5), g=(5,), o=(5, 2)), (4,)),
    "weights from weights": (
        formula(lambda x, e, w, b: x @ functional.linear(e, w, b).t(), e=(2, 3), w=(4, 3), b=(4,)),
        (4,),
    ),
    "one bias for two weights": (
        formula(lambda x, w, v, b: torch.addmm(b, torch.tanh(torch.addmm(b, x, w)), v), w=(4, 4), v=(4, 4), b=(4,)),
        (4,),
    ),
    "one weight with two biases": (
        formula(lambda x, w, b, c: torch.addmm(c, torch.tanh(torch.addmm(b, x, w)), w), w=(4, 4), b=(4,), c=(4,)),
        (4,),
    ),
    "bias as a row": (formula(lambda x, w, b: torch.addmm(b, x, w), w=(4, 3), b=(1, 3)), (4,)),
    "bias of one number": (formula(lambda x, w, b: torch.addmm(b, x, w), w=(4, 3), b=(1,)), (4,)),
    "scaled product": (formula(lambda x, w, b: torch.addmm(b, x, w, beta=0.3, alpha=1.7), w=(4, 3), b=(3,)), (4,)),
    "division": (formula(lambda x, w, g: g / (1 + torch.exp(x @ w)) + (x @ w) / (1 + g * g), w=(4, 3), g=(3,)), (4,)),
    "left multiplication": (formula(lambda x, w, v: (v @ torch.tanh(w @ x.t())).t(), w=(5, 4), v=(2, 5)), (4,)),
    "residual": (formula(lambda x, w, v: (x + torch.tanh(x @ w)) @ v, w=(4, 4), v=(4, 1)), (4,)),
    "tokens": (
        lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2), nn.Flatten(), nn.Linear(8, 2)),
        (4, 3),
    ),
    "an output for every token": (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), (4, 3)),
    "class token": (
        formula(lambda x, c, w: torch.cat([c.expand(len(x), 1, 3), x], 1).flatten(1) @ w, c=(1, 1, 3), w=(15, 2)),
        (4, 3),
    ),
    "linear attention": (formula(attention, q=(3, 3), k=(3, 3), v=(3, 2)), (4, 3)),
    "constant positions": (formula(beside_positions, w=(3, 4), v=(4, 2)), (5, 3)),
    "constant state": (formula(beside_a_state, w=(4, 3), u=(2, 3)), (4,)),
    "unused parameter": (formula(lambda x, w, v: x @ w, w=(4, 2), v=(3,)), (4,)),
    "written in place": (formula(written_in_place, w=(4, 3), g=()), (4,)),
    "einsum": (formula(lambda x, w, v: torch.einsum("nti,io->no", torch.tanh(x @ w), v), w=(3, 5), v=(5, 2)), (4, 3)),
    "einsum over two axes": (formula(lambda x, w: torch.einsum("nti,tio->no", torch.tanh(x), w), w=(4, 3, 5)), (4, 3)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 2)),
        (1, 4, 4),
    ),
    "layer norm": (lambda: nn.Sequential(nn.Linear(3, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 2)), (3,)),
    "batch norm in evaluation": (lambda: nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)), (3,)),
    "softmax": (formula(lambda x, w: torch.softmax(x @ w, 1), w=(4, 3)), (4,)),
    **NETWORKS,
}
"""Networks that the difference rules read."""

KINDS = (
    *("relu", "no bias", "called twice", "two heads", "one output without an axis", "tied and transposed"),
    *("overlapping slices", "gains and shifts", "low rank", "weights from weights", "one bias for two weights"),
    *("bias of one number", "left multiplication", "an output for every token", "unused parameter", "written in place"),
    *("convolution", "batch norm in evaluation", "softmax", "lstm", "encoder, norm before", "tied embedding"),
    *("transposed", "max pooling", "branching", "rotary positions", "bilinear", "weight norm", "learned slopes"),
)
"""A network for each kind of use of a weight: in one or several products, by element, by views or functions of the
weight, and together with constants, choices and operations that torch decomposes."""

DENSE: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "entropy": (formula(lambda x, w: torch.special.entr(2 + torch.tanh(x @ w)), w=(4, 3)), (4,)),
    "entropies": (formula(lambda x, w: torch.special.entr(2 + torch.tanh(x @ w)).sum((1, 2)), w=(3, 3)), (3, 3)),
    "outputs without inputs": (formula(lambda x, b: b.expand(len(x), 2) * 1.0, b=(2,)), (4,)),
}
"""Networks with an operation without a rule, whose Jacobians come from autograd."""


@dataclass(frozen=True)
class Problem:
    """A module with random weights, and random inputs."""

    module: nn.Module
    x: Tensor
    generator: torch.Generator

    @property
    def start(self) -> Weights:
        """The module's own weights."""
        return {name: weight.detach() for name, weight in self.module.named_parameters()}

    def inputs(self, count: int) -> Tensor:
        return torch.randn(count, *self.x.shape[1:], generator=self.generator, dtype=torch.float64).to(self.x.dtype)

    def end(self, size: float) -> Weights:
        """Return the weights after a random step of this relative size."""
        return {
            name: weight
            + size * torch.randn(weight.shape, generator=self.generator, dtype=torch.float64).to(weight.dtype)
            for name, weight in self.start.items()
        }


def problem(name: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> Problem:
    """Return the problem of this name. The scale of its weights keeps activations nonlinear."""
    make, shape = (READ | DENSE)[name]
    return problem_of(
        make(), lambda generator: torch.randn(5, *shape, generator=generator, dtype=torch.float64), seed, dtype
    )


def problem_of(
    module: nn.Module, inputs: Callable[[torch.Generator], Tensor], seed: int = 0, dtype: torch.dtype = torch.float64
) -> Problem:
    generator = torch.Generator().manual_seed(seed)
    module = module.to(dtype).eval()
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(0.7 * torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return Problem(module, inputs(generator).to(dtype), generator)


def routed(name: str) -> Problem:
    """Return the network of this name in `ROUTED` with random weights, and a batch."""
    return problem_of(ROUTED[name](), routed_batch)


# The tape, reader, features and Jacobians of a network, computed once for all laws.
#
# A test that changes a module, a rule or a reader uses a new `problem` instead.


@dataclass(frozen=True)
class Step:
    """A random step of the weights, with its secant Jacobian at the inputs of a problem."""

    reading: Reading
    start: Tape
    end: Tape

    @property
    def change(self) -> Tensor:
        """f(end) − f(start)."""
        return self.end.outputs - self.start.outputs

    @property
    def scale(self) -> Tensor:
        """The size of the outputs at both ends."""
        return self.start.outputs.abs().max() + self.end.outputs.abs().max()

    @property
    def weights(self) -> Weights:
        """Δθ between both tapes."""
        return {name: self.end[slot].detach() - self.start[slot].detach() for slot, name in self.start.weights.items()}


@dataclass(frozen=True)
class Known:
    """A problem with five inputs, and three more inputs."""

    given: Problem
    steps: dict[float, Step] = field(default_factory=dict)

    @property
    def unspent(self) -> Problem:
        """The problem with a copy of the generator, so that the order of tests does not matter."""
        generator = torch.Generator()
        generator.set_state(self.given.generator.get_state())
        return replace(self.given, generator=generator)

    @cached_property
    def other(self) -> Tensor:
        return self.unspent.inputs(3)

    @cached_property
    def reader(self) -> Reader:
        return reader_of(self.given.module)[0]

    @cached_property
    def tape(self) -> Tape:
        """The tape of the five at the start."""
        return self.reader.record(self.given.start, self.given.x)

    @cached_property
    def features(self) -> Jacobian:
        """The tangent features of the five."""
        return self.reader.tangent(self.tape)

    @cached_property
    def jacobians(self) -> Weights:
        """The oracle's Jacobians of all eight inputs."""
        return oracle.jacobians(self.given.module, torch.cat([self.given.x, self.other]))

    @cached_property
    def kernel(self) -> Tensor:
        """The oracle's kernel of the five with all eight."""
        rows = torch.cat(list(self.jacobians.values()), 2)
        return torch.einsum("qcp,ndp->qcnd", rows[:5], rows)

    def step(self, size: float) -> Step:
        if size not in self.steps:
            end = self.reader.record(self.unspent.end(size), self.given.x)
            self.steps[size] = Step(self.reader.secant(self.tape, end), self.tape, end)
        return self.steps[size]


@cache
def known(name: str, dtype: torch.dtype = torch.float64) -> Known:
    return Known(problem(name, dtype=dtype))
