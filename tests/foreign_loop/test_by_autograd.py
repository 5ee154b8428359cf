"""Contributions against plain autograd, in loops of small steps.

The secant Jacobian of the package differs from the mean Jacobian along a step in the second order of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import ntkexp
from tests.foreign_loop.account import Account

RATE = 1e-4  # steps of about this size, so that second-order terms are below 1e-7 of the Jacobian
TOLERANCE = 1e-5  # parts of an example may cancel: 100 times these terms

Give: TypeAlias = Callable[[Tensor, Sequence[int]], object]
Train: TypeAlias = Callable[[nn.Module, torch.optim.Optimizer, Give], None]

with torch.random.fork_rng(devices=()):
    torch.manual_seed(0)
    X, Y, QUERIES = torch.randn(9, 4).double(), torch.randn(9, 2).double(), torch.randn(3, 4).double()


def squares(model: nn.Module, batch: Tensor, inputs: Tensor | None = None) -> Tensor:
    outputs: Tensor = model(X[batch] if inputs is None else inputs)
    return (outputs - Y[batch]).square().sum(1)


def uneven(model: nn.Module, optimizer: torch.optim.Optimizer, give: Give) -> None:
    """Accumulate over micro-batches of 4, 4 and 1 examples."""
    for _ in range(4):
        optimizer.zero_grad()
        for batch in torch.split(torch.randperm(9), 4):
            losses = squares(model, batch) / 9
            give(losses, batch.tolist())
            losses.sum().backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def augmented(model: nn.Module, optimizer: torch.optim.Optimizer, give: Give) -> None:
    """Add noise to the inputs, draw some examples twice, and clip. One batch has no gradient."""
    for step in range(5):
        batch = torch.randint(9, (5,))
        NAMES[:] = batch.tolist()
        losses = squares(model, batch, X[batch] + 0.1 * torch.randn(5, 4).double()) * (step != 2)
        give(losses, NAMES)
        optimizer.zero_grad(set_to_none=False)
        losses.sum().backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def contrasted(model: nn.Module, optimizer: torch.optim.Optimizer, give: Give) -> None:
    """If the loss couples examples, the part of an example comes from its outputs."""
    for _ in range(4):
        batch = torch.randperm(9)[:6]
        outputs = model(X[batch])
        unit = nn.functional.normalize(outputs, dim=1)
        loss = nn.functional.cross_entropy(unit @ unit.T, torch.arange(6).roll(1))
        (slopes,) = torch.autograd.grad(loss, outputs, retain_graph=True)
        give((outputs * slopes).sum(1), batch.tolist())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()


NAMES: list[int] = []  # of the present batch
LOOPS: dict[str, tuple[Train, type[torch.optim.Optimizer], dict[str, Any]]] = {
    "uneven": (uneven, torch.optim.SGD, {"momentum": 0.9}),
    "augmented": (augmented, torch.optim.Adam, {}),
    "contrasted": (contrasted, torch.optim.SGD, {"momentum": 0.5}),
    "contrasted, Adam": (contrasted, torch.optim.Adam, {"eps": 1e-3}),
}


@pytest.mark.parametrize("case", LOOPS)
def test_contributions_are_those_of_plain_autograd(case: str) -> None:
    train, kind, settings = LOOPS[case]
    by_noise = train is augmented

    def seeded() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3 * by_noise), nn.Linear(6, 2)).double()
        return model, kind(model.parameters(), lr=RATE, **settings)  # type: ignore[call-arg]

    account = Account(*seeded(), QUERIES)
    train(account.model, account.optimizer, account.give)
    model, optimizer = seeded()
    ids = (lambda call: NAMES) if by_noise else None
    with ntkexp.follow(model, optimizer, queries=QUERIES, ids=ids) as trace:
        train(model, optimizer, lambda losses, names: None)
    found = trace.attribute(quiet=True)["contribution"].to_numpy()
    expected = torch.stack(list(account.contributions.values()), -1).numpy()
    assert found.shape == expected.shape  # examples in the order of their first use
    missed = np.linalg.norm(found - expected, axis=(0, 1))
    assert (missed <= TOLERANCE * np.linalg.norm(expected, axis=(0, 1))).all()
