"""Every architecture, globbed, is rebuilt by the secant machine from a run of a few steps on the default data."""

from __future__ import annotations

import pytest

from tests.config.components import OWN, asked_for, networks
from tests.run.small import ran
from tests.run.test_exactness import exact


@pytest.mark.sample(2)
@pytest.mark.parametrize(("init", "width"), [("standard", 16), pytest.param("ntk", 8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", networks())
def test_a_few_steps_are_exact(model: str, init: str, width: int) -> None:
    run = ran(
        *asked_for("model", model),
        f"init={init}",
        f"model.width={width}",
        "steps=2",
        *("data.train=4", "data.probe=2", "data.test=2"),
        "ladder.machine=[secant]",
        trust=[str(OWN)],
    )
    for row in run.rows("secant"):
        assert exact(row), f"{row.split}: {row.relative_error:.1e} with a floor of {row.floor:.1e}"
    assert {row.split for row in run.rows("secant")} == {"train", "probe", "test"}
