"""What users give stays as it was: inputs that a module overwrites, and weights that its embedding shortens."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ntkexp
from ntkexp.mistake import Mistake
from tests.kernel import oracle
from tests.kernel.oracle import agree

Use = Callable[[nn.Module, Tensor], object]
EPS = torch.finfo(torch.float64).eps


def tangent(net: nn.Module, x: Tensor) -> Tensor:
    return ntkexp.tangent_kernel(net, x)


def tangent_of_both(net: nn.Module, x: Tensor) -> Tensor:
    return ntkexp.tangent_kernel(net, x.clone(), x)


def operator(net: nn.Module, x: Tensor) -> object:
    return ntkexp.TangentKernel(net)(x)


def secant(net: nn.Module, x: Tensor) -> Tensor:
    before = {name: weight.detach() for name, weight in net.named_parameters()}
    return ntkexp.secant_kernel(net, before, {name: 1.1 * weight for name, weight in before.items()}, x, x)


def queries(net: nn.Module, x: Tensor) -> None:
    with ntkexp.follow(net, torch.optim.SGD(net.parameters(), 0.1), queries=x):
        pass


USES: tuple[Use, ...] = (tangent, tangent_of_both, operator, secant, queries)


class Overwriting(nn.Linear):
    """Changes its input by an operation, and goes on with that."""

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


CHANGES: tuple[Callable[[Tensor], object], ...] = (
    torch.Tensor.relu_,
    an_element,
    without_gradients,
    lambda x: x.data.mul_(2),
    in_numpy,
)


@pytest.mark.parametrize("use", USES, ids=lambda each: each.__name__)
@pytest.mark.parametrize("change", CHANGES, ids=["relu_", "an element", "no_grad", "data", "numpy"])
def test_a_module_that_overwrites_its_inputs_is_refused_before_theirs_are(change: Any, use: Use) -> None:
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
    before = x.clone()
    with pytest.raises(Mistake, match=r"overwrites its inputs|other outputs when it is run again"):
        use(Overwriting(change), x)
    assert torch.equal(x, before)


def shortening(*, bag: bool, tied: bool = False) -> nn.Module:
    """A network whose first layer shortens the rows that it looks up to a norm that all of them exceed."""
    kind: Any = nn.EmbeddingBag if bag else nn.Embedding
    head = nn.Linear(3, 5, bias=False)
    net = nn.Sequential(kind(5, 3, max_norm=0.1), nn.Tanh(), head).double()
    if tied:
        net[2].weight = net[0].weight
    return net


@pytest.mark.filterwarnings("ignore:no difference rule for the operation aten.embedding_renorm")
@pytest.mark.parametrize(("bag", "tied"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("use", [tangent, operator, secant, queries], ids=lambda each: each.__name__)
def test_an_embedding_with_a_largest_norm_keeps_its_weights(use: Use, bag: bool, tied: bool) -> None:
    net = shortening(bag=bag, tied=tied)
    x, before = torch.tensor([[0, 1], [2, 3]]), deepcopy(net.state_dict())
    # differences of a norm that is cut have no rule, and a tied readout sees the rows that other examples looked up
    if tied or use in (secant, queries):
        with pytest.raises(ValueError, match=r"embedding_renorm|couples the examples"):
            use(net, x)
    else:
        use(net, x)
    for name, weight in net.state_dict().items():
        assert torch.equal(weight, before[name])


@pytest.mark.filterwarnings("ignore:no difference rule for the operation aten.embedding_renorm")
def test_its_kernel_is_that_of_the_shortened_weights() -> None:
    """As autograd differentiates: rows count as they are after they were shortened."""
    net, x = shortening(bag=False), torch.tensor([[0, 1], [2, 3], [1, 1]])
    twin = deepcopy(net)
    twin(x)  # shortens its weights for good
    agree(ntkexp.tangent_kernel(net, x), oracle.tangent(twin, x, x), 100 * EPS)
