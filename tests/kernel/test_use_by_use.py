"""A Jacobian kept use by use contracts as the Jacobian does, and holds no row as long as the weights."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ntkexp.library import reader_of
from ntkexp.shapes import Weights
from tests.kernel.compare import agree
from tests.kernel.known import Known, known
from tests.kernel.problems import KINDS

EPS = torch.finfo(torch.float64).eps


def rows(network: Known) -> dict[str, Tensor]:
    """The oracle's Jacobian of the five, by parameter."""
    return {name: found[:5] for name, found in network.jacobians.items()}


def drawn(network: Known) -> Weights:
    """A random vector in the shape of the trained weights."""
    draw = torch.Generator().manual_seed(1)
    trained = {name: p for name, p in network.given.module.named_parameters() if p.requires_grad}
    return {name: torch.randn(p.shape, generator=draw, dtype=p.dtype) for name, p in trained.items()}


@pytest.mark.parametrize("name", KINDS)
def test_it_contracts_as_the_jacobian_does_on_both_sides(name: str) -> None:
    network = known(name)
    found, jacobians, weights = network.reader.use_by_use(network.tape), rows(network), drawn(network)
    applied = torch.stack([jacobians[key] @ weights[key].flatten() for key in jacobians]).sum(0)
    size = sum(float(jacobians[key].abs().amax()) * float(weights[key].norm()) for key in jacobians)
    agree(found.applied(weights), applied, 100 * EPS, size)
    left = torch.randn(applied.shape, generator=torch.Generator().manual_seed(2), dtype=applied.dtype)
    gradient = found.weighted(left).total(weights)
    for key, jacobian in jacobians.items():
        expected = torch.einsum("nc,ncp->p", left, jacobian).view(weights[key].shape)
        agree(gradient[key], expected, 100 * EPS, jacobian.abs().sum((0, 1)).max() * left.abs().max() + 1e-300)


class Looked(nn.Module):
    """A table that a text looks up, and the same table against which it is read."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(words, 3), nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.norm(torch.tanh(self.table(x)))
        return hidden.sum(1)


def test_a_table_takes_what_was_read_of_it() -> None:
    """Twice the words, and the same memory: no example has a row as long as the table."""
    texts = torch.tensor([[0, 4, 4, 1], [2, 2, 0, 3]])
    sizes = []
    for words in (1000, 2000):
        reader, own = reader_of(Looked(words).double())
        sizes.append(reader.use_by_use(reader.record(own, texts)).nbytes)
    assert sizes[0] == sizes[1] < 8 * 1000 * 3
