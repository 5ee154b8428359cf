"""The judge is tried: rules judge invented tables whose truth is known, inside, outside and at the edge.

false verdicts        the worst share, over places of the truth, of verdicts that are wrong; at the edge, of any
support, refute       the share of tables that are decided, well inside and outside of what was expected
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ntkexp.claim.expectation.average import Bound, Equality, Location, Order, Slope
from ntkexp.claim.expectation.base import AbstractExpectation, Identity
from ntkexp.claim.judge import judge_part
from ntkexp.records.atomic import Json

TABLES = 500
WRONG = {-1.0: ("refuted",), 0.0: ("supported", "refuted"), 1.0: ("supported",)}
"""The verdicts that are wrong, by where the truth is."""

RULES: tuple[AbstractExpectation, ...] = (
    Identity(),
    Slope(along="width", value=-1.0, margin=0.2),
    Slope(along="width", value=-0.5, margin=0.2, bound="upper"),
    Bound(limit=1.0, margin=0.1, side="upper"),
    Order(along="rule", above="left", below="secant", margin=0.1),
    Order(along="rule", above="left", below="secant", margin=0.5, scale="log"),
    Equality(value=1.0, margin=0.1),
    Location(along="width", value=64.0, margin=0.25),
)


@dataclass(frozen=True)
class Tried:
    """A rule was tried on so many tables at each place."""

    rule: str
    tables: int
    false: float
    support: float
    refute: float

    @property
    def fields(self) -> dict[str, Json]:
        """The rates are plain data."""
        return {
            "rule": self.rule,
            "tables": self.tables,
            "false_verdicts": self.false,
            "power_to_support": self.support,
            "power_to_refute": self.refute,
        }


def try_rule(rule: AbstractExpectation, tables: int = TABLES, seed: int = 0) -> Tried:
    """Try one rule."""
    generator = np.random.default_rng(seed)
    rates = {place: verdicts(rule, place, tables, generator) for place in rule.places}
    false = max(rates[place].count(word) for place in rule.places for word in WRONG[place]) / tables
    return Tried(
        rule=f"{rule.option}: {rule.words}",
        tables=tables,
        false=false,
        support=rates[-1.0].count("supported") / tables,
        refute=rates[1.0].count("refuted") / tables,
    )


def verdicts(rule: AbstractExpectation, place: float, tables: int, generator: np.random.Generator) -> Sequence[str]:
    """Judge tables whose truth is at a place."""
    return [judge_part(rule, rule.invent(place, generator)).verdict for _ in range(tables)]
