"""How runs end: after their steps, at a loss, or by diverging, which is a finished run with advice."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest

from ntkexp.optimizer.base import AbstractStable
from ntkexp.optimizer.descent import GD, Momentum
from ntkexp.run.outcome import advice
from tests.run.small import ran

LINEAR = ("model.depth=0", "steps=200", "ladder.machine=[secant,left,linearised]", "path.schedule=1000")


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_a_run_stops_at_a_loss(loss: str) -> None:
    whole = ran(f"loss={loss}", "ladder.machine=[]")
    losses = [row["loss"] for row in whole.memory.rows]
    target = losses[10]
    assert target is not None
    stopped = ran(f"loss={loss}", "ladder.machine=[]", f"stop_at_loss={target!r}")
    first = next(step for step, value in enumerate(losses) if value is not None and value <= target)
    assert stopped.outcome.steps == first
    assert [row["loss"] for row in stopped.memory.rows] == losses[: first + 1]
    assert stopped.outcome.sentence == f"trained for {first} steps, to a loss of {losses[first]:.3g}"
    assert not stopped.outcome.diverged


def test_a_run_that_has_arrived_before_its_first_step_is_finished() -> None:
    run = ran("stop_at_loss=1e6", "path.error_samples=4")
    assert (run.outcome.steps, run.outcome.diverged) == (0, False)
    assert {row.note for row in run.rows("secant")} == {"the network did not move here"}


def test_just_below_the_largest_stable_step_a_quadratic_converges() -> None:
    run = ran(*LINEAR, "optimizer.stable_fraction=0.99")
    losses = [row["loss"] or 0.0 for row in run.memory.rows]
    assert all(after <= before for before, after in pairwise(losses[20:]))
    assert not run.outcome.diverged


def test_just_above_it_diverges_and_says_so() -> None:
    # the top mode grows by 1.1 a step, its loss by 1.21: a million times within some hundred steps
    run = ran(*LINEAR, "optimizer.stable_fraction=1.05")
    assert run.outcome.diverged
    assert 0 < run.outcome.steps < 200
    said = run.outcome.sentence
    assert said.startswith(f"diverged at step {run.outcome.steps}: ")
    assert (
        f"is 1.05 times the largest stable one at the start, {run.setting.start.largest_stable_step:.3g}; try " in said
    )


STABLE = 2.0


@pytest.mark.parametrize("share", [0.01, 0.5, 1.0, 1.05, 40.0])
@pytest.mark.parametrize("kind", [GD, Momentum])
def test_the_advice_is_a_smaller_step_than_the_one_that_diverged(kind: type[AbstractStable], share: float) -> None:
    """In the key that was set: the default is no answer to a run that diverged at it."""
    for key, value in {"stable_fraction": share, "step_size": share * STABLE}.items():
        said = advice(kind.model_validate({key: value}), share * STABLE, STABLE)
        found = re.fullmatch(rf".*; try optimizer\.{key}=(\S+)", said)
        assert found is not None
        assert float(found[1]) <= value / 1.01  # three digits are printed


def test_a_run_that_diverged_has_its_table() -> None:
    run = ran(*LINEAR, "optimizer.stable_fraction=1.05")
    assert len(run.table) == 9
    assert all(row.exact for row in run.rows("secant"))  # the sum is exact on the way to infinity too


def test_outputs_beyond_all_numbers_end_a_run_as_well() -> None:
    run = ran("optimizer.step_size=1e300", "ladder.machine=[secant,left,kernel_regression]")
    assert run.outcome.diverged
    assert len(run.table) == 9
