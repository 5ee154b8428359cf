"""Gradient flow: closed forms, the limit of gradient descent, and the error that it claims."""

from __future__ import annotations

from itertools import pairwise
from math import log

import pytest
import torch

from ntkexp.machine.base import Prediction
from ntkexp.mistake import Mistake
from ntkexp.optimizer.flow import Flow
from ntkexp.shapes import Weights
from tests.run.small import Ran, ran, small

FLOW = ("optimizer=flow", "optimizer.step_size=0.2", "model.activation=tanh", "ladder.machine=[gauss]")
LINEAR = (*FLOW, "model.depth=0")
TOLERANCES = (1e-4, pytest.param(1e-6, marks=pytest.mark.slow), 1e-8)


def predicted(found: Ran, machine: str) -> torch.Tensor:
    """f̂ of one rung."""
    (outcome,) = (rung.outcome for rung in found.outcome.rungs if rung.name == machine)
    assert isinstance(outcome, Prediction), str(outcome)
    return outcome.outputs


@pytest.mark.parametrize("tolerance", TOLERANCES)
def test_a_linear_network_follows_the_closed_form(tolerance: float) -> None:
    found = ran(*LINEAR, f"optimizer.tolerance={tolerance}", "ladder.machine=[frozen_start,linearised]")
    missed = predicted(found, "frozen_start") - found.outcome.evidence.end
    assert missed.norm() < 20 * tolerance * found.change.norm()  # as many arcs add up, each within the tolerance
    assert (predicted(found, "linearised") - found.outcome.evidence.end).norm() < 20 * tolerance * found.change.norm()


@pytest.mark.parametrize("tolerance", TOLERANCES)
def test_an_arc_is_as_near_as_it_claims(tolerance: float) -> None:
    weights: Weights = {"w": torch.tensor([1.0, -2.0], dtype=torch.float64)}
    rates, sizes = torch.tensor([1.0, 30.0], dtype=torch.float64), {"w": 0.7}

    def field(here: Weights) -> Weights:
        return {"w": rates * here["w"]}

    move = Flow(tolerance=tolerance).move(0, weights, field(weights), field, sizes, {})
    assert (move.weights["w"] - torch.exp(-0.7 * rates) * weights["w"]).norm() < 20 * tolerance * 3
    begun = 0.0
    for arc in move.arcs:
        for u in (0.0, 0.3, 0.5, 1.0):
            expected = torch.exp(-0.7 * (begun + u * arc.length) * rates) * weights["w"]
            assert (arc.at(u)["w"] - expected).norm() < 30 * tolerance * 3  # dense output is of one order less
        begun += arc.length
    assert begun == pytest.approx(1.0, rel=1e-14)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [pytest.param("squared", marks=pytest.mark.slow), "cross_entropy"])
def test_gradient_descent_tends_to_it_at_first_order(loss: str) -> None:
    shared = ("model.activation=tanh", f"loss={loss}", "data.classes=all", "path.rule=[left]", "ladder.machine=[]")
    end = ran(*shared, "optimizer=flow", "optimizer.step_size=2.0", "steps=2", "path.error_samples=0").outcome
    errors = []
    for steps in (16, 32):
        descended = ran(*shared, f"optimizer.step_size={4 / steps}", f"steps={steps}").outcome
        errors.append(float((descended.evidence.end - end.evidence.end).norm()))
    slopes = [log(coarse / fine) / log(2) for coarse, fine in pairwise(errors)]
    assert slopes == pytest.approx([1], abs=0.15)  # the next order still shows


CASES = (
    ("loss=squared", "data.classes=[3,8]"),
    ("loss=cross_entropy", "data.classes=all", "schedule=cosine"),
)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", CASES, ids=lambda overrides: overrides[0])
def test_the_path_closes_to_its_accuracy(case: tuple[str, ...]) -> None:
    found = ran(*FLOW, *case, "optimizer.tolerance=1e-8", "path.nodes=3", "path.probes=[probe]", "steps=6")
    assert found.error("gauss") < 1e-6
    facts = found.outcome.evidence.paths["gauss"].facts
    assert facts["flow_error"] < 1e-6


def test_decay_closes_it_too() -> None:
    found = ran(
        *FLOW,
        "optimizer.weight_decay=0.05",
        "optimizer.tolerance=1e-8",
        "path.nodes=3",
        "path.probes=[probe]",
        "steps=6",
    )
    (row,) = (row for row in found.rows("gauss") if row.split == "probe")
    assert row.relative_error is not None
    assert row.relative_error < 1e-6
    assert found.outcome.evidence.paths["gauss"].facts["decay_share"] > 1e-3


def test_more_nodes_are_nearer_and_the_estimate_says_by_how_much() -> None:
    chosen = (*FLOW, "optimizer.step_size=1", "steps=6", "path.probes=[probe]", "optimizer.tolerance=1e-4")
    one, four = (ran(*chosen, f"path.nodes={n}", "path.error_samples=6") for n in (1, 4))
    true = (one.contributions("gauss") - four.contributions("gauss")).norm() / four.contributions("gauss").norm()
    said = one.outcome.evidence.paths["gauss"].facts["error_bar"]
    assert float(true) / 2 < said < 2 * float(true)


def test_rules_for_steps_say_that_there_are_none() -> None:
    found = ran(*LINEAR, "ladder.machine=[secant,left,gauss,fixed_coefficients,kernel_regression]")
    notes = {row.machine: row.note for row in found.table.values()}
    assert notes["secant"] == notes["left"] == "a flow has no finite steps; its path is integrated over time, by gauss"
    for machine in ("gauss", "fixed_coefficients", "kernel_regression"):
        assert all(row.relative_error is not None for row in found.rows(machine))


def test_what_came_of_steps_adds_up_to_the_parts() -> None:
    whole = ran(*FLOW, "steps=4", "path.error_samples=3", "data.classes=[1,3,8]", "schedule=cosine")
    theirs, steps = whole.outcome.evidence.paths["gauss"], whole.by_step("gauss")
    assert (steps.sum(2) - theirs.contributions.sum(2)).norm() < 1e-13 * steps.norm()  # sums of 4 differences


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (("optimizer.clip_norm=1",), r"optimizer\.clip_norm=1: a flow has no steps"),
        (("path.every=snapshots",), r"path\.every=snapshots: a flow is integrated over time"),
    ],
)
def test_what_has_no_meaning_is_refused(chosen: tuple[str, ...], said: str) -> None:
    with pytest.raises(Mistake, match=said):
        small("optimizer=flow", *chosen)


def test_a_field_that_is_not_finite_is_one_line_with_advice() -> None:
    weights: Weights = {"w": torch.ones(1)}

    def broken(here: Weights) -> Weights:
        return {"w": here["w"] / 0}

    with pytest.raises(Mistake, match=r"at step 7 the flow would need arcs shorter .* raise optimizer\.tolerance"):
        Flow().move(7, weights, {"w": torch.ones(1)}, broken, {"w": 1.0}, {})
