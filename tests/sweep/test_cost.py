"""Estimates: from shapes alone, larger for what is larger, and said to be impossible where a run is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ntkexp.config.compose import compose
from ntkexp.engine.base import Began, Ended, Stepped
from ntkexp.sweep.listener import RemainingTime
from ntkexp.sweep.plan import Estimator, RunCost

SMALL = ("data.train=24", "data.probe=12", "data.test=12", "model.width=16", "steps=20")


def cost(*words: str) -> RunCost:
    return Estimator()(compose([*SMALL, *words]))


@pytest.mark.sample(2)
@pytest.mark.parametrize("more", ["model.width=64", "model.depth=4", "data.train=100", "optimizer=adam", "model=cnn"])
def test_more_work_costs_more(more: str) -> None:
    assert cost(more).seconds > cost().seconds


@pytest.mark.parametrize("more", ["model.width=256", "data.train=100", "model=cnn"])
def test_larger_shapes_need_more_memory(more: str) -> None:
    assert cost(more).bytes > cost().bytes


def test_steps_cost_alike_and_many_need_no_more_memory() -> None:
    few, more, many = (cost(f"steps={steps}") for steps in (100_000, 200_000, 300_000))
    assert many.seconds - more.seconds == pytest.approx(more.seconds - few.seconds)
    assert many.bytes == few.bytes  # as what came of single steps is put together to stretches


def test_what_is_estimated_once_is_not_looked_at_again() -> None:
    estimate = Estimator()
    for words in ((), ("seed=1",), ("init.alpha=2",), ("optimizer.step_size=0.1",)):
        estimate(compose([*SMALL, *words]))
    assert len(estimate.known) == 1


def test_a_run_that_cannot_be_says_why() -> None:
    assert "data.train=100000" in cost("data.train=100000").mistake
    assert "raise memory_gb" in cost("memory_gb=0.1").mistake


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the clock says."""
    told = [0.0]
    monkeypatch.setattr("ntkexp.sweep.listener.time.monotonic", lambda: told[0])
    return told


def test_what_is_ahead_shrinks_as_estimated_where_the_estimate_is_right(now: list[float]) -> None:
    clock = RemainingTime({"a": 100.0, "b": 100.0, "c": 100.0, "d": 100.0}, workers=2)
    assert clock.ahead == 200
    clock.see(Began("a"))
    clock.see(Began("b"))
    now[0] = 50.0
    for name in "ab":
        clock.see(Stepped(name, 5, 10))
    assert clock.ahead == pytest.approx(150, rel=0.15)  # a tenth of a run comes after its last step
    now[0] = 100.0
    for name in "ab":
        clock.see(Ended(name, "done"))
    assert clock.ahead == pytest.approx(100)


def test_a_slow_machine_is_believed(now: list[float]) -> None:
    clock = RemainingTime({"a": 100.0, "b": 100.0}, workers=1)
    clock.see(Began("a"))
    now[0] = 1000.0
    clock.see(Ended("a", "done"))
    assert clock.ahead == pytest.approx(750, rel=1 / 3)  # ten times slower than thought, which counts a little


def test_jobs_without_estimates_tell_by_those_that_ended(now: list[float]) -> None:
    clock = RemainingTime({"a": 1.0, "b": 1.0, "c": 1.0}, workers=1, believed=0.0)
    assert clock.ahead is None
    clock.see(Began("a"))
    now[0] = 7.0
    assert clock.ahead is None
    clock.see(Ended("a", "done"))
    assert clock.ahead == pytest.approx(14)


def test_what_was_held_comes_again(now: list[float]) -> None:
    clock = RemainingTime({"a": 100.0}, workers=1)
    clock.see(Began("a"))
    clock.see(replace(Ended("a", "done"), how="held"))
    assert clock.ahead == 100
