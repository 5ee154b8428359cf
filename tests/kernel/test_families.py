"""Families of operations: their rules against definitions, and modules that contain them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, fft, linalg, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import orthogonal

import ntkexp
from ntkexp.kernel.read.reader import Reader, Reading
from ntkexp.kernel.secant.call import NoRule
from ntkexp.model.functional import function_of
from ntkexp.shapes import Weights
from tests.kernel import oracle
from tests.kernel.networks import Formula, own_weights
from tests.kernel.oracle import EPS, agree, applied, normal, refused
from tests.kernel.samples.base import Sample, square
from tests.kernel.samples.shaped import matrix, regular
from tests.kernel.test_rules import problem_of

SIZE = 0.6  # of the step


def secant(sample: Sample) -> Tensor:
    """J̄ applied to a direction that differs from its step."""
    problem = problem_of(sample)
    return applied(problem.secant(SIZE)[0].jacobian, problem.other)


def matrices(sample: Sample) -> tuple[Tensor, Tensor, Tensor]:
    """The matrices of a sample at both ends of the step, and their other direction."""
    problem = problem_of(sample)
    _, start, end = problem.secant(SIZE)
    before, after = (tape.outputs.view(-1, 3, 3) for tape in (start, end))
    return before, after, sample(problem.x @ problem.other["w"], problem.x @ problem.other["v"])


def by_hand(h: Tensor, k: Tensor, function: Callable[..., tuple[Tensor, Tensor]]) -> Tensor:
    """Both parts of a complex number, from the parts of two others."""
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
    """The cross-entropy of a logit and a label."""
    return (1 - k) * functional.softplus(h) + k * functional.softplus(-h)


DEFINITIONS: dict[str, tuple[Sample, Sample]] = {
    "entropy": (lambda h, k: functional.binary_cross_entropy_with_logits(h, k, reduction="none"), entropy),
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
def test_a_rule_is_that_of_the_definition(name: str) -> None:
    operation, definition = DEFINITIONS[name]
    agree(secant(operation), secant(definition), 100 * EPS)


def test_the_exponential_has_the_divided_difference_of_a_block_matrix() -> None:
    """exp [[A₁, V], [0, A₀]] has the change of exp off its diagonal. The rule is the mean of both orders."""
    a0, a1, v = matrices(matrix)
    blocks = [torch.cat([torch.cat([a, v], 2), torch.cat([0 * v, b], 2)], 1) for a, b in ((a1, a0), (a0, a1))]
    expected = sum(linalg.matrix_exp(block)[:, :3, 3:] for block in blocks) / 2
    agree(secant(lambda h, k: linalg.matrix_exp(matrix(h, k))), expected.flatten(1), 1000 * EPS)


def test_a_determinant_has_the_mean_derivative_along_the_step() -> None:
    """By autograd, at more Gauss nodes than a polynomial of degree two needs."""
    a0, a1, v = matrices(matrix)
    found = torch.zeros(5, 1, dtype=torch.float64)
    for place, weight in ((-(0.6**0.5), 5 / 18), (0.0, 8 / 18), (0.6**0.5, 5 / 18)):
        point = torch.lerp(a0, a1, (1 + place) / 2).requires_grad_()
        (slope,) = torch.autograd.grad(linalg.det(point).sum(), point)
        found = found + weight * (slope * v).sum((1, 2))[:, None]
    agree(secant(lambda h, k: linalg.det(matrix(h, k))[:, None]), found, 100 * EPS)


def along(
    function: Callable[[Tensor, Tensor], Tensor], x: Tensor, first: Tensor, last: Tensor
) -> tuple[Reading, Tensor, Tensor]:
    """Return the secant of a formula of one weight, and the outputs at its ends."""
    module = Formula(function, w=tuple(first.shape)).to(x.dtype)
    reader = Reader(function_of(module), frozenset({"w"}))
    start, end = (reader.record({"w": w}, x) for w in (first, last))
    return reader.secant(start, end), start.outputs, end.outputs


def test_values_that_meet_on_the_way_still_close() -> None:
    """When the larger eigenvalue becomes the smaller one, its vector turns by a right angle."""
    first, last = (torch.tensor(w).double() for w in ([1.0, 2.0], [2.0, 1.0]))
    x = torch.tensor([[1.0, 1.1], [2.0, 0.3]]).double()
    reading, before, after = along(lambda x, w: linalg.eigvalsh(torch.diag_embed(x * w)), x, first, last)
    for found in (reading.jvp, applied(reading.jacobian, {"w": last - first})):
        agree(found, after - before, 100 * EPS, 4.0)


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
    vectors, tolerance = VECTORS[kind], 200 * torch.finfo(dtype).eps
    x, spread = normal(5, 4, seed=9).to(dtype), torch.diag(torch.tensor([0.0, 5.0, -7.0, 11.0]))
    closed, turned = 0, 0
    for seed in range(6):
        start = spread + 0.3 * normal(4, 4, seed=seed)
        first, last = (w.to(dtype) for w in (start, start + 0.05 * normal(4, 4, seed=100 + seed)))
        try:
            reading, before, after = along(lambda x, w: (x @ vectors(w)).tanh(), x, first, last)
        except NoRule:
            turned += int(bool(((vectors(first) * vectors(last)).sum(0) < 0).any()))
            continue
        for found in (reading.jvp, applied(reading.jacobian, {"w": last - first})):
            agree(found, after - before, tolerance, 1.0)
        closed += 1
    assert closed + turned == 6
    assert closed


@pytest.mark.parametrize("end", [[1.0, 1.0], [1.0, 1.0 + 1e-9]])
def test_vectors_of_equal_values_are_refused(end: list[float]) -> None:
    def vectors(x: Tensor, w: Tensor) -> Tensor:
        result: Tensor = linalg.eigh(torch.diag_embed(x * w))[1].flatten(1)
        return result

    with refused(r"does not determine its eigenvectors.*aten\._linalg_eigh", kind=NoRule):
        along(vectors, torch.ones(3, 2).double(), torch.ones(2).double(), torch.tensor(end).double())


def test_singular_vectors_of_no_value_are_refused_by_that_reason() -> None:
    first, last = (torch.eye(4, 2).double() * torch.tensor([size, 3.0]) for size in (1.0, 1.5))
    with refused("belong to no singular value; give full_matrices=False", kind=NoRule):
        along(lambda x, w: x @ linalg.svd(w)[0], torch.ones(3, 4).double(), first, last)


def test_a_short_exponential_closes_to_the_values_of_torch() -> None:
    """torch stops the series of a single matrix of norm 0.03 where it is off by 1e-12."""
    w = normal(4, 4, seed=2)
    w = w / (w - w.t()).abs().sum(0).max()
    reading, before, after = along(
        lambda x, w: x @ linalg.matrix_exp(w - w.t()), normal(5, 4, seed=3), 0.01 * w, 0.03 * w
    )
    agree(reading.jvp, after - before, 100 * EPS, after.abs().max())


# Modules of these families.


def fnet(x: Tensor, body: nn.Module, norm: nn.Module, head: nn.Module) -> Tensor:
    """Fourier mixing of tokens."""
    h = body(x)
    h = norm(h + fft.fft(fft.fft(h, dim=-1), dim=-2).real)
    outputs: Tensor = head(functional.gelu(h).mean(1))
    return outputs


def fourier_operator(x: Tensor, body: nn.Module, head: nn.Module, gains: Tensor) -> Tensor:
    """Complex weights for the lowest frequencies."""
    h = body(x).transpose(1, 2)
    frequencies = fft.rfft(h)
    kept = torch.zeros_like(frequencies)
    kept[..., :3] = torch.einsum("bix,iox->box", frequencies[..., :3], torch.view_as_complex(gains))
    outputs: Tensor = head(functional.gelu(fft.irfft(kept, n=x.shape[1]) + h).transpose(1, 2))
    return outputs.flatten(1)


def flow(x: Tensor, w: Tensor, coupling: nn.Module) -> Tensor:
    """A log-density under an invertible linear map and a coupling."""
    w = w + 2 * torch.eye(3, dtype=x.dtype)
    y = x.mean(1) @ w
    a, b = y[:, :1], y[:, 1:]
    scale, shift = coupling(a).chunk(2, 1)
    z = torch.cat([a, b * scale.tanh().exp() + shift], 1)
    outputs: Tensor = scale.tanh().sum(1) + linalg.slogdet(w)[1] - z.square().sum(1) / 2
    return outputs


def scores(x: Tensor, body: nn.Module, head: nn.Module) -> Tensor:
    """Alignment scores, summed along the way, and an autoencoder's loss."""
    h = body(x)
    loss = functional.binary_cross_entropy_with_logits(head(h.tanh()), x.sigmoid(), reduction="none")
    return torch.cat([torch.logcumsumexp(h, 1).flatten(1), loss.mean((1, 2))[:, None]], 1)


def turned(how: str, rows: int, *, moving: bool) -> nn.Module:
    """A layer whose weight is orthogonal, before and after."""
    layer = orthogonal(nn.Linear(3, rows), orthogonal_map=how, use_trivialization=moving)
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(5 * rows, 2))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "FNet": lambda: Formula(fnet, body=nn.Linear(3, 4), norm=nn.LayerNorm(4), head=nn.Linear(4, 2)),
    "Fourier operator": lambda: Formula(
        fourier_operator, body=nn.Linear(3, 2), head=nn.Linear(2, 1), gains=(2, 2, 3, 2)
    ),
    "flow": lambda: Formula(flow, w=(3, 3), coupling=nn.Linear(1, 4)),
    "scores": lambda: Formula(scores, body=nn.Linear(3, 3), head=nn.Linear(3, 3)),
    **{
        f"{how}, {rows} × 3": partial(turned, how, rows, moving=rows == 3)
        for how in ("householder", "cayley", "matrix_exp")
        for rows in (3, 4, 2)
    },
}


QUICK = ("Fourier operator", "flow", "householder, 4 × 3", "matrix_exp, 3 × 3")


def made(name: str) -> nn.Module:
    """Return the module with random free weights."""
    torch.manual_seed(0)
    module = MODULES[name]().double().eval()
    with torch.no_grad():
        for parameter, weight in module.named_parameters():
            if "parametrizations" not in parameter:
                weight.copy_(0.5 * torch.randn(weight.shape, dtype=torch.float64))
    return module


def gradient_step(module: nn.Module, x: Tensor) -> tuple[Weights, Weights, Tensor]:
    """Return both ends of a step down ½Σf² that is not small, and f at its start."""
    outputs = module(x).reshape(len(x), -1)
    found = torch.autograd.grad(outputs.square().sum() / 2, list(module.parameters()), materialize_grads=True)
    start = own_weights(module)
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


def written_by_parts(x: Tensor, w: Tensor) -> Tensor:
    """Complex numbers that are written, and shown by their parts."""
    z = torch.zeros(len(x), 3, dtype=torch.complex128)
    z[:, :2] = torch.view_as_complex((x @ w).view(-1, 2, 2))
    z.real[:, 2:] = x[:, :1]
    return torch.view_as_real(z)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (written_by_parts, "writes complex numbers in place"),
        (lambda x, w: fft.fft(x @ w, dim=0).abs(), "couples the examples of a batch"),
        (lambda x, w: torch.logcumsumexp(x @ w, 0), "couples the examples of a batch"),
    ],
)
def test_writes_by_parts_and_sums_along_examples_are_refused(function: Callable[..., Tensor], words: str) -> None:
    with refused(words):
        ntkexp.tangent_kernel(Formula(function, w=(3, 4)).double(), normal(4, 3, seed=3))
