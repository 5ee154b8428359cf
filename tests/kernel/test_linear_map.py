"""Maps that are given with their transposes pull many vectors back at once as they pull back one after the other."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel.features.assemble import assemble, pull_back
from ntkexp.kernel.read.program_cache import parts
from ntkexp.kernel.secant.call import inner_products
from ntkexp.kernel.secant.replay import Replay
from ntkexp.library import reader_of
from tests.kernel.compare import agree

EPS = torch.finfo(torch.float64).eps
SHAPE, OUTPUTS = (2, 5, 4), 3
BRANCHES = {
    "convolution": nn.Conv2d(4, 6, 3, stride=2, padding=1),
    "of single pixels": nn.Conv2d(4, 6, 1),
    "of single pixels in groups": nn.Conv2d(4, 6, 1, groups=2),
    "of some pixels": nn.Conv2d(4, 6, 1, stride=2),
    "transposed": nn.ConvTranspose2d(4, 6, 3, stride=2),
    "group norm": nn.GroupNorm(2, 4),
    "group norm without gains": nn.GroupNorm(2, 4, affine=False),
    "layer norm": nn.LayerNorm(SHAPE[1:]),
    "layer norm of rows": nn.LayerNorm(SHAPE[2:]),
    "batch norm": nn.BatchNorm2d(4),
}


@pytest.mark.parametrize("name", BRANCHES)
def test_many_vectors_at_once(name: str) -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 4, 1), nn.Tanh(), BRANCHES[name], nn.Flatten(), nn.LazyLinear(OUTPUTS))
    module, x = nn.Sequential(*layers).eval(), torch.randn(3, *SHAPE, dtype=torch.float64)
    module(x.float())  # how wide the last layer is follows from what comes before
    reader, start = reader_of(module.double())
    end = {name: weight + 0.3 * torch.randn_like(weight) for name, weight in start.items()}
    tapes = reader.record(start, x), reader.record(end, x)
    replay, owned = Replay(*tapes, reader.trained), reader.checks.owners(tapes[0])
    mixtures = torch.randn(4, 3, OUTPUTS, dtype=torch.float64)

    def read(*, at_once: bool) -> list[Tensor]:
        given = (replay.delta, replay.uses, owned, replay.leaves, mixtures)
        return parts(assemble(pull_back(*given, at_once=at_once)))

    for found, expected in zip(read(at_once=True), read(at_once=False), strict=True):
        agree(found, expected, 100 * EPS)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("way", [nn.Conv2d(2, 4, 3, padding=1), nn.ConvTranspose2d(2, 4, 2, stride=2), nn.Linear(4, 6)])
def test_what_examples_share_is_pulled_back_once(way: nn.Module, *, at_once: bool) -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 2, 1), deepcopy(way), nn.Flatten(), nn.LazyLinear(OUTPUTS))
    module, x = nn.Sequential(*layers), torch.randn(3, *SHAPE)
    module(x)  # how wide the last layer is follows from what comes before
    reader, start = reader_of(module.double())
    tape = reader.record(start, x.double())
    replay, owned = Replay(tape, tape, reader.trained), reader.checks.owners(tape)
    shared = torch.randn(4, 1, OUTPUTS, dtype=torch.float64).expand(-1, 3, -1)
    found, expected = (
        parts(assemble(pull_back(replay.delta, replay.uses, owned, replay.leaves, mixtures, at_once=at_once)))
        for mixtures in (shared, shared.contiguous())
    )
    if at_once:  # one by one, outputs are copied to stand beside each other
        assert any(part.dim() > 2 and part.stride(0) == 0 for part in found)
    for one, other in zip(found, expected, strict=True):
        agree(one, other, 100 * EPS)


def test_inner_products_are_those_of_rows() -> None:
    vectors, fixed = torch.arange(24.0).view(2, 3, 1, 4), torch.ones(5, 3, 1, 4) * torch.arange(5.0).view(5, 1, 1, 1)
    assert torch.equal(inner_products(vectors, fixed), (vectors * fixed[:, None]).sum(-1, keepdim=True))
