"""follow(steps=): the change by chosen steps adds up, and agrees with the attribution of all steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

from ntkexp.foreign_loop.trace import Trace
from ntkexp.mistake import Mistake
from tests.foreign_loop import loops
from tests.foreign_loop.loops import STEPS, Loop, Maker, apart, followed, loop, outputs_of, plain, sgd

SUMMED = 1e3  # eps: of all that is added up, relative to its size


def explained(found: xr.Dataset) -> xr.DataArray:
    return found["contribution"].sum("example") + found["decay"] + found["carried"]


CHOSEN: dict[str, tuple[Maker, int | list[int], list[int]]] = {
    "last three, over two runs": (loops.adamw, 3, [5, 6, 7]),
    "the first, two runs, the last": (loops.nesterov, [7, 0, 3, 4], [0, 3, 4, 7]),
}


@pytest.mark.parametrize(("maker", "steps", "indices"), CHOSEN.values(), ids=CHOSEN)
def test_the_movement_by_some_steps_adds_up(maker: Maker, steps: int | list[int], indices: list[int]) -> None:
    """Contributions, decay and momentum from earlier steps are the change over these steps.

    Together with the movement by the other steps they are the change of training.
    """
    given = loop(maker)
    outputs = [outputs_of(given.model, given.queries)]

    def observed(given: Loop, batch: torch.Tensor) -> None:
        plain(given, batch)
        outputs.append(outputs_of(given.model, given.queries))

    loops.train(given, observed)
    on_the_way = torch.stack(outputs).numpy()
    by_these = sum(on_the_way[index + 1] - on_the_way[index] for index in indices)
    change = on_the_way[-1] - on_the_way[0]
    found = followed(loop(maker), plain, steps=steps).attribute(quiet=True)
    tolerance = SUMMED * torch.finfo(torch.float64).eps * float(abs(on_the_way).max())
    np.testing.assert_allclose(explained(found), by_these, rtol=0, atol=tolerance)
    np.testing.assert_allclose(explained(found) + found["other_steps"], change, rtol=0, atol=tolerance)
    np.testing.assert_allclose(found["change"], change, rtol=0, atol=tolerance)
    assert found.attrs["share"] == pytest.approx(float((by_these * change).sum() / (change**2).sum()), rel=1e-9)
    assert found["step"].to_numpy().tolist() == indices


def test_a_step_without_momentum_moves_as_among_all_steps() -> None:
    every = followed(loop(sgd), plain).attribute(quiet=True)
    some = followed(loop(sgd), plain, steps=[1, 4, 5]).attribute(quiet=True)
    assert apart(some["by_step"], every["by_step"][..., [1, 4, 5]]) < 1e-13
    assert not some["carried"].any()
    assert "carried" not in followed(loop(sgd), plain, steps=STEPS).attribute(quiet=True)


@pytest.mark.parametrize("maker", [loops.adamw, loops.nesterov])
def test_a_begun_optimizer_carries_its_momentum(maker: Maker) -> None:
    """Following from step 3 on agrees with choosing the steps from 3 on."""
    among_all = followed(loop(maker), plain, steps=range(3, STEPS)).attribute(quiet=True)
    begun = loop(maker)
    loops.train(begun, plain, end=3)
    found = followed(begun, plain, begin=3, steps=range(STEPS - 3)).attribute(quiet=True)
    for part in ("contribution", "decay", "carried"):
        assert apart(found[part], among_all[part]) < 1e-12
    assert abs(found["carried"]).max() > 0.1 * abs(found["change"]).max()


def test_a_begun_optimizer_has_no_effects() -> None:
    begun = loop(loops.adamw)
    loops.train(begun, plain, end=3)
    trace = followed(begun, plain, begin=3, steps=range(STEPS), loss=lambda outputs, call: outputs.sum(1))
    with pytest.raises(Mistake, match="effects need an optimizer without momentum from before"):
        trace.attribute(effects=True, quiet=True)


def test_wrong_choices_are_refused() -> None:
    def trace(steps: object, **more: Any) -> Trace:
        return followed(loop(sgd), plain, steps=steps, **more)

    with pytest.raises(Mistake, match=r"steps=0: give a number n for the last n steps, or indices"):
        trace(0)
    with pytest.raises(Mistake, match="chosen steps can be stored only in memory"):
        trace(2, to="somewhere")
    with pytest.raises(Mistake, match="steps=: the loop took 8 steps, and none of the chosen ones"):
        trace([9]).attribute(quiet=True)
    with pytest.raises(Mistake, match="effects need all steps, but steps= omits some"):
        trace(2, loss=lambda outputs, call: outputs.sum(1)).attribute(effects=True, quiet=True)
