"""The claim, cell by cell: network × loss × optimizer, the secant machine is the trained network to rounding.

`python -m tests.run.test_every_cell` prints the table of README.md: the largest error of each network under each
optimizer, over all losses and splits.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from tests.run.small import Ran, ran
from tests.run.test_exactness import exact

OWN = Path(__file__).with_name("own_nets.py")
NETWORKS = {
    "MLP, ReLU": ("model=mlp",),
    "CNN, max pooling": ("model=cnn", "model.pooling=max"),
    "ResNet, batch norm in evaluation": ("model=resnet", "model.norm=batch", "model.stages=2"),
    "transformer": ("model=transformer",),
    "RMS norm, rotary positions, SwiGLU": ("model=module", f"model.path={OWN}:Modern"),
    "LSTM": ("model=module", f"model.path={OWN}:Recurrent"),
    "tied embedding": ("data=modular_addition", "data.modulus=5", "model=transformer", "model.tied=true"),
}
LOSSES = ("squared", "cross_entropy", "logistic", "hinge")
OPTIMIZERS = {
    "GD": ("optimizer=gd",),
    "SGD": ("optimizer=sgd", "optimizer.batch=4"),
    "momentum": ("optimizer=momentum", "optimizer.batch=4"),
    "Nesterov": ("optimizer=nesterov", "optimizer.weight_decay=0.01"),
    "Adam": ("optimizer=adam", "optimizer.step_size=0.01"),
    "AdamW, decay, clipping": (
        *("optimizer=adamw", "optimizer.step_size=0.01", "optimizer.weight_decay=0.1"),
        *("optimizer.clip_norm=0.1", "optimizer.batch=5", "schedule=cosine"),
    ),
}
SIZES = ("data.train=6", "data.probe=3", "data.test=3", "model.width=8", "steps=3")
EPS = torch.finfo(torch.float64).eps
DIAGONAL = [  # each network, each optimizer and each loss
    (network, LOSSES[(2 * row + column) % len(LOSSES)], optimizer)
    for (row, network), (column, optimizer) in product(enumerate(NETWORKS), enumerate(OPTIMIZERS))
    if (row - column) % len(OPTIMIZERS) == 0
]


def cell(network: str, loss: str, optimizer: str) -> Ran:
    """A short run, read by the secant machine."""
    torch.set_num_threads(1)
    chosen = (*NETWORKS[network], f"loss={loss}", *OPTIMIZERS[optimizer])
    return ran(*SIZES, *chosen, "path.rule=[secant]", "ladder.machine=[secant]", trust=[str(OWN)])


def check(run: Ran) -> None:
    """Every split is there, and exact; where parts cancel, their sum loses as many digits."""
    rows, cancellation = run.rows("secant"), run.outcome.evidence.path.facts["cancellation"]
    assert {row.split for row in rows} == {"train", "probe", "test"}
    for row in rows:
        known = exact(row) or (row.relative_error or 0.0) < 10 * EPS * cancellation
        assert known, f"{row.split}: {row.relative_error:.1e} with a floor of {row.floor:.1e}, {cancellation:.1e}-fold"


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


def table() -> str:
    """The largest error of each network under each optimizer, in Markdown."""
    lines = [f"| |{'|'.join(OPTIMIZERS)}|", f"|---{'|---' * len(OPTIMIZERS)}|"]
    for network in NETWORKS:
        errors = [
            max(row.relative_error or 0.0 for loss in LOSSES for row in cell(network, loss, optimizer).rows("secant"))
            for optimizer in OPTIMIZERS
        ]
        lines.append(f"|{network}|{'|'.join(f'{error:.0e}' for error in errors)}|")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.stdout.write(f"{table()}\n")
