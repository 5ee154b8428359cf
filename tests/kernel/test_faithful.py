"""Modules whose gradients are not the derivatives of their values, and modules that change by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel.features.blocks import Factored
from ntkexp.library import reader_of, secant_kernel, tangent_kernel
from ntkexp.mistake import Mistake
from tests.kernel import oracle
from tests.kernel.applied import applied
from tests.kernel.compare import agree
from tests.kernel.problems import Formula

pytestmark = pytest.mark.filterwarnings("ignore:.*plain Jacobians")  # test_rules.py hears them

EPS = torch.finfo(torch.float64).eps


class Straight(torch.autograd.Function):
    """The sign, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Newer(torch.autograd.Function):
    """The same, as torch.func wants it."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.sign()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Saving(torch.autograd.Function):
    """tanh, which keeps its result for the way back: its gradient is the derivative."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x.tanh()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        kept: Tensor = gradients[0] * (1 - result * result)
        return kept


def applied_to(function: type[torch.autograd.Function], x: Tensor) -> Tensor:
    """The function, whose call torch leaves without types."""
    result: Tensor = function.apply(x)  # type: ignore[no-untyped-call]  # torch's own
    return result


def under_no_grad(h: Tensor) -> Tensor:
    """Clamped, with the gradient of the identity."""
    h = h * 1
    with torch.no_grad():
        h.clamp_(min=0)
    return h


def into_data(h: Tensor) -> Tensor:
    h = h * 1
    h.data.clamp_(min=0)
    return h


UNFAITHFUL: dict[str, Callable[..., Tensor]] = {
    "a detached branch": lambda x, w, v: torch.tanh(x @ w) @ v + (x @ w).detach() @ v,
    "a detached weight": lambda x, w, v: torch.tanh(torch.tanh(x @ w) @ w.detach().t() @ w) @ v,
    "a detached gain": lambda x, w, v: torch.tanh(x @ w * w.detach()[0]) @ v,
    "a straight-through sign": lambda x, w, v: (torch.tanh(x @ w) + (x @ w).sign().detach() - (x @ w).detach()) @ v,
    "an autograd.Function": lambda x, w, v: applied_to(Straight, x @ w) @ v,
    "a newer autograd.Function": lambda x, w, v: applied_to(Newer, x @ w) @ v,
    "a write under no_grad": lambda x, w, v: under_no_grad(x @ w) @ v,
    "a write into data": lambda x, w, v: into_data(x @ w) @ v,
    "a detached correction": lambda x, w, v: x @ w @ v - (x @ w @ v).detach().tanh(),
}


def module(function: Callable[..., Tensor]) -> tuple[nn.Module, Tensor]:
    """A formula with random weights, and inputs."""
    generator = torch.Generator().manual_seed(0)
    made = Formula(function, w=(3, 4), v=(4, 2)).double()
    with torch.no_grad():
        for weight in made.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator, dtype=torch.float64))
    return made, torch.randn(5, 3, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("name", UNFAITHFUL)
def test_the_tangent_kernel_is_that_of_the_gradients(name: str) -> None:
    made, x = module(UNFAITHFUL[name])
    agree(tangent_kernel(made, x), oracle.tangent(made, x, x), 100 * EPS)


@pytest.mark.parametrize("name", UNFAITHFUL)
def test_a_secant_kernel_is_refused_in_one_line(name: str) -> None:
    made, x = module(UNFAITHFUL[name])
    end = {name: 1.1 * weight.detach() for name, weight in made.named_parameters()}
    with pytest.raises(Mistake, match="gradients are not the derivatives of its values") as caught:
        secant_kernel(made, {}, end, x, x)
    assert "\n" not in str(caught.value)


def test_an_autograd_function_that_differentiates_its_values_is_read() -> None:
    made, x = module(lambda x, w, v: applied_to(Saving, x @ w) @ v)
    reader, own = reader_of(made)
    end = {name: 1.1 * weight for name, weight in own.items()}
    start, after = reader.record(own, x), reader.record(end, x)
    assert all(isinstance(block, Factored) for block in reader.tangent(start).blocks)
    agree(tangent_kernel(made, x), oracle.tangent(made, x, x), 100 * EPS)
    change = after.outputs - start.outputs
    found = applied(reader.secant(start, after).jacobian, {name: end[name] - own[name] for name in own})
    agree(found, change, 100 * EPS, after.outputs.abs().max())


def test_a_module_that_no_parameter_trains_is_refused() -> None:
    made, x = module(lambda x, w, v: (x @ w @ v).detach())
    with pytest.raises(Mistake, match="depend on no parameter"):
        tangent_kernel(made, x)


NO_NUMBERS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "a root at zero, times zero": (
        "autograd's gradients are no numbers, from Mul on",
        lambda x, w, v: ((x @ w) * 0).sqrt() @ v,
    ),
    "a hidden row": (
        r"outputs of the module are no numbers, from aten\._softmax\.default on",
        lambda x, w, v: torch.softmax((x @ w).masked_fill(torch.tensor(True), -torch.inf), 1) @ v,
    ),
}


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_what_is_no_number_is_said(name: str) -> None:
    """And is not taken for a gradient of its own."""
    words, function = NO_NUMBERS[name]
    made, x = module(function)
    with pytest.raises(Mistake, match=words) as caught:
        secant_kernel(made, {}, {}, x, x)
    assert "\n" not in str(caught.value)


class Counting(nn.Module):
    """A module that remembers how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(3, 2), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        outputs: Tensor = self.layer(x) * self.calls
        return outputs


def noisy() -> nn.Module:
    """A module with random numbers that torch does not know of."""
    generator = np.random.default_rng(0)
    return Formula(lambda x, w: x @ w + generator.normal(), w=(3, 2))


@pytest.mark.parametrize("make", [Counting, noisy])
def test_a_module_that_changes_by_itself_is_refused(make: Callable[[], nn.Module]) -> None:
    made = make().double()
    with torch.no_grad():
        for weight in made.parameters():
            weight.fill_(0.5)
    with pytest.raises(Mistake, match="gives other outputs when it is run again") as caught:
        tangent_kernel(made, torch.ones(4, 3, dtype=torch.float64))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_units_within_rounding_of_a_kink_make_no_module_unfaithful(seed: int) -> None:
    """Single precision, and so many units that some lie on the other side when the module is run again."""
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
    reader, start = reader_of(nn.Sequential(*net, nn.Flatten(), nn.Linear(1024, 1)).eval())
    reader.checks.faithful_owners(reader.record(start, torch.randn(64, 1, 8, 8)))
