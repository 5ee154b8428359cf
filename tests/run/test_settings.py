"""Runs whose networks cast to single precision inside, or have an operation without a rule; and their sentences."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from functools import cache
from itertools import pairwise
from math import log
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

from ntkexp.kernel.record.recorder import DispatchMode
from ntkexp.mistake import Mistake
from ntkexp.optimizer.base import AbstractStable
from ntkexp.optimizer.descent import GD, Adam, Momentum
from ntkexp.records.folder import PROVENANCE, RunFolder
from ntkexp.run.loop import train_steps
from ntkexp.run.outcome import step_size_advice
from ntkexp.run.setting import prepare
from ntkexp.run.state import begin
from tests.run.cells import OWN
from tests.run.small import Memory, execute_in, ran, small


def ending(function: str) -> tuple[str, ...]:
    """The settings of a network whose outputs pass through a function."""
    return "model=module", f"model.path={OWN}:{function}"


@pytest.mark.parametrize(
    ("casts", "low", "high", "told"),
    [
        (
            "keep",
            1e-12,
            100 * torch.finfo(torch.float32).eps,
            "the error of a secant 1e-07 of the outputs; casts=ignore",
        ),
        ("ignore", 0.0, 1e-12, "read without its casts"),
    ],
)
def test_casts_cost_their_rounding_unless_they_are_ignored(casts: str, low: float, high: float, told: str) -> None:
    run = ran(*ending("Shortened"), "path.rule=[secant]", f"path.casts={casts}", trust=[str(OWN)])
    assert low < run.error("secant") <= high
    assert told in run.outcome.sentence


def test_a_run_without_secants_says_how_its_kernels_are_read() -> None:
    sentence = ran(*ending("Entropy"), "path.rule=[left]", "steps=2", trust=[str(OWN)]).outcome.sentence
    assert "no difference rule for the operation aten.special_entr.default: the tangent is computed" in sentence
    for optimizer in ("gd", "momentum"):  # a secant is refused before training, also by an integral from the end
        with pytest.raises(
            Mistake, match=r"no difference rule for the operation aten\.special_entr.*path\.rule=\[gauss,left\]"
        ):
            prepare(small(*ending("Entropy"), "path.rule=[secant]", f"optimizer={optimizer}", trust=[str(OWN)]))


# Machines in float32 combine sums in float64 and kernels in float32.


TINY = ("data.train=8", "data.query=4", "data.test=4", "model.width=8")


def test_every_machine_of_the_ladder_speaks_of_a_run_in_float32_whose_optimizer_remembers() -> None:
    """Contributions are summed in float64 there, kernels are not: machines made of both have to bring them together."""
    run = ran("optimizer=momentum", *TINY, "steps=4", "dtype=float32")
    double = ran("optimizer=momentum", *TINY, "steps=4")
    for machine in ("fixed_coefficients", "kernel_regression", "frozen_start", "linearised", "rbf_identity"):
        for row, other in zip(run.rows(machine), double.rows(machine), strict=True):
            assert row.relative_error is not None
            assert other.relative_error is not None
            assert abs(row.relative_error - other.relative_error) < 1e-2, (machine, row.split)


# How the error of a rule falls with the step size on a smooth network, over the same path time.
#
# A sum over steps of local errors of order η^{p+1} is of order η^p: 1 for left ends, 2n for n Gauss nodes; a secant
# has
# no error to fall.


TIME = 3.0
STEP_SIZES = (0.2, 0.1, 0.05, 0.025)  # the largest is a fifth to an eighth of the largest stable one
NEAR = 0.2  # the next term of the error still shows at the largest step: a few per cent over a factor 8
SMOOTH = ("model.activation=tanh", "path.rule=[gauss,left,secant]", "path.queries=[query]", "path.schedule=1000")


@cache
def errors(points: int) -> dict[str, tuple[float, ...]]:
    """The final error of each rule at each step size."""
    shared = (*SMOOTH, f"path.quadrature_points={points}", "ladder.machine=[]")
    runs = [ran(*shared, f"optimizer.step_size={size}", f"steps={round(TIME / size)}") for size in STEP_SIZES]
    return {rule: tuple(run.error(rule) for run in runs) for rule in ("gauss", "left", "secant")}


def slope(found: tuple[float, ...]) -> float:
    """The fitted power of the step size."""
    return float(np.polyfit(list(map(log, STEP_SIZES)), list(map(log, found)), 1)[0])


@pytest.mark.parametrize(
    ("rule", "points", "order"), [("left", 1, 1), ("gauss", 1, 2), pytest.param("gauss", 2, 4, marks=pytest.mark.slow)]
)
def test_the_order_of_a_rule(rule: str, points: int, order: int) -> None:
    assert abs(slope(errors(points)[rule]) - order) < NEAR


def test_the_secant_is_exact_at_every_step_size() -> None:
    assert max(errors(1)["secant"]) < 1e-13  # √120 steps times a few eps, and some room


# How runs end: after their steps, at a loss, or by diverging, which is a finished run with advice.


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


@pytest.mark.parametrize("alpha", [100.0, 4.0, 0.25])
def test_a_centred_run_stops_at_its_loss_before_the_division_by_alpha(alpha: float) -> None:
    centred = ("init.centred=true", f"init.alpha={alpha}", "ladder.machine=[]")
    # a row of metrics holds the objective, loss/α²
    losses = [alpha**2 * cast("float", row["loss"]) for row in ran(*centred).memory.rows]
    target = 1.001 * min(losses[:11])
    stop = next(step for step, loss in enumerate(losses) if loss <= target)
    assert stop > 0
    stopped = ran(*centred, f"stop_at_loss={target!r}")
    assert stopped.outcome.steps == stop
    sentence = f"trained for {stop} steps, to a loss of {losses[stop]:.3g} (before the division by init.alpha²)"
    assert stopped.outcome.sentence == sentence


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
    assert len(run.table) == 9
    assert all(row.exact for row in run.rows("secant"))  # the sum is exact on the way to infinity too
    said = run.outcome.sentence
    assert said.startswith(f"diverged at step {run.outcome.steps}: ")
    assert (
        f"is 1.05 times the largest stable one at the start, {run.setting.start.largest_stable_step:.3g}; try " in said
    )


def test_outputs_that_overflow_have_no_accuracy() -> None:
    """Before, they counted as the first class."""
    run = ran("data.train=12", "data.query=5", "data.test=6", "steps=3", "optimizer.step_size=1e200")
    first, last = (run.memory.rows[place] for place in (0, -1))
    assert 0 <= (first["accuracy"] or 0.0) <= 1
    assert str(last["accuracy"]) == "nan"
    assert all(row.agreement is None for row in run.rows("secant"))


STABLE = 2.0


@pytest.mark.parametrize("share", [0.01, 0.5, 1.0, 1.05, 40.0])
@pytest.mark.parametrize("kind", [GD, Momentum])
def test_the_advice_is_a_smaller_step_than_the_one_that_diverged(kind: type[AbstractStable], share: float) -> None:
    """In the key that was set: the default is no answer to a run that diverged at it."""
    for key, value in {"stable_fraction": share, "step_size": share * STABLE}.items():
        said = step_size_advice(kind.model_validate({key: value}), share * STABLE, STABLE)
        found = re.fullmatch(rf".*; try optimizer\.{key}=(\S+)", said)
        assert found is not None
        assert float(found[1]) <= value / 1.01  # three digits are printed
    assert step_size_advice(Adam(), share, STABLE) == f"; try optimizer.step_size={share / 10:.3g}"


def test_outputs_beyond_all_numbers_end_a_run_as_well() -> None:
    run = ran("optimizer.step_size=1e300", "ladder.machine=[secant,left,kernel_regression]")
    assert run.outcome.diverged
    assert len(run.table) == 9


# A run takes the given number of threads, or a number that fits the work of a step. Its folder holds the number.


WORDS = ("steps=2", "path.rule=[left]", "ladder.machine=[]", "path.error_samples=0")
CORES = {0, 1, 2}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine of three cores, whatever the tests run on."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: CORES)
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def threads(place: Path, given: int | None, most: int | None = None, width: int = 16) -> int:
    """How many a run took, by its folder."""
    experiment = small(*WORDS, f"model.width={width}").model_copy(update={"threads": given})
    folder = execute_in(place, experiment, WORDS, most_threads=most)
    assert RunFolder(folder).is_intact
    taken: int = RunFolder(folder).read_sealed(PROVENANCE)["threads"]
    assert torch.get_num_threads() == taken
    return taken


@pytest.mark.usefixtures("machine")
def test_a_small_run_takes_one_thread_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    assert threads(tmp_path / "by size", None) == 1
    assert threads(tmp_path / "told", 2) == 2


@pytest.mark.usefixtures("machine")
def test_a_large_run_takes_all_that_there_are_for_it(tmp_path: Path) -> None:
    assert threads(tmp_path / "by size", None, width=1000) == len(CORES)
    assert threads(tmp_path / "of a worker", None, most=2, width=1000) == 2
    assert threads(tmp_path / "told", 1, most=2, width=1000) == 1


# A device is waited for as rarely as numbers are needed: each wait stops it between two steps.
#
# Each read of a number from a tensor is one operation, on the CPU too, so that reads can be counted. Comparisons of
# tensors and lists of places also wait, because only the device knows their length.


WAITING = {"_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2"}
"""The first is of float(tensor) and of `if tensor`, not of numbers fetched together."""


class Waits(DispatchMode):
    """Counts operations whose results Python reads, one by one."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = [each for each in args[1] if each is not None] if func._schema.name == "aten::index" else []
        chosen_by_mask = any(mask.dtype == torch.bool for mask in masks)
        self.count += func._schema.name.removeprefix("aten::") in WAITING or chosen_by_mask
        return func(*args, **(kwargs or {}))


def waits(steps: int, *overrides: str) -> int:
    """Count the waits in some steps. The first step keeps a kernel."""
    setting = prepare(small(f"steps={steps}", "path.rule=[secant]", "path.schedule=[0]", *overrides))
    listener = Memory()
    with Waits() as seen:
        train_steps(begin(setting, listener.trajectory), listener)
    found: int = seen.count
    return found


@pytest.mark.parametrize(
    ("more", "each"),
    [
        (("data.classes=[1,3,8]", "path.error_samples=0"), 0),
        (("optimizer=sgd", "optimizer.clip_norm=0.1", "path.error_samples=0"), 1),  # how much a gradient is shortened
        pytest.param(("model=cnn", "model.width=4", "model.pooling=max"), 2, marks=pytest.mark.slow),  # who is largest
    ],
    ids=["gd", "clipped", "pooled"],
)
def test_a_step_reads_no_number_by_itself_that_it_does_not_need(more: tuple[str, ...], each: int) -> None:
    assert waits(9, *more) - waits(6, *more) == 3 * each  # the first six build the programs
