"""What is pulled back to rows of products is grouped by the example that owns it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel.features.assemble import row_index, select_rows
from ntkexp.library import secant_kernel, tangent_kernel
from tests.kernel import oracle
from tests.kernel.compare import agree

EPS = torch.finfo(torch.float64).eps


class Twice(nn.Module):
    """One weight and one bias in two products, each with a factor of its own before the bias."""

    def __init__(self, first: float, second: float) -> None:
        super().__init__()
        self.layer, self.first, self.second = nn.Linear(4, 4, dtype=torch.float64), first, second

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.layer.weight.t(), self.layer.bias
        return torch.addmm(bias, torch.addmm(bias, x, weight, beta=self.first).tanh(), weight, beta=self.second)


@pytest.mark.parametrize("owner", [[0, 1, 2, 0, 1, 2], [2, 0, 1, 0, 1, 2], [0, 2, 2, -1, 0, 2]], ids=str)
def test_rows_of_any_order_come_example_by_example(owner: list[int]) -> None:
    whose, rows = torch.tensor(owner), torch.arange(1.0, 25).view(6, 4)
    places = row_index(whose, 3)
    assert places is not None
    found = select_rows(rows, 0, places)
    for example in range(3):
        own = rows[whose == example]
        assert torch.equal(found[example, : len(own)], own)
        assert not found[example, len(own) :].any()
    assert torch.equal(select_rows(rows[None], 1, places), found[None])


@pytest.mark.parametrize("factors", [(2.0, 2.0), (2.0, 0.5), (1.0, 0.0)], ids=str)
def test_a_bias_that_is_used_twice_with_factors_of_its_own(factors: tuple[float, float]) -> None:
    torch.manual_seed(0)
    module, x = Twice(*factors), torch.randn(5, 4, dtype=torch.float64)
    agree(tangent_kernel(module, x), oracle.tangent(module, x, x), 100 * EPS)
    agree(secant_kernel(module, {}, {}, x, x), oracle.tangent(module, x, x), 100 * EPS)
