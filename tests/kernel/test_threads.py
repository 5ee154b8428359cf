"""Small kernels take one thread and large ones all; torch is left with as many as it had."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from ntkexp.kernel.read.plan import FEW, threads_for, work
from ntkexp.library import reader_of

ALL = 3


@pytest.fixture(autouse=True)
def several() -> Iterator[None]:
    """More than one thread, whatever the tests run with."""
    before = torch.get_num_threads()
    torch.set_num_threads(ALL)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("operations", "threads"), [(0, 1), (FEW, 1), (2 * FEW, ALL)])
def test_threads_are_chosen_by_size_for_a_while(operations: float, threads: int) -> None:
    with threads_for(operations):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == ALL


def test_products_are_counted() -> None:
    """Forward and C pull-backs of both sides, and the Gram of what the products give."""
    module, x = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double(), torch.ones(4, 3).double()
    convolution = nn.Conv1d(2, 3, 2).double()
    for net, given, numbers, forward in (
        (module, x, 5 + 2, 3 * 5 + 5 * 2),
        (convolution, torch.ones(4, 2, 6).double(), 3 * 5, 3 * 5 * 2 * 2),
    ):
        reader, weights = reader_of(net)
        tape = reader.record(weights, given)
        assert work(tape).of_kernel((4, 4), 2) == 2 * 3 * 4 * forward * 2 + 2 * 4 * 4 * 2**2 * numbers
