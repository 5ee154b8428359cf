"""Most modules are recorded as they run; those that write in place or read numbers run again with help."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ntkexp.kernel.record.tape import Tape
from ntkexp.library import reader_of

MODES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], int]] = {
    "plain": (torch.relu, torch.relu, 1),
    "written in place": (torch.relu_, torch.relu, 2),
    "a number read": (lambda z: z * float(z.shape[1]), lambda z: z * 4.0, 1),
    "a number of a tensor read": (lambda z: z * float(z.sum()), lambda z: z * z.sum().item(), 2),
}


class Layered(nn.Module):
    """Two layers with something in between; `runs` are counted."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.between = nn.Linear(3, 4).double(), nn.Linear(4, 1).double(), between
        self.runs = 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        result: Tensor = self.last(self.between(self.first(x)))
        return result


def recorded(module: Layered) -> Tape:
    """At ones; in a way that can be differentiated."""
    reader, weights = reader_of(module)
    return reader.record(weights, torch.ones(2, 3, dtype=torch.float64))


@pytest.mark.parametrize("mode", MODES)
def test_a_module_runs_again_only_where_it_needs_help_and_its_tape_is_the_same(mode: str) -> None:
    given, twin, runs = MODES[mode]
    module = Layered(given)
    found, expected = recorded(module), recorded(Layered(twin))
    assert module.runs == runs
    assert [entry.op for entry in found.entries] == [entry.op for entry in expected.entries]
    assert torch.equal(found.outputs, expected.outputs)
    assert any(entry.reads for entry in found.entries) == (mode == "a number of a tensor read")
