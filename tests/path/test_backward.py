"""The sum backwards, compared with the sum forwards, which has one memory for each training example and step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from ntkexp.kernel.features.jacobian import Jacobian
from ntkexp.mistake import Mistake
from ntkexp.optimizer.descent import GD
from ntkexp.path.integration import fair_counts
from ntkexp.path.recording import STRETCHES, halves_at_zero
from ntkexp.path.step_kernel import StepBlock
from ntkexp.path.two_passes import sample_points
from ntkexp.run.loop import run
from ntkexp.run.outcome import Outcome
from ntkexp.run.setting import Setting, prepare
from tests.kernel.oracle import by_name
from tests.run.small import Memory, Ran, ran, small
from tests.run.test_exactness import DECAY, REMEMBERING

ALL = ("path.attributed=1000", "steps=9", "model.width=8", "data.train=10", "data.query=5", "data.test=4")
QUICK = (*ALL, "path.rule=[secant]", "ladder.machine=[secant]")
ROUNDING = 1e-12  # 9 steps, each some tens of eps; Adam divides by small numbers


def dense(features: Jacobian, like: Mapping[str, Tensor]) -> Tensor:
    """Multiply the Jacobian out: [example, out, P]."""
    rows = {
        name: torch.zeros(features.examples, features.outputs, w.numel(), dtype=w.dtype) for name, w in like.items()
    }
    for block in features.blocks:
        for name, part in by_name(block).items():
            rows[name][:, :, : part.shape[2]] += part
    return torch.cat(list(rows.values()), dim=2)


def flat(weights: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([weight.flatten() for weight in weights.values()])


@cache
def summed(case: str) -> Ran:
    """A run whose path is summed backwards, by two rules."""
    return ran(*ALL, *REMEMBERING[case], "path.rule=[secant,left]", "ladder.machine=[]")


@cache
def forwards(case: str, rule: str, first: int = 0, count: int | None = None) -> Tensor:
    """The change by each step's gradient of each example, and by its decay: [point, out, step, example], decay last.

    Each gradient passes through a copy of the optimizer's memory. Only `count` weights from the first one on change.
    """
    setting = summed(case).setting
    optimizer: Any = setting.experiment.optimizer
    like, path = setting.problem.weights, setting.experiment.path
    among = slice(first, None if count is None else first + count)
    (piece,) = path.quadrature(next(each for each in path.rule if each.option == rule))
    train, outputs, steps = setting.points.train, setting.problem.targets.shape[1], setting.experiment.steps
    found = torch.zeros(len(setting.problem.targets), outputs, steps, train + 1, dtype=torch.float64)
    memory = torch.zeros(steps, train + 1, flat(like).numel(), dtype=torch.float64)
    for step in setting.descent.steps_from(like):
        r, pulls, lost = step.index, torch.zeros_like(memory), torch.zeros_like(memory)
        rows = torch.cat([dense(block, like) for block in step.view.train_jacobians])
        sizes = flat({name: torch.full_like(w, step.step_size * step.factors[name]) for name, w in like.items()})
        pulls[r, :-1] = torch.einsum("nc,ncp->np", step.output_gradient, rows)
        (lost if optimizer.decouples else pulls)[r, -1] = optimizer.weight_decay * flat(step.segment.start)
        if hasattr(optimizer, "betas"):
            first, second = optimizer.betas
            memory = first * memory + (1 - first) * pulls
            spread = (flat(step.memory["square"]) / (1 - second ** (r + 1))).sqrt() + optimizer.eps
            moved = memory / (1 - first ** (r + 1)) / spread
        elif "square" in step.memory:  # RMSprop carries nothing from step to step but its denominator
            moved = pulls / (flat(step.memory["square"]).sqrt() + optimizer.eps)
        else:
            memory = optimizer.momentum * memory + (1 - getattr(optimizer, "dampening", 0.0) * (r > 0)) * pulls
            moved = memory if hasattr(optimizer, "dampening") else pulls + optimizer.momentum * memory
        moved = (sizes * (moved + lost))[..., among]
        for place in setting.domain.block_slices:
            jacobian = dense(StepBlock(setting.points, step.segment, place).jacobian(piece), like)[..., among]
            found[place] -= torch.einsum("qcp,snp->qcsn", jacobian, moved)
    return found


@pytest.mark.parametrize(
    ("case", "rule"),  # by the left end, one that remembers in each of the two ways
    [
        pytest.param(
            case, rule, marks=() if (case, rule) in {("nesterov", "secant"), ("adam", "left")} else pytest.mark.slow
        )
        for case in REMEMBERING
        for rule in ("secant", "left")
    ],
)
def test_the_parts_are_those_of_the_sum_forwards(case: str, rule: str) -> None:
    """Contributions of examples, decay, steps and components, and the times of half of each contribution."""
    found, expected = summed(case), forwards(case, rule)
    path, sums = found.outcome.matrices.paths[rule], found.outcome.by_component.get(rule)
    whole, size = expected.sum(2), expected.sum(2).norm()
    assert (path.contributions - whole[..., :-1]).norm() < ROUNDING * size
    assert (path.decay - whole[..., -1]).norm() <= ROUNDING * size
    assert (found.by_step(rule) - expected.sum(3)).norm() < ROUNDING * expected.sum(3).norm()
    if case == "nesterov":
        assert sums is not None
        at = 0
        for k, name in enumerate(sums.components):
            count = found.setting.problem.weights[name].numel()
            share = forwards(case, rule, at, count).sum(2)
            at += count
            assert (sums.parts[..., k] - share[..., :-1]).norm() <= ROUNDING * size, name
            assert (sums.decay[..., k] - share[..., -1]).norm() <= ROUNDING * size, name
    if case in {"nesterov", "adam"}:
        assert path.half_by is not None
        masses = expected[..., :-1].abs().movedim(2, 0).flatten(1)
        sizes = [found.setting.descent.step_size_at(step) for step in range(len(masses))]
        np.testing.assert_allclose(path.half_by.flatten(), halves_of(masses, sizes), rtol=1e-9)  # masses to some 1e-12


def halves_of(masses: Tensor, sizes: list[float]) -> list[float]:
    """The share of the time after which half of each column is reached, if each step acts evenly."""
    gathered = np.cumsum(np.vstack([np.zeros(masses.shape[1]), masses]), axis=0)
    times = np.cumsum([0.0, *sizes])
    return [float(np.interp(one[-1] / 2, one, times) / times[-1]) if one[-1] else np.nan for one in gathered.T]


@pytest.mark.parametrize("steps", [1, 19, 20, 21, 137])
def test_a_stretch_dates_to_its_own_length(steps: int) -> None:
    masses = torch.rand(steps, 8, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 4
    masses[:, 0] = 0.0  # a part of zero has no time
    halves, sizes = halves_at_zero(steps, masses[0]), [1.0 + k / steps for k in range(steps)]
    for step in reversed(range(steps)):
        halves.add(step, slice(0, 8), masses[step])
    found, exact = halves.half_times(sizes).flatten(), halves_of(masses.flatten(1), sizes)
    assert found[0].isnan()
    # a stretch is a twentieth of the steps and one at most, and the longest step is twice the shortest
    tolerance = 1e-12 if steps <= STRETCHES else 2 * (1 / STRETCHES + 1 / steps)
    np.testing.assert_allclose(found, exact, atol=tolerance)


def test_the_shares_of_steps_are_no_less_than_the_whole() -> None:
    """Σ|Δ𝒮| over steps is at least |Σ 𝒮|, and equal where no step takes back what another did."""
    found = summed("adam")
    mass = sum(float(share["contribution_mass"] or 0) for share in found.memory.shares)
    assert len(found.memory.shares) == 9
    assert all(float(share["closure"] or 0) < 1e-11 for share in found.memory.shares)  # the rounding of f in one step
    assert mass >= float(found.contributions("secant").abs().sum()) * (1 - 1e-13)  # sums of ~1000 terms


class Remembering(GD):
    """Gradient descent that is summed backwards, as if it had a memory."""

    needs_backward_sum: ClassVar[bool] = True


SUBSTEPS, LAYERS = ("path.substeps=2",), ("optimizer.layers={network.3: 0.25}", DECAY, "optimizer.clip_norm=0.2")


def same_sums(one: Outcome, other: Outcome) -> None:
    """Assert that 𝒦, 𝒮, 𝒟 and the components of two runs differ by rounding."""
    for rule, path in one.matrices.paths.items():
        again, sums, other_sums = other.matrices.paths[rule], one.by_component.get(rule), other.by_component.get(rule)
        pairs = [(getattr(path, name), getattr(again, name)) for name in ("kernel", "contributions", "decay")]
        if sums is not None and other_sums is not None:
            pairs += [(sums.parts, other_sums.parts), (sums.decay, other_sums.decay)]
        for ours, theirs in pairs:
            assert (ours - theirs).norm() <= ROUNDING * ours.norm()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (SUBSTEPS, "secant"),
        (SUBSTEPS, "left"),
        (LAYERS, "left"),
        (LAYERS, "gauss"),
        (SUBSTEPS, "gauss"),
        (LAYERS, "secant"),
    ],
)
def test_without_memory_backwards_is_forwards(settings: tuple[str, ...], rule: str) -> None:
    """For a run with several outputs, a part of it skipped by clipping, by component."""
    words = (*ALL, "data.classes=all", *settings, f"path.rule=[{rule}]", "ladder.machine=[]", "path.by=parameter")
    experiment = small(*words)
    backwards = experiment.model_copy(update={"optimizer": Remembering(**experiment.optimizer.model_dump())})
    same_sums(*(run(prepare(chosen), Memory()) for chosen in (experiment, backwards)))


def test_chunks_change_the_result_by_rounding() -> None:
    setting = prepare(small(*QUICK, *REMEMBERING["adam"]))
    chunks: list[Setting] = [replace(setting, domain=replace(setting.domain, chunk=chunk)) for chunk in (19, 4)]
    same_sums(*(run(each, Memory()) for each in chunks))


def test_a_few_points_of_every_split_are_attributed() -> None:
    found = ran("optimizer=adam", "steps=3", "path.attributed=10")
    evidence = found.outcome.matrices
    assert evidence.attributed.nonzero()[:, 0].tolist() == [0, 1, 2, 3, 24, 25, 26, 36, 37, 38]
    assert torch.equal(evidence.path.contributions.isfinite().all(2)[:, 0], evidence.attributed)
    table = found.table
    assert "at 3 of 12 points" in table["secant", "query"].note
    assert table["kernel_regression", "train"].note == "4 of 24 training examples are attributed: raise path.attributed"
    assert "scales every weight by its own factor" in table["linearised", "test"].note


@pytest.mark.parametrize("count", [0, 1, 7, 100])
@pytest.mark.parametrize("sizes", [(5,), (1, 9), (3, 3, 3), ()])
def test_shares_are_as_even_as_the_groups_allow(count: int, sizes: tuple[int, ...]) -> None:
    counts = fair_counts(count, sizes)
    assert sum(counts) == min(count, sum(sizes))
    assert all(t <= size for t, size in zip(counts, sizes, strict=True))
    short = [t for t, size in zip(counts, sizes, strict=True) if t < size]
    assert max(short, default=0) - min(short, default=0) <= 1


def test_adjoints_that_do_not_fit_are_a_mistake() -> None:
    with pytest.raises(Mistake, match=r"memory_gb=0\.75 is less than the .* GB of this run with the attribution"):
        prepare(small("optimizer=adam", "model.width=1024", "memory_gb=0.75", "data.classes=all"))


SMOOTH = ("model.activation=tanh", "steps=8", "model.width=16", "data.train=10", "data.query=6", "data.test=0")
MEASURED = (*SMOOTH, "path.rule=[secant]", "ladder.machine=[]", "path.attributed=1000")


@pytest.mark.parametrize(
    ("case", "cut"),
    [
        pytest.param("nesterov", (), marks=pytest.mark.slow),
        ("momentum", ("path.substeps=2", "path.romberg=1")),
        pytest.param("adamw", (), marks=pytest.mark.slow),
    ],
)
def test_the_error_bar_is_the_distance_from_a_finer_quadrature(case: str, cut: tuple[str, ...]) -> None:
    """Eight substeps are off by a 64th of what one is: the bar, of higher order itself, is off by a few per cent."""
    found = ran(*MEASURED, *REMEMBERING[case], *cut, "path.error_samples=1000")
    finer = ran(*MEASURED, *REMEMBERING[case], *cut, "path.substeps=8", "path.error_samples=0")
    difference = found.contributions("secant") - finer.contributions("secant")
    measured = float(difference.norm() / found.contributions("secant").norm())
    assert measured > 1e-9  # there is an error to be measured
    assert found.error_bar == pytest.approx(measured, rel=0.05)
    assert "error_bar" not in finer.outcome.matrices.path.facts


def test_a_sample_of_the_points_stands_for_all() -> None:
    """‖𝒮 − 𝒮_integral‖² ≈ Q/m Σ ‖(𝒮_2n − 𝒮_n) · 4/3‖² over m of the Q points."""
    one, two = (ran(*MEASURED, *REMEMBERING["momentum"], f"path.substeps={n}").contributions("secant") for n in (1, 2))
    for count in (1000, 8, 3):
        found = ran(*MEASURED, *REMEMBERING["momentum"], f"path.error_samples={count}")
        sample = sample_points(len(one), count)
        expected = 4 / 3 * (two - one)[sample].norm() * (len(one) / len(sample)) ** 0.5 / one.norm()
        assert found.error_bar == pytest.approx(float(expected), rel=1e-6)  # a difference that lost some digits
        assert torch.equal(found.contributions("secant"), one)
