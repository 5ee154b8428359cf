"""Families of operations: what a rule is by its definition, and modules in which they are met."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, fft, linalg, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import orthogonal

import ntkexp
from ntkexp.kernel.read.reader import Reader
from ntkexp.kernel.secant.call import NoRule
from ntkexp.mistake import Mistake
from ntkexp.model.functional import function_of
from ntkexp.shapes import Weights
from tests.kernel import oracle
from tests.kernel.oracle import agree, applied
from tests.kernel.problems import Formula
from tests.kernel.samples.base import Sample, square
from tests.kernel.samples.shaped import matrix, regular
from tests.kernel.test_rules import problem_of

EPS = torch.finfo(torch.float64).eps
GENERATOR = torch.Generator()
SIZE = 0.6  # of the step


def normal(*shape: int) -> Tensor:
    """Random numbers, which begin anew in every test."""
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def secant(sample: Sample) -> Tensor:
    """J̄ applied to another direction than that of its step."""
    problem = problem_of(sample)
    return applied(problem.secant(SIZE)[0].jacobian, problem.other)


def matrices(sample: Sample) -> tuple[Tensor, Tensor, Tensor]:
    """What the matrices of a sample are at both ends of the step, and the other direction of them."""
    problem = problem_of(sample)
    _, start, end = problem.secant(SIZE)
    before, after = (tape.outputs.view(-1, 3, 3) for tape in (start, end))
    return before, after, sample(problem.x @ problem.other["w"], problem.x @ problem.other["v"])


def by_hand(h: Tensor, k: Tensor, function: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
    """Both parts of a complex number, from those of two others."""
    return torch.stack(function(h, k, k, h), -1)


def cosines(h: Tensor, k: Tensor) -> Tensor:
    """The Fourier transform by its definition."""
    places = torch.arange(6.0, dtype=h.dtype)
    angles = -2 * torch.pi * places[:, None] * places[:4] / 6
    return torch.stack([h @ angles.cos(), h @ angles.sin()], -1)


def reflected(h: Tensor, k: Tensor) -> Tensor:
    q = torch.eye(3, 2, dtype=h.dtype).expand(len(h), 3, 2)
    for n in (1, 0):
        v = square(h).mT[:, :, n : n + 1].tril(-n - 1) + torch.eye(3, dtype=h.dtype)[:, n : n + 1]
        q = q - v * k[:, n, None, None] @ (v.mT @ q)
    return q


def one_by_one(h: Tensor, k: Tensor) -> Tensor:
    """Running sums, each from the one before."""
    sums = [h[:, 0]]
    for n in range(1, 6):
        sums.append(torch.logaddexp(sums[-1], h[:, n]))
    return torch.stack(sums, 1)


def entropy(h: Tensor, k: Tensor) -> Tensor:
    """Of a logit and a label."""
    return (1 - k) * functional.softplus(h) + k * functional.softplus(-h)


DEFINITIONS: dict[str, tuple[Sample, Sample]] = {
    "entropy": (
        lambda h, k: functional.binary_cross_entropy_with_logits(h, k, reduction="none"),
        entropy,
    ),
    "running sums": (lambda h, k: torch.logcumsumexp(h, 1), one_by_one),
    "product": (
        lambda h, k: torch.view_as_real(torch.complex(h, k) * torch.complex(k, h)),
        partial(by_hand, function=lambda a, b, c, d: (a * c - b * d, a * d + b * c)),
    ),
    "length": (lambda h, k: torch.complex(h, k).abs(), torch.hypot),
    "angle": (lambda h, k: torch.complex(h, k).angle(), lambda h, k: torch.atan2(k, h)),
    "Fourier": (lambda h, k: torch.view_as_real(fft.rfft(h)), cosines),
    "solution": (
        lambda h, k: linalg.solve(regular(h, k), torch.ones(3, 2, dtype=h.dtype)),
        lambda h, k: linalg.inv(regular(h, k)) @ torch.ones(3, 2, dtype=h.dtype),
    ),
    "reflections": (lambda h, k: linalg.householder_product(square(h).mT, k[:, :2]), reflected),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_a_rule_is_that_of_what_the_operation_is_made_of(name: str) -> None:
    operation, definition = DEFINITIONS[name]
    expected = secant(definition)
    agree(secant(operation), expected, 100 * EPS)


def test_the_exponential_has_the_divided_difference_of_a_block_matrix() -> None:
    """exp [[A₁, V], [0, A₀]] has the change of exp beside its diagonal, of which the rule is the mean both ways."""
    a0, a1, v = matrices(matrix)
    blocks = [torch.cat([torch.cat([a, v], 2), torch.cat([0 * v, b], 2)], 1) for a, b in ((a1, a0), (a0, a1))]
    expected = sum(linalg.matrix_exp(block)[:, :3, 3:] for block in blocks) / 2
    agree(secant(lambda h, k: linalg.matrix_exp(matrix(h, k))), expected.flatten(1), 1000 * EPS)


def test_a_determinant_has_the_mean_derivative_along_the_step() -> None:
    """Found by autograd, at more Gauss nodes than a polynomial of degree two wants."""
    a0, a1, v = matrices(matrix)
    found = torch.zeros(5, 1, dtype=torch.float64)
    for place, weight in ((-(0.6**0.5), 5 / 18), (0.0, 8 / 18), (0.6**0.5, 5 / 18)):
        point = torch.lerp(a0, a1, (1 + place) / 2).requires_grad_()
        (slope,) = torch.autograd.grad(linalg.det(point).sum(), point)
        found = found + weight * (slope * v).sum((1, 2))[:, None]
    agree(secant(lambda h, k: linalg.det(matrix(h, k))[:, None]), found, 100 * EPS)


def test_values_that_meet_on_the_way_still_close() -> None:
    """Where the larger eigenvalue becomes the smaller one its vector turns by a right angle."""
    module = Formula(lambda x, w: linalg.eigvalsh(torch.diag_embed(x * w)), w=(2,)).double()
    reader, x = Reader(function_of(module), frozenset({"w"})), torch.tensor([[1.0, 1.1], [2.0, 0.3]]).double()
    start, end = (reader.record({"w": torch.tensor(w).double()}, x) for w in ([1.0, 2.0], [2.0, 1.0]))
    reading = reader.secant(start, end)
    change = end.outputs - start.outputs
    agree(reading.push, change, 100 * EPS, 4.0)
    agree(applied(reading.jacobian, {"w": torch.tensor([1.0, -1.0]).double()}), change, 100 * EPS, 4.0)


VECTORS: dict[str, Callable[[Tensor], Tensor]] = {
    "eigen": lambda w: linalg.eigh(w + w.t())[1],
    "left": lambda w: linalg.svd(w)[0],
    "left of a tall one": lambda w: linalg.svd(w[:, 1:], full_matrices=False)[0],
    "right": lambda w: linalg.svd(w)[2].t(),
    "right of a tall one": lambda w: linalg.svd(w[:, 1:], full_matrices=False)[2].t().tile(2, 1)[:4],
}


@pytest.mark.parametrize("kind", VECTORS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_vectors_of_values_close_or_have_turned_round(kind: str, dtype: torch.dtype) -> None:
    """LAPACK chooses their signs, and a vector that becomes its negative has no difference along the matrix's."""
    vectors = VECTORS[kind]
    module = Formula(lambda x, w: (x @ vectors(w)).tanh(), w=(4, 4)).to(dtype)
    reader, x = Reader(function_of(module), frozenset({"w"})), normal(5, 4).to(dtype)
    spread, closed, turned = torch.diag(torch.tensor([0.0, 5.0, -7.0, 11.0])), 0, 0
    for seed in range(6):
        GENERATOR.manual_seed(seed)
        first = spread + 0.3 * normal(4, 4)
        ends = [first.to(dtype), (first + 0.05 * normal(4, 4)).to(dtype)]
        start, end = (reader.record({"w": w}, x) for w in ends)
        try:
            reading = reader.secant(start, end)
        except NoRule:
            u0, u1 = (vectors(w) for w in ends)
            turned += int(bool(((u0 * u1).sum(0) < 0).any()))
            continue
        change = end.outputs - start.outputs
        agree(reading.push, change, 200 * torch.finfo(dtype).eps, 1.0)
        agree(applied(reading.jacobian, {"w": ends[1] - ends[0]}), change, 200 * torch.finfo(dtype).eps, 1.0)
        closed += 1
    assert closed + turned == 6
    assert closed


@pytest.mark.parametrize("end", [[1.0, 1.0], [1.0, 1.0 + 1e-9]])
def test_vectors_of_equal_values_are_refused(end: list[float]) -> None:
    module = Formula(lambda x, w: linalg.eigh(torch.diag_embed(x * w))[1].flatten(1), w=(2,)).double()
    reader, x = Reader(function_of(module), frozenset({"w"})), torch.ones(3, 2).double()
    first, last = (reader.record({"w": torch.tensor(w).double()}, x) for w in ([1.0, 1.0], end))
    with pytest.raises(NoRule, match=r"vectors of values that meet.*aten\._linalg_eigh"):
        reader.secant(first, last)


def test_singular_vectors_of_no_value_are_refused_by_that_reason() -> None:
    module = Formula(lambda x, w: x @ linalg.svd(w)[0], w=(4, 2)).double()
    reader, x = Reader(function_of(module), frozenset({"w"})), torch.ones(3, 4).double()
    first, last = (reader.record({"w": torch.eye(4, 2).double() * torch.tensor([size, 3.0])}, x) for size in (1.0, 1.5))
    with pytest.raises(NoRule, match="belong to no singular value; give full_matrices=False"):
        reader.secant(first, last)


def test_a_short_exponential_closes_to_what_torch_makes_of_it() -> None:
    """torch stops the series of a single matrix of norm 0.03 where it is off by 1e-12."""
    module = Formula(lambda x, w: x @ linalg.matrix_exp(w - w.t()), w=(4, 4)).double()
    GENERATOR.manual_seed(2)
    reader, x, w = Reader(function_of(module), frozenset({"w"})), normal(5, 4), normal(4, 4)
    norm = float((w - w.t()).abs().sum(0).max())
    start, end = (reader.record({"w": size / norm * w}, x) for size in (0.01, 0.03))
    agree(reader.secant(start, end).push, end.outputs - start.outputs, 100 * EPS, end.outputs.abs().max())


class Mixed(nn.Module):
    """Fourier mixing of tokens, as in FNet."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        h = self.norm(h + fft.fft(fft.fft(h, dim=-1), dim=-2).real)
        out: Tensor = self.head(functional.gelu(h).mean(1))
        return out


class Spectral(nn.Module):
    """Complex weights for the lowest frequencies, as in a Fourier neural operator."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 2), nn.Linear(2, 1)
        self.gains = nn.Parameter(torch.empty(2, 2, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x).transpose(1, 2)
        frequencies = fft.rfft(h)
        kept = torch.zeros_like(frequencies)
        gains = torch.view_as_complex(self.gains)
        kept[..., :3] = torch.einsum("bix,iox->box", frequencies[..., :3], gains)
        out: Tensor = self.head(functional.gelu(fft.irfft(kept, n=x.shape[1]) + h).transpose(1, 2))
        return out.flatten(1)


class Flow(nn.Module):
    """A log-density under an invertible linear map and a coupling."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.coupling = nn.Parameter(torch.empty(3, 3)), nn.Linear(1, 4)

    def forward(self, x: Tensor) -> Tensor:
        w = self.w + 2 * torch.eye(3, dtype=x.dtype)
        y = x.mean(1) @ w
        a, b = y[:, :1], y[:, 1:]
        scale, shift = self.coupling(a).chunk(2, 1)
        z = torch.cat([a, b * scale.tanh().exp() + shift], 1)
        out: Tensor = scale.tanh().sum(1) + linalg.slogdet(w)[1] - z.square().sum(1) / 2
        return out


class Scored(nn.Module):
    """Alignment scores, summed along the way, and an autoencoder's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        loss = functional.binary_cross_entropy_with_logits(self.head(h.tanh()), x.sigmoid(), reduction="none")
        return torch.cat([torch.logcumsumexp(h, 1).flatten(1), loss.mean((1, 2))[:, None]], 1)


def turned(how: str, rows: int, *, moving: bool) -> nn.Module:
    """A layer whose weight is orthogonal, before and after."""
    layer = orthogonal(nn.Linear(3, rows), orthogonal_map=how, use_trivialization=moving)
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(5 * rows, 2))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "FNet": Mixed,
    "Fourier operator": Spectral,
    "flow": Flow,
    "scores": Scored,
    **{
        f"{how}, {rows} × 3": partial(turned, how, rows, moving=rows == 3)
        for how in ("householder", "cayley", "matrix_exp")
        for rows in (3, 4, 2)
    },
}


QUICK = ("Fourier operator", "flow", "householder, 4 × 3", "matrix_exp, 3 × 3")


def made(name: str) -> nn.Module:
    """The module, its free weights random."""
    torch.manual_seed(0)
    module = MODULES[name]().double().eval()
    with torch.no_grad():
        for parameter, weight in module.named_parameters():
            if "parametrizations" not in parameter:
                weight.copy_(0.5 * torch.randn(weight.shape, dtype=torch.float64))
    return module


def gradient_step(module: nn.Module, x: Tensor) -> tuple[Weights, Weights, Tensor]:
    """A step down ½Σf² that is not small, and f at its start."""
    outputs = module(x).reshape(len(x), -1)
    found = torch.autograd.grad(outputs.square().sum() / 2, list(module.parameters()), materialize_grads=True)
    start = {name: weight.detach() for name, weight in module.named_parameters()}
    size = 0.1 / max(float(gradient.norm()) for gradient in found)
    step = dict(zip(start, found, strict=True))
    return start, {name: weight - size * step[name] for name, weight in start.items()}, size * outputs.detach()


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODULES]
)
def test_modules_of_these_families_have_kernels(name: str) -> None:
    module = made(name)
    x, queries = torch.randn(4, 5, 3, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64)
    agree(ntkexp.tangent_kernel(module, queries, x), oracle.tangent(module, queries, x), 1000 * EPS)
    start, end, residual = gradient_step(module, x)
    kernel = ntkexp.secant_kernel(module, start, end, queries=queries, train=x)
    predicted = -torch.einsum("qcid,id->qc", kernel, residual)
    before, after = (torch.func.functional_call(module, weights, queries).reshape(2, -1) for weights in (start, end))
    agree(predicted, (after - before).detach(), 1000 * EPS, before.detach().abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODULES)
def test_their_training_is_followed_to_rounding(name: str) -> None:
    module = made(name)
    x, queries = torch.randn(4, 5, 3, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64)
    optimizer, before = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9), module(queries).detach()
    with ntkexp.follow(module, optimizer, queries=queries) as trace:
        for step in range(5):
            optimizer.zero_grad()
            module(x[step % 2 :: 2]).square().mean().backward()
            optimizer.step()
    found = trace.attribute()
    explained = torch.from_numpy((found["contribution"].sum("example") + found["decay"]).to_numpy())
    change = (module(queries).detach() - before).reshape(2, -1)
    agree(explained.reshape(2, -1), change, 1e-12, before.abs().max())


def test_complex_numbers_that_are_written_and_shown_by_their_parts_are_refused() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        z = torch.zeros(len(x), 3, dtype=torch.complex128)
        z[:, :2] = torch.view_as_complex((x @ w).view(-1, 2, 2))
        z.real[:, 2:] = x[:, :1]
        return torch.view_as_real(z)

    module = Formula(function, w=(3, 4)).double()
    with pytest.raises(Mistake, match="writes complex numbers in place") as caught:
        ntkexp.tangent_kernel(module, torch.ones(2, 3, dtype=torch.float64))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: fft.fft(x @ w, dim=0).abs(),
        lambda x, w: torch.logcumsumexp(x @ w, 0),
    ],
)
def test_what_runs_along_the_examples_is_refused(function: Callable[..., Tensor]) -> None:
    GENERATOR.manual_seed(3)
    with pytest.raises(Mistake, match="couples the examples of a batch"):
        ntkexp.tangent_kernel(Formula(function, w=(3, 4)).double(), normal(4, 3))
