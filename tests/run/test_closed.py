"""The closure check runs at every step, and says where a rule is wrong, however little."""

from __future__ import annotations

import pytest
from torch import Tensor

from ntkexp.kernel.secant.rules import RULES
from ntkexp.kernel.secant.rules.base import AbstractCall
from tests.run.small import ran

QUICK = ("model.activation=tanh", "steps=4", "path.rule=[secant]", "ladder.machine=[secant]")
OPTIMIZERS = ("optimizer=gd", "optimizer=nesterov")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("reading", ["init.antisymmetric=true", "init.centred=true", "init.alpha=1e6"])
def test_rounding_is_never_taken_for_a_mistake(optimizer: str, reading: str) -> None:
    for fraction in ("1e-8", "0.1"):
        run = ran(*QUICK, optimizer, reading, f"optimizer.stable_fraction={fraction}")
        assert run.outcome.sentence == "trained for 4 steps"


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_rule_that_is_wrong_by_a_billionth_is_found(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = RULES["tanh"]

    def wrong(call: AbstractCall) -> Tensor:
        found = right(call)
        assert isinstance(found, Tensor)
        return found * (1 + 1e-9)

    monkeypatch.setitem(RULES, "tanh", wrong)
    assert "the secant misses 4 steps, most of all step" in ran(*QUICK, optimizer).outcome.sentence
