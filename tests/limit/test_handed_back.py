"""What the fused engine hands to torch is what docs/how-to.md says, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ntkexp.covariance.covariance import Signal
from ntkexp.covariance.pairs import Coarse, Operations, coarsen
from ntkexp.layer.affine import Conv, Dense
from ntkexp.layer.base import AbstractLayer, Concatenation, Residual
from ntkexp.layer.linear import AvgPool, Flatten, GlobalAvgPool
from ntkexp.layer.pointwise import ReLU
from ntkexp.layer.smooth import Generic, Hermite, Polynomial
from ntkexp.layer.spec import kinds
from ntkexp.limit.fused.program import program
from ntkexp.limit.infinite_kernel import engine_of
from ntkexp.limit.network import network
from ntkexp.mistake import Mistake

HOW_TO = Path(__file__).parents[2] / "docs" / "how-to.md"
TITLE, HEADER = (
    "## Know which engine computes a kernel at infinite width\n",
    "| engine=fused says | because |\n|---|---|\n",
)
GIVEN: dict[str, AbstractLayer] = {
    "Generic": Generic(fn="softplus"),
    "Polynomial": Polynomial(powers=(0.1, 0.5)),
    "Hermite": Hermite(degree=2),
    "Residual": Residual(branch=(ReLU(), Conv(features=2))),
    "Concatenation": Concatenation(branches=((ReLU(),), (Conv(features=3),))),
    "Dense": Dense(features=2),
    "Conv": Conv(features=2),
}
"""Layers of those kinds that take more than their name."""
END = (Flatten(), Dense(features=1))
LAYERS = [kind for name, kind in kinds().items() if kind.__module__.startswith("ntkexp.")]


class MyLayer(ReLU):
    """It replaces the formula of its parent."""

    def alone(self, q: Tensor) -> tuple[Tensor, Tensor]:
        return q, q


class Overlapping(AvgPool):
    """Windows have a pixel in common with the next."""

    def fused(self, shape: tuple[int, ...], register: int, free: int) -> Operations:
        return (coarsen(register, [Coarse(((0, 1), (1, 2))) for _ in shape[1:]]),)


def said(layers: tuple[AbstractLayer, ...], x: Tensor) -> str:
    """What the engine says that is asked for layers by name."""
    with pytest.raises(Mistake, match=r"engine=fused: .*; choose torch") as refused:
        engine_of("fused", network(layers, tuple(x.shape[1:])), x, 4, 1.0, 1)
    return str(refused.value).removeprefix("engine=fused: ").removesuffix("; choose torch")


def test_it_is_what_the_page_says() -> None:
    vectors = (Dense(features=2), ReLU(), Dense(features=1))
    found = [
        said((Dense(features=2), Dense(features=1)), torch.ones(2, 3)),
        said((Conv(features=2), MyLayer(), *END), torch.ones(2, 1, 8, 8)),
        said(vectors, torch.ones(2, 3, dtype=torch.float16)),
        said(vectors, torch.ones(2, 3, requires_grad=True)),
    ]
    rows = HOW_TO.read_text().split(TITLE)[1].split(HEADER)[1].split("\n\n")[0].splitlines()
    assert [row.split(" | ")[0].removeprefix("| ") for row in rows] == found


UNEQUAL = Residual(branch=(ReLU(), *(Conv(features=2, stride=2),) * 2), shortcut=(Conv(features=2, stride=4),))


@pytest.mark.parametrize("layer", [UNEQUAL, Overlapping(window=4)], ids=["steps", "overlap"])
def test_from_a_smaller_image_on_torch_takes_over(layer: AbstractLayer) -> None:
    layers = (Conv(features=2), ReLU(), Conv(features=2), layer, *END)
    known = program(layers, (1, 8, 8))
    assert known.rest == layers[3:]
    assert len(known.levels[0].operations) > 1


@pytest.mark.parametrize("shape", [(2, 8), (2, 9, 8), (2, 8, 9, 8)], ids=["1-D", "2-D", "3-D"])
@pytest.mark.parametrize("kind", LAYERS, ids=lambda kind: kind.__name__)
def test_every_layer_that_has_a_limit_is_known(kind: Any, shape: tuple[int, ...]) -> None:
    """Up to the readout, which is of vectors, on images of every kind, before and after a stride and a pool."""
    layer: AbstractLayer = GIVEN.get(kind.__name__) or kind()
    try:
        layer.carry(Signal().after_weights())
    except Mistake:
        return  # it has no limit
    conv = Conv(features=2, circular=True)
    if isinstance(layer, Dense | Flatten | GlobalAvgPool):
        middle: tuple[AbstractLayer, ...] = ()
    else:
        middle = (conv, layer, Conv(features=2, stride=2), layer, AvgPool(window=1), conv)
    ends = (layer,) if isinstance(layer, Flatten | GlobalAvgPool) else (Flatten(),)
    layers = (*middle, ReLU()) if middle else (conv, ReLU())
    net = network((*layers, *ends, Dense(features=1)), shape)
    assert program(net.layers, net.shape).rest == net.layers[-1:]
