"""The closure check runs at every step, and says where a rule is wrong, however little."""

from __future__ import annotations

import pytest
from torch import Tensor

from ntkexp.kernel.secant.call import Call
from ntkexp.kernel.secant.rules import RULES
from tests.run.small import ran

QUICK = ("model.activation=tanh", "steps=4", "path.rule=[secant]", "ladder.machine=[secant]")


@pytest.mark.sample(3)
@pytest.mark.parametrize(  # all pairs
    ("reading", "optimizer", "fraction"),
    [
        ("init.antisymmetric=true", "optimizer=gd", "1e-8"),
        ("init.antisymmetric=true", "optimizer=nesterov", "0.1"),
        ("init.centred=true", "optimizer=gd", "0.1"),
        ("init.centred=true", "optimizer=nesterov", "1e-8"),
        ("init.alpha=1e6", "optimizer=gd", "1e-8"),
        ("init.alpha=1e6", "optimizer=nesterov", "0.1"),
    ],
)
def test_rounding_is_never_taken_for_a_mistake(reading: str, optimizer: str, fraction: str) -> None:
    run = ran(*QUICK, optimizer, reading, f"optimizer.stable_fraction={fraction}")
    assert run.outcome.sentence == "trained for 4 steps"


@pytest.mark.parametrize("optimizer", ["optimizer=gd", "optimizer=nesterov"])
def test_a_rule_that_is_wrong_by_a_billionth_is_found(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = RULES["tanh"]

    def wrong(call: Call) -> Tensor:
        found = right(call)
        assert isinstance(found, Tensor)
        return found * (1 + 1e-9)

    monkeypatch.setitem(RULES, "tanh", wrong)
    assert "the secant misses 4 steps, most of all step" in ran(*QUICK, optimizer).outcome.sentence
