"""A module as a function: it is afterwards what it was, and an example alone is what it is beside others."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from ntkexp.library import finite_step_kernel, secant_kernel, tangent_kernel
from ntkexp.model.functional import function_of
from ntkexp.shapes import Weights
from tests.kernel.compare import agree

X = torch.tensor([[0.3, -1.0], [2.0, 0.5]], dtype=torch.float64)
Read = Callable[[nn.Module, Weights], object]
READINGS: dict[str, Read] = {
    "function": lambda module, weights: function_of(module)(weights, X),
    "tangent": lambda module, weights: tangent_kernel(module, X, weights=weights),
    "secant": lambda module, weights: secant_kernel(module, {}, weights, X, X),
}


def with_a_layer_twice() -> nn.Sequential:
    """Its tensors have two names each."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        layer = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Tanh())
        return nn.Sequential(layer, layer, nn.Linear(2, 1)).double().eval()


def moved(module: nn.Module) -> Weights:
    """Other weights."""
    return {name: weight.detach() + 0.5 for name, weight in module.named_parameters()}


@pytest.mark.parametrize("read", READINGS.values(), ids=READINGS)
def test_a_layer_that_stands_twice_in_a_module_keeps_its_own_tensors(read: Read) -> None:
    module = with_a_layer_twice()
    before = [*module.parameters(), *module.buffers()]
    read(module, moved(module))
    assert all(one is other for one, other in zip([*module.parameters(), *module.buffers()], before, strict=True))


class Tokens(nn.Module):
    """Pixels of normalised images one after another, so that their gradient comes back with channels last."""

    def __init__(self, affine: bool) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3, affine=affine)
        self.head = nn.Linear(27, 2)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.asinh(self.norm(self.patches(x))).flatten(2).transpose(1, 2)
        outputs: Tensor = self.head(tokens.flatten(1))
        return outputs


@pytest.mark.parametrize("affine", [True, False])
def test_one_image_alone_has_the_kernel_that_it_has_beside_others(affine: bool) -> None:
    """Where torch itself goes back wrongly."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        module, x = Tokens(affine).double().eval(), torch.randn(2, 1, 5, 5, dtype=torch.float64)
    together = tangent_kernel(module, x)
    agree(tangent_kernel(module, x[:1], x), together[:1], 1e-14)
    agree(finite_step_kernel(module, x, x[:1], 1e-6), together[:, :, :1], 1e-4)  # up to the step


def test_weights_go_wherever_they_are_held() -> None:
    module = with_a_layer_twice()
    bias = nn.Parameter(torch.tensor([0.3, -0.3], dtype=torch.float64))
    linear, norm, _ = module[0].children()
    linear.bias = norm.bias = bias
    there = deepcopy(module)
    with torch.no_grad():
        for weight in there.parameters():
            weight.add_(0.5)
    assert torch.equal(function_of(module)(moved(module), X), there(X))
