"""The claim, cell by cell: network × loss × optimizer, the secant machine is the trained network to rounding."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from tests.run.cells import LOSSES, NETWORKS, OPTIMIZERS, OWN, SIZES, cell
from tests.run.small import Ran, ran
from tests.run.test_exactness import exact

EPS = torch.finfo(torch.float64).eps
DIAGONAL = [  # each network, each optimizer and each loss
    (network, LOSSES[(2 * row + column) % len(LOSSES)], optimizer)
    for (row, network), (column, optimizer) in product(enumerate(NETWORKS), enumerate(OPTIMIZERS))
    if (row - column) % len(OPTIMIZERS) == 0
]


def check(run: Ran) -> None:
    """Every split is there, and exact; where parts cancel, their sum loses as many digits."""
    rows, cancellation = run.rows("secant"), run.outcome.evidence.path.facts["cancellation"]
    assert {row.split for row in rows} == {"train", "probe", "test"}
    for row in rows:
        known = exact(row) or (row.relative_error or 0.0) < 10 * EPS * cancellation
        assert known, f"{row.split}: {row.relative_error:.1e} with a floor of {row.floor:.1e}, {cancellation:.1e}-fold"


@pytest.mark.sample(3)
@pytest.mark.parametrize(("network", "loss", "optimizer"), DIAGONAL)
def test_a_network_under_an_optimizer(network: str, loss: str, optimizer: str) -> None:
    check(cell(network, loss, optimizer))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("network", "loss", "optimizer"), [cell for cell in product(NETWORKS, LOSSES, OPTIMIZERS) if cell not in DIAGONAL]
)
def test_every_cell(network: str, loss: str, optimizer: str) -> None:
    check(cell(network, loss, optimizer))


BALANCED = ("seed=1", "data.seed=0")
"""Some batches of which hold as many of one class as of the other."""


def test_parts_that_cancel_lose_as_many_digits() -> None:
    """The slopes of a hinge are ±1: in a balanced batch the last bias has no gradient, and Adam divides by ε alone."""
    chosen = (*NETWORKS["LSTM"], "loss=hinge", *OPTIMIZERS["AdamW, decay, clipping"], "optimizer.batch=4", *BALANCED)
    run = ran(*SIZES, *chosen, "path.rule=[secant]", "ladder.machine=[secant]", trust=[str(OWN)])
    facts = run.outcome.evidence.path.facts
    assert facts["cancellation"] > 1e6
    for row in run.rows("secant"):
        assert (row.relative_error or 0.0) < 10 * EPS * facts["cancellation"]
