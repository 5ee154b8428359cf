"""A run that is left at any point, there or on its way back, goes on from its state to the same bits of everything."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from ntkexp.path import integrals
from ntkexp.run.loop import Way, run
from ntkexp.run.outcome import Outcome
from ntkexp.run.setting import Setting, prepare
from ntkexp.run.state import RunState
from tests.run.small import Memory, small


def whole(setting: Setting) -> Setting:
    return setting


def attributed_in_chunks(setting: Setting) -> Setting:
    """Ten points at once: two chunks of nine steps."""
    return replace(setting, domain=replace(setting.domain, chunk=10))


def swept_in_chunks(setting: Setting) -> Setting:
    """So little memory that three points are swept at once: two chunks of six steps."""
    assert setting.sweep is not None
    plan = setting.sweep.plan
    return replace(setting, sweep=replace(setting.sweep, plan=replace(plan, free=2 * 3.5 * 3 * plan.per_output)))


@dataclass(frozen=True)
class Case:
    """A run, and the points at which it is left: the number of a step, a step back, a step of the sweep for effects."""

    words: tuple[str, ...]
    fast: tuple[int, ...]
    slow: tuple[int, ...] = ()
    event: str = "step"
    cut: Callable[[Setting], Setting] = whole
    stretches: bool = False  # whether steps are told in stretches, as those of a long run are


SNAPSHOTS = (
    *("path.every=snapshots", "path.count=6", "path.rule=[secant,left]", "ladder.machine=[secant]"),
    *("optimizer=sgd", "optimizer.batch=7", "data.classes=all", "loss=cross_entropy", "schedule=cosine"),
)
SEQUENCE = ("data=sequence", "ladder.machine=[]", "path.rule=[secant]", "optimizer.batch=5")
BACK = (
    *("path.attributed=1000", "steps=9", "model.width=8", "data.train=10", "data.query=5", "data.test=4"),
    *("path.rule=[secant]", "ladder.machine=[secant]", "optimizer=adamw", "optimizer.step_size=0.05"),
    *("optimizer.weight_decay=0.3", "schedule=cosine", "data.classes=all"),
)
EFFECTS = (
    *("data.classes=[0,1,2]", "data.train=12", "data.query=4", "data.test=3", "loss=cross_entropy", "steps=6"),
    *("model.width=6", "model.activation=tanh", "path.rule=[left]", "ladder.machine=[left]", "path.attributed=5"),
    "path.effects=derivative",
)
ADAM = ("optimizer=adam", "optimizer.step_size=0.02", "optimizer.batch=4", "optimizer.eps=1e-4")
FLOW = ("optimizer=flow", "steps=4", "path.error_samples=3", "data.classes=[1,3,8]", "schedule=cosine")
STRETCHED = ("path.rule=[secant,left]", "ladder.machine=[]", "data.train=10", "data.query=5", "data.test=4")
CASES = {
    "some steps": Case((*SNAPSHOTS, "path.schedule=6"), (5,)),
    "chosen steps": Case((*SNAPSHOTS, "path.schedule=[3,4,11]"), (), (1, 13)),
    "adaptive steps": Case((*SNAPSHOTS, "path.schedule=adaptive"), (), (5, 20)),
    "stretches": Case(STRETCHED, (11,), stretches=True),
    "a flow": Case(FLOW, (1, 4)),
    "phases": Case((*SEQUENCE, "optimizer=sgd", "optimizer.weight_decay=0.01"), (17,), (4,)),
    "phases, there": Case((*SEQUENCE, "optimizer=momentum", "optimizer.step_size=0.05"), (), (17,)),
    "phases, back": Case((*SEQUENCE, "optimizer=momentum", "optimizer.step_size=0.05"), (5,), (10, 21), event="back"),
    "back": Case(BACK, (1, 9, 10), event="back", cut=attributed_in_chunks),  # in a chunk, at its end, in the next one
    "effects": Case((*EFFECTS, *ADAM), (2,), (6, 7), event="effects", cut=swept_in_chunks),
    "effects of descent": Case((*EFFECTS, "optimizer=gd"), (), (2, 6, 7), event="effects", cut=swept_in_chunks),
}
TABLE = [
    pytest.param(name, at, marks=[pytest.mark.slow] * (at in case.slow))
    for name, case in CASES.items()
    for at in (*case.fast, *case.slow)
]


class Left(KeyboardInterrupt):
    """A run was left."""


class Leaving(Memory):
    """Saves the state at a point, as a checkpoint does, and leaves."""

    at: tuple[str, int] | None = None
    saved: bytes = b""

    def on_step(self, state: RunState, loss: float) -> None:
        self.pass_by(state, "step", state.step)

    def on_step_back(self, state: RunState, way: Way, done: int, total: int) -> None:
        self.pass_by(state, way, done)

    def pass_by(self, state: RunState, event: str, number: int) -> None:
        if self.at == (event, number):
            file = io.BytesIO()
            torch.save(state.state, file)
            self.saved = file.getvalue()
            raise Left


def setting_of(name: str) -> Setting:
    """Prepared anew, as by another process: without the programs of the run that was left."""
    return CASES[name].cut(prepare(small(*CASES[name].words)))


@cache
def undisturbed(name: str) -> dict[str, Any]:
    return numbers(run(setting_of(name), Memory()))


def numbers(outcome: Outcome) -> dict[str, Any]:
    """All that a run leaves."""
    found: dict[str, Any] = {"end": outcome.evidence.end, "weights": outcome.weights, "sentence": outcome.sentence}
    for rule, path in outcome.evidence.paths.items():
        parts = (path.contributions, path.kernel, path.decay, path.half_by, path.facts)
        steps = outcome.by_step[rule]
        found[rule] = (*parts, steps.stacked(), steps.edges)
    if outcome.phases is not None:
        shares = {
            rule: [(torch.from_numpy(share.contributions[:]), share.decay) for share in each]
            for rule, each in outcome.phases.shares.items()
        }
        found["phases"] = (outcome.phases.change, shares)
    if outcome.effects is not None:
        found["effects"] = (outcome.effects.values, outcome.effects.facts)
    return found


def assert_same_bits(one: Any, other: Any) -> None:
    if isinstance(other, Tensor):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    elif isinstance(other, dict):
        assert one.keys() == other.keys()
        for key in other:
            assert_same_bits(one[key], other[key])
    elif isinstance(other, list | tuple):
        for mine, theirs in zip(one, other, strict=True):
            assert_same_bits(mine, theirs)
    else:
        assert one == other


@pytest.fixture(autouse=True)
def _stretches(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if CASES[name].stretches:
        monkeypatch.setattr(integrals, "MAX_TOTALS", 1)
        monkeypatch.setattr(integrals, "MIN_STRETCHES", 4)


@pytest.mark.sample(5)
@pytest.mark.parametrize(("name", "at"), TABLE)
def test_a_run_that_was_left_goes_on_to_the_same_bits(name: str, at: int) -> None:
    listener = Leaving()
    listener.at = (CASES[name].event, at)
    with pytest.raises(Left):
        run(setting_of(name), listener)
    listener.at = None
    saved = torch.load(io.BytesIO(listener.saved), weights_only=True)
    assert_same_bits(numbers(run(setting_of(name), listener, saved)), undisturbed(name))
