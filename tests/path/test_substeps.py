"""The contributions of one walk, read in many ways at once: the ways share the tapes inside each step."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import log

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from ntkexp.path.forward_sum import ErrorBar
from ntkexp.path.integrals import Integrals
from ntkexp.path.rule.base import Gauss, Secant, Substep
from ntkexp.path.step_kernel import StepBlock
from ntkexp.run.setting import Setting, prepare
from tests.run.small import ran, small

Ways = Mapping[str, tuple[Substep, ...]]


def contributions(ways: Ways, *overrides: str) -> dict[str, Float[Tensor, "query out train"]]:
    """𝒮 at the query points by each quadrature of the steps."""
    setting = prepare(small("path.queries=[query]", *overrides))
    found = {name: with_room(substeps, setting) for name, substeps in ways.items()}
    for step in setting.descent.steps_from(setting.problem.weights):
        for place in setting.domain.block_slices:
            block = StepBlock(setting.points, step.segment, place)
            for integrals in found.values():
                integrals.add(step, block)
    return {name: integrals.contributions[setting.domain.summed_points] for name, integrals in found.items()}


def with_room(substeps: tuple[Substep, ...], setting: Setting) -> Integrals:
    """Nothing accumulated yet."""
    return Integrals(
        substeps, *(setting.start.kernel.new_zeros(setting.start.kernel.shape[:axes]) for axes in (4, 3, 2))
    )


def distance(left: Float[Tensor, "query out train"], right: Float[Tensor, "query out train"]) -> float:
    """‖𝒮 − 𝒮′‖/‖𝒮′‖."""
    return float((left - right).norm() / right.norm())


# Substeps and extrapolations: the sum of contributions is always exact, and the parts tend to the parts of the
# integral ∫₀¹ J(θ₀ + uΔθ; x) du.
#
# A substep replaces a mean of products by a product of means. The error is proportional to the changes of both factors
# inside the substep: n⁻² for smooth networks, and for networks with kinks too if no substep holds kinks of two layers.
# Kinks of two layers inside one substep err like n⁻¹. They share one with probability n⁻¹, until substeps are shorter
# than the distance between kinks.


ADMISSIBLE = [(n, k) for n in range(1, 9) for k in range(4) if n % 2**k == 0]
PIECES = (1, 2, 4, 8)
KINKED = (4, 8, 16, 32)
VERY_MANY = 128  # 16 times better than the best that is compared with it

STEPS = ("steps=6", "ladder.machine=[]", "optimizer.stable_fraction=0.5")
SMOOTH = ("model.activation=tanh", *STEPS)
RELU = ("model.activation=relu", "data.query=200", "model.width=64", "ladder.machine=[]")


def secant(substeps: int, romberg: int = 0) -> tuple[Substep, ...]:
    return Secant().quadrature(points=1, substeps=substeps, romberg=romberg)


def slope(substeps: tuple[int, ...], errors: list[float]) -> float:
    """The fitted power of 1/n."""
    return -float(np.polyfit(list(map(log, substeps)), list(map(log, errors)), 1)[0])


@cache
def smooth() -> dict[str, Float[Tensor, "query out train"]]:
    """Contributions along a smooth walk, by secants, and by enough quadrature points for the integral."""
    ways = {f"{n} {k}": secant(n, k) for n in (*PIECES, 16) for k in (0, 1) if n % 2**k == 0}
    return contributions({**ways, "integral": Gauss().quadrature(points=16, substeps=1, romberg=0)}, *SMOOTH)


def smooth_errors(substeps: tuple[int, ...], romberg: int) -> list[float]:
    """How far the parts are from the integral's."""
    return [distance(smooth()[f"{n} {romberg}"], smooth()["integral"]) for n in substeps]


@cache
def kinked(depth: int, seed: int, *overrides: str) -> tuple[float, ...]:
    """How far the parts of a ReLU network are from those by very many substeps."""
    chosen = (*RELU, f"model.depth={depth}", f"seed={seed}", *overrides)
    found = contributions({str(n): secant(n) for n in (*KINKED, VERY_MANY)}, *chosen)
    return tuple(distance(found[str(n)], found[str(VERY_MANY)]) for n in KINKED)


@pytest.mark.parametrize(("substeps", "romberg"), ADMISSIBLE)
def test_substeps_cover_the_step_with_weights_that_sum_to_one(substeps: int, romberg: int) -> None:
    cut = secant(substeps, romberg)
    assert abs(sum(substep.weight for substep in cut) - 1) < 1e-14
    # the secant of u² has the slope u₀ + u₁, and the slopes' mean is its change over the whole step
    assert abs(sum(substep.weight * (substep.start + substep.end) for substep in cut) - 1) < 1e-14


def test_parts_of_a_smooth_network_converge_at_order_two_and_four() -> None:
    """The next orders, n⁻⁴ and n⁻⁶, are seen at the fewest substeps."""
    assert abs(slope(PIECES, smooth_errors(PIECES, 0)) - 2) < 0.1
    assert abs(slope((2, 4, 8, 16), smooth_errors((2, 4, 8, 16), 1)) - 4) < 0.2  # with one extrapolation


DEEP = (2, ("steps=30", "optimizer.stable_fraction=0.1", "data.query=48"), range(4))
"""Steps so short that kinks of two layers seldom share a substep; four seeds, as single events still show in one."""


@pytest.mark.parametrize(
    ("depth", "words", "seeds"),
    [(1, ("steps=4",), [0]), pytest.param(*DEEP, marks=pytest.mark.slow)],
)
def test_parts_of_a_relu_network_converge_at_order_two(depth: int, words: tuple[str, ...], seeds: range) -> None:
    errors = np.sqrt(np.square([kinked(depth, seed, *words) for seed in seeds]).mean(0)).tolist()
    assert 1.6 <= slope(KINKED, errors) <= 2.3


ONE_LAYER = (*RELU, "steps=4", "model.depth=1")


@pytest.mark.parametrize(
    ("words", "substeps", "romberg"),
    [
        *((SMOOTH, *cut) for cut in ((1, 0), (4, 0), (2, 1))),
        ((*ONE_LAYER, "seed=0"), 4, 0),
    ],
)
def test_the_error_bar_is_right(words: tuple[str, ...], substeps: int, romberg: int) -> None:
    every = ("path.error_samples=6", "path.rule=[secant]", "path.queries=[query]")
    run = ran(*words, *every, f"path.substeps={substeps}", f"path.romberg={romberg}")
    seed = run.setting.experiment.seed
    is_smooth = words == SMOOTH
    true = distance(run.contributions("secant"), smooth()["integral"]) if is_smooth else kinked(1, seed, "steps=4")[0]
    assert true / 2 < run.error_bar < 2 * true


# The error bar's estimator ‖Σ_s e_s‖² from a sample of steps, on errors that are made up.


ERRORS, DRAWS = 30, 4000


def estimate(errors: Tensor, every: int) -> float:
    """The error bar from the errors [step, query, out, train] of its sample."""
    bar = ErrorBar(
        rule="secant", coarse=(), fine=(), richardson_factor=1.0, every=every, total=torch.zeros_like(errors[0])
    )
    sample = errors[[step for step in range(len(errors)) if bar.measures(step)]]
    bar.restore({"total": sample.sum(0), "squares": sample.square().sum()})
    return bar.estimate(len(errors))


def made_up(drift: float) -> Tensor:
    """Independent errors around a common one: they add up, or cancel, as the drift is large or zero."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(ERRORS, 5, 1, 40, generator=generator, dtype=torch.float64)
    return noise + drift * torch.randn(5, 1, 40, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("drift", [0.0, 0.3, 3.0])
def test_it_is_exact_when_every_step_is_measured(drift: float) -> None:
    errors = made_up(drift)
    assert estimate(errors, every=1) == pytest.approx(float(errors.sum(0).norm()), rel=1e-12)


@pytest.mark.sample(2)
@pytest.mark.parametrize("every", [2, 5, 10])
@pytest.mark.parametrize("drift", [0.3, 3.0])
def test_its_square_is_unbiased_over_the_order_of_the_errors(drift: float, every: int) -> None:
    errors, generator = made_up(drift), torch.Generator().manual_seed(1)
    orders = (torch.randperm(ERRORS, generator=generator) for _ in range(DRAWS))
    squares = torch.tensor([estimate(errors[order], every) ** 2 for order in orders], dtype=torch.float64)
    deviation = float(squares.std()) / DRAWS**0.5
    assert abs(float(squares.mean()) - float(errors.sum(0).square().sum())) < 4 * deviation  # 1 in 10,000 by chance


@pytest.mark.parametrize("every", [2, 5, 10])
def test_it_never_says_less_than_a_measured_step_does(every: int) -> None:
    errors = made_up(0.0)
    errors[1::2] = -errors[::2]  # neighbours cancel
    assert estimate(errors, every) > 0


def test_a_single_measured_step_stands_for_all() -> None:
    errors = made_up(0.0)[:1].repeat(ERRORS, 1, 1, 1)
    assert estimate(errors, every=ERRORS) == pytest.approx(float(errors.sum(0).norm()), rel=1e-12)


def test_without_a_measured_step_nothing_is_known() -> None:
    assert torch.tensor(estimate(made_up(0.0)[:2], every=10)).isnan()
