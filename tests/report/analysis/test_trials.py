"""The judge on trial: of 1,000 sweeps with a known truth, how many intervals hold it, and how many verdicts are false.

Of 1,000 trials at 95 %, the share that is held lies within 2 % of it: three standard deviations of a binomial.
"""

from __future__ import annotations

from functools import cache
from itertools import product

import numpy as np
import pytest

from ntkexp.records.sweep import MARGIN, Expected
from ntkexp.report.analysis.estimate import compare, power_law
from tests.report.analysis.trials import DESIGNS, SWEEPS, Laws, estimates, laws

SEEDS = (2, 3, 5)
ALONE = ("one point left", 2)  # one seed that can be asked: there is no interval
CASES = [case for case in product(DESIGNS, SEEDS) if case != ALONE]
CHANCE = 3 * np.sqrt(0.05 * 0.95 / SWEEPS)  # three standard deviations of a rate of 5 %


@cache
def tried(name: str, seeds: int) -> Laws:
    return laws(DESIGNS[name], seeds)


@pytest.mark.sample(8)
@pytest.mark.parametrize(("name", "seeds"), CASES)
def test_intervals_hold_the_exponent_as_often_as_they_say(name: str, seeds: int) -> None:
    assert 0.93 <= tried(name, seeds).coverage() <= 0.975


@pytest.mark.sample(10)
@pytest.mark.parametrize(("name", "seeds"), CASES)
def test_a_straight_law_is_seldom_called_curved(name: str, seeds: int) -> None:
    assert tried(name, seeds).bends() <= 0.05 + CHANCE


@pytest.mark.sample(16)
@pytest.mark.parametrize(("name", "seeds"), CASES)
@pytest.mark.parametrize("bound", [None, "upper"])
def test_verdicts_are_seldom_false(name: str, seeds: int, bound: None) -> None:
    """At the edge of the margin either verdict is false, and nowhere more often; however much chance there is."""
    found, edge = tried(name, seeds), Expected(-MARGIN, bound=bound)
    much, little = found.words(edge), found.words(edge, 0.01)
    assert max(much["agrees"], much["larger"], little["agrees"], little["larger"]) <= 0.05
    assert little["undecided"] >= 0.9


@pytest.mark.parametrize(("name", "seeds"), CASES)
def test_a_wrong_exponent_is_not_agreed_with(name: str, seeds: int) -> None:
    """−1 for −½, or the other way round; two seeds agreed with it in a third of the sweeps when covering was enough."""
    assert tried(name, seeds).words(Expected(0.5))["agrees"] <= 0.01
    assert tried(name, seeds).words(Expected(-0.5, bound="upper"))["agrees"] <= 0.01


def test_what_is_true_is_found() -> None:
    found = tried("complete", 5)
    assert found.words(Expected(0.0), 0.5)["agrees"] > 0.95
    assert found.words(Expected(-0.5))["larger"] > 0.95
    assert found.words(Expected(0.5))["smaller"] > 0.95
    assert found.bends(0.3) > 0.95


def test_one_seed_that_can_be_asked_leaves_everything_undecided() -> None:
    assert tried(*ALONE).words(Expected(0.0))["undecided"] == 1


@pytest.mark.parametrize("value", [0.0, 0.06, 0.2])
def test_as_many_more_seeds_as_are_said_decide(value: float) -> None:
    """In 80 % of the trials at least, where value and spread are what they seemed; not with half as many."""
    (first,) = estimates(np.array([[value - 0.1], [value + 0.1], [value - 0.1], [value + 0.1]]))
    more = compare(first, Expected(0.0)).more
    assert more is not None
    spread, total = first.error * 2, 4 + more
    decided = []
    for seeds in (total, max(total // 2, 2)):
        drawn = value + spread * np.random.default_rng(seeds).normal(size=(seeds, SWEEPS))
        decided.append(np.mean([compare(law, Expected(0.0)).where != "across" for law in estimates(drawn)]))
    assert decided[0] >= 0.8 - CHANCE
    assert decided[1] < 0.75


def test_what_hardly_any_number_of_seeds_decides_has_none() -> None:
    (edge,) = estimates(MARGIN + np.array([[-1.0], [1.0], [0.001]]))
    assert compare(edge, Expected(0.0)).more is None


@pytest.mark.parametrize("name", ["a point missing", "a seed a run", "seeds alone at one width"])
def test_a_thousand_sweeps_at_once_are_a_thousand_power_laws(name: str) -> None:
    x, which = DESIGNS[name].runs(3)
    scatter = DESIGNS[name].scatter(np.random.default_rng([3, 11]), x, which, 2)
    found = laws(DESIGNS[name], 3, sweeps=2)
    for y, exponent, curvature in zip(np.exp(scatter.T), found.exponents, found.curvatures, strict=True):
        law = power_law(x, y, which)
        # the least squares of a few numbers, rounded
        assert (law.exponent.low, law.exponent.high) == pytest.approx((exponent.low, exponent.high), rel=1e-9)
        assert law.curvature.low == pytest.approx(curvature.low, rel=1e-9)
