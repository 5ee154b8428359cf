"""Uses that share their β are one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ntkexp.kernel.features.blocks import Factored
from ntkexp.kernel.features.gram import gram
from ntkexp.kernel.features.jacobian import Jacobian, gathered, in_few_uses
from ntkexp.kernel.secant.uses import View
from tests.kernel.compare import agree

EPS = torch.finfo(torch.float64).eps
READ = {
    "all": torch.ones(5, 6),
    "last": torch.eye(6)[5].expand(5, 6),
    "masked": (torch.arange(6) < torch.tensor([[3], [6], [1], [4], [0]])).double(),
}
"""Which positions of five examples are read: before a mean, a look at the last, a mean without padding."""


def block(read: Tensor, shift: float | None, seed: int = 0) -> Factored:
    """Random inputs, and for every example one β at the positions that are read."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(*read.shape, 30, generator=draw, dtype=torch.float64)
    beta = torch.randn(len(read), 2, 1, 20, generator=draw, dtype=torch.float64)
    bias = None if shift is None else View("b", (20,), (1,), 0)
    view = View("w", (30, 20), (20, 1), 0)
    return Factored(inputs, beta * read.double()[:, None, :, None], view, bias, shift)


@pytest.mark.parametrize("shift", [None, 1.0, 0.5])
@pytest.mark.parametrize("read", READ.values(), ids=READ)
def test_gradients_stay_the_same(read: Tensor, shift: float | None) -> None:
    given = block(read, shift)
    found = gathered(given)
    assert found.inputs.shape[1] == 1
    agree(found.dense(), given.dense(), 10 * EPS)


@pytest.mark.parametrize("example", [0, 4])
def test_other_uses_stay_as_they_are(example: int) -> None:
    for other in (0.5, float("nan")):
        given = block(READ["all"], None)
        given.outputs[example, 1, 3, 7] *= other
        assert gathered(given) is given


def test_nothing_is_gathered_of_nothing() -> None:
    for shape in ((0, 6), (5, 0)):
        given = block(torch.ones(shape), None)
        assert gathered(given) is given


def test_a_kernel_between_gathered_and_other_uses() -> None:
    left, right = block(READ["masked"], 1.0), block(torch.rand(5, 6), 1.0, 1)
    found = gram(*(in_few_uses(Jacobian((side,), 5, 2)) for side in (left, right)))
    agree(found, torch.einsum("qcio,ndio->qcnd", left.dense(), right.dense()), 100 * EPS)
