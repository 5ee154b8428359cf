"""Snapshots: the written-out sum with hat functions, the path of every step, and the error bar."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from math import inf, nan
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as some
from torch import Tensor

from ntkexp.mistake import Mistake
from ntkexp.path.integrals import Rounding, StepTotals, Tally
from ntkexp.path.settings import Adaptive
from ntkexp.path.step_kernel import StepBlock
from ntkexp.run.loop import run
from ntkexp.run.outcome import miss_remarks
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
    """The sums over steps of K(t_s), interpolated linearly in time between snapshots, from hat functions.

    The error is a third of the change without every other snapshot.
    """
    setting = prepare(small(*overrides))
    steps = list(setting.descent.steps_from(setting.problem.weights))
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
    rows = setting.domain.summed_points
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
    return block.kernel(setting.experiment.path.quadrature(chosen), step.right_factor, shrinking)


def nodes(found: Ran) -> list[int]:
    """The steps of the snapshots."""
    return sorted({*(step for step in found.memory.kernels if step < 20), 19})


@pytest.mark.parametrize(("case", "schedule"), list(zip(CASES, SCHEDULES, strict=True)))
def test_sums_and_their_error_are_those_of_hat_functions(case: tuple[str, ...], schedule: str) -> None:
    found = ran(*SHORT, *case, schedule)
    for rule in ("secant", "left"):
        path, expected = found.outcome.matrices.paths[rule], written_out(nodes(found), rule, *case)
        for ours, theirs in zip((path.kernel, path.contributions, path.decay), expected[:3], strict=True):
            assert (ours - theirs).norm() <= ROUNDING * theirs.norm()
        moved = expected.contributions.sum(2) + expected.decay
        assert (found.by_step(rule).sum(2) - moved).norm() <= ROUNDING * moved.norm()
        assert path.facts["error_bar"] == pytest.approx(float(expected.error.norm() / expected.contributions.norm()))
        assert path.facts["sum_error_bar"] == pytest.approx(float(expected.error.sum(2).norm() / moved.norm()))
        assert found.outcome.by_step[rule].clipped_edges(20) == (0, *(node + 1 for node in nodes(found)))


@pytest.mark.sample(1)
@case
def test_a_snapshot_at_every_step_is_the_path_of_every_step(case: tuple[str, ...]) -> None:
    found, every = ran(*SHORT, *case, "path.schedule=1"), ran(*SHORT, *case, "path.every=1")
    for rule, path in found.outcome.matrices.paths.items():
        other = every.outcome.matrices.paths[rule]
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


# The change by each step: long paths are summed over stretches of steps.


@given(some.lists(some.floats(-1, 1), min_size=1, max_size=70), some.integers(1, 4), some.data())
def test_long_paths_are_told_in_stretches(added: list[float], pairs: int, data: some.DataObject) -> None:
    """Also from a checkpoint. All stretches but the last are equally long."""
    totals = StepTotals(zero=torch.zeros(1, 1, dtype=torch.float64), max_stretches=2 * pairs)
    kept = data.draw(some.integers(0, len(added) - 1))
    for step, change in enumerate(added):
        if step == kept:
            state, totals = totals.state, StepTotals(zero=totals.zero, max_stretches=2 * pairs)
            totals.restore(state)
        totals.add(step, slice(None), torch.full((1, 1), change, dtype=torch.float64))
    edges = totals.clipped_edges(len(added))
    assert len(edges) <= 2 * pairs + 1
    assert (edges[0], edges[-1]) == (0, len(added))
    lengths = [end - start for start, end in pairwise(edges)]
    assert len(set(lengths[:-1])) <= 1
    assert lengths[-1] <= lengths[0]
    assert lengths[0] == 1 or len(edges) > pairs  # no coarser than need be
    together = np.add.reduceat(np.array(added), edges[:-1])
    np.testing.assert_allclose(totals.stacked().flatten().numpy(), together, rtol=0, atol=1e-14)


def test_a_run_that_ends_sooner_is_told_as_far_as_it_went() -> None:
    found = ran("ladder.machine=[]", "path.rule=[secant]", "data.train=10", "steps=100000", "stop_at_loss=0.3")
    steps = found.outcome.steps
    assert 0 < steps < 100
    assert found.outcome.by_step["secant"].clipped_edges(steps) == tuple(range(steps + 1))


# When kernels are taken, where that follows from how they change.


def taken(timetable: Adaptive, rate: float) -> list[int]:
    """The steps of a run whose kernel grows by this share of its start at every step."""
    found = []
    for step in range(timetable.steps):
        if timetable.due(step):
            timetable.observe(step, torch.full((2, 1, 2, 1), 1 + rate * step, dtype=torch.float64))
            found.append(step)
    return found


@given(some.integers(1, 400), some.integers(2, 20), some.floats(1e-3, 1), some.floats(0, 1))
def test_there_is_room_for_all_of_them(steps: int, count: int, change: float, rate: float) -> None:
    timetable = Adaptive(steps, count, change)
    found = taken(timetable, rate)
    assert found[0] == 0
    assert len(found) + 1 <= timetable.capacity


def test_they_lie_as_far_apart_as_the_kernel_takes_to_change() -> None:
    found = taken(Adaptive(steps=10_000, count=1000, change=0.1), rate=0.001)
    logarithms = [torch.log1p(torch.tensor(0.001 * step)) for step in found[8:]]
    gaps = torch.stack(logarithms).diff()
    assert (gaps - 0.1).abs().max() < 0.02  # a distance is predicted from the last, which was e^0.1 times shorter


# The reported error of a step whose numbers are not finite.


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
    found = tally.closure_error(UNIT)
    assert found is not None
    other = Tally(missed=1e-4, changed=1.0, outputs=1.0).closure_error(UNIT)
    assert other is not None
    assert "misses 2 steps, most of all step 3" in miss_remarks({2: other, 3: found})[0]


@pytest.mark.parametrize("size", [inf, nan])
def test_a_run_that_has_diverged_misses_nothing(size: float) -> None:
    assert Tally(missed=nan, changed=size, outputs=size).closure_error(UNIT) is None


# The number of points in a block changes results by rounding alone.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("block", "more"),
    [(1, "path.queries=[query]"), (7, "path.queries=[query]"), (7, "path.queries=[train,query,test]")],
)
def test_small_blocks_change_rounding_alone(block: int, more: str) -> None:
    """Five steps, with sums of ten products in another order."""
    sizes = ("data.train=10", "data.query=6", "data.test=4", "steps=5", "path.count=2", "path.error_samples=2")
    found = []
    for size in (20, block):
        setting = prepare(small(*sizes, "path.rule=[secant,left,gauss]", "ladder.machine=[secant,left]", more))
        cut = replace(setting.points, block=size, cache=[])
        descent, domain = replace(setting.descent, points=cut), replace(setting.domain, points=cut, explained=cut)
        found.append(run(replace(setting, descent=descent, domain=domain), Memory()))
    whole, blocks = found
    pairs = [(blocks.weights[name], weight) for name, weight in whole.weights.items()]
    pairs += [(blocks.matrices.end, whole.matrices.end), (blocks.matrices.kernel_end, whole.matrices.kernel_end)]
    for rule, path in whole.matrices.paths.items():
        pairs += [
            (getattr(blocks.matrices.paths[rule], name), getattr(path, name)) for name in ("kernel", "contributions")
        ]
    for ours, theirs in pairs:
        scale = float(theirs.nan_to_num().abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12 * scale, equal_nan=True)
