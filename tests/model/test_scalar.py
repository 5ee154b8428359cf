"""Functions of one number, against their kernels in closed form and against the numbers that Huszár (2020) gives."""

from __future__ import annotations

from math import log, prod

import pytest
import torch
from jaxtyping import Float
from pydantic import ValidationError
from torch import Tensor
from torch.func import functional_call

from ntkexp.data.synthetic import Integers
from ntkexp.library import ascend, finite_step_kernel, secant_kernel, tangent_kernel
from ntkexp.model.scalar import AbstractScalar
from tests.config.components import SCALAR, configured
from tests.kernel.oracle import EPS, normal, refused
from tests.run.small import ran
from tests.test_init import init

X = torch.arange(-10.0, 21.0, dtype=torch.float64)[:, None]
OBSERVED = X[20:21]
"""The point 10."""

ON_INTEGERS = ("data=integers", "data.train=1", "data.query=0", "data.test=30")


def function(name: str, **changes: object) -> torch.nn.Module:
    model = configured("model", name, **changes)
    assert isinstance(model, AbstractScalar)
    return model.function()


def at_ten(name: str, **changes: object) -> Float[Tensor, " point"]:
    """k(x, 10) for all x."""
    return tangent_kernel(function(name, **changes), X, OBSERVED)[:, 0, 0, 0]


def curve(kernel: Float[Tensor, "point out one out_"]) -> Float[Tensor, " point"]:
    """Return a kernel with one point, divided by the point's kernel with itself."""
    return kernel[:, 0, 0, 0] / kernel[20, 0, 0, 0]


KERNELS = {
    "lookup_table": lambda x: (x == 10).double(),
    "scalar_linear": lambda x: 10 * x + 1,
    "reparametrised_linear": lambda x: 10 * x + 100,
}


@pytest.mark.parametrize("name", sorted(KERNELS))
def test_kernels_in_closed_form(name: str) -> None:
    assert torch.equal(at_ten(name), KERNELS[name](X[:, 0]))


def test_one_step_of_a_table_moves_one_entry() -> None:
    """The loss is (f − y)². A step of 0.1 for it is a step of 0.2 for ½(f − y)²: 32 → 35.6."""
    run = ran(*ON_INTEGERS, "model=lookup_table", "loss.reduction=sum", "optimizer.step_size=0.2", "steps=1")
    start, end = run.outcome.matrices.start[:, 0], run.outcome.matrices.end[:, 0]
    assert (start[0].item(), round(end[0].item(), 12)) == (32.0, 35.6)
    assert torch.equal(start[1:], end[1:])


def test_a_line_moves_the_other_way_left_of_a_tenth() -> None:
    x = torch.tensor([[-0.1 - 1e-9], [-0.1 + 1e-9]], dtype=torch.float64)
    away, along = tangent_kernel(function("scalar_linear"), x, OBSERVED)[:, 0, 0, 0].tolist()
    assert away < 0 < along


def test_two_parametrisations_are_one_function_with_two_kernels() -> None:
    one, other = function("scalar_linear"), function("reparametrised_linear")
    assert torch.equal(one(X), other(X))
    assert set((at_ten("reparametrised_linear") - at_ten("scalar_linear")).tolist()) == {99.0}


def test_the_bumps_that_the_text_describes() -> None:
    """The numbers have the digits of the text."""
    kernel = at_ten("radial_basis")
    shares = kernel / kernel[20]
    assert round(kernel[20].item(), 6) == 2.542236
    assert (round(shares.min().item(), 4), X[shares.argmin()].item()) == (-0.2785, 0.0)
    assert (round(shares.max().item(), 3), X[shares.argmax()].item()) == (1.204, 8.0)
    assert round(shares[0].item(), 3) == 0.387
    finite = finite_step_kernel(function("radial_basis"), X, OBSERVED, 1.0)[:, 0, 0, 0]
    assert X[finite.argmax()].item() == 7.0


def test_the_bumps_in_the_order_of_the_formula() -> None:
    """Read as amplitudes first, none of it holds: never negative, largest at 10."""
    kernel = at_ten("radial_basis", reading="amplitude_first")
    assert kernel.min() > 0
    assert X[kernel.argmax()].item() == 10.0


def test_ascent_flattens_the_kernel() -> None:
    module = function("radial_basis")
    ascended = ascend(module, OBSERVED, steps=15, step_size=1.0)
    before, after = (curve(tangent_kernel(module, X, OBSERVED, weights=at)) for at in ({}, ascended))
    assert (round(before.min().item(), 3), round(before.max().item(), 3)) == (-0.279, 1.204)
    assert (round(after.min().item(), 3), round(after.max().item(), 3)) == (0.859, 1.137)


@pytest.mark.parametrize("reading", ["centre_first", "amplitude_first"])
def test_the_bumps_are_what_is_written(reading: str) -> None:
    c1, a1, c2, a2, b = (4, -10, 25, 10, 50) if reading == "centre_first" else (-10, 4, 10, 25, 50)
    expected = a1 * torch.exp(-((X - c1) ** 2) / 30) + a2 * torch.exp(-((X - c2) ** 2) / 30) + b
    torch.testing.assert_close(function("radial_basis", reading=reading)(X), expected, rtol=4 * EPS, atol=0)


def test_a_finite_step_misses_the_tangent_in_first_order() -> None:
    """At η = 2^−k the ratio of two errors is 2 + O(η); rounding is eps·|f|/η = 3e-12 there, against errors of 1e-3."""
    module = function("radial_basis")
    tangent = tangent_kernel(module, X, OBSERVED)
    errors = [(finite_step_kernel(module, X, OBSERVED, 2.0**-k) - tangent).norm().item() for k in (7, 8)]
    assert abs(log(errors[0] / errors[1], 2) - 1) < 0.01


def test_a_finite_step_is_a_secant() -> None:
    """K̃ = J̄(x) J(x′)ᵀ; f is 60 and a step of 1 changes it by 1, so that differences round at 100 eps."""
    module = function("radial_basis")
    end = ascend(module, OBSERVED, steps=1, step_size=1.0)
    secant = secant_kernel(module, dict(module.named_parameters()), end, X, OBSERVED)
    torch.testing.assert_close(finite_step_kernel(module, X, OBSERVED, 1.0), secant, rtol=0, atol=1000 * EPS)


def test_finite_steps_at_given_weights_and_several_outputs() -> None:
    """A linear map has the kernel (x·x′ + 1) δ at any weights and any step, but for the rounding of differences."""
    layer = torch.nn.Linear(3, 2).double()
    x = normal(4, 3)
    weights = {"bias": torch.ones(2, dtype=torch.float64)}
    kernel = finite_step_kernel(layer, x, x[:2], 0.5, weights=weights)
    expected = (x @ x[:2].t() + 1)[:, None, :, None] * torch.eye(2)[:, None]
    torch.testing.assert_close(kernel, expected, rtol=0, atol=1000 * EPS)
    outputs = functional_call(layer, ascend(layer, x[:1], 0, 1.0) | weights, (x,))
    assert outputs.shape == (4, 2)


@pytest.mark.parametrize("shape", [(), (3, 2)])
def test_finite_steps_of_outputs_of_any_shape(shape: tuple[int, ...]) -> None:
    """A number, or several axes, become a row."""
    flat = torch.nn.Linear(3, prod(shape)).double()
    module = torch.nn.Sequential(flat, torch.nn.Unflatten(1, shape) if shape else torch.nn.Flatten(0))
    x = normal(4, 3)
    expected = finite_step_kernel(flat, x, x[:2], 0.5)
    torch.testing.assert_close(finite_step_kernel(module, x, x[:2], 0.5), expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted(SCALAR))
def test_several_numbers_are_refused(name: str) -> None:
    model = configured("model", name)
    assert isinstance(model, AbstractScalar)
    with refused(rf"model={name} maps one number to one output; .*choose data=integers"):
        model.module(init("ntk"), (2,), 1, torch.Generator())


@pytest.mark.parametrize("x", [-11.0, 21.0, 0.5])
def test_a_table_has_no_entry_elsewhere(x: float) -> None:
    with refused(rf"no entry for {x:g}; its keys are the integers from model.first=-10 to model.last=20"):
        function("lookup_table")(torch.tensor([[x]], dtype=torch.float64))


def test_an_empty_table_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"model\.last=-11: the table starts at model.first=-10"):
        configured("model", "lookup_table", last=-11)


def test_a_step_of_no_size_is_refused() -> None:
    with refused(r"step_size=0\.0: give a finite number other than 0"):
        finite_step_kernel(function("scalar_linear"), X, OBSERVED, 0.0)


def test_integers_keep_their_order_and_their_unit() -> None:
    data = Integers(train=2, observed=(5, -3), value=7.0).split(seed=3)
    assert data.train.inputs.flatten().tolist() == [5.0, -3.0]
    assert data.train.target.flatten().tolist() == [7.0, 7.0]
    assert sorted([*data.train.inputs.flatten().tolist(), *data.test.inputs.flatten().tolist()]) == X.flatten().tolist()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"observed": (30,)}, "30 is not in -10 … 20"),
        ({"observed": (1, 1), "train": 2}, "give each number once"),
        ({"observed": (1, 2)}, "data.train=1: 2 of the numbers are observed"),
        ({"label_noise": 0.1}, "data.label_noise: all targets of integers are equal"),
    ],
)
def test_integers_that_contradict_themselves(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        configured("data", "integers", **changes)
