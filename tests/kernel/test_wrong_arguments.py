"""What the functions of the library cannot take is refused in one line, whatever it is."""

from __future__ import annotations

from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ntkexp import infinite_kernel, load_run, secant_kernel, tangent_kernel
from ntkexp.foreign_loop.arguments import refuse_unusable
from ntkexp.library import finite_step_kernel
from ntkexp.mistake import Mistake

X = torch.arange(15.0, dtype=torch.float64).view(5, 3)
NET = nn.Linear(3, 2).double()
OWN = dict(NET.named_parameters())
DENSE = {"layer": "Dense", "features": 1}

INPUTS: dict[str, Any] = {
    "another rank": torch.ones(5, 2, 3, dtype=torch.float64),
    "another width": torch.ones(5, 4, dtype=torch.float64),
    "another dtype": X.float(),
    "no example": X[:0],
    "one number": X[0, 0],
    "not finite": X * nan,
    "array": X.numpy(),
    "lists": X.tolist(),
    "list of rows": list(X),
    "wrong name": {"z": X},
    "sparse": X.to_sparse(),
    "without numbers": X.to("meta"),
    "number": 3.0,
}

SIDES: dict[str, Callable[[Any], object]] = {
    "x2": lambda x: tangent_kernel(NET, X, x),
    "x2, sketched": lambda x: tangent_kernel(NET, X, x, sketch=8),
    "probes": lambda x: secant_kernel(NET, OWN, OWN, x, X),
    "train": lambda x: secant_kernel(NET, OWN, OWN, X, x),
    "x2, a finite step": lambda x: finite_step_kernel(NET, X, x, 0.1),
}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_that_do_not_fit_are_refused(side: str, kind: str) -> None:
    with pytest.raises(Mistake):
        SIDES[side](INPUTS[kind])


def gives(answer: Callable[[Tensor], object]) -> nn.Module:
    """A module with a weight, which makes this of what a layer gives."""

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2).double()

        def forward(self, x: Tensor) -> object:
            return answer(self.layer(x))

    return Given()


MODULES: dict[str, Any] = {
    "none": None,
    "a function": torch.tanh,
    "a class": nn.Linear,
    "not yet initialised": nn.LazyLinear(2),
    "wrapped": nn.DataParallel(NET),
    "outputs without gradients": gives(Tensor.detach),
    "outputs that are not finite": gives(lambda h: h * inf),
    "gradients that are not finite": gives(lambda h: (0 * h).sqrt()),
    "whole numbers": gives(lambda h: (h > 0).long()),
    "no outputs": gives(lambda h: h[:, :0]),
    "an error": gives(lambda h: h[:, 7]),
}


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.filterwarnings("ignore:.*plain Jacobians")
def test_modules_without_a_kernel_are_refused(kind: str) -> None:
    with pytest.raises(Mistake):
        tangent_kernel(MODULES[kind], X)


CALLS: dict[str, Callable[[], object]] = {
    "sketch": lambda: tangent_kernel(NET, X, sketch=10**400),
    "step size": lambda: finite_step_kernel(NET, X, X, nan),
    "W_std": lambda: infinite_kernel([DENSE | {"W_std": 1e200}], X),
    "b_std": lambda: infinite_kernel([DENSE | {"b_std": 1e308}], X),
    "memory_gb": lambda: infinite_kernel([DENSE], X, memory_gb=nan),
    "endless memory": lambda: infinite_kernel([DENSE], X, memory_gb=inf),
    "threads": lambda: infinite_kernel([DENSE], X, threads=0),
    "a run": lambda: load_run(None),  # type: ignore[arg-type]
    "following with no memory": lambda: refuse_unusable(NET, [object()], None, None, None, None, nan),
    "following into a number": lambda: refuse_unusable(NET, [object()], None, None, None, 3),
}


@pytest.mark.parametrize("argument", CALLS)
def test_arguments_that_cannot_be_are_refused(argument: str) -> None:
    with pytest.raises(Mistake):
        CALLS[argument]()


def test_sequences_of_other_lengths_have_a_kernel() -> None:
    """As many axes and outputs, however long."""
    layer = nn.Linear(3, 2).double()
    net = nn.Sequential(layer, nn.AdaptiveAvgPool2d((1, 2)), nn.Flatten())
    long, short = torch.ones(4, 7, 3, dtype=torch.float64), torch.ones(5, 2, 3, dtype=torch.float64)
    assert tangent_kernel(net, long, short).shape == (4, 2, 5, 2)
