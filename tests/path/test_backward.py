"""The sum backwards, compared with the sum forwards: a memory of its own for every training example."""

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
from ntkexp.run.loop import run
from ntkexp.run.setting import Setting, prepare
from tests.kernel.oracle import by_name
from tests.run.small import Memory, Ran, ran, small

ALL = ("path.attributed=1000", "steps=9", "model.width=8", "data.train=10", "data.query=5", "data.test=4")
QUICK = (*ALL, "path.rule=[secant]", "ladder.machine=[secant]")
DECAY = "optimizer.weight_decay=0.3"
CASES = {
    "momentum": ("optimizer=momentum", "optimizer.dampening=0.3", DECAY),
    "nesterov": ("optimizer=nesterov", "optimizer.batch=3", DECAY),
    "rmsprop": ("optimizer=rmsprop", "optimizer.batch=3", DECAY, "optimizer.clip_norm=0.2"),
    "adam": ("optimizer=adam", "optimizer.step_size=0.05", DECAY, "optimizer.clip_norm=0.2"),
    "amsgrad": ("optimizer=adam", "optimizer.step_size=0.05", "optimizer.amsgrad=true", "optimizer.batch=3"),
    "adamw": ("optimizer=adamw", "optimizer.step_size=0.05", DECAY, "schedule=cosine", "data.classes=all"),
    "layers": ("optimizer=nesterov", "optimizer.layers={network.1: 0.25}", DECAY, "optimizer.clip_norm=0.2"),
}
ROUNDING = 1e-12  # 9 steps, each some tens of eps; Adam divides by small numbers


def dense(features: Jacobian, like: Mapping[str, Tensor]) -> Tensor:
    """[example, out, P], multiplied out."""
    parts = {name: torch.zeros(features.examples, features.outputs, w.numel(), dtype=w.dtype)
             for name, w in like.items()}  # fmt: skip
    for block in features.blocks:
        for name, rows in by_name(block).items():
            parts[name][:, :, : rows.shape[2]] += rows
    return torch.cat(list(parts.values()), dim=2)


def flat(weights: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([weight.flatten() for weight in weights.values()])


@cache
def summed(case: str) -> Ran:
    """A run whose path is summed backwards, by two rules."""
    return ran(*QUICK, *CASES[case], "path.rule=[secant,left]")


def forwards(setting: Setting, rule: str, only: int | None = None, among: slice = slice(None)) -> tuple[Tensor, Tensor]:
    """𝒮 and 𝒟: each example's gradients pass through a copy of the optimizer's memory, and decay through another; those
    of all steps, or of one alone; and what they did through all weights, or through those in one place.
    """
    optimizer: Any = setting.experiment.optimizer
    like, path = setting.problem.weights, setting.experiment.path
    (piece,) = path.quadrature(next(each for each in path.rule if each.option == rule))
    train, outputs = setting.points.train, setting.problem.targets.shape[1]
    found = torch.zeros(len(setting.problem.targets), outputs, train + 1, dtype=torch.float64)
    memory = torch.zeros(train + 1, flat(setting.problem.weights).numel(), dtype=torch.float64)
    for step in setting.descent.walk(setting.problem.weights):
        theta, r = flat(step.segment.start), step.index
        rows = torch.cat([dense(block, like) for block in step.view.right])
        own = torch.einsum("nc,ncp->np", step.output_gradient, rows) * (only in (None, r))
        sizes = flat({name: torch.full_like(w, step.step_size * step.factors[name]) for name, w in like.items()})
        decay = optimizer.weight_decay * theta * (only in (None, r))
        pulls = torch.cat([own, (0 * decay if optimizer.decouples else decay)[None]])
        if hasattr(optimizer, "betas"):
            first, second = optimizer.betas
            memory = first * memory + (1 - first) * pulls
            spread = (flat(step.memory["square"]) / (1 - second ** (r + 1))).sqrt() + optimizer.eps
            moved = sizes / (1 - first ** (r + 1)) / spread * memory
        elif "square" in step.memory:  # RMSprop: nothing is carried from step to step but what it divides by
            moved = sizes / (flat(step.memory["square"]).sqrt() + optimizer.eps) * pulls
        else:
            fresh = 1 - getattr(optimizer, "dampening", 0.0) * (r > 0)
            memory = optimizer.momentum * memory + fresh * pulls
            moved = sizes * (memory if hasattr(optimizer, "dampening") else pulls + optimizer.momentum * memory)
        if optimizer.decouples:
            moved = torch.cat([moved[:-1], moved[-1:] + sizes * decay])
        for place in setting.domain.places:
            block = StepBlock(setting.points, step.segment, place)
            found[place] -= dense(block.jacobian(piece), like)[..., among] @ moved[:, among].t()
    return found[..., :-1], found[..., -1]


RULED = [  # by the left end, what remembers in each of the two ways
    pytest.param(case, rule, marks=() if rule == "secant" or case in {"momentum", "adam"} else pytest.mark.slow)
    for case in CASES
    for rule in ("secant", "left")
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("case", "rule"), RULED)
def test_the_parts_are_those_of_the_sum_forwards(case: str, rule: str) -> None:
    found = summed(case)
    parts, decay = forwards(found.setting, rule)
    path = found.outcome.evidence.paths[rule]
    assert (path.contributions - parts).norm() < ROUNDING * parts.norm()
    assert (path.decay - decay).norm() <= ROUNDING * (decay.norm() + parts.norm())


@pytest.mark.parametrize("case", CASES)
def test_the_network_is_the_sum_of_its_parts(case: str) -> None:
    found = summed(case)
    for row in found.rows("secant"):
        assert row.exact, row
    for share in found.memory.shares:
        assert float(share["closure"] or 0) < 1e-11, share  # the rounding of f over the change of a step


def test_the_shares_of_steps_add_up() -> None:
    """Σ|Δ𝒮| over steps is at least |Σ 𝒮|; each step's parts are what its gradients did, now and later."""
    found = summed("adam")
    mass = sum(float(share["contribution_mass"] or 0) for share in found.memory.shares)
    assert len(found.memory.shares) == 9
    whole = float(found.contributions("secant").abs().sum())
    assert mass >= whole * (1 - 1e-13)  # equal where no step takes back what another did: both are sums of ~1000 terms


class Remembering(GD):
    """Gradient descent that is summed backwards, as if it had a memory."""

    remembers: ClassVar[bool] = True


PIECES, LAYERS = ("path.pieces=2",), ("optimizer.layers={network.3: 0.25}", DECAY, "optimizer.clip_norm=0.2")


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        (PIECES, "[secant]"),
        (LAYERS, "[left]"),
        (PIECES, "[gauss]"),
        *(
            pytest.param(settings, rule, marks=pytest.mark.slow)
            for settings, rule in ((LAYERS, "[secant]"), (PIECES, "[left]"), (LAYERS, "[gauss]"))
        ),
    ],
)
def test_without_memory_backwards_is_forwards(settings: tuple[str, ...], rule: str) -> None:
    """𝒦, 𝒮 and 𝒟, of a run with several outputs, a part of it skipped by clipping."""
    experiment = small(*ALL, "data.classes=all", *settings, f"path.rule={rule}", "ladder.machine=[]")
    backwards = experiment.model_copy(update={"optimizer": Remembering(**experiment.optimizer.model_dump())})
    first, second = (run(prepare(chosen), Memory()).evidence for chosen in (experiment, backwards))
    for one, other in ((first.path.kernel, second.path.kernel), (first.path.contributions, second.path.contributions),
                       (first.path.decay, second.path.decay)):  # fmt: skip
        assert (one - other).norm() <= ROUNDING * one.norm()


def test_chunks_change_the_result_by_rounding() -> None:
    setting = prepare(small(*QUICK, *CASES["adam"]))
    whole, cut = (run(in_chunks(setting, chunk), Memory()).evidence.path for chunk in (19, 4))
    assert (whole.contributions - cut.contributions).norm() <= ROUNDING * whole.contributions.norm()
    assert (whole.kernel - cut.kernel).norm() <= ROUNDING * whole.kernel.norm()


def in_chunks(setting: Setting, chunk: int) -> Setting:
    """The same, with so many points attributed at once."""
    return replace(setting, domain=replace(setting.domain, chunk=chunk))


def test_a_few_points_of_every_split_are_attributed() -> None:
    found = ran("optimizer=adam", "steps=3", "path.attributed=10")
    evidence = found.outcome.evidence
    assert evidence.attributed.nonzero()[:, 0].tolist() == [0, 1, 2, 3, 24, 25, 26, 36, 37, 38]
    assert torch.equal(evidence.path.contributions.isfinite().all(2)[:, 0], evidence.attributed)
    table = found.table
    assert "at 3 of 12 points" in table["secant", "query"].note
    assert table["kernel_regression", "train"].note == "4 of 24 training examples are attributed: raise path.attributed"
    assert "scales every weight by its own factor" in table["linearised", "test"].note


@pytest.mark.parametrize("count", [0, 1, 7, 100])
@pytest.mark.parametrize("sizes", [(5,), (1, 9), (3, 3, 3), ()])
def test_shares_are_as_even_as_the_groups_allow(count: int, sizes: tuple[int, ...]) -> None:
    taken = fair_counts(count, sizes)
    assert sum(taken) == min(count, sum(sizes))
    assert all(t <= size for t, size in zip(taken, sizes, strict=True))
    short = [t for t, size in zip(taken, sizes, strict=True) if t < size]
    assert max(short, default=0) - min(short, default=0) <= 1


def test_brackets_that_do_not_fit_are_a_mistake() -> None:
    with pytest.raises(Mistake, match=r"memory_gb=0\.75 is less than the .* GB of this run with the attribution"):
        prepare(small("optimizer=adam", "model.width=1024", "memory_gb=0.75", "data.classes=all"))


@cache
def alone(case: str) -> list[tuple[Tensor, Tensor]]:
    """𝒮 and 𝒟 of each step alone."""
    setting = summed(case).setting
    return [forwards(setting, "secant", step) for step in range(setting.experiment.steps)]


@pytest.mark.parametrize("case", ["nesterov", "adam", pytest.param("adamw", marks=pytest.mark.slow)])
def test_what_came_of_a_step_is_what_its_gradients_and_its_decay_did(case: str) -> None:
    found, path = summed(case), summed(case).outcome.evidence.path
    expected = torch.stack([parts.sum(2) + decay for parts, decay in alone(case)], dim=2)
    assert (found.by_step("secant") - expected).norm() < ROUNDING * expected.norm()
    together = path.contributions.sum(2) + path.decay
    assert (found.by_step("secant").sum(2) - together).norm() < ROUNDING * together.norm()


@pytest.mark.parametrize("case", ["nesterov", "adam"])
def test_half_was_done_when_the_gradients_had_done_half(case: str) -> None:
    """By the oracle with the gradients of one step alone: an example acts when its gradient is taken."""
    found = summed(case)
    half_by = found.outcome.evidence.path.half_by
    assert half_by is not None
    masses = torch.stack([parts.abs() for parts, _ in alone(case)]).flatten(1)
    sizes = [found.setting.descent.size(step) for step in range(len(masses))]
    np.testing.assert_allclose(half_by.flatten(), halves_of(masses, sizes), rtol=1e-9)  # masses are known to some 1e-12


def halves_of(masses: Tensor, sizes: list[float]) -> list[float]:
    """The share of the time by which half of each column was done, spread evenly over each step."""
    gathered = np.cumsum(np.vstack([np.zeros(masses.shape[1]), masses]), axis=0)
    times = np.cumsum([0.0, *sizes])
    return [float(np.interp(one[-1] / 2, one, times) / times[-1]) if one[-1] else np.nan for one in gathered.T]


@pytest.mark.parametrize("steps", [1, 19, 20, 21, 137])
def test_a_stretch_dates_to_its_own_length(steps: int) -> None:
    masses = torch.rand(steps, 8, 1, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) ** 4
    masses[:, 0] = 0.0  # what does nothing has no time
    halves, sizes = halves_at_zero(steps, masses[0]), [1.0 + k / steps for k in range(steps)]
    for step in reversed(range(steps)):
        halves.add(step, slice(0, 8), masses[step])
    found, exact = halves.by(sizes).flatten(), halves_of(masses.flatten(1), sizes)
    assert found[0].isnan()
    # a stretch is a twentieth of the steps and one at most, and the longest step is twice the shortest
    tolerance = 1e-12 if steps <= STRETCHES else 2 * (1 / STRETCHES + 1 / steps)
    np.testing.assert_allclose(found, exact, atol=tolerance)


SMOOTH = ("model.activation=tanh", "steps=8", "model.width=16", "data.train=10", "data.query=6", "data.test=0")
MEASURED = (*SMOOTH, "path.rule=[secant]", "ladder.machine=[]", "path.attributed=1000")


@pytest.mark.parametrize(
    ("case", "pieces"),
    [
        pytest.param("nesterov", (), marks=pytest.mark.slow),
        ("momentum", ("path.pieces=2", "path.romberg=1")),
        pytest.param("adamw", (), marks=pytest.mark.slow),
    ],
)
def test_the_error_bar_is_the_distance_from_a_finer_quadrature(case: str, pieces: tuple[str, ...]) -> None:
    """Eight pieces are off by a 64th of what one is: the bar, of higher order itself, is off by a few per cent."""
    found = ran(*MEASURED, *CASES[case], *pieces, "path.error_samples=1000")
    finer = ran(*MEASURED, *CASES[case], *pieces, "path.pieces=8", "path.error_samples=0")
    difference = found.contributions("secant") - finer.contributions("secant")
    measured = float(difference.norm() / found.contributions("secant").norm())
    assert measured > 1e-9  # there is an error to be measured
    assert found.error_bar == pytest.approx(measured, rel=0.05)


def test_a_sample_of_the_points_stands_for_all() -> None:
    every, some = (ran(*MEASURED, *CASES["momentum"], f"path.error_samples={count}") for count in (1000, 8))
    assert some.error_bar == pytest.approx(every.error_bar, rel=0.5)  # 8 of 16 points
    assert torch.equal(some.contributions("secant"), every.contributions("secant"))


def test_nobody_who_asks_for_no_error_bar_pays_for_it() -> None:
    facts = ran(*QUICK, *CASES["momentum"], "path.error_samples=0").outcome.evidence.path.facts
    assert "error_bar" not in facts
