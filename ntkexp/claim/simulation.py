"""Simulations of the judge: its error rate and its power.

The judge receives random tables whose true value is known: inside the expected range of
a rule, at its edge, or outside. The judge's verdicts are then compared with the truth.
A design is a look (statistical test) with several stages or parts
(rules), or a pair of looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ntkexp.claim.expectation import (
    EXAMPLE,
    AbstractAverage,
    AbstractExpectation,
    Bound,
    Equality,
    Identity,
    Location,
    Order,
    Slope,
)
from ntkexp.claim.judge import judge_part, judge_table
from ntkexp.claim.look import MINIMUM, Look
from ntkexp.claim.quantity import Column
from ntkexp.records.atomic import Json
from ntkexp.records.claim import BELOW_MINIMUM, pair_verdict

# --- Random tables.


SEEDS = 5
"""The number of seeds of a random table."""
SHARED_EXAMPLES = 20
"""The number of examples of a random table, which all seeds share."""
POSITIONS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""The positions along the axis of a random power law."""


@singledispatch
def invent(
    rule: AbstractExpectation,
    offset: float,
    generator: np.random.Generator,
    seeds: int = SEEDS,
) -> pd.DataFrame:
    """Draw a random table for a rule. The true value lies inside the expected range
    (`offset` −1), at its edge (0) or outside (1)."""
    raise NotImplementedError(f"{type(rule).__name__} has no invented tables")


def offsets_of(rule: AbstractExpectation) -> tuple[float, ...]:
    """Return the offsets to simulate: inside the range (−1), at its edge (0) and
    outside (1). An identity is never undecided, so it has no edge."""
    return (-1.0, 1.0) if isinstance(rule, Identity) else (-1.0, 0.0, 1.0)


@invent.register(Identity)
def _(
    rule: Identity, offset: float, generator: np.random.Generator, seeds: int = SEEDS
) -> pd.DataFrame:
    """Draw a table of errors below the bound. For offset 1,
    one error is ten times the bound."""
    values = rule.tolerance * 10 ** -generator.uniform(0.01, 4, 10 * seeds)
    if offset > 0:
        values[generator.integers(len(values))] = 10 * rule.tolerance
    return pd.DataFrame({"seed": np.arange(len(values)) % seeds, "value": values})


@invent.register(AbstractAverage)
def _(
    rule: AbstractAverage,
    offset: float,
    generator: np.random.Generator,
    seeds: int = SEEDS,
) -> pd.DataFrame:
    """Draw one figure per seed, with a standard deviation of 0.4 times the margin, or
    0.4 if the margin is 0.

    If the rule is about seeds and examples, draw a number for each seed and example.
    Seeds, examples and residuals then have this standard deviation."""
    expected = rule.expected
    unit = rule.scaled_margin or 1.0
    # the true value: the middle of the range, or an edge ± offset · unit
    if offset < 0 and expected.bound is None:
        truth = expected.value
    elif expected.bound == "lower":
        truth = expected.low - offset * unit
    else:
        truth = expected.high + offset * unit
    sd = 0.4 * unit
    figures = truth + sd * generator.standard_normal(seeds)
    labels = {"seed": np.arange(seeds)}
    if rule.over_examples:
        shape = (seeds, SHARED_EXAMPLES)
        figures = figures[:, None] + sd * generator.standard_normal(SHARED_EXAMPLES)
        figures = (figures + sd * generator.standard_normal(shape)).ravel()
        seed, example = np.indices(shape)
        labels = {"seed": seed.ravel(), EXAMPLE: example.ravel()}
    return table_of(rule, np.exp(figures) if rule.is_log else figures, labels)


def table_of(
    rule: AbstractAverage,
    figures: NDArray[np.float64],
    labels: Mapping[str, NDArray[np.int64]],
) -> pd.DataFrame:
    """Return a table with these figures, in the form that `rule` reads. `labels` are
    the columns that label the figures, such as the seed."""
    table = pd.DataFrame({**labels, "value": figures})
    if not isinstance(rule, Order):
        return table
    above = figures if rule.is_log else 1 + figures
    return pd.concat(
        [
            table.assign(**{rule.along: rule.above, "value": above}),
            table.assign(**{rule.along: rule.below, "value": 1.0}),
        ],
        ignore_index=True,
    )


@invent.register(Slope)
def _(
    rule: Slope, offset: float, generator: np.random.Generator, seeds: int = SEEDS
) -> pd.DataFrame:
    """Draw a power law with a random exponent per seed, and noise at each position."""
    sign = -1.0 if rule.bound == "lower" else 1.0
    # the true exponent: inside the range, or at value ± (1 + 1.5 offset) margin
    if offset >= 0:
        truth = rule.value + sign * rule.margin * (1 + 1.5 * offset)
    elif rule.bound is None:
        truth = rule.value
    else:
        truth = rule.value - sign * rule.margin
    slopes = truth + 0.3 * rule.margin * generator.standard_normal((seeds, 1))
    heights = generator.standard_normal((seeds, 1))
    noise = 0.3 * rule.margin * generator.standard_normal((seeds, len(POSITIONS)))
    values = np.exp(heights + slopes * np.log(POSITIONS) + noise)
    return table_of_curves(rule.along, np.array(POSITIONS), values)


@invent.register(Location)
def _(
    rule: Location, offset: float, generator: np.random.Generator, seeds: int = SEEDS
) -> pd.DataFrame:
    """Draw a Gaussian bump with a random centre per seed."""
    centre = rule.expected.value
    reach = rule.expected.margin
    truth = centre if offset < 0 else centre + reach * (1 + 1.5 * offset)
    tops = truth + 0.4 * reach * generator.standard_normal((seeds, 1))
    x = centre + reach * np.arange(-6, 11)
    values = rule.sign * np.exp(-(((x - tops) / (3 * reach)) ** 2))
    return table_of_curves(rule.along, np.exp(x), values)


def table_of_curves(
    along: str, x: NDArray[np.float64], values: NDArray[np.float64]
) -> pd.DataFrame:
    """Return a table with a curve for each seed, from `values` [seed, position]."""
    seeds = np.arange(len(values))
    columns = {"seed": np.repeat(seeds, len(x)), "value": values.ravel()}
    return pd.DataFrame({along: np.tile(x, len(seeds)), **columns})


# --- Simulations of single rules.


TABLES_PER_RULE = 500
TABLES_PER_DESIGN = 200
WRONG_VERDICTS = {
    -1.0: ("refuted",),
    0.0: ("supported", "refuted"),
    1.0: ("supported",),
}
"""The wrong verdicts for a true value inside the expected range (−1), at its edge (0),
and outside (1)."""

SIMULATED_RULES: tuple[AbstractExpectation, ...] = (
    Identity(),
    Slope(along="width", value=-1.0, margin=0.2),
    Slope(along="width", value=-0.5, margin=0.2, bound="upper"),
    Bound(limit=1.0, margin=0.1, side="upper"),
    Order(along="rule", above="left", below="secant", margin=0.1),
    Order(along="rule", above="left", below="secant", margin=0.5, scale="log"),
    Equality(value=1.0, margin=0.1),
    Equality(value=1.0, margin=0.1, over_examples=True),
    Location(along="width", value=64.0, margin=0.25),
)


@dataclass(frozen=True)
class Tried:
    """The error rate and the power of a rule or design.

    Attributes:
        false: The rate of wrong verdicts, for the worst position of the true value.
        support: The rate of `supported` for a true value inside the range.
        refute: The rate of `refuted` for a true value outside the range. If the margin
            is a minimal effect, the rate of `below minimum` for a true value between
            the null value and the edge.
    """

    rule: str
    tables: int
    false: float
    support: float
    refute: float

    @property
    def fields(self) -> dict[str, Json]:
        return {
            "rule": self.rule,
            "tables": self.tables,
            "false_verdicts": self.false,
            "power_to_support": self.support,
            "power_to_refute": self.refute,
        }


def try_judging(
    rule: AbstractExpectation, tables: int = TABLES_PER_RULE, seed: int = 0
) -> Tried:
    """Estimate error rate and power for one rule,
    from `tables` random tables per offset."""
    generator = np.random.default_rng(seed)
    verdicts: dict[float, list[str]] = {}
    for truth in offsets_of(rule):
        verdicts[truth] = [
            judge_part(rule, invent(rule, truth, generator)).verdict
            for _ in range(tables)
        ]
    wrong = [
        verdicts[truth].count(word)
        for truth in offsets_of(rule)
        for word in WRONG_VERDICTS[truth]
    ]
    return Tried(
        rule=f"{rule.option}: {rule.whole_words}",
        tables=tables,
        false=max(wrong) / tables,
        support=verdicts[-1.0].count("supported") / tables,
        refute=verdicts[1.0].count("refuted") / tables,
    )


# --- Simulations of designs: tests with several stages or parts, or a pair of tests
# (main and second look).


@dataclass(frozen=True)
class JudgingDesign:
    """A look with its stages and parts, alone or as a pair (main look, second look).

    If `shared`, all parts use the same random numbers, as if they measured quantities
    of the same runs. Otherwise the parts are independent."""

    name: str
    look: Look
    pair: bool = False
    shared: bool = False

    def judge(
        self,
        truths: Sequence[float],
        seconds: Sequence[float],
        generator: np.random.Generator,
    ) -> str:
        """Draw random tables, and return the verdict of the judge. `truths` and
        `seconds` hold the offset of each part's true value, in the main and in the
        second look."""
        main = self.judge_look(truths, generator)
        if not self.pair:
            return main
        return pair_verdict(main, self.judge_look(seconds, generator))

    def judge_look(
        self, truths: Sequence[float], generator: np.random.Generator
    ) -> str:
        # Draw a table of all seeds.
        draw = int(generator.integers(2**32))
        tables = []
        for index, (part, truth) in enumerate(
            zip(self.look.expectation, truths, strict=True)
        ):
            part_generator = np.random.default_rng([draw, 0 if self.shared else index])
            rows = invent(part, truth, part_generator, len(self.look.seeds))
            tables.append(rows.assign(quantity=index))
        table = pd.concat(tables, ignore_index=True)

        # Judge stage by stage, until the test is decided.
        look = self.look.at(0)
        while True:
            finding = judge_table(look, table[table["seed"].isin(look.seeds_now)])
            following = look.after(finding.verdict)
            if following is look:
                return finding.verdict
            look = following


def look_of(
    *parts: AbstractExpectation,
    planned: tuple[int, ...] = (5,),
    null: float | None = None,
) -> Look:
    """Return a look that judges invented tables. Part k (a rule) selects the rows with
    k in the column `quantity`.

    `null` is the value without an effect. If it is given, the margin of each part is
    the smallest effect that matters.
    """
    placed = tuple(
        part.model_copy(update={"where": {"quantity": index}})
        for index, part in enumerate(parts)
    )
    seeds = tuple(range(planned[-1]))
    look = Look({}, None, seeds, Column(column="value"), placed, planned=planned)
    if null is None:
        return look
    minimum = {MINIMUM: "a minimal effect"}
    return replace(look, nulls=(null,) * len(parts), margins=(minimum,) * len(parts))


EQUAL = Equality(value=1.0, margin=0.1)
FALLS = Slope(along="width", value=-1.0, margin=0.2)
ABOVE = Order(along="rule", above="left", below="secant", margin=0.1)
DESIGNS = (
    JudgingDesign("looks at 6 and 24 seeds", look_of(EQUAL, planned=(6, 24))),
    JudgingDesign(
        "looks at 6, 12, 24 and 48 seeds", look_of(EQUAL, planned=(6, 12, 24, 48))
    ),
    JudgingDesign("a pair of looks", look_of(EQUAL), pair=True),
    JudgingDesign("three parts", look_of(EQUAL, FALLS, ABOVE)),
    JudgingDesign(
        "three parts of the same draws", look_of(EQUAL, EQUAL, EQUAL), shared=True
    ),
    JudgingDesign(
        "a pair of looks at 6 and 24 seeds, of two parts",
        look_of(EQUAL, FALLS, planned=(6, 24)),
        pair=True,
    ),
    JudgingDesign(
        "a pair of looks over seeds and examples",
        look_of(
            Bound(limit=1.0, margin=0.1, side="upper", over_examples=True), planned=(8,)
        ),
        pair=True,
    ),
    JudgingDesign(
        "a pair of looks at a minimal effect",
        look_of(ABOVE, planned=(12,), null=0.0),
        pair=True,
    ),
)


INSIDE, EDGE, HALFWAY, OUTSIDE = -1.0, 0.0, 0.5, 1.0
"""Positions of a true value relative to its range. For a minimal effect, HALFWAY lies
between the null value and the edge, and OUTSIDE is the null value."""
REJECTED = ("refuted", BELOW_MINIMUM)


def try_design(
    design: JudgingDesign, tables: int = TABLES_PER_DESIGN, seed: int = 0
) -> Tried:
    """Simulate a design for true values where the judge is most likely to err.

        main look    second look    wrong verdicts
        edge         inside         supported, refuted, below minimum
        inside       edge           supported                             pairs
        edge         outside        refuted, below minimum                pairs
        outside      edge           refuted, below minimum                pairs
        outside      outside        below minimum                         minimal effects

    A position is that of the true value of the first part. The other parts lie inside
    their ranges. The first line is also simulated with all parts at their edges. In the
    last line there is no effect, and so no direction."""
    generator = np.random.default_rng(seed)

    def at(position: float) -> list[float]:
        """Return the true values of all parts: the first at this position, the others
        inside their ranges."""
        return [position] + [INSIDE] * (len(design.look.expectation) - 1)

    def rate(main: Sequence[float], second: Sequence[float], *words: str) -> float:
        verdicts = [design.judge(main, second, generator) for _ in range(tables)]
        return sum(verdict in words for verdict in verdicts) / tables

    minimal = bool(design.look.margins)
    all_edges = [EDGE] * len(design.look.expectation)
    wrong = [
        rate(all_edges, at(INSIDE), "supported", *REJECTED),
        rate(at(EDGE), at(INSIDE), "supported", *REJECTED),
    ]
    if design.pair:
        wrong.append(rate(at(INSIDE), at(EDGE), "supported"))
        wrong.append(rate(at(EDGE), at(OUTSIDE), *REJECTED))
        wrong.append(rate(at(OUTSIDE), at(EDGE), *REJECTED))
    if minimal:
        wrong.append(rate(at(OUTSIDE), at(OUTSIDE), BELOW_MINIMUM))
    refuted = rate(at(OUTSIDE), at(OUTSIDE), "refuted")
    if minimal:
        refuted = rate(at(HALFWAY), at(HALFWAY), BELOW_MINIMUM)
    return Tried(
        rule=design.name,
        tables=tables,
        false=max(wrong),
        support=rate(at(INSIDE), at(INSIDE), "supported"),
        refute=refuted,
    )
