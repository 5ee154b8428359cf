"""A device is waited for as rarely as numbers are needed: each wait stops it between two steps.

On the CPU as well a number that is read from a tensor is an operation of its own, and those can be counted; so are
comparisons of tensors, and lists of places, whose length only the device knows.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ntkexp.kernel.record.recorder import DispatchMode
from ntkexp.run.loop import train_steps
from ntkexp.run.setting import prepare
from ntkexp.run.state import begin
from tests.run.small import Memory, small

WAITING = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2"}
"""The first is of float(tensor) and of `if tensor`, not of numbers fetched together."""


class Waits(DispatchMode):
    """Counts operations whose results Python reads, one by one."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = [each for each in args[1] if each is not None] if func._schema.name == "aten::index" else []
        chosen_by_mask = any(mask.dtype == torch.bool for mask in masks)
        self.count += func._schema.name.removeprefix("aten::") in WAITING or chosen_by_mask
        return func(*args, **(kwargs or {}))


def waits(steps: int, *overrides: str) -> int:
    """How many waits there are in so many steps, of which the first keeps a kernel."""
    setting = prepare(small(f"steps={steps}", "path.rule=[secant]", "path.schedule=[0]", *overrides))
    listener = Memory()
    with Waits() as seen:
        train_steps(begin(setting, listener.trajectory), listener)
    found: int = seen.count
    return found


@pytest.mark.parametrize(
    ("more", "each"),
    [
        (("data.classes=[1,3,8]", "path.error_samples=0"), 0),
        (("optimizer=sgd", "optimizer.clip_norm=0.1", "path.error_samples=0"), 1),  # how much a gradient is shortened
        pytest.param(("model=cnn", "model.width=4", "model.pooling=max"), 2, marks=pytest.mark.slow),  # who is largest
    ],
    ids=["gd", "clipped", "pooled"],
)
def test_a_step_reads_no_number_by_itself_that_it_does_not_need(more: tuple[str, ...], each: int) -> None:
    assert waits(9, *more) - waits(6, *more) == 3 * each  # programs are made in the first
