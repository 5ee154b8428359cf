"""Some steps of a loop: what they did adds up, and is what they did among all steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import nn

from ntkexp.foreign_loop.trace import Trace
from ntkexp.mistake import Mistake
from tests.foreign_loop.loops import STEPS, Loop, Optimizers, batches, followed, loop, plain, sgd

SUMMED = 1e3  # eps: of all that is added up, relative to its size


def adamw(model: nn.Sequential) -> Optimizers:
    return [torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)]


def nesterov(model: nn.Sequential) -> Optimizers:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)]


def explained(found: xr.Dataset) -> xr.DataArray:
    return found["contribution"].sum("example") + found["decay"] + found["carried"]


def outputs_on_the_way(given: Loop) -> NDArray[np.float64]:
    """f at the queries before each step, and after the last, of a loop that is not followed."""
    found = [given.model(given.queries).detach().numpy()]
    for _, batch in zip(range(STEPS), batches(), strict=False):
        plain(given, batch)
        found.append(given.model(given.queries).detach().numpy())
    return np.stack(found)


CHOSEN: dict[str, tuple[Callable[[nn.Sequential], Optimizers], int | list[int], list[int]]] = {
    "last three, over two runs": (adamw, 3, [5, 6, 7]),
    "the first, two runs, the last": (nesterov, [7, 0, 3, 4], [0, 3, 4, 7]),
}


@pytest.mark.parametrize(("optimizer", "steps", "indices"), CHOSEN.values(), ids=CHOSEN)
def test_what_some_steps_did_adds_up(
    optimizer: Callable[[nn.Sequential], Optimizers], steps: int | list[int], indices: list[int]
) -> None:
    """Contributions, decay and what was carried into them are the change over these steps, and with what the others
    did that of training."""
    on_the_way = outputs_on_the_way(loop(optimizer))
    found = followed(loop(optimizer), plain, steps=steps).attribute(quiet=True)
    by_these = sum(on_the_way[index + 1] - on_the_way[index] for index in indices)
    room = SUMMED * torch.finfo(torch.float64).eps * float(abs(on_the_way).max())
    np.testing.assert_allclose(explained(found), by_these, rtol=0, atol=room)
    np.testing.assert_allclose(explained(found) + found["other_steps"], found["change"], rtol=0, atol=room)
    np.testing.assert_allclose(found["change"], on_the_way[-1] - on_the_way[0], rtol=0, atol=room)
    change = on_the_way[-1] - on_the_way[0]
    assert found.attrs["share"] == pytest.approx(float((by_these * change).sum() / (change**2).sum()), rel=1e-9)
    assert found["step"].to_numpy().tolist() == indices


def test_a_step_without_a_memory_does_what_it_does_among_all() -> None:
    """Of gradient descent, whose steps carry nothing: step by step the same as where all are followed."""
    every = followed(loop(sgd), plain).attribute(quiet=True)
    some = followed(loop(sgd), plain, steps=[1, 4, 5]).attribute(quiet=True)
    np.testing.assert_allclose(some["by_step"], every["by_step"][..., [1, 4, 5]], rtol=0, atol=1e-14)
    assert not some["carried"].any()
    assert "carried" not in followed(loop(sgd), plain, steps=STEPS).attribute(quiet=True)


def test_steps_that_cannot_be_told_apart_are_refused() -> None:
    def trace(steps: object, **more: Any) -> Trace:
        return followed(loop(sgd), plain, steps=steps, **more)

    with pytest.raises(Mistake, match=r"steps=0: give a number, for the last n steps, or the numbers of some"):
        trace(0)
    with pytest.raises(Mistake, match="some steps are held in memory"):
        trace(2, to="somewhere")
    with pytest.raises(Mistake, match="steps=: the loop took 8 steps, and none of these"):
        trace([9]).attribute(quiet=True)
    with pytest.raises(Mistake, match="effects need all steps, and steps= leaves some out"):
        trace(2, loss=lambda outputs, call: outputs.sum(1)).attribute(effects=True, quiet=True)
