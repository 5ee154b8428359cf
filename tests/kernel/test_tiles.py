"""The kernel of single uses by tiles is the kernel by whole products."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import ntkexp
from ntkexp.kernel.features import gram as tiles
from ntkexp.kernel.features.blocks import Factored, Features, Key
from ntkexp.kernel.features.gram import gram
from tests.kernel.compare import agree
from tests.kernel.test_gram import factored

EPS = torch.finfo(torch.float64).eps


def features(examples: int, outputs: int, seed: int) -> Features:
    """Two layers, and a readout, whose β are the same for all examples."""
    blocks: dict[Key, Factored] = {
        (name, None): factored(examples, 1, 3, 4, outputs, seed + k) for k, name in enumerate("abc")
    }
    readout = blocks["c", None].outputs
    readout[:] = torch.eye(4, dtype=torch.float64)[:outputs, None]
    return Features(blocks, examples, outputs)


@pytest.mark.parametrize(("rows", "outputs", "outputs_"), [(5, 2, 3), (7, 3, 3), (100, 4, 1)])
def test_tiles_give_the_kernel(rows: int, outputs: int, outputs_: int, monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = features(5, outputs, 0), features(4, outputs_, 10)
    expected = gram(left, right), gram(left, left)
    monkeypatch.setattr(tiles, "ROWS", rows)
    monkeypatch.setattr(tiles, "WORTHWHILE", 0)
    agree(gram(left, right), expected[0], 100 * EPS)
    found = gram(left, left)
    agree(found, expected[1], 100 * EPS)
    assert torch.equal(found, found.permute(2, 3, 0, 1))


def test_the_library_takes_them_for_large_kernels_of_many_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here they are taken by themselves, and refused, for the same numbers."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 10)).double()
    x = torch.randn(110, 3, dtype=torch.float64)
    found = ntkexp.tangent_kernel(module, x)
    monkeypatch.setattr(tiles, "pays", lambda _: False)
    agree(found, ntkexp.tangent_kernel(module, x), 100 * EPS)
