"""The table: each column by its definition, on outputs made by hand."""

from __future__ import annotations

from dataclasses import replace
from math import sqrt

import pytest
import torch
from torch import Tensor

from ntkexp.machine.base import AbstractMachine, DoesNotApply, Evidence, Prediction
from ntkexp.machine.ladder import Ladder, Region, Rung, results
from ntkexp.machine.machines import Left, Linearised, RBFRegression
from ntkexp.records.results import Result
from tests.machine.evidence import POINTS, TRAIN, evidence, kernel_of, random

EPS = torch.finfo(torch.float64).eps
PLACES = {
    "train": Region(slice(0, TRAIN), torch.full((1, TRAIN), 7 / sqrt(TRAIN))),
    "probe": Region(slice(TRAIN, TRAIN + 2), torch.tensor([[3.0, 4.0], [0.0, 6.0]])),
}


class Fixed(AbstractMachine):
    """Says that f̂ = f_T + 1 everywhere, or fails."""

    fails: bool = False

    def predict(self, evidence: Evidence) -> Prediction:
        if self.fails:
            torch.linalg.cholesky(-torch.eye(2))
        return Prediction(evidence.end + 1.0, "by hand")


def found(start: Tensor, end: Tensor) -> Evidence:
    return replace(evidence(kernel_of(random(POINTS, 9, seed=7), start.shape[1])), start=start, end=end)


def row(outputs: Tensor, given: Evidence, *, classifies: bool = True, split: str = "probe") -> Result:
    rungs = [Rung("fixed", Prediction(outputs, "by hand"), 0.0)]
    table = {result.split: result for result in results(rungs, PLACES, given, classifies)}
    return table[split]


def column(*values: float) -> Tensor:
    """One output: zeros on the training examples and on the last point, these on the probe points."""
    return torch.tensor([0.0] * TRAIN + [*values, 0.0], dtype=torch.float64)[:, None]


def test_each_column_by_hand() -> None:
    result = row(column(4.0, -1.0), found(column(0.0, 0.0), column(3.0, 4.0)))
    assert (result.split, result.machine, result.detail, result.note) == ("probe", "fixed", "by hand", "")
    assert result.relative_error == pytest.approx(sqrt(1 + 25) / 5, rel=1e-15)
    assert result.floor == pytest.approx(100 * EPS * 11 / 5, rel=1e-15)
    assert result.max_error == 5.0
    assert result.agreement == 0.5
    assert result.r2 == pytest.approx(1 - 26 / 0.5, rel=1e-15)


def test_a_split_in_which_nothing_moved_has_no_relative_error() -> None:
    result = row(column(1.0, 2.0), found(column(1.0, 2.0), column(1.0, 2.0)))
    assert (result.relative_error, result.floor, result.max_error) == (None, None, 0.0)
    assert result.note == "the network did not move here"


def test_a_network_that_is_constant_has_no_r2() -> None:
    assert row(column(1.0, 2.0), found(column(0.0, 0.0), column(2.0, 2.0))).r2 is None


def test_regression_has_no_agreement() -> None:
    assert row(column(1.0, 2.0), found(column(0.0, 0.0), column(1.0, 2.0)), classifies=False).agreement is None


def test_several_outputs_agree_by_their_largest() -> None:
    end, outputs = torch.zeros(POINTS, 3).double(), torch.zeros(POINTS, 3).double()
    end[TRAIN, 1], end[TRAIN + 1, 2] = 1.0, 1.0
    outputs[TRAIN, 1], outputs[TRAIN + 1, 0] = 9.0, 1.0
    assert row(outputs, found(torch.zeros(POINTS, 3).double(), end)).agreement == 0.5


def test_outputs_that_are_not_finite_have_an_error_that_is_none_either() -> None:
    result = row(column(float("nan"), 2.0), found(column(0.0, 0.0), column(1.0, 2.0)))
    assert result.relative_error is not None
    assert torch.tensor([result.relative_error, result.max_error, result.r2]).isnan().all()
    assert not result.exact


def test_a_machine_that_does_not_apply_says_why_on_every_split() -> None:
    rungs = [Rung("left", DoesNotApply("for this reason"), 0.0)]
    table = results(rungs, PLACES, found(column(0.0, 0.0), column(1.0, 2.0)), classifies=True)
    assert table == [Result(split, "left", note="for this reason") for split in PLACES]


def test_climbing_tries_every_machine_in_order() -> None:
    ladder = Ladder(machine=(Left(), Fixed(), Fixed(fails=True), Linearised()))
    rungs = ladder.climb(found(column(0.0, 0.0), column(1.0, 2.0)))
    assert [rung.name for rung in rungs] == ["left", "fixed", "fixed", "linearised"]
    outcomes = [type(rung.outcome) for rung in rungs]
    assert outcomes == [DoesNotApply, Prediction, DoesNotApply, Prediction]
    assert str(rungs[2].outcome).startswith("its linear algebra failed (")


def test_a_control_says_so_in_every_row() -> None:
    """And no other machine does: whoever looks at the rows need not know machines by name."""
    given = found(column(0.0, 0.0), column(1.0, 2.0))
    table = results(Ladder(machine=(RBFRegression(), Linearised())).climb(given), PLACES, given, classifies=False)
    assert {(result.machine, result.control) for result in table} == {("rbf_regression", True), ("linearised", False)}
