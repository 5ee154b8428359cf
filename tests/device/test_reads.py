"""A followed step makes the host wait for the device a few times, however many parameters the model has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ntkexp.foreign_loop.follow import follow
from tests.device.emulated import DEVICE, IS_EMULATED, counted_reads

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not IS_EMULATED, reason="a GPU does not count reads"),
]

IN_THE_LOOP = 3
"""A check for moved weights, signatures of gradients and weights, and signatures of optimizer states."""
TO_DISK = 3  # more: digests of the examples, and the log entry of the step
ATTRIBUTED = 16  # the proofs (a), of outputs and (c) of a step, and its examples for display
AT_ONCE = 1  # more, at single steps: checkpoints, and checks of new programs


def reads_of(steps: int, layers: int, optimizer: type[torch.optim.Optimizer], folder: Path | None) -> tuple[int, int]:
    """Return the numbers of reads in a loop and in its attribution."""
    torch.manual_seed(0)
    hidden = [part for _ in range(layers) for part in (nn.Linear(8, 8), nn.Tanh())]
    model = nn.Sequential(*hidden, nn.Linear(8, 1)).double().to(DEVICE)
    x, queries = (torch.randn(count, 8).double().to(DEVICE) for count in (6, 3))
    made = optimizer(model.parameters(), lr=0.01)  # type: ignore[call-arg]  # every optimizer has one
    with counted_reads() as in_loop, follow(model, made, queries=queries, to=folder) as trace:
        for _ in range(steps):
            made.zero_grad()
            model(x).square().mean().backward()
            made.step()
    with counted_reads() as attributed:
        trace.attribute()
    return sum(in_loop.values()), sum(attributed.values())


@pytest.mark.parametrize(("optimizer", "to_disk"), [(torch.optim.AdamW, True), (torch.optim.SGD, False)])
def test_reads_of_a_step_are_few(optimizer: type[torch.optim.Optimizer], to_disk: bool, tmp_path: Path) -> None:
    found = {}
    for layers in (1, 4):
        few, many = (
            reads_of(steps, layers, optimizer, tmp_path / f"{layers}-{steps}" if to_disk else None) for steps in (8, 16)
        )
        in_loop, attributed = ((after - before) / 8 for before, after in zip(few, many, strict=True))
        assert in_loop <= IN_THE_LOOP + TO_DISK * to_disk
        assert attributed <= ATTRIBUTED
        found[layers] = in_loop, attributed
    assert found[1][0] == found[4][0]
    assert abs(found[1][1] - found[4][1]) <= AT_ONCE
