"""A rule says itself whether it closes a step; no name is asked for."""

from __future__ import annotations

from typing import ClassVar

from ntkexp.path.rule.base import AbstractRule, Piece
from ntkexp.run.loop import run
from ntkexp.run.setting import prepare
from tests.run.small import Memory, small


class Halves(AbstractRule):
    """The secants of both halves of a step, whose mean closes it, or so it says."""

    closes: ClassVar[bool] = True

    def quadrature(self, nodes: int, pieces: int, romberg: int) -> tuple[Piece, ...]:
        return tuple(Piece(k / 2 / pieces, (k + 1) / 2 / pieces, 0.5 / pieces) for k in range(2 * pieces))

    def detail(self, nodes: int, pieces: int, romberg: int) -> str:
        return ""


class Optimist(Halves):
    """The left end alone, which closes nothing."""

    def quadrature(self, nodes: int, pieces: int, romberg: int) -> tuple[Piece, ...]:
        return (Piece(0.0, 0.0, 1.0),)


def closures(rule: AbstractRule) -> tuple[list[float], str, bool]:
    """How far each step is from being closed, what the run says, and whether it knows its parts."""
    experiment, memory = small("steps=4", "path.error_samples=2", "ladder.machine=[]"), Memory()
    path = experiment.path.model_copy(update={"rule": (rule,)})
    outcome = run(prepare(experiment.model_copy(update={"path": path})), memory)
    found = [float(row["closure"] or 0) for row in memory.rows[:-1]]
    return found, outcome.sentence, "error_bar" in outcome.evidence.path.facts


def test_a_rule_of_any_name_that_closes_is_held_to_it() -> None:
    found, said, measured = closures(Halves())
    assert 0 < max(found) < 1e-12  # some eps, relative to the change of a step
    assert said == "trained for 4 steps"
    assert measured


def test_one_that_says_so_in_vain_is_found_out() -> None:
    found, said, _ = closures(Optimist())
    assert min(found) > 1e-6
    assert "misses 4 steps" in said
