"""The variance of a mean over seeds and examples, compared with closed forms, a bootstrap and simulations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import NDArray

from ntkexp.mistake import Mistake
from ntkexp.report.analysis.estimate import Estimate, mean_of
from ntkexp.report.analysis.two_way import two_way_mean


@dataclass(frozen=True)
class TwoWayDesign:
    """`seeds` draw `examples` of a pool each; y = a + b + ε with these standard deviations."""

    seeds: int
    examples: int
    pool: int
    seed_sd: float
    example_sd: float
    residual_sd: float

    def draw(self, generator: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the drawn examples and the numbers, [seed, example]."""
        drawn = np.array([generator.permutation(self.pool)[: self.examples] for _ in range(self.seeds)])
        of_seeds = self.seed_sd * generator.standard_normal((self.seeds, 1))
        of_examples = self.example_sd * generator.standard_normal(self.pool)
        residuals = self.residual_sd * generator.standard_normal(drawn.shape)
        return drawn, of_seeds + of_examples[drawn] + residuals

    def estimate(self, generator: np.random.Generator) -> Estimate:
        drawn, numbers = self.draw(generator)
        return two_way_mean(np.repeat(np.arange(self.seeds), self.examples), drawn.ravel(), numbers.ravel())


DESIGNS = [
    TwoWayDesign(8, 20, 20, 1, 1, 1),
    TwoWayDesign(8, 20, 20, 0.2, 1, 1),
    TwoWayDesign(8, 20, 20, 1, 0, 1),
    TwoWayDesign(8, 60, 357, 0.1, 1, 1),
    TwoWayDesign(20, 20, 357, 0.1, 1, 1),
    TwoWayDesign(12, 200, 357, 0.05, 1, 0.5),
]


@pytest.mark.parametrize("design", DESIGNS, ids=str)
def test_intervals_over_seeds_and_examples_cover_at_their_level(design: TwoWayDesign) -> None:
    """The rate of 1,000 tables is known to three standard errors, 2.1 %. The mean of the variances is the variance
    of the means, which 1,000 tables show to three standard errors, 3 √(2/1000) = 13 %."""
    generator, tables = np.random.default_rng(1), 1000
    estimates = [design.estimate(generator) for _ in range(tables)]
    covered = sum(bool(estimate.covers(0.0)) for estimate in estimates) / tables
    assert abs(covered - 0.95) <= 3 * math.sqrt(0.95 * 0.05 / tables)
    variance = np.mean([estimate.error**2 for estimate in estimates])
    assert variance == pytest.approx(np.var([estimate.value for estimate in estimates]), rel=0.14)


def test_intervals_over_seeds_alone_do_not_cover_other_examples() -> None:
    """All seeds share 20 examples, which differ more than the seeds."""
    generator = np.random.default_rng(1)
    tables = [DESIGNS[1].draw(generator)[1] for _ in range(1000)]
    assert sum(bool(mean_of(table.mean(1).tolist()).covers(0.0)) for table in tables) < 750


def crossed(seeds: int = 5, examples: int = 7, residual_sd: float = 1.0) -> NDArray[np.float64]:
    """Return a table [seed, example] of seeds that share all examples."""
    drawn, numbers = TwoWayDesign(seeds, examples, examples, 1.0, 3.0, residual_sd).draw(np.random.default_rng(0))
    return np.take_along_axis(numbers, drawn.argsort(axis=1), axis=1)


def of_table(table: NDArray[np.float64]) -> Estimate:
    seeds, examples = np.indices(table.shape)
    return two_way_mean(seeds.ravel(), examples.ravel(), table.ravel())


def mean_squares(table: NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the mean squares of seeds, of examples and of the residual."""
    seeds, examples = table.shape
    of_seeds, of_examples = table.mean(1, keepdims=True), table.mean(0, keepdims=True)
    residual = table - of_seeds - of_examples + table.mean()
    return (
        examples * float(of_seeds.var(ddof=1)),
        seeds * float(of_examples.var(ddof=1)),
        float((residual**2).sum()) / ((seeds - 1) * (examples - 1)),
    )


def test_the_variance_of_a_full_table_is_that_of_the_analysis_of_variance() -> None:
    table = crossed()
    of_seeds, of_examples, residual = mean_squares(table)
    assert of_examples > residual
    estimate = of_table(table)
    assert estimate.value == pytest.approx(table.mean(), rel=1e-14)  # a mean of 35 numbers
    assert estimate.error**2 == pytest.approx((of_seeds + of_examples - residual) / table.size, rel=1e-12)


def test_the_variance_is_that_of_a_bootstrap_over_seeds_and_examples() -> None:
    """Without a residual, resampling both sides gives Σ_s (ȳ_s − ȳ)²/S² + Σ_e (ȳ_e − ȳ)²/E², which is too small by
    1 − 1/S and 1 − 1/E. The variance of 20,000 samples is known to three standard errors, 3 √(2/20000) = 3 %."""
    table = crossed(residual_sd=0.0)
    seeds, examples = table.shape
    generator = np.random.default_rng(0)
    samples = [
        table[np.ix_(generator.integers(0, seeds, seeds), generator.integers(0, examples, examples))].mean()
        for _ in range(20_000)
    ]
    of_seeds, of_examples, _ = mean_squares(table)
    assert of_table(table).error ** 2 == pytest.approx((of_seeds + of_examples) / table.size, rel=1e-12)
    resampled = (of_seeds * (1 - 1 / seeds) + of_examples * (1 - 1 / examples)) / table.size
    assert np.var(samples) == pytest.approx(resampled, rel=0.03)


def test_examples_that_no_two_seeds_share_leave_the_interval_over_seeds() -> None:
    table = crossed()
    seeds = np.repeat(np.arange(len(table)), table.shape[1])
    estimate = two_way_mean(seeds, np.arange(table.size), table.ravel())
    alone = mean_of(table.mean(1).tolist())
    assert (estimate.value, estimate.error) == pytest.approx((alone.value, alone.error), rel=1e-12)
    assert estimate.freedom == alone.freedom


def test_an_interval_over_examples_is_never_narrower() -> None:
    """Examples that differ less than their residuals suggest add nothing."""
    table = np.array([[1.0, -1.0], [-1.0, 1.0], [2.0, 0.0]])
    assert of_table(table).error == pytest.approx(mean_of(table.mean(1).tolist()).error, rel=1e-12)


def test_one_seed_has_no_interval_and_pairs_are_unique() -> None:
    assert not two_way_mean([0, 0], [1, 2], [1.0, 3.0]).known
    assert math.isnan(two_way_mean([], [], []).value)
    with pytest.raises(Mistake, match="a seed has several numbers at one example"):
        two_way_mean([0, 0, 1], [1, 1, 1], [1.0, 3.0, 2.0])
