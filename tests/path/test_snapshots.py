"""Snapshots: the written-out sum with hat functions, the path of every step, and what they say of their own error."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from math import inf, nan
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor

from ntkexp.mistake import Mistake
from ntkexp.path import integrals
from ntkexp.path.integrals import Rounding, Tally
from ntkexp.path.points import NetworkView
from ntkexp.path.settings import Adaptive
from ntkexp.path.step_kernel import StepBlock
from ntkexp.run.loop import run
from ntkexp.run.outcome import Outcome, miss_remarks
from ntkexp.run.setting import Setting, prepare
from tests.run.small import Memory, Ran, ran, small

CASES = (
    ("optimizer=gd", "optimizer.weight_decay=0.05", "optimizer.clip_norm=0.5", "path.queries=[query]"),
    ("optimizer=gd", "data.classes=[3,8]"),
    ("optimizer=sgd", "optimizer.batch=7", "data.classes=all", "loss=cross_entropy", "schedule=cosine"),
)
SCHEDULES = ("path.schedule=6", "path.schedule=[3,4,11]", "path.schedule=adaptive")
SHORT = ("path.every=snapshots", "path.count=6", "path.rule=[secant,left]", "ladder.machine=[secant]")
ROUNDING = 1e-13  # 20 steps, each adding some tens of eps

case = pytest.mark.parametrize("case", CASES, ids=lambda overrides: overrides[-1])


class Sums(NamedTuple):
    """𝒦, 𝒮, 𝒟 and the estimated error of 𝒮."""

    kernel: Tensor
    contributions: Tensor
    decay: Tensor
    error: Tensor


def written_out(taken: list[int], rule: str, *overrides: str) -> Sums:
    """The sums over steps of K(t_s), linear in time between the steps at which it was taken, from hat functions.

    The error is a third of what the sum loses without every other snapshot.
    """
    setting = prepare(small(*overrides))
    steps = list(setting.descent.walk(setting.problem.weights))
    times = np.concatenate([[0.0], np.cumsum([step.step_size for step in steps])])
    sizes = torch.tensor([step.step_size for step in steps], dtype=torch.float64)
    impulses = torch.stack([step.step_size * step.output_gradient for step in steps])
    hats = torch.tensor(np.array([np.interp(times[:-1], times[taken], row) for row in np.eye(len(taken))]))
    kernels, pulls = zip(*(read(setting, steps[node], rule) for node in taken), strict=True)
    weights, sums = hats @ sizes, torch.einsum("ks,snd->knd", hats, impulses)
    error = torch.zeros_like(contracted(kernels[0], sums[0]))
    for k in range(1, len(taken) - 1, 2):
        before, here, after = times[[taken[k - 1], taken[k], taken[k + 1]]]
        interpolated = torch.lerp(kernels[k - 1], kernels[k + 1], (here - before) / (after - before))
        error += contracted(kernels[k] - interpolated, sums[k]) / 3
    rows = setting.domain.read
    return Sums(
        kernel=torch.einsum("k,kqcnd->qcnd", weights, torch.stack(kernels))[rows],
        contributions=-torch.stack(list(map(contracted, kernels, sums))).sum(0)[rows],
        decay=-torch.einsum("k,kqc->qc", weights, torch.stack(pulls))[rows],
        error=error[rows],
    )


def contracted(kernel: Tensor, output_gradient: Tensor) -> Tensor:
    """K ℓ′."""
    return torch.einsum("qcnd,nd->qcn", kernel, output_gradient)


def read(setting: Setting, step: Any, rule: str) -> tuple[Tensor, Tensor]:
    """The kernel of a step at all points, and λJ̄·θ."""
    block = StepBlock(setting.points, step.segment, slice(0, len(setting.points.inputs)))
    (chosen,) = (each for each in setting.experiment.path.rule if each.option == rule)
    shrinking = {name: step.weight_decay * weight for name, weight in step.view.weights.items()}
    return block.kernel(setting.experiment.path.quadrature(chosen), step.side, shrinking)


def nodes(found: Ran) -> list[int]:
    """The steps of the snapshots."""
    return sorted({*(step for step in found.memory.kernels if step < 20), 19})


@pytest.mark.parametrize(("case", "schedule"), list(zip(CASES, SCHEDULES, strict=True)))
def test_sums_and_their_error_are_those_of_hat_functions(case: tuple[str, ...], schedule: str) -> None:
    found = ran(*SHORT, *case, schedule)
    for rule in ("secant", "left"):
        path, expected = found.outcome.evidence.paths[rule], written_out(nodes(found), rule, *case)
        for ours, theirs in zip((path.kernel, path.contributions, path.decay), expected[:3], strict=True):
            assert (ours - theirs).norm() <= ROUNDING * theirs.norm()
        moved = expected.contributions.sum(2) + expected.decay
        assert (found.by_step(rule).sum(2) - moved).norm() <= ROUNDING * moved.norm()
        assert path.facts["error_bar"] == pytest.approx(float(expected.error.norm() / expected.contributions.norm()))
        assert path.facts["sum_error_bar"] == pytest.approx(float(expected.error.sum(2).norm() / moved.norm()))
        assert found.outcome.by_step[rule].until(20) == (0, *(node + 1 for node in nodes(found)))


@pytest.mark.sample(1)
@case
def test_a_snapshot_at_every_step_is_the_path_of_every_step(case: tuple[str, ...]) -> None:
    found, every = ran(*SHORT, *case, "path.schedule=1"), ran(*SHORT, *case, "path.every=1")
    for rule, path in found.outcome.evidence.paths.items():
        other = every.outcome.evidence.paths[rule]
        steps = found.by_step(rule), every.by_step(rule)
        for ours, theirs in ((path.kernel, other.kernel), (path.decay, other.decay), steps):
            assert ours.numel()
            assert (ours - theirs).norm() <= ROUNDING * theirs.norm()
    assert found.error("left") == pytest.approx(every.error("left"), rel=1e-9)
    for rows in zip(found.memory.rows, every.memory.rows, strict=True):
        for column in ("closure", "contribution_mass", "contribution_sum", "kernel_mass"):
            numbers = [row.get(column) or 0.0 for row in rows]  # none after the last step
            assert numbers[0] == pytest.approx(numbers[1], rel=1e-9, abs=ROUNDING)


@pytest.mark.parametrize("ending", [pytest.param("stop_at_loss=1e-9", marks=pytest.mark.slow), "stop_at_loss=0.2"])
def test_a_kernel_that_does_not_move_needs_two(ending: str) -> None:
    found = ran(*SHORT, "model.depth=0", "path.schedule=100", ending)
    assert found.error("secant") < ROUNDING
    assert found.outcome.steps == (20 if ending == "stop_at_loss=1e-9" else len(found.memory.rows) - 1)


def test_a_run_that_ends_sooner_is_closed_at_its_end() -> None:
    found = ran(*SHORT, "model.activation=tanh", "steps=200", "path.count=12", "stop_at_loss=0.1")
    assert 0 < found.outcome.steps < 199
    assert found.error("secant") < 0.05  # the open interval alone is most of the path
    assert found.outcome.by_step["secant"].edges[-1] == found.outcome.steps


LONG = (*SHORT, "model.activation=tanh", "steps=200", "path.queries=[query]", "path.rule=[secant]")


@cache
def every_step() -> Tensor:
    """The parts of a long run, from every step."""
    return ran(*LONG, "path.every=1").contributions("secant")


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["log", pytest.param("adaptive", marks=pytest.mark.slow)])
def test_the_estimate_of_its_error_is_right(schedule: str) -> None:
    found = ran(*LONG, f"path.schedule={schedule}", "path.count=10")
    true = float((found.contributions("secant") - every_step()).norm() / every_step().norm())
    assert true / 3 < found.error_bar < 3 * true


def test_what_remembers_is_refused() -> None:
    with pytest.raises(
        Mistake, match=r"path\.every=snapshots: optimizer=adam carries past gradients .* use path\.every=1"
    ):
        small("path.every=snapshots", "optimizer=adam")


# What came of each step, where steps are summed as they are taken: the change of the outputs, step by step.


QUICK = ("path.rule=[secant,left]", "ladder.machine=[]", "data.train=10", "data.query=5", "data.test=4")
TOTALS = {
    "decay": ("optimizer.weight_decay=0.1", "path.queries=[query]"),
    "clipped": ("optimizer=sgd", "optimizer.batch=3", "optimizer.clip_norm=0.5", "data.classes=all"),
    "kernel free": ("path.kernels=none", "path.outputs=[2,7]", "data.classes=all"),
    "float32": ("dtype=float32",),
}
BACK = "optimizer=momentum"


@cache
def undisturbed(*words: str) -> Ran:
    """A run of which every step is told by itself."""
    return ran(*QUICK, *words)


SOME = ("clipped", *(pytest.param(name, marks=pytest.mark.slow) for name in TOTALS if name != "clipped"))


@pytest.mark.parametrize("case", SOME)
def test_it_is_the_change_of_the_outputs(case: str) -> None:
    found = undisturbed(*TOTALS[case])
    points, domain = found.setting.points, found.setting.domain
    ways = [found.setting.problem.weights, *found.memory.weights]
    outputs = torch.stack([NetworkView(points, weights).outputs for weights in ways], dim=2)
    changes = outputs.diff(dim=2)[domain.read][:, list(domain.integrated)]
    eps = torch.finfo(changes.dtype).eps
    assert (found.by_step("secant") - changes).abs().max() < 100 * eps * outputs.abs().max()  # of tens of layers' terms
    for rule, path in found.outcome.evidence.paths.items():
        together, sums = path.contributions.sum(2) + path.decay, found.by_step(rule)
        assert (sums.sum(2) - together).abs().max() < 100 * eps * path.contributions.abs().sum(2).max()


@pytest.mark.parametrize("words", [(), pytest.param((BACK,), marks=pytest.mark.slow)], ids=["online", "back"])
def test_long_paths_are_told_in_stretches(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    exact = undisturbed(*words).by_step("secant")
    monkeypatch.setattr(integrals, "MAX_TOTALS", 1)
    monkeypatch.setattr(integrals, "MIN_STRETCHES", 4)
    found = ran(*QUICK, *words)
    edges = found.outcome.by_step["secant"].until(found.outcome.steps)
    assert edges == (0, 8, 16, 20)
    together = np.add.reduceat(exact.numpy(), edges[:-1], axis=2)
    tolerance = 1e-14 * float(exact.abs().max())  # sums of 8 numbers
    np.testing.assert_allclose(found.by_step("secant").numpy(), together, atol=tolerance)


def test_a_run_that_ends_sooner_is_told_as_far_as_it_went() -> None:
    found = ran(*QUICK, "steps=100000", "stop_at_loss=0.3")
    steps = found.outcome.steps
    assert 0 < steps < 100
    assert found.outcome.by_step["secant"].until(steps) == tuple(range(steps + 1))


# When kernels are taken, where that follows from how they change.


def taken(timetable: Adaptive, rate: float) -> list[int]:
    """The steps of a run whose kernel grows by this share of its start at every step."""
    found = []
    for step in range(timetable.steps):
        if timetable.due(step):
            timetable.saw(step, torch.full((2, 1, 2, 1), 1 + rate * step, dtype=torch.float64))
            found.append(step)
    return found


@given(some.integers(1, 400), some.integers(2, 20), some.floats(1e-3, 1), some.floats(0, 1))
def test_there_is_room_for_all_of_them(steps: int, count: int, change: float, rate: float) -> None:
    timetable = Adaptive(steps, count, change)
    found = taken(timetable, rate)
    assert found[0] == 0
    assert len(found) + 1 <= timetable.room


def test_they_lie_as_far_apart_as_the_kernel_takes_to_change() -> None:
    found = taken(Adaptive(steps=10_000, count=1000, change=0.1), rate=0.001)
    logarithms = [torch.log1p(torch.tensor(0.001 * step)) for step in found[8:]]
    gaps = torch.stack(logarithms).diff()
    assert (gaps - 0.1).abs().max() < 0.02  # a distance is predicted from the last, which was e^0.1 times shorter


# What a step is said to have missed, where numbers are none.


UNIT = Rounding(terms=1.0, eps=2.0**-52)


@pytest.mark.parametrize(
    "tally",
    [
        Tally(missed=nan, changed=1.0, outputs=1.0),
        Tally(missed=nan, changed=1.0, outputs=1.0, contribution_mass=nan),
        Tally(missed=inf, changed=1.0, outputs=1.0, contribution_mass=inf),
        Tally(missed=1e-3, changed=1.0, outputs=1.0, contribution_mass=nan),
    ],
)
def test_an_error_that_is_no_number_is_not_explained_by_rounding(tally: Tally) -> None:
    found = tally.miss(UNIT)
    assert found is not None
    other = Tally(missed=1e-4, changed=1.0, outputs=1.0).miss(UNIT)
    assert other is not None
    assert "misses 2 steps, most of all step 3" in miss_remarks({2: other, 3: found})[0]


@pytest.mark.parametrize("size", [inf, nan])
def test_a_run_that_has_diverged_misses_nothing(size: float) -> None:
    assert Tally(missed=nan, changed=size, outputs=size).miss(UNIT) is None


# How many points are read at once moves results by rounding alone, and whether tapes are kept not at all.


SIZES = ("data.train=10", "data.query=6", "data.test=4", "steps=5", "path.count=2")
CHOSEN = (*SIZES, "path.rule=[secant,left,gauss]", "path.error_samples=2", "ladder.machine=[secant,left]")
WHOLE = 20
BLOCKS_ROUNDING = 1e-12  # sums of ten products in another order, through five steps


def outcome(block: int, *overrides: str, keep: bool = True) -> Outcome:
    """The same run, with points read so many at a time."""
    setting = prepare(small(*CHOSEN, *overrides))
    points = setting.points
    cut = replace(points, block=block, keep=keep, cache=[])
    descent, domain = replace(setting.descent, points=cut), replace(setting.domain, points=cut, explained=cut)
    return run(replace(setting, descent=descent, domain=domain), Memory())


def numbers(found: Outcome) -> dict[str, Tensor]:
    """All that a run leaves."""
    paths = {f"{name}.{what}": getattr(path, what) for name, path in found.evidence.paths.items() for what in PARTS}
    return paths | {"end": found.evidence.end, "kernel": found.evidence.kernel_end} | found.weights


PARTS = ("kernel", "contributions")


@pytest.mark.slow
@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("block", "more"),
    [
        (1, ("path.queries=[query]",)),
        (7, ("path.queries=[query]",)),
        (7, ("path.queries=[train,query,test]",)),
    ],
)
def test_small_blocks_change_rounding_alone(block: int, more: tuple[str, ...]) -> None:
    whole, cut = (numbers(outcome(size, *more)) for size in (WHOLE, block))
    for name, value in whole.items():
        scale = float(value.nan_to_num().abs().max())
        torch.testing.assert_close(cut[name], value, rtol=0, atol=BLOCKS_ROUNDING * scale, equal_nan=True)


@pytest.mark.parametrize("block", [7, WHOLE])
def test_keeping_tapes_changes_nothing(block: int) -> None:
    kept, dropped = (numbers(outcome(block, keep=keep)) for keep in (True, False))
    for name, value in kept.items():
        assert torch.equal(dropped[name], value), name
