"""Weights by name are views of one vector; what comes back to them is put together once, however many they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import vjp

from ntkexp.effects.trajectory import flat_like
from ntkexp.kernel.record.recorder import DispatchMode


class Counting(DispatchMode):
    """Counts the numbers in tensors that operations make."""

    made: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor) and not found._is_view():
            self.made += found.numel()
        return found


def made_on_the_way_back(names: int) -> float:
    """Numbers for each weight, where every weight is squared and all are summed."""
    flat = flat_like({str(k): torch.zeros(5) for k in range(names)})

    def squared(vector: Tensor) -> Tensor:
        return torch.stack([weight @ weight for weight in flat.weights(vector).values()]).sum()

    back = vjp(squared, torch.ones(flat.size))[1]
    counting = Counting()
    with counting:
        back(torch.tensor(1.0))
    return counting.made / flat.size


def test_many_names_cost_no_more_on_the_way_back_than_few() -> None:
    assert made_on_the_way_back(40) < 1.1 * made_on_the_way_back(4)  # and not as many vectors as there are names
