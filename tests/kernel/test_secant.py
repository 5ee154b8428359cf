"""The secant kernel: exact for one step of gradient descent, however long, and the tangent at length zero."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from ntkexp.kernel.read.reader import Reader, Reading
from ntkexp.kernel.record.tape import Tape
from ntkexp.library import reader_of, secant_kernel, tangent_kernel
from ntkexp.shapes import Weights
from tests.kernel import oracle
from tests.kernel.applied import applied
from tests.kernel.compare import agree
from tests.kernel.problems import READ, Problem, problem

EPS = torch.finfo(torch.float64).eps
ROUNDING = 300 * EPS  # relative to the sizes of f and of the terms that sum to its change


def outputs(given: Problem, weights: Weights, x: Tensor) -> Tensor:
    """f(θ; x), a row an example."""
    found: Tensor = functional_call(given.module, given.start | weights, (x,), tie_weights=True)
    return found.detach().reshape(len(x), -1)


def read(given: Problem, size: float) -> tuple[Reader, Reading, Tape, Tape]:
    """A random step, read at the problem's inputs."""
    reader, own = reader_of(given.module)
    start, end = reader.record(own, given.x), reader.record(given.end(size), given.x)
    return reader, reader.secant(start, end), start, end


@pytest.mark.parametrize("size", [1e-8, 1e-4, 0.3, 3.0])
@pytest.mark.parametrize("name", READ)
def test_the_push_and_the_reverse_close(name: str, size: float) -> None:
    _, reading, start, end = read(problem(name), size)
    change = end.outputs - start.outputs
    step = {key: end[slot].detach() - start[slot].detach() for slot, key in start.weights.items()}
    scale = start.outputs.abs().max() + end.outputs.abs().max()
    agree(reading.push, change, ROUNDING, scale)
    agree(applied(reading.features, step), change, ROUNDING, scale)


@pytest.mark.parametrize("step_size", [1e-3, 0.3, 3.0])
@pytest.mark.parametrize("name", READ)
def test_one_step_of_descent_is_exact(name: str, step_size: float) -> None:
    """f(end; x) − f(start; x) = −η Σᵢ K̄(x, xᵢ) ℓ′ᵢ for the gradient step of any loss with output gradients ℓ′."""
    given = problem(name, seed=1)
    probes = given.inputs(3)
    shape = outputs(given, {}, given.x).shape
    residual = torch.randn(shape, generator=given.generator, dtype=torch.float64) / len(given.x)
    jacobian = oracle.jacobians(given.module, given.x)
    start = given.start
    end = {
        key: start[key] - step_size * torch.einsum("ncp,nc->p", rows, residual).view(start[key].shape)
        for key, rows in jacobian.items()
    }
    kernel = secant_kernel(given.module, start, end, probes, given.x)
    predicted = -step_size * torch.einsum("qcnd,nd->qc", kernel, residual)
    before, after = outputs(given, {}, probes), outputs(given, end, probes)
    terms = step_size * torch.einsum("qcnd,nd->qc", kernel.abs(), residual.abs()).max()
    agree(predicted, after - before, ROUNDING, before.abs().max() + after.abs().max() + terms)


@pytest.mark.parametrize("name", READ)
def test_at_length_zero_it_is_the_tangent_kernel_and_symmetric(name: str) -> None:
    given = problem(name, seed=2)
    kernel = secant_kernel(given.module, {}, {}, given.x, given.x)
    agree(kernel, tangent_kernel(given.module, given.x), 100 * EPS)
    agree(kernel, kernel.permute(2, 3, 0, 1), 100 * EPS)


def test_it_is_not_symmetric_along_a_step() -> None:
    given = problem("tanh")
    kernel = secant_kernel(given.module, {}, given.end(1.0), given.x, given.x)
    assert (kernel - kernel.permute(2, 3, 0, 1)).abs().max() > 1e-2 * kernel.abs().max()


@pytest.mark.parametrize("name", ["relu", "tanh", "called twice", "gains and shifts", "low rank", "two heads"])
def test_frozen_parameters_may_move_and_add_nothing_to_the_kernel(name: str) -> None:
    """What each parameter adds is its own, at the values of all of them: the shares add up to the whole kernel."""
    given = problem(name, seed=3)
    end = given.end(0.5)
    whole = secant_kernel(given.module, given.start, end, given.x, given.x)
    parameters = list(given.module.parameters())
    shares = []
    for chosen in parameters:
        for weight in parameters:
            weight.requires_grad_(weight is chosen)
        shares.append(secant_kernel(given.module, given.start, end, given.x, given.x))
    agree(torch.stack(shares).sum(0), whole, ROUNDING)


def test_the_push_includes_what_frozen_parameters_do() -> None:
    given = problem("gelu", seed=4)
    frozen = next(iter(given.module.parameters()))
    frozen.requires_grad_(False)
    _, reading, start, end = read(given, 0.5)
    scale = start.outputs.abs().max() + end.outputs.abs().max()
    agree(reading.push, end.outputs - start.outputs, ROUNDING, scale)


def test_weights_that_are_not_named_are_the_modules_own() -> None:
    given = problem("silu", seed=5)
    end = given.end(0.5)
    some = {"0.weight": end["0.weight"]}
    expected = secant_kernel(given.module, given.start, given.start | some, given.x, given.x)
    assert torch.equal(secant_kernel(given.module, {}, some, given.x, given.x), expected)


@pytest.mark.parametrize("name", ["relu", "tanh", "called twice"])
def test_single_precision_closes_to_single_precision(name: str) -> None:
    given = problem(name, dtype=torch.float32)
    _, reading, start, end = read(given, 0.3)
    scale = start.outputs.abs().max() + end.outputs.abs().max()
    agree(reading.push, end.outputs - start.outputs, 300 * torch.finfo(torch.float32).eps, scale)


@pytest.mark.parametrize("name", ["relu", "leaky_relu"])
def test_pieces_telescope(name: str) -> None:
    """The mean of the secants of n equal pieces closes for every n, across kinks too."""
    given = problem(name, seed=6)
    reader, own = reader_of(given.module)
    end = given.end(1.0)
    pieces = 3
    tapes = [
        reader.record({key: torch.lerp(own[key], end[key], k / pieces) for key in own}, given.x)
        for k in range(pieces + 1)
    ]
    step = {key: end[key] - own[key] for key in own}
    parts = [applied(reader.secant(tapes[k], tapes[k + 1]).features, step) for k in range(pieces)]
    change = tapes[-1].outputs - tapes[0].outputs
    agree(torch.stack(parts).mean(0), change, ROUNDING, tapes[0].outputs.abs().max() + tapes[-1].outputs.abs().max())
