"""A run that is stopped and resumed, with more or less memory, has the same bits as an uninterrupted run."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings, strategies as some
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from torch import Tensor

from ntkexp.capacity import MemoryBudget
from ntkexp.machine.base import Prediction
from ntkexp.on_disk import is_on_disk
from ntkexp.run.loop import BackwardPass, run
from ntkexp.run.outcome import Outcome
from ntkexp.run.setting import Setting, prepare
from ntkexp.run.state import RunState, drop_sums, load_sums, save_sums
from tests.run.small import Memory, small


def whole(setting: Setting) -> Setting:
    return setting


def attributed_in_chunks(setting: Setting) -> Setting:
    """Attribute ten points at once: two chunks of nine steps."""
    return replace(setting, domain=replace(setting.domain, chunk=10))


def swept_in_chunks(setting: Setting) -> Setting:
    """Give the sweep memory for three points at once: two chunks of six steps."""
    assert setting.sweep is not None
    plan = setting.sweep.plan
    return replace(
        setting, sweep=replace(setting.sweep, plan=replace(plan, budget=MemoryBudget(2 * 3.5 * 3 * plan.per_output)))
    )


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
MOMENTUM = ("optimizer=momentum", "optimizer.step_size=0.05")
GROWING = (*MOMENTUM, "optimizer._target_=tests.run.growing.GrowingMomentum")
WITHOUT_KERNELS = (
    *("path.kernels=none", "steps=4", "path.error_samples=2", "optimizer.weight_decay=0.1"),
    "ladder.machine=[secant,left,rbf_identity,random_identity]",
)
COMPONENTS = ("steps=5", "model.width=8", "data.train=10", "ladder.machine=[]", "path.by=module")
Cut = Callable[[Setting], Setting]
FAST: dict[str, tuple[tuple[str, ...], Cut]] = {
    "some steps": ((*SNAPSHOTS, "path.schedule=6"), whole),
    "without kernels": ((*WITHOUT_KERNELS, "data.classes=[1,3,8]"), whole),
    "phases": ((*SEQUENCE, "optimizer=sgd", "optimizer.weight_decay=0.01", "path.kernels=none"), whole),
    "back": (BACK, attributed_in_chunks),
    "a growing momentum, back": ((*COMPONENTS, *GROWING, "steps=4"), whole),
    "effects": ((*EFFECTS, *ADAM), swept_in_chunks),
    "diagnostics": ((*COMPONENTS, "path.schedule=2", "diagnostics=[kernel_velocity]"), whole),
}
SLOW: dict[str, tuple[tuple[str, ...], Cut]] = {
    "chosen steps": ((*SNAPSHOTS, "path.schedule=[3,4,11]"), whole),
    "adaptive steps": ((*SNAPSHOTS, "path.schedule=adaptive"), whole),
    "a flow": (FLOW, whole),
    "components": (COMPONENTS, whole),
    "components, back": ((*COMPONENTS, *MOMENTUM), attributed_in_chunks),
    "phases, back": ((*SEQUENCE, *MOMENTUM), whole),
    "phases of classes": ((*WITHOUT_KERNELS, "data=sequence", "data.phases=[[0,1,2],[3,4,5]]"), whole),
    "effects of descent": ((*EFFECTS, "optimizer=gd"), swept_in_chunks),
}
CASES = FAST | SLOW


class Left(KeyboardInterrupt):
    """A run was left."""


@dataclass(eq=False)
class Leaving(Memory):
    """Saves the state at a moment, as a checkpoint does, and leaves."""

    at: tuple[str, int] | None = None
    saved: bytes = b""
    passed: list[tuple[str, int]] = field(default_factory=list)

    def on_step(self, state: RunState, loss: float) -> None:
        self.pass_by(state, "step", state.step)

    def on_step_back(self, state: RunState, way: BackwardPass, done: int, total: int) -> None:
        self.pass_by(state, way, done)

    def pass_by(self, state: RunState, event: str, number: int) -> None:
        self.passed.append((event, number))
        if self.at == (event, number):
            file = io.BytesIO()
            torch.save(save_sums(self.scratch, len(self.passed), state.state)[0], file)
            self.saved = file.getvalue()
            raise Left


def setting_of(name: str, *, keep: bool = True, spills: bool = False) -> Setting:
    """Prepare a run as a new process does, one that keeps tapes or has its sums on disk, as its memory allows."""
    words, cut = CASES[name]
    setting = cut(prepare(small(*words, trust=["tests"] if words[-2:-1] == GROWING[-1:] else ())))
    points, domain = replace(setting.points, keeps_tapes=keep, cache=[]), setting.domain
    assert domain.explained is domain.points
    domain = replace(domain, points=points, explained=points, spills=spills)
    return replace(setting, descent=replace(setting.descent, points=points), domain=domain)


@cache
def undisturbed(name: str) -> tuple[dict[str, Any], Leaving]:
    listener = Leaving()
    return numbers(run(setting_of(name), listener)), listener


def numbers(outcome: Outcome) -> dict[str, Any]:
    """Return everything that a run leaves."""
    found: dict[str, Any] = {"end": outcome.matrices.end, "weights": outcome.weights, "sentence": outcome.sentence}
    found["machines"] = {r.name: r.outcome.outputs for r in outcome.machines if isinstance(r.outcome, Prediction)}
    for rule_name, path in outcome.matrices.paths.items():
        parts = (path.contributions, path.kernel, path.decay, path.half_by, path.facts)
        steps, sums = outcome.by_step[rule_name], outcome.by_component.get(rule_name)
        components = () if sums is None else (sums.parts, sums.decay, sums.totals.stacked())
        found[rule_name] = (*parts, steps.stacked(), steps.edges, components)
    if outcome.phases is not None:
        shares = {
            rule_name: [(torch.from_numpy(share.contributions[:]), share.decay) for share in each]
            for rule_name, each in outcome.phases.shares.items()
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


class Interrupted(RuleBasedStateMachine):
    """A run that several processes carry out, one after the other, each from the checkpoint of the one before."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.listener, self.done = name, Leaving(), 0
        self.expected, self.alone = undisturbed(name)

    @rule(share=some.floats(0, 1), keep=some.booleans(), spills=some.booleans())
    def go_on_and_leave(self, share: float, *, keep: bool, spills: bool) -> None:
        left = len(self.alone.passed) - self.done
        if left:
            self.done += 1 + int(share * (left - 1))
            self.listener.at = self.alone.passed[self.done - 1]
            with pytest.raises(Left):
                self.go_on(keep=keep, spills=spills)

    def go_on(self, **memory: bool) -> Outcome:
        saved = None
        if self.listener.saved:
            saved = load_sums(self.listener.scratch, torch.load(io.BytesIO(self.listener.saved), weights_only=True))
        return run(setting_of(self.name, **memory), self.listener, saved)

    def teardown(self) -> None:
        self.listener.at, spills = None, self.done % 2 == 0
        outcome = self.go_on(keep=spills, spills=spills)
        assert all(is_on_disk(path.contributions) == spills for path in outcome.matrices.paths.values())
        assert_same_bits(numbers(outcome), self.expected)
        assert self.listener.passed == self.alone.passed
        assert_same_bits(self.listener.kernels, self.alone.kernels)
        assert_same_bits(self.listener.rows, self.alone.rows)
        drop_sums(self.listener.scratch)
        assert {file.name for file in self.listener.scratch.iterdir()} <= {"trajectory.bin"}  # sums have no names


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
@pytest.mark.sample(4)
def test_a_run_that_is_left_goes_on_to_the_same_bits(name: str) -> None:
    examples, legs = (2, 2) if name in FAST else (3, 3)
    chosen = settings(
        max_examples=examples,
        stateful_step_count=legs,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(partial(Interrupted, name), settings=chosen)  # type: ignore[arg-type]  # a factory will do


@pytest.mark.parametrize(("name", "moment"), [("back", ("back", 12)), ("effects", ("effects", 8))])
def test_a_backward_pass_starts_again_if_its_chunks_have_another_size(name: str, moment: tuple[str, int]) -> None:
    """With more memory, one chunk holds all points. The run was left in the second of two chunks."""
    listener = Leaving(at=moment)
    with pytest.raises(Left):
        run(setting_of(name), listener)
    saved = torch.load(io.BytesIO(listener.saved), weights_only=True)
    listener.at = None
    words, _ = CASES[name]
    resumed, alone = (run(prepare(small(*words)), *rest) for rest in ((listener, saved), (Leaving(),)))
    assert_same_bits(numbers(resumed), numbers(alone))
