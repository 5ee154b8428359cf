"""Inputs and weights of users stay as they were, if a module overwrites the one or an embedding shortens the other."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntkexp
from tests.kernel import oracle
from tests.kernel.networks import own_weights, scaled
from tests.kernel.oracle import EPS, agree, refused

Use = Callable[[nn.Module, Tensor], object]


def queries(net: nn.Module, x: Tensor) -> None:
    with ntkexp.follow(net, torch.optim.SGD(net.parameters(), 0.1), queries=x):
        pass


USES: dict[str, Use] = {
    "tangent": ntkexp.tangent_kernel,
    "tangent of both": lambda net, x: ntkexp.tangent_kernel(net, x.clone(), x),
    "operator": lambda net, x: ntkexp.TangentKernel(net)(x),
    "secant": lambda net, x: ntkexp.secant_kernel(net, own_weights(net), scaled(net, 1.1), x, x),
    "queries": queries,
}


class Overwriting(nn.Linear):
    """A layer that changes its input by an operation, and continues with it."""

    def __init__(self, change: Callable[[Tensor], object]) -> None:
        super().__init__(3, 2, dtype=torch.float64)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        self.change(x)
        return super().forward(x)


def in_numpy(x: Tensor) -> None:
    x.detach().numpy()[...] *= 2


def without_gradients(x: Tensor) -> None:
    with torch.no_grad():
        x.add_(1)


def an_element(x: Tensor) -> None:
    x[:, 0] = 0


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "relu_": torch.Tensor.relu_,
    "an element": an_element,
    "no_grad": without_gradients,
    "data": lambda x: x.data.mul_(2),
    "numpy": in_numpy,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_module_that_overwrites_its_inputs_is_refused_before_those_of_users_change(change: str, use: str) -> None:
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
    before = x.clone()
    with refused(r"overwrites its inputs|other outputs when it runs again"):
        USES[use](Overwriting(CHANGES[change]), x)
    assert torch.equal(x, before)


def shortening(*, bag: bool, tied: bool = False) -> nn.Module:
    """Return a network whose first layer shortens the rows that it reads to a norm that all of them exceed."""
    kind: Any = nn.EmbeddingBag if bag else nn.Embedding
    head = nn.Linear(3, 5, bias=False)
    net = nn.Sequential(kind(5, 3, max_norm=0.1), nn.Tanh(), head).double()
    if tied:
        net[2].weight = net[0].weight
    return net


@pytest.mark.filterwarnings("ignore:no difference rule for the operation aten.embedding_renorm")
@pytest.mark.parametrize(("bag", "tied"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("use", ["tangent", "operator", "secant", "queries"])
def test_an_embedding_with_a_largest_norm_keeps_its_weights(use: str, bag: bool, tied: bool) -> None:
    net = shortening(bag=bag, tied=tied)
    x, before = torch.tensor([[0, 1], [2, 3]]), deepcopy(net.state_dict())
    # differences of a norm that is cut have no rule, and a tied readout sees the rows that other examples read
    refusing = pytest.raises(ValueError, match=r"embedding_renorm|couples the examples")
    with refusing if tied or use in ("secant", "queries") else nullcontext():
        USES[use](net, x)
    for name, weight in net.state_dict().items():
        assert torch.equal(weight, before[name])


@pytest.mark.filterwarnings("ignore:no difference rule for the operation aten.embedding_renorm")
def test_its_kernel_is_that_of_the_shortened_weights() -> None:
    """Autograd differentiates at the rows after they were shortened."""
    net, x = shortening(bag=False), torch.tensor([[0, 1], [2, 3], [1, 1]])
    twin = deepcopy(net)
    twin(x)  # shortens its weights for good
    agree(ntkexp.tangent_kernel(net, x), oracle.tangent(twin, x, x), 100 * EPS)
